"""A clock for one process: how long it was in which phase, and how long it did nothing.

Every second since the clock began is counted exactly once, so phases and idle time add up to the wall's time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

IDLE = "idle"
MAX_INTERVALS = 4096
"""Finished intervals that wait for the next report; older ones are forgotten."""


class Interval(NamedTuple):
    """One finished phase. start_s: seconds since the epoch; lane: number of the thread, from 0."""

    phase: str
    start_s: float
    seconds: float
    lane: int


@dataclass(frozen=True)
class ClockReport:
    """What happened in a span of time. start_s: seconds since the epoch; phases: name -> seconds, with "idle"; they add
    up to wall_s. intervals: phases that ended in the span."""

    start_s: float
    wall_s: float
    phases: dict[str, float] = field(default_factory=dict)
    intervals: tuple[Interval, ...] = ()


class ActorClock:
    """Phases may be nested: the inner one counts. Phases of several threads at once count together, as
    "decode+denoise", and under their name where they are the same."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, epoch: Callable[[], float] = time.time):
        """clock: monotonic seconds; epoch: seconds since the epoch, asked once."""
        self._clock, self._lock = clock, threading.Lock()
        self._start = self._mark = self._reported = clock()
        self._epoch = epoch() - self._start
        self._totals: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._stacks: dict[int, list[str]] = {}
        self._lanes: dict[int, int] = {}
        self._intervals: deque[Interval] = deque(maxlen=MAX_INTERVALS)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surrounds a phase of this thread. Raises: ValueError for a name that is empty or "idle"."""
        if not name or name == IDLE:
            raise ValueError(f"phase {name!r}: must not be empty or {IDLE!r}")
        thread = threading.get_ident()
        with self._lock:
            start = self._advance()
            self._stacks.setdefault(thread, []).append(name)
            lane = self._lanes.setdefault(thread, len(self._lanes))
        try:
            yield
        finally:
            with self._lock:
                end = self._advance()
                stack = self._stacks[thread]
                del stack[len(stack) - 1 - stack[::-1].index(name)]  # coroutines of a thread end in any order
                if not stack:
                    del self._stacks[thread]
                self._intervals.append(Interval(name, self._epoch + start, end - start, lane))

    def totals(self) -> tuple[float, dict[str, float]]:
        """(seconds since the clock began, phase -> seconds of them)."""
        with self._lock:
            now = self._advance()
            return now - self._start, dict(self._totals)

    def report(self) -> ClockReport:
        """The span since the last report, or since the clock began."""
        with self._lock:
            now = self._advance()
            phases = {name: value - self._last.get(name, 0.0) for name, value in self._totals.items()}
            report = ClockReport(
                self._epoch + self._reported, now - self._reported, {k: v for k, v in phases.items() if v > 0},
                tuple(self._intervals),
            )  # fmt: skip
            self._reported, self._last = now, dict(self._totals)
            self._intervals.clear()
            return report

    def _advance(self) -> float:
        """Count the time since the last mark to what has been going on; now."""
        now = self._clock()
        label = "+".join(sorted({stack[-1] for stack in self._stacks.values()})) or IDLE
        if now > self._mark:
            self._totals[label] = self._totals.get(label, 0.0) + now - self._mark
        self._mark = now
        return now
