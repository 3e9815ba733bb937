"""How much of the time a pool works."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from sage_ray.types import GroupInfo, Scores


class BusyShare:
    """Share of the wall time in which the members of a pool had work, between two calls of `take`.

    Args: size: members of the pool. clock: seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic):
        self.size, self._clock = size, clock
        self._tasks: Counter[Hashable] = Counter()
        self._work_s, self._could_s, self._then = 0.0, 0.0, clock()

    def resize(self, size: int) -> None:
        """The pool has so many members from now on."""
        self._advance()
        self.size = size

    @contextmanager
    def working(self, member: Hashable = None) -> Iterator[None]:
        """A member has one more task inside; several at once count once."""
        self._advance()
        self._tasks[member] += 1
        try:
            yield
        finally:
            self._advance()
            self._tasks[member] -= 1
            if not self._tasks[member]:
                del self._tasks[member]

    def take(self) -> float:
        """Share in [0, 1] since the last call, and begin anew; 0 when no time has passed."""
        self._advance()
        could_s, work_s = self._could_s, self._work_s
        self._could_s = self._work_s = 0.0
        return min(1.0, work_s / could_s) if could_s > 0 else 0.0

    def _advance(self) -> None:
        now = self._clock()
        self._work_s += len(self._tasks) * (now - self._then)
        self._could_s += self.size * (now - self._then)
        self._then = now


def sequential_shares(
    elapsed_s: float, update_s: float, infos: Sequence[GroupInfo], scores: Sequence[Scores], pools: tuple[int, int]
) -> dict[str, float]:
    """Busy shares of an iteration whose phases follow each other, from the seconds that its parts report.

    Args: pools: rollout groups and reward workers.
    """
    rollout_s = sum(info.denoise_s + info.decode_s for info in infos)
    reward_s = sum(score.seconds for score in scores)
    work = {"rollout": rollout_s / pools[0], "reward": reward_s / pools[1], "learner": update_s}
    return {f"pool/{name}_busy": min(1.0, seconds / elapsed_s) for name, seconds in work.items()}
