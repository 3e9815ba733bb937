"""Progress of a run that nobody watches: plain lines in a file. Same methods as sage_ray/progress.py, without rich."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sage_ray.actor_clock import ActorClock


class LogProgress:
    """Appends a line for everything that is told, with the seconds since it was made."""

    def __init__(self, file: Path, num_iterations: int):
        self.file, self.num_iterations, self.finished = file, num_iterations, 0
        self.seconds: dict[str, float] = {}
        self.clock = ActorClock()
        self.listeners: list[Callable[[str], None]] = []
        self._start = time.monotonic()
        file.parent.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the phase's seconds to `seconds`."""
        start = time.monotonic()
        try:
            with self.clock.phase(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def iteration(self, i: int, metrics: Mapping[str, float | None]) -> None:
        """Iteration i is finished."""
        self.finished = i
        shown = (f"{name} {metrics[name]:+.4f}" for name in ("reward/total", "truth/total") if metrics.get(name))
        self.message(f"iteration {i}/{self.num_iterations}  {'  '.join(shown)}")

    def message(self, text: str) -> None:
        """One line."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic() - self._start:7.1f} s  {text}\n")
        for listener in self.listeners:
            listener(text)

    def started_with(self, metrics: Mapping[str, float | None]) -> None:
        """Values at the start are in metrics.jsonl."""
