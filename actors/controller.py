"""The controller: prompts -> rollout -> reward -> advantage -> learner -> weights -> rollout.

It holds references, rewards and versions; latents and frames never pass through it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from actors.cluster import Layout, wait_until_ready
from actors.pools import GroupRefs, LearnerGroup, RolloutPool
from actors.reward_service import RewardService
from actors.wait import wait_all
from sage_ray.advantage import Advantages, Normalisation, axis_advantages, group_advantages
from sage_ray.config import Config
from sage_ray.config_check import num_prompts
from sage_ray.data.prompts import PromptCursor
from sage_ray.divergence import Divergence
from sage_ray.iteration_record import iteration_metrics, rollout_rows
from sage_ray.metrics import MetricsWriter
from sage_ray.progress import Progress
from sage_ray.reward_parts import RewardParts
from sage_ray.rewards.batching import batch_videos
from sage_ray.rewards.build import part_weights
from sage_ray.rollout_log import RolloutLog
from sage_ray.schedule import sigma_grid
from sage_ray.training_schedule import training_schedule
from sage_ray.types import AXES, GroupInfo, GroupRequest, Prompt, Scores

HELD_OUT_GROUP = 1_000_000
"""Group numbers of held-out evaluation prompts start here, so that their noise differs from the training set's."""


