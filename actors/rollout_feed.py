"""Scored groups for the asynchronous ring, made ahead of the learner as far as it may be.

All groups of iteration k are made by the weights that were published after iteration k - overlap.max_policy_age (those
of the start before that), whoever makes them and whenever: a run gives the same numbers however fast its workers are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from actors.publisher import Publication
from actors.scored_group import ScoredGroup
from actors.scored_rollouts import ScoredRollouts
from sage_ray.config import Config
from sage_ray.config_check import num_prompts
from sage_ray.types import GroupRequest


class RolloutFeed:
    """Asks the rollout pool for groups in order of iterations and groups, and keeps them until they are learned.

    Back-pressure: at most overlap.max_groups groups are being made or wait for the learner.

    Args:
        requests: of an iteration, for weights of a version. first: iterations that are finished; published: their
        weights, which all workers hold.
    """

    def __init__(
        self,
        config: Config,
        source: ScoredRollouts,
        requests: Callable[[int, int], list[GroupRequest]],
        first: int,
        published: Publication,
    ):
        self.config, self.source, self.requests, self.first = config, source, requests, first
        self.age, self.num_groups = config.overlap.max_policy_age, num_prompts(config)
        self.max_groups = config.overlap.max_groups or (self.age + 1) * self.num_groups
        self._published = {first: published}
        self._made: dict[int, list[asyncio.Future[ScoredGroup]]] = {}
        self._queue: deque[list[GroupRequest]] = deque()
        self._next, self._unlearned, self._running, self._paused = first, 0, 0, False
        self._changed, self._keeping = asyncio.Condition(), set[asyncio.Future[None]]()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until it is cancelled, or until the first group that cannot be made or scored."""
        giving = asyncio.ensure_future(self._give_out())
        try:
            await asyncio.wait([self._failed, giving], return_when=asyncio.FIRST_COMPLETED)
            for one in (self._failed, giving):
                if one.done():
                    one.result()
        finally:
            for one in (giving, *self._keeping):
                one.cancel()
            await asyncio.gather(giving, *self._keeping, return_exceptions=True)

    async def group(self, iteration: int, number: int) -> ScoredGroup:
        """A group of an iteration, once its last reward is there."""
        return await self._place(iteration, number)

    async def publish(self, finished: int, publication: Publication) -> None:
        """Weights after `finished` iterations. Weights that no later iteration is made by are let go, and groups of
        finished iterations."""
        self._published[finished] = publication
        self._made.pop(finished - 1, None)
        oldest = self.sampler(self._queue[0][0].step if self._queue else self._next)
        self._published = {number: one for number, one in self._published.items() if number >= oldest}
        await self._notify()

    async def learned(self, count: int) -> None:
        """The learner has taken `count` more groups."""
        self._unlearned -= count
        await self._notify()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Inside no group is being made and the workers' weights may be changed (`source.load`)."""
        self._paused = True
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == 0)
        try:
            yield
        finally:
            self._paused = False
            await self._notify()

    def sampler(self, iteration: int) -> int:
        """After how many iterations the weights were published that make an iteration's groups."""
        return max(self.first, iteration - self.age)

    @property
    def num_waiting(self) -> int:
        """Groups that are scored, or being made, and not learned yet."""
        return self._unlearned

    async def _give_out(self) -> None:
        while True:
            task, publication = await self._take()
            for request, making in zip(task, self.source.scored(task, publication), strict=True):
                keeping = asyncio.ensure_future(self._keep(request, asyncio.wrap_future(making)))
                self._keeping.add(keeping)
                keeping.add_done_callback(self._kept)

    async def _take(self) -> tuple[Sequence[GroupRequest], Publication]:
        """The next task in order, once its weights are published and there is room for it."""
        async with self._changed:
            await self._changed.wait_for(self._may_start)
            task = self._queue.popleft()
            self._unlearned += len(task)
            self._running += len(task)
            return task, self._published[self.sampler(task[0].step)]

    def _may_start(self) -> bool:
        if not self._queue:
            self._plan_next()
        if self._paused or not self._queue:
            return False
        return self._unlearned + len(self._queue[0]) <= self.max_groups

    def _plan_next(self) -> None:
        """Queue the next iteration's tasks, if the weights that make them are there."""
        publication = self._published.get(self.sampler(self._next))
        if publication is not None and self._next < self.config.num_iterations:
            requests, size = self.requests(self._next, publication.version), self.config.rollout.groups_per_task
            self._queue.extend(requests[i : i + size] for i in range(0, len(requests), size))
            self._next += 1

    async def _keep(self, request: GroupRequest, making: asyncio.Future[ScoredGroup]) -> None:
        try:
            made = await making
        finally:
            self._running -= 1
            await self._notify()
        self._place(request.step, request.group).set_result(replace(made, refs=made.refs.without_frames()))

    def _kept(self, keeping: asyncio.Future[None]) -> None:
        self._keeping.discard(keeping)
        if not keeping.cancelled() and (error := keeping.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    def _place(self, iteration: int, number: int) -> asyncio.Future[ScoredGroup]:
        create = asyncio.get_running_loop().create_future
        return self._made.setdefault(iteration, [create() for _ in range(self.num_groups)])[number]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
