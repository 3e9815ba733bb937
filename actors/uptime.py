"""A clock that stands still while its process does: who was waited for may have worked on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable


class Uptime:
    """Seconds since it was made, of which no more than `longest_s` pass between two ticks.

    Args: clock: of the wall.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic):
        self.longest_s, self._clock = longest_s, clock
        self._passed, self._mark = 0.0, clock()

    def __call__(self) -> float:
        return self._passed + min(self._clock() - self._mark, self.longest_s)

    def tick(self) -> None:
        """To be called much more often than every `longest_s`."""
        self._passed, self._mark = self(), self._clock()
