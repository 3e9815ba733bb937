"""Which rollout tasks wait, who makes which, and which take too long. Knows neither Ray nor the time."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import statistics
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.publisher import Publication
from actors.rollout_group import GroupRefs
from sage_ray.config import FaultsConfig
from sage_ray.types import GroupInfo, GroupRequest

MIN_SLOW_S = 2.0
"""No task counts as slow before."""


class Made(NamedTuple):
    """A finished group of videos."""

    refs: GroupRefs
    info: GroupInfo


@dataclass(eq=False)
class Task:
    """Groups of videos that one rollout group makes in one call, with the weights of a publication.

    made: what the first maker gives. makers: who makes it now. errors: words of those whose code failed on it, one a
    maker. doubted: the first outcome with videos that are not finite, and who made it.
    """

    order: int
    requests: tuple[GroupRequest, ...]
    publication: Publication
    made: asyncio.Future[list[Made]]
    makers: list[Hashable] = field(default_factory=list)
    errors: dict[Hashable, str] = field(default_factory=dict)
    doubted: tuple[Hashable, list[Made]] | None = None
    is_late: bool = False

    @property
    def cost(self) -> float:
        """Denoising steps of all videos: tasks of training and of evaluation differ."""
        return float(sum(one.group_size * (len(one.sigmas) - 1) for one in self.requests))

    @property
    def is_compared(self) -> bool:
        """Whether its trajectories have log-probs, by which two workers can be compared."""
        return all(one.trained_steps for one in self.requests)

    def suits(self, maker: Hashable) -> bool:
        """Whether this maker may make it: it does not, and has not done so in vain."""
        doubts = self.doubted is not None and self.doubted[0] is maker
        return not (self.made.done() or maker in self.makers or maker in self.errors or doubts)


class TaskBoard:
    """The tasks that are not finished. A task is given to one maker, in the order in which they came; one that takes
    too long is given to one more.

    Args: first_bound_s: within which a task must be made before there is anything to compare with.
    """

    def __init__(self, faults: FaultsConfig, first_bound_s: float):
        self.faults, self.first_bound_s = faults, first_bound_s
        self._waiting: list[Task] = []
        self._making: set[Task] = set()
        self._rates: deque[float] = deque(maxlen=64)
        self._numbers = itertools.count()

    def put(self, requests: Iterable[GroupRequest], publication: Publication, made: asyncio.Future[list[Made]]) -> Task:
        """A new task, behind all others."""
        self._waiting.append(Task(next(self._numbers), tuple(requests), publication, made))
        return self._waiting[-1]

    def waiting(self) -> list[Task]:
        """Tasks that nobody makes, in order. Those whose asker has gone (their future is cancelled) are forgotten."""
        if any(task.made.done() for task in self._waiting):
            self._waiting = [task for task in self._waiting if not task.made.done()]
        return self._waiting

    def late(self) -> list[Task]:
        """Tasks that one more may make, in order."""
        found = (task for task in self._making if task.is_late and len(task.makers) == 1 and not task.made.done())
        return sorted(found, key=_order)

    def open(self) -> list[Task]:
        """All tasks that are not finished, in order."""
        return sorted((task for task in (*self.waiting(), *self._making) if not task.made.done()), key=_order)

    def give(self, task: Task, maker: Hashable) -> None:
        """This maker begins to make it."""
        if task in self._making:
            assert task.is_late
        else:
            self._waiting.remove(task)
            self._making.add(task)
        task.makers.append(maker)

    def leave(self, task: Task, maker: Hashable) -> None:
        """This maker makes it no more; it waits again, at its old place, where nobody does and it is not finished."""
        task.makers.remove(maker)
        if not task.makers:
            self._making.discard(task)
            task.is_late = False
            if not task.made.done():
                bisect.insort(self._waiting, task, key=_order)

    def took(self, task: Task, seconds: float) -> None:
        """A maker has made it in this time."""
        self._rates.append(seconds / task.cost)

    def is_slow(self, task: Task, seconds: float) -> bool:
        """Whether one more should make a task that is being made for so long."""
        limit_s = max(MIN_SLOW_S, self.faults.slow_factor * self._median_s(task)) if self._rates else self.first_bound_s
        return seconds > limit_s

    def bound_s(self, task: Task) -> float:
        """When its maker counts as hung."""
        if not self._rates:
            return self.first_bound_s
        return min(self.first_bound_s, max(self.faults.hung_min_s, self.faults.hung_factor * self._median_s(task)))

    def _median_s(self, task: Task) -> float:
        return statistics.median(self._rates) * task.cost


def _order(task: Task) -> int:
    return task.order