@dataclass(frozen=True)
class EvaluatedSet:
    """One evaluated prompt set.

    parts: names of the reward parts; axes: float64 [N, K] per video, truth: [N, 3], reward and truth_total: their
    weighted sums [N], matches: [N]; truth,
    truth_total and matches are None without a judge. previews: (prompt, frames uint8 [T, H, W, 3]) of fixed videos.
    """

    parts: tuple[str, ...]
    axes: np.ndarray
    reward: np.ndarray
    truth: np.ndarray | None
    truth_total: np.ndarray | None
    matches: np.ndarray | None
    previews: list[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Rollout:
    """One iteration's finished rollouts, in group order."""

    groups: list[GroupRefs]
    infos: list[GroupInfo]
    scores: list[Scores]


class Controller:
    """Drives the ring over the three pools."""

    def __init__(self, config: Config, layout: Layout, prompts: Sequence[Prompt], progress: Progress):
        self.config, self.progress = config, progress
        self.cursor = PromptCursor(list(prompts), config.seed, num_prompts(config))
        self.output = Path(config.output_dir)
        self.metrics = MetricsWriter(self.output)
        self.rollout_log = RolloutLog(self.output / "rollouts")
        self.schedule = training_schedule(config)
        self.sigmas = tuple(map(float, self.schedule.coefs.sigmas))
        self.rollouts = RolloutPool(config, layout)
        self.rewards = RewardService(config, layout, batch_videos(config))
        self.learner = LearnerGroup(config, layout)
        self.reward = RewardParts((), ())
        self.divergence, self._noted = Divergence(), {}
        self.version, self.digest, self.checkpoint = 0, "", ""

    def start(self) -> None:
        """Load every model and give the rollout workers version 0. Unblocked by the slowest actor."""
        ready = self.rollouts.ready()
        num_trainable = self.learner.setup()
        wait_until_ready(ready, "the rollout workers", self.config.cluster.start_timeout_s)
        parts = self.rewards.start()
        self.reward = RewardParts(parts, part_weights(self.config.reward, parts))
        self.publish()
        self.progress.message(f"policy: {num_trainable:,} trainable parameters, {self.schedule.describe()}")

    def close(self) -> None:
        """End the reward service's thread and close the run's files; the actors end with Ray."""
        self.rewards.close()
        self.metrics.close()

    def run_sync(self, after_iteration: Callable[[int], None]) -> None:
        """Strictly on-policy loop: every iteration's rollouts are made by the weights of the last update.

        `after_iteration` is called with the number of finished iterations.
        """
        for iteration in range(self.config.num_iterations):
            metrics = self.step(iteration)
            metrics["alarms/divergence"] = float(self._watch(metrics))
            self.metrics.write(iteration + 1, metrics)
            self.progress.iteration(iteration + 1, metrics)
            last = iteration + 1 == self.config.num_iterations
            if last or (iteration + 1) % self.config.save_interval == 0:
                self.save()
            after_iteration(iteration + 1)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take an evaluation's metrics into the next look at whether reward and its judges part."""
        self._noted |= metrics

    def _watch(self, metrics: Mapping[str, float]) -> int:
        """Say what has parted from the rising reward; the number of new warnings."""
        warnings = self.divergence.update({**self._noted, **metrics})
        self._noted = {}
        for warning in warnings:
            self.progress.message(f"warning: {warning}")
        return len(warnings)

    def publish(self, average: bool = False) -> None:
        """Give the learner's weights (or their moving average) to every rollout worker; returns once all have
        confirmed version and digest."""
        publication = self.learner.publish(self.version, average)
        self.rollouts.load_weights(publication)
        self.digest = publication.digest

    def save(self) -> None:
        """Write a checkpoint of the present version, unless it is there already."""
        folder = str(self.output / "checkpoints" / f"version_{self.version:06d}")
        if folder != self.checkpoint:
            with self.progress.phase("save"):
                self.learner.save(folder)
            self.checkpoint = folder

    def step(self, iteration: int) -> dict[str, float]:
        """One iteration. Consumes the cursor's prompts; produces metrics, a rollout log, and a new policy version
        on every worker."""
        times: dict[str, float] = {}
        prompts = self.cursor.at(iteration)
        with self._phase("rollout", times):
            rollout = self._roll_out([self._request(iteration, g, prompt) for g, prompt in enumerate(prompts)])
        advantages = self._advantages(rollout.scores)
        trajectories = [group.trajectory for group in rollout.groups]
        rollout.groups.clear()  # frames are scored: their memory is free before the update
        with self._phase("update", times):
            metrics = self.learner.update(
                trajectories,
                advantages.values,
                advantages.weights,
                self.schedule.rule.num_trained,
            )
        self.version = int(metrics["policy_version"])
        with self._phase("publish", times):
            self.publish()
        record = rollout.scores, rollout.infos, advantages, self.reward
        self.rollout_log.write(iteration + 1, rollout_rows(iteration + 1, prompts, *record))
        counters = {f"reward_service/{name}": float(count) for name, count in self.rewards.counts.items()}
        return metrics | times | counters | iteration_metrics(*record)

    def _phase(self, name: str, times: dict[str, float]):
        return _Timed(self.progress.phase(name), lambda seconds: times.__setitem__(f"phase/{name}_s", seconds))

    def _request(self, iteration: int, group: int, prompt: Prompt) -> GroupRequest:
        sampling = self.config.sampling
        plan = self.schedule.rule.at(self.config.seed, iteration, group)
        return GroupRequest(
            step=iteration,
            group=group,
            prompt=prompt,
            group_size=self.config.data.group_size,
            policy_version=self.version,
            seed=self.config.seed,
            sigmas=self.sigmas,
            sde_type=sampling.sde_type,
            eta=sampling.eta,
            sde_steps=plan.sde_steps,
            trained_steps=plan.trained_steps,
        )

    def _roll_out(self, requests: Sequence[GroupRequest]) -> Rollout:
        """Generate and score groups; scoring of a group starts while others are still being generated."""
        groups, scores = {}, {}
        for refs in self.rollouts.generate(requests):
            number = refs.request.group
            groups[number], scores[number] = refs, self.rewards.score(refs, refs.request.group_size)
            self.rewards.wait_for_room()
        order = sorted(groups)
        infos = wait_all([groups[g].info for g in order], "rollout reports", self.config.rollout.timeout_s)
        for info in infos:
            made = info.policy_version, info.weights_digest, info.sigmas
            if made != (self.version, self.digest, requests[0].sigmas):
                raise RuntimeError(f"group {info.group}: made with {made}, not what was asked for")
        values = self.rewards.collect([scores[g] for g in order])
        for i, info in enumerate(infos):  # a broken video decodes to black, which has a score but deserves none
            kept = np.where(np.asarray(info.finite)[:, None], values[i].axes, np.nan)
            reasons = tuple(
                why if ok else "its latents are not finite"
                for why, ok in zip(values[i].reasons, info.finite, strict=True)
            )
            values[i] = dataclasses.replace(values[i], axes=kept, reasons=reasons)
        self.rewards.check_failures(values)
        if not any(np.isfinite(self.reward.total(value.axes)).any() for value in values):
            num_broken = sum(not ok for info in infos for ok in info.finite)
            raise RuntimeError(f"no video has a finite reward; {num_broken} have latents that are not finite")
        return Rollout([groups[g] for g in order], infos, values)

    def _advantages(self, scores: Sequence[Scores]) -> Advantages:
        settings = self.config.advantage
        how = Normalisation(
            eps=settings.eps,
            rule=settings.std_rule,
            global_std=settings.global_std,
            min_std=settings.min_std,
            clip=settings.clip,
        )
        axes_PGK = np.stack([s.axes for s in scores])
        if settings.combine == "axis":
            trained = self.reward.trained
            return axis_advantages(axes_PGK[..., trained], [self.reward.weights[k] for k in trained], how)
        return group_advantages(self.reward.total(axes_PGK), how)

    def evaluate(self, prompts: Sequence[Prompt], first_group: int, num_previews: int) -> EvaluatedSet:
        """ODE videos of fixed prompts and seeds under the present weights (or those that `publish` gave last), scored
        and judged."""
        settings = self.config.evaluation
        sigmas = tuple(map(float, sigma_grid(settings.num_steps, self.schedule.shift)))
        requests = [
            GroupRequest(
                step=0,
                group=first_group + i,
                prompt=prompt,
                group_size=settings.videos_per_prompt,
                policy_version=self.version,
                seed=settings.seed,
                sigmas=sigmas,
                sde_type="ode",
                eta=0.0,
                sde_steps=(),
                evaluation=True,
            )
            for i, prompt in enumerate(prompts)
        ]
        rollout = self._roll_out(requests)
        axes = np.concatenate([s.axes for s in rollout.scores])
        truth, matches = _judged(rollout.scores)
        shown = range(0, len(prompts), max(1, len(prompts) // max(1, num_previews)))
        frames = wait_all([_first_video.remote(rollout.groups[i].frames) for i in shown], "previews", 600.0)
        return EvaluatedSet(
            parts=self.reward.names,
            axes=axes,
            reward=self.reward.total(axes),
            truth=truth,
            truth_total=None if truth is None else self.reward.truth_total(truth),
            matches=matches,
            previews=[(prompts[i].text, video) for i, video in zip(shown, frames, strict=True)],
        )


def _judged(scores: Sequence[Scores]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(truth [N, 3], matches [N]) of all groups, nan in one that was lost as a whole; None without a judge."""
    if all(score.truth is None for score in scores):
        return None, None
    truth = [np.full((len(s.axes), len(AXES)), np.nan) if s.truth is None else s.truth for s in scores]
    matches = [np.full(len(s.axes), np.nan) if s.matches is None else s.matches for s in scores]
    return np.concatenate(truth), np.concatenate(matches)


class _Timed:
    """A context manager that also reports its wall time."""

    def __init__(self, inner, report: Callable[[float], None]):
        self.inner, self.report = inner, report

    def __enter__(self) -> None:
        self.start = time.monotonic()
        self.inner.__enter__()

    def __exit__(self, *error) -> None:
        self.inner.__exit__(*error)
        self.report(time.monotonic() - self.start)


@ray.remote(num_cpus=0)
def _first_video(frames: np.ndarray) -> np.ndarray:
    """The first video of a group, so that the driver fetches one video and not the group."""
    return np.array(frames[0])
