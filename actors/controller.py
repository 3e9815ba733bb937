"""The controller: prompts -> rollout -> reward -> advantage -> learner -> weights -> rollout.

It holds references, rewards and versions; latents and frames never pass through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from actors.cluster import Layout
from actors.pools import LearnerGroup
from actors.scored_rollouts import ScoredRollouts
from actors.turns import Turns
from sage_ray.advantage import Advantages, Normalisation, axis_advantages, group_advantages
from sage_ray.config import Config
from sage_ray.config_check import num_prompts
from sage_ray.data.prompts import PromptCursor
from sage_ray.divergence import Divergence
from sage_ray.iteration_record import iteration_metrics, rollout_rows
from sage_ray.metrics import MetricsWriter
from sage_ray.progress import Progress
from sage_ray.rollout_log import RolloutLog
from sage_ray.training_schedule import training_schedule
from sage_ray.types import GroupRequest, Prompt, Scores


class Controller:
    """Drives the ring over the three pools. rollouts: rollout pool and reward service, as evaluation uses them too."""

    def __init__(self, config: Config, layout: Layout, prompts: Sequence[Prompt], progress: Progress):
        self.config, self.progress = config, progress
        self.cursor = PromptCursor(list(prompts), config.seed, num_prompts(config))
        self.output = Path(config.output_dir)
        self.metrics = MetricsWriter(self.output)
        self.rollout_log = RolloutLog(self.output / "rollouts")
        self.schedule = training_schedule(config)
        self.sigmas = tuple(map(float, self.schedule.coefs.sigmas))
        self.rollouts = ScoredRollouts(config, layout)
        self.learner = LearnerGroup(config, layout)
        self.turns = Turns(config.cluster.take_turns, self.rollouts, self.learner)
        self.divergence, self._noted = Divergence(), {}
        self.version, self.checkpoint = 0, ""

    def start(self) -> None:
        """Load every model, one side after the other where they take turns, and give the rollout workers version 0.
        Unblocked by the slowest actor."""
        if self.turns.enabled:
            self.rollouts.start()
            self.turns.learn()
            num_trainable = self.learner.setup()
        else:
            num_trainable = self.learner.setup()
            self.rollouts.start()
        self.publish()
        self.progress.message(f"policy: {num_trainable:,} trainable parameters, {self.schedule.describe()}")

    def close(self) -> None:
        """End the reward service's thread and close the run's files; the actors end with Ray."""
        self.rollouts.close()
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
        confirmed version and digest. It is their turn then."""
        self.turns.learn()
        publication = self.learner.publish(self.version, average)
        self.turns.generate()
        self.rollouts.load(publication)

    def save(self) -> None:
        """Write a checkpoint of the present version, unless it is there already."""
        folder = str(self.output / "checkpoints" / f"version_{self.version:06d}")
        if folder != self.checkpoint:
            with self.progress.phase("save"):
                self.turns.learn()
                self.learner.save(folder)
                self.turns.generate()
            self.checkpoint = folder

    def step(self, iteration: int) -> dict[str, float]:
        """One iteration. Consumes the cursor's prompts; produces metrics, a rollout log, and a new policy version
        on every worker."""
        times, turn_s = {}, self.turns.seconds
        prompts = self.cursor.at(iteration)
        with self._phase("rollout", times):
            rollout = self.rollouts.roll_out([self._request(iteration, g, prompt) for g, prompt in enumerate(prompts)])
        advantages = self._advantages(rollout.scores)
        trajectories = [group.trajectory for group in rollout.groups]
        rollout.groups.clear()  # frames are scored: their memory is free before the update
        self.turns.learn()
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
        if self.turns.enabled:
            times |= {"phase/turn_s": self.turns.seconds - turn_s, **self.turns.sizes()}
        record = rollout.scores, rollout.infos, advantages, self.rollouts.parts
        self.rollout_log.write(iteration + 1, rollout_rows(iteration + 1, prompts, *record))
        counters = {f"reward_service/{name}": float(count) for name, count in self.rollouts.rewards.counts.items()}
        return metrics | times | counters | iteration_metrics(*record)

    def _phase(self, name: str, times: dict[str, float]):
        report = partial(times.__setitem__, f"phase/{name}_s")
        return _Timed(self.progress.phase(name), report, lambda: time.monotonic() - self.turns.seconds)

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

    def _advantages(self, scores: Sequence[Scores]) -> Advantages:
        settings = self.config.advantage
        how = Normalisation(
            eps=settings.eps,
            rule=settings.std_rule,
            global_std=settings.global_std,
            min_std=settings.min_std,
            clip=settings.clip,
        )
        axes_PGK, parts = np.stack([s.axes for s in scores]), self.rollouts.parts
        if settings.combine == "axis":
            return axis_advantages(axes_PGK[..., parts.trained], [parts.weights[k] for k in parts.trained], how)
        return group_advantages(parts.total(axes_PGK), how)


class _Timed:
    """A context manager that also reports its seconds by a clock: the wall's, which stands still while turns change."""

    def __init__(self, inner, report: Callable[[float], None], clock: Callable[[], float]):
        self.inner, self.report, self.clock = inner, report, clock

    def __enter__(self) -> None:
        self.start = self.clock()
        self.inner.__enter__()

    def __exit__(self, *error) -> None:
        self.inner.__exit__(*error)
        self.report(self.clock() - self.start)
