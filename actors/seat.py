"""A rollout group in the pool: the weights it holds, the tasks it has, and since when nothing came of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import ray

from actors.publisher import Publication, PublishError
from actors.rollout_group import RolloutGroup
from actors.scored_group import check_made
from actors.task_board import Made, Task
from actors.wait import wait_async
from sage_ray.busy_share import BusyShare

TASKS_AT_ONCE = 2
"""Of a rollout group: one runs and one waits, so that it never waits for the controller."""
Value = TypeVar("Value")


class SeatLostError(RuntimeError):
    """The group was ended while something was asked of it."""


class Seat:
    """A rollout group that swaps weights between its tasks, whatever the others do.

    Args: clock: seconds, which stand still while this process does. busy: counts the group as working while it has a
    task.

    held: token of the publication whose weights it has, None while they change. tasks: in the order in which it makes
    them. since: when it began with the first. serves: takes tasks. leaves: ends after those it has. is_new: has not
    finished any. unheard: tokens of publications that it cannot get any more. nodes: ids of its actors' nodes, once
    known.
    """

    def __init__(self, number: int, group: RolloutGroup, clock: Callable[[], float], busy: BusyShare):
        self.number, self.group, self._clock, self._busy = number, group, clock, busy
        self.held: object | None = None
        self.tasks: list[Task] = []
        self.since, self.serves, self.leaves, self.is_new = 0.0, False, False, True
        self.unheard: set[object] = set()
        self.nodes: frozenset[str] = frozenset()
        self._using, self._changed = 0, asyncio.Condition()
        self._lost: asyncio.Event = asyncio.Event()

    @property
    def name(self) -> str:
        return f"rollout-{self.number}"

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def lose(self) -> None:
        """Everything that waits for this group ends with SeatLostError."""
        self.serves = False
        self._lost.set()

    @property
    def first_s(self) -> float:
        """How long it has been busy with its first task; 0 without any."""
        return self._clock() - self.since if self.tasks else 0.0

    def may_make(self, task: Task) -> bool:
        """Whether a task may be given to it."""
        return task.suits(self) and task.publication.token not in self.unheard

    def take(self, task: Task) -> None:
        """It has one more task."""
        self.tasks.append(task)
        self.since = self._clock() if len(self.tasks) == 1 else self.since

    def drop(self, task: Task) -> None:
        """A task is made, or will not be."""
        self.tasks.remove(task)
        self.since, self.is_new = self._clock(), False

    async def make(self, task: Task, load_s: float) -> list[Made]:
        """Make a task with its publication's weights. Raises: SeatLostError, what the actors raise, and RuntimeError
        where they made something else than was asked for."""
        async with self.holding(task.publication, load_s):
            with self._busy.working(self):
                return await self._generate(task)

    @asynccontextmanager
    async def holding(self, publication: Publication, load_s: float) -> AsyncIterator[None]:
        """Inside the group holds a publication's weights. It is given them once no task of it needs others."""
        wanted = publication.token
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_lost or self.held == wanted or not self._using)
            if self.is_lost:
                raise SeatLostError(self.name)
            if self.held != wanted:
                self.held = None
                await self.unless_lost(self._load(publication, load_s))
                self.held = wanted
            self._using += 1
        try:
            yield
        finally:
            async with self._changed:
                self._using -= 1
                self._changed.notify_all()

    async def unless_lost(self, work: Awaitable[Value]) -> Value:
        """Value of some work; SeatLostError as soon as the group is lost, whatever the work waits for."""
        doing, losing = asyncio.ensure_future(work), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((doing, losing), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise SeatLostError(self.name)
            return doing.result()
        finally:
            doing.cancel()
            losing.cancel()

    async def _generate(self, task: Task) -> list[Made]:
        first, last = task.requests[0], task.requests[-1]
        groups, others = self.group.generate(task.requests)
        what = f"groups {first.group} to {last.group} of iteration {first.step + 1}"
        refs = [*(group.info for group in groups), *others]
        infos = (await self.unless_lost(wait_async(refs, what, UNBOUNDED_S)))[: len(groups)]
        for group, info in zip(groups, infos, strict=True):
            check_made(info, group.request, task.publication.digest)
        made_with = {"task": task.requests, "publication": task.publication}
        return [Made(replace(group, **made_with), info) for group, info in zip(groups, infos, strict=True)]

    async def _load(self, publication: Publication, load_s: float) -> None:
        """Every actor of the group takes the weights. Raises RuntimeError when one confirms anything else."""
        what = f"weights of version {publication.version} on {self.name}"
        members = self.group.members
        if publication.is_there_for(members):
            asked = publication.load_on(members)
        else:  # the learner puts it into the object store first
            asked = await asyncio.to_thread(publication.load_on, members)
        try:
            answers = await wait_async(asked, what, load_s)
        except ray.exceptions.ObjectLostError as error:
            raise PublishError(f"{what}: they are gone with the learner that made them") from error
        publication.check_loaded(answers)


def is_loss(error: BaseException) -> bool:
    """Whether an error says that a group's actors are gone, or do not answer; else it is one of theirs."""
    return isinstance(error, ray.exceptions.RayActorError | TimeoutError | SeatLostError)


UNBOUNDED_S = float("inf")
"""Who takes too long is found by the pool, which knows what is usual."""
