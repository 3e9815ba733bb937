"""Progress on the terminal: a live line when stdout is a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from sage_ray.actor_clock import ActorClock

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = ("reward/total", "truth/total")
"""Metrics printed after each iteration, with their value at the start."""


class Progress:
    """Says what is running, for how long, how good it is so far and when it will end."""

    def __init__(self, num_iterations: int, finished: int = 0, console: Console | None = None) -> None:
        """num_iterations: of the whole run; finished: those of them that a resumed run has behind it.

        clock: of the phases of this process; listeners: are told every line.
        """
        from rich.console import Console  # here: a sweep's host has another progress, and maybe no rich
        from rich.markup import escape

        self._escape = escape
        self.num_iterations, self.finished = num_iterations, finished
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._seconds: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._marks_s: list[float] = []
        self.clock = ActorClock()
        self.listeners: list[Callable[[str], None]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surrounds one phase (rollout, reward, update, publish, evaluate) and measures it."""
        start_s = time.monotonic()
        self._marks_s = self._marks_s or [start_s]
        running = self.finished + 1
        where = f"iteration {running}/{self.num_iterations}: {name}" if running <= self.num_iterations else name
        live = self.console.status(self._escape(where)) if self.console.is_terminal else contextlib.nullcontext()
        if not self.console.is_terminal:
            self.message(f"{where} ...")
        try:
            with live, self.clock.phase(name):
                yield
        except BaseException:
            self.message(f"{where} failed after {time.monotonic() - start_s:.1f} s")
            raise
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start_s

    def iteration(self, i: int, metrics: Mapping[str, float | None]) -> None:
        """Reports that iteration i (counted from 1) is finished, and forgets the phases' seconds.

        Rate and ETA count evaluations in. They leave the first iteration out as soon as there is a second: it pays for
        start-up.
        """
        self.finished = i
        self._marks_s.append(time.monotonic())
        first = 1 if len(self._marks_s) > 2 else 0
        per_iteration_s = (self._marks_s[-1] - self._marks_s[first]) / max(1, len(self._marks_s) - 1 - first)
        left_s = per_iteration_s * (self.num_iterations - i)
        parts = [f"iteration {i}/{self.num_iterations}", *self._values(metrics)]
        parts += [f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items()]
        if per_iteration_s > 0:
            parts.append(f"{60 / per_iteration_s:.1f} iterations/min")
        self.message("  ".join([*parts, f"ETA {duration(left_s)}"]))
        self._seconds.clear()

    def message(self, text: str) -> None:
        """Prints one line as it is, above the live line if there is one."""
        self.console.print(self._escape(text))
        for listener in self.listeners:
            listener(text)

    def started_with(self, metrics: Mapping[str, float | None]) -> None:
        """The run's first values, of a run that goes on."""
        self._first |= {name: value for name in SHOWN if (value := metrics.get(name)) is not None}

    def _values(self, metrics: Mapping[str, float | None]) -> Iterator[str]:
        for name in SHOWN:
            value = metrics.get(name)
            if value is not None:
                start = self._first.setdefault(name, value)
                yield f"{name.partition('/')[0]} {value:+.4f} (start {start:+.4f})"


def duration(seconds: float) -> str:
    """Seconds as "42 s", "3 min 05 s" or "2 h 07 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
