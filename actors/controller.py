"""The controller: prompts -> rollout -> reward -> advantage -> learner -> weights -> rollout.

It holds references, rewards and versions; latents and frames never pass through it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import ray

from actors.cluster import Layout
from actors.elastic import Elastic
from actors.learner_group import LearnerGroup, LearnerLostError
from actors.overlap import OverlapLoop
from actors.publisher import Publication, PublishError
from actors.recovery import recover
from actors.rollout_group import GroupRefs
from actors.scored_rollouts import Rollout, ScoredRollouts
from actors.startup_memory import startup_memory
from actors.stop import ENDS, StopRequest, reason
from actors.telemetry import Telemetry
from actors.turns import Turns
from sage_ray.advantage import Advantages, Normalisation, axis_advantages, group_advantages
from sage_ray.busy_share import sequential_shares
from sage_ray.checkpoint import CheckpointError
from sage_ray.checkpoint_store import checkpoint_name
from sage_ray.checks import CheckedRun
from sage_ray.config_check import num_prompts
from sage_ray.data.prompts import PromptCursor
from sage_ray.divergence import Divergence
from sage_ray.iteration_record import iteration_metrics, rollout_rows
from sage_ray.metrics import FILE_NAME, MetricsWriter, read_lines
from sage_ray.progress import Progress
from sage_ray.resume import Resume, checkpoint_path, identity
from sage_ray.rollout_log import RolloutLog
from sage_ray.training_schedule import training_schedule
from sage_ray.types import GroupRequest, Prompt, Scores

TRIES = 3
"""Of what needs rollout workers that may die meanwhile."""


class Controller:
    """Drives the ring over the three pools, from the start or from where `run.resume` says.

    rollouts: rollout pool and reward service, as evaluation uses them too. finished: iterations. checkpoint: the last
    one that is whole.
    """

    def __init__(self, run: CheckedRun, layout: Layout, progress: Progress, stop: StopRequest):
        config = self.config = run.config
        self.resume, self.progress, self.stop = run.resume or Resume(None), progress, stop
        self.cursor = PromptCursor(run.prompts, config.seed, num_prompts(config))
        self.identity = identity(config, run.prompts)
        self.output = Path(config.output_dir)
        self.metrics = MetricsWriter(self.output, self.resume.iteration + 1 if run.resume else None)
        self.rollout_log = RolloutLog(self.output / "rollouts")
        self.schedule = training_schedule(config)
        self.sigmas = tuple(map(float, self.schedule.coefs.sigmas))
        self.layout, self.telemetry = layout, Telemetry(run, layout, progress)
        self.read_past()
        with ExitStack() as undo:  # its threads must not outlive a Ray that they ask
            self.rollouts = ScoredRollouts(config, layout)
            undo.callback(self.rollouts.close)
            self.learner = LearnerGroup(config, layout)
            undo.pop_all()
        self.learner.publisher.receivers = lambda: self.rollouts.rollouts.idle_members
        self.rollouts.rollouts.staff.tell = progress.message
        self.elastic = Elastic(config, layout, self.rollouts.rollouts, progress)
        self.turns = Turns(config.cluster.take_turns, self.rollouts, self.learner)
        self.finished, self.version, self.rebuilds = self.resume.iteration, 0, 0
        self.checkpoint = self.staged = self.resume.checkpoint.path if self.resume.checkpoint else ""
        self._kept: dict[int, Rollout] = {}
        self._reached = self.finished

    def read_past(self) -> None:
        """What the run has written before tells whether it diverges, and how it began."""
        lines = read_lines(self.output / FILE_NAME)
        self.divergence = Divergence()
        self._noted = self.divergence.replay(lines)
        self.progress.started_with(next((line for line in lines if "reward/total" in line), {}))

    def start(self) -> None:
        """Load every model, one side after the other where they take turns, and give the rollout workers the first
        version. Unblocked by the slowest actor."""
        if self.turns.enabled:
            self.rollouts.start()
            self.turns.learn()
            num_trainable = self.learner.setup()
        else:
            num_trainable = self.learner.setup()
            self.rollouts.start()
        if self.resume.checkpoint:
            self.version = self.learner.load(self.resume.checkpoint.path)
            self.rollouts.rewards.counts.update(self.resume.checkpoint.trainer["counters"])
        self.publish()
        for words in startup_memory(self.config, self.learner.ranks[0], self.rollouts.rollouts.members[0]):
            self.progress.message(words)
        self.progress.message(f"policy: {num_trainable:,} trainable parameters, {self.schedule.describe()}")
        self.telemetry.start(self.schedule.rule.num_trained, lambda: self.rollouts.rewards.num_pending)
        self.elastic.start()

    def close(self) -> None:
        """End the threads of pool and service and close the run's files; the actors end with Ray."""
        self.elastic.close()
        self.telemetry.close()
        self.rollouts.close()
        self.metrics.close()

    def run_sync(self, after_iteration: Callable[[int], None]) -> None:
        """Strictly on-policy loop: every iteration's rollouts are made by the weights of the last update.

        `after_iteration` is called with the number of finished iterations. A stop that is asked for comes between two
        of them, or in a rollout or an evaluation, which can be repeated. The last checkpoint is written at the end. A
        lost learner is started again, and the run goes on from its last checkpoint.
        """
        told, last = self.finished, self.config.num_iterations
        while told < last or self.staged != self.checkpoint:
            try:
                if self.finished == told < last:
                    self.step(self.finished)
                    self.save_when_due()
                if told < self.finished:
                    after_iteration(self.finished)
                    told = self.finished
                if told == last:
                    self.look_at_save(self.config.learner.timeout_s, must=True)
            except LearnerLostError as error:
                recover(self, error)
                told = min(told, self.finished)

    def run_async(self, after_iteration: Callable[[int], None], is_due: Callable[[int], bool]) -> None:
        """Overlapping loop: rollouts of the next iterations are made while the learner updates, by weights that are at
        most overlap.max_policy_age publishes old (see `actors.overlap`).

        `after_iteration` is called with the number of finished iterations where `is_due` says so: it waits until no
        rollout worker works. A run that is resumed, or whose learner was lost, begins with fresh rollouts.
        """
        while self.finished < self.config.num_iterations or self.staged != self.checkpoint:
            try:
                asyncio.run(OverlapLoop.run(self, after_iteration, is_due))
                self.look_at_save(self.config.learner.timeout_s, must=True)
            except LearnerLostError as error:
                recover(self, error)

    def save_when_due(self) -> None:
        """After an iteration: note what was written, and begin to write when it is time."""
        self.look_at_save()
        if self.finished == self.config.num_iterations or self.finished % self.config.save_interval == 0:
            self.save()

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take an evaluation's metrics into the next look at whether reward and its judges part."""
        self._noted |= metrics
        self.telemetry.evaluated(self.finished, metrics)

    def _watch(self, metrics: Mapping[str, float]) -> int:
        """Say what has parted from the rising reward; the number of new warnings."""
        warnings = self.divergence.update({**self._noted, **metrics})
        self._noted = {}
        for warning in warnings:
            self.progress.message(f"warning: {warning}")
            self.telemetry.diverged(self.finished + 1, warning)
        return len(warnings)

    def publish(self, average: bool = False) -> None:
        """Give the learner's weights (or their moving average) to every rollout worker; returns once all that are idle
        have confirmed version and digest. It is their turn then."""
        with self.stop.held():
            self.turns.learn()
            publication = self.publication(average)
            self.turns.generate()
            try:
                self.rollouts.load(publication)
            except ENDS as error:
                self.learner.raise_if_lost(error)
                raise

    def publication(self, average: bool = False) -> Publication:
        """Publish the learner's weights to the workers that are idle; who does not take them is replaced."""
        for _ in range(TRIES):
            try:
                self.published = self.learner.publish(self.version, average)
                return self.published
            except PublishError as error:
                failed = error
                self.progress.message(f"warning: {reason(error)}; it is tried again without them")
                self.rollouts.rollouts.replace(error.missing, reason(error))
        raise failed

    def reachable(self, groups: Mapping[int, GroupRefs]) -> dict[int, ray.ObjectRef]:
        """Trajectories by number, for the learner; those that are lost, as of a node that died, are made again."""
        found = dict(groups)
        for _ in range(TRIES):
            missing = self.learner.missing({number: refs.trajectory for number, refs in found.items()})
            if not missing:
                return {number: refs.trajectory for number, refs in found.items()}
            self.progress.message(f"warning: the trajectories of groups {missing} are lost and made again")
            again = self.rollouts.make_again([found[number] for number in missing])
            found |= {number: refs.without_frames() for number, refs in zip(missing, again, strict=True)}
        raise RuntimeError(f"trajectories of groups {missing} were lost {TRIES} times")

    def save(self) -> None:
        """Begin to write a checkpoint of the last finished iteration, unless one of its version is there already."""
        place = f"{checkpoint_path(self.config)}/{checkpoint_name(self.version)}"
        if place == self.staged:
            return
        with self.progress.phase("save"), self.stop.held():
            self.look_at_save(self.config.learner.timeout_s)
            self.turns.learn()
            counters = dict(self.rollouts.rewards.counts)
            self.learner.save(place, {"iteration": self.finished, "identity": self.identity, "counters": counters})
            self.turns.generate()
        self.staged = place

    def look_at_save(self, wait_s: float = 0.0, must: bool = False) -> None:
        """Take note of a checkpoint that has been written. One that could not be is told, and the run goes on.

        Args: wait_s: how long to wait for one that is being written. must: raise CheckpointError when it could not be.
        """
        if self.staged == self.checkpoint:
            return
        try:
            written = self.learner.saved(wait_s)
        except CheckpointError as error:
            self.staged = self.checkpoint
            if must:
                raise
            self.progress.message(f"warning: no checkpoint, the run goes on: {reason(error)}")
        else:
            self.checkpoint = written or self.checkpoint

    def step(self, iteration: int) -> None:
        """One iteration. Consumes the cursor's prompts; produces metrics, a rollout log, and a new policy version
        on every worker. From the update on it is not interrupted: then it is finished, or never was."""
        times, turn_s = {}, self.turns.seconds
        start = time.monotonic()
        with self._phase("rollout", times):
            rollout = self._rollout(iteration)
        advantages = self.advantages(rollout.scores)
        with self.stop.held():
            metrics = self._learn(rollout, advantages, times)
            if self.turns.enabled:
                times |= {"phase/turn_s": self.turns.seconds - turn_s, **self.turns.sizes()}
            pools = len(self.rollouts.rollouts.staff.serving) or 1, self.config.reward.num_workers
            elapsed_s, update_s = time.monotonic() - start, times["phase/update_s"]
            shares = sequential_shares(elapsed_s, update_s, rollout.infos, rollout.scores, pools)
            self.finish(iteration, metrics | times | shares | {"policy/age": 0.0}, rollout, advantages)
            self.elastic.after_iteration(rollout.infos, update_s, self.rollouts.rewards.num_pending)

    def _rollout(self, iteration: int) -> Rollout:
        """An iteration's groups, without the frames that are scored; those of before the learner was lost, where its
        weights are the same again."""
        kept = self._kept.pop(iteration, None)
        if kept is not None and kept.digest == self.published.digest:
            self.progress.message(f"iteration {iteration + 1} learns from the rollouts that were kept")
            kept = replace(kept, groups=[replace(group, publication=self.published) for group in kept.groups])
        else:
            made = self.rollouts.roll_out(self.requests(iteration, self.version))
            kept = Rollout([group.without_frames() for group in made.groups], made.infos, made.scores)
        self._kept[iteration] = kept
        return kept

    def _learn(self, rollout: Rollout, advantages: Advantages, times: dict[str, float]) -> dict[str, float]:
        """Update and publish; nobody needs the weights of a run that is to stop."""
        trajectories = self.reachable(dict(enumerate(rollout.groups)))
        self.turns.learn()
        with self._phase("update", times):
            metrics = self.learner.update(
                list(trajectories.values()),
                advantages.values,
                advantages.weights,
                self.schedule.rule.num_trained,
            )
        self.version = int(metrics["policy_version"])
        if self.stop.requested is None:
            with self._phase("publish", times):
                self.publish()
            metrics |= self.published.metrics
        return metrics

    def finish(self, iteration: int, metrics: dict[str, float], rollout: Rollout, advantages: Advantages) -> None:
        """Record a finished iteration: rollout log, metrics, alarms."""
        record = rollout.scores, rollout.infos, advantages, self.rollouts.parts
        rows = rollout_rows(iteration + 1, self.cursor.at(iteration), *record)
        self.rollout_log.write(iteration + 1, rows)
        counters = {f"reward_service/{name}": float(count) for name, count in self.rollouts.rewards.counts.items()}
        metrics = metrics | counters | self.rollouts.rollouts.staff.metrics() | iteration_metrics(*record)
        metrics["alarms/divergence"] = float(self._watch(metrics))
        metrics |= self.telemetry.judge(iteration + 1, metrics)
        self.metrics.write(iteration + 1, metrics)
        self.progress.iteration(iteration + 1, metrics)
        self.telemetry.iteration(iteration + 1, metrics)
        self.finished = iteration + 1
        if self.finished > self._reached:  # what is only made again is no progress
            self._reached, self.rebuilds = self.finished, 0
        self._kept.pop(iteration, None)

    def _phase(self, name: str, times: dict[str, float]):
        report = partial(times.__setitem__, f"phase/{name}_s")
        return _Timed(self.progress.phase(name), report, lambda: time.monotonic() - self.turns.seconds)

    def requests(self, iteration: int, version: int) -> list[GroupRequest]:
        """What is asked of the rollout workers in an iteration, of a policy version."""
        prompts = self.cursor.at(iteration)
        return [self._request(iteration, g, prompt, version) for g, prompt in enumerate(prompts)]

    def _request(self, iteration: int, group: int, prompt: Prompt, version: int) -> GroupRequest:
        sampling = self.config.sampling
        plan = self.schedule.rule.at(self.config.seed, iteration, group)
        return GroupRequest(
            step=iteration,
            group=group,
            prompt=prompt,
            group_size=self.config.data.group_size,
            policy_version=version,
            seed=self.config.seed,
            sigmas=self.sigmas,
            sde_type=sampling.sde_type,
            eta=sampling.eta,
            sde_steps=plan.sde_steps,
            trained_steps=plan.trained_steps,
        )

    def advantages(self, scores: Sequence[Scores]) -> Advantages:
        """Of some groups; each by itself, unless advantage.global_std."""
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
