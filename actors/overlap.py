"""The asynchronous ring: rollouts of later iterations are made while the learner updates.

The learner takes groups in their order, each as soon as its last reward is there, so gradients are summed as in the
synchronous ring: with overlap.max_policy_age=0 the two give the same bits. Which weights make which groups is fixed
(`RolloutFeed`). A run that is resumed begins with fresh rollouts, as older weights are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import ray

from actors.rollout_feed import RolloutFeed
from actors.scored_group import ScoredGroup
from actors.scored_rollouts import Rollout, as_rollout
from actors.stop import ENDS
from sage_ray.advantage import Advantages
from sage_ray.busy_share import BusyShare
from sage_ray.group_chunks import Chunk, chunks_of

if TYPE_CHECKING:
    from actors.controller import Controller


class OverlapLoop:
    """A controller's learner beside its rollout feed. Made and run inside of an event loop."""

    def __init__(self, controller: Controller):
        self.controller, self.learner = controller, controller.learner
        self.num_trained = controller.schedule.rule.num_trained
        self.chunks = chunks_of(controller.config, self.num_trained)
        self.feed = RolloutFeed(
            controller.config, controller.rollouts, controller.requests, controller.finished, controller.published
        )
        self.busy, self._times = BusyShare(1), dict[str, float]()

    @classmethod
    async def run(
        cls, controller: Controller, after_iteration: Callable[[int], None], is_due: Callable[[int], bool]
    ) -> None:
        """Until the last iteration, or the first error of either side."""
        loop = cls(controller)
        sides = [
            asyncio.ensure_future(loop._learn_all(after_iteration, is_due)),
            asyncio.ensure_future(loop.feed.run()),
        ]
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in done:
                try:
                    side.result()
                except ENDS as error:
                    loop.learner.raise_if_lost(error)
                    raise
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _learn_all(self, after_iteration: Callable[[int], None], is_due: Callable[[int], bool]) -> None:
        controller = self.controller
        for iteration in range(controller.finished, controller.config.num_iterations):
            await self._learn(iteration)
            controller.save_when_due()
            if is_due(iteration + 1):
                async with self.feed.quiet():
                    controller.rollouts.load(controller.published)
                    after_iteration(iteration + 1)

    async def _learn(self, iteration: int) -> None:
        """One iteration. Consumes the feed's groups; produces metrics, a rollout log and a published version. From its
        optimizer step on it is not interrupted: then it is finished, or never was."""
        controller, start, self._times = self.controller, time.monotonic(), {}
        scored: list[ScoredGroup] = []
        early = self.chunks[:-1] if self.chunks else []
        with controller.progress.phase("learn"):
            for number, chunk in enumerate(early):
                scored += await self._receive(iteration, chunk.groups)
                if number == 0:
                    await asyncio.to_thread(self.learner.begin)
                await self._accumulate(chunk, scored)
            scored += await self._receive(iteration, range(len(scored), self.feed.num_groups))
        rollout = as_rollout(scored)
        controller.rollouts.check_scores(rollout.scores, rollout.infos)
        advantages = controller.advantages(rollout.scores)
        with controller.stop.held():
            with controller.progress.phase("learn"):
                metrics = await self._step(scored, advantages, begun=bool(early))
                controller.version = int(metrics["policy_version"])
                await self._publish(iteration + 1)
            metrics |= controller.published.metrics | self._times | self._shares(rollout, time.monotonic() - start)
            metrics["policy/age"] = float(iteration - self.feed.sampler(iteration))
            controller.finish(iteration, metrics, rollout, advantages)
            update_s = self._times.get("phase/update_s", 0.0)
            controller.elastic.after_iteration(rollout.infos, update_s, controller.rollouts.rewards.num_pending)

    async def _receive(self, iteration: int, numbers: Iterable[int]) -> list[ScoredGroup]:
        with self._clock("wait"):
            return [await self.feed.group(iteration, number) for number in numbers]

    async def _accumulate(self, chunk: Chunk, scored: Sequence[ScoredGroup]) -> None:
        """The learner takes a chunk that is no iteration's last."""
        advantages = self._advantages(chunk.groups, scored)
        refs = await self._reachable(scored, chunk.needed)
        with self.busy.working(), self._clock("update"):
            await asyncio.to_thread(self.learner.accumulate, chunk, refs, advantages)
        await self.feed.learned(len(chunk.groups))

    async def _step(self, scored: Sequence[ScoredGroup], advantages: Advantages, begun: bool) -> dict[str, float]:
        """The learner takes the rest and steps; its metrics."""
        trajectories = await self._reachable(scored, self.chunks[-1].needed if begun and self.chunks else None)
        with self.busy.working(), self._clock("update"):
            if not begun:
                values, weights = advantages.values, advantages.weights
                update = self.learner.update
                metrics = await asyncio.to_thread(
                    update, list(trajectories.values()), values, weights, self.num_trained
                )
            else:
                assert self.chunks
                await asyncio.to_thread(self.learner.accumulate, self.chunks[-1], trajectories, advantages)
                metrics = await asyncio.to_thread(self.learner.finish)
        await self.feed.learned(len(self.chunks[-1].groups) if begun and self.chunks else len(scored))
        return metrics

    async def _reachable(
        self, scored: Sequence[ScoredGroup], numbers: Sequence[int] | None
    ) -> dict[int, ray.ObjectRef]:
        """Trajectories by group number, all or some; those that were lost are made again first."""
        chosen = {number: scored[number].refs for number in (range(len(scored)) if numbers is None else numbers)}
        return await asyncio.to_thread(self.controller.reachable, chosen)

    async def _publish(self, finished: int) -> None:
        """Nobody needs the weights of a run that is to stop."""
        if self.controller.stop.requested is None:
            with self._clock("publish"):
                publication = await asyncio.to_thread(self.controller.publication)
                self.controller.rollouts.rollouts.current = publication  # newcomers load it
            await self.feed.publish(finished, publication)

    def _advantages(self, numbers: Sequence[int], scored: Sequence[ScoredGroup]) -> Advantages:
        """Of some groups, in an array for all: each group is normalised by itself."""
        part = self.controller.advantages([scored[number].scores for number in numbers])
        values, weights = (
            np.zeros((self.feed.num_groups, rows.shape[1]), rows.dtype) for rows in (part.values, part.weights)
        )
        values[list(numbers)], weights[list(numbers)] = part.values, part.weights
        return Advantages(values, weights, part.num_failed, part.num_small_groups, part.num_flat_groups)

    def _shares(self, rollout: Rollout, elapsed_s: float) -> dict[str, float]:
        reward_s = sum(score.seconds for score in rollout.scores) / self.controller.config.reward.num_workers
        return {
            "pool/rollout_busy": self.controller.rollouts.rollouts.staff.busy.take(),
            "pool/reward_busy": min(1.0, reward_s / elapsed_s),
            "pool/learner_busy": self.busy.take(),
            "queue/trajectories": float(self.feed.num_waiting),
        }

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            name = f"phase/{phase}_s"
            self._times[name] = self._times.get(name, 0.0) + time.monotonic() - start
