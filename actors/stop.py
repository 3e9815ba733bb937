"""The end of a run: by an error, told in one line whatever went wrong on whichever actor, or by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray

ENDS = (ray.exceptions.RayError, TimeoutError, RuntimeError, OSError, ValueError)
"""What ends a run with a line; anything else is our own mistake and keeps its traceback."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RunStoppedError(RuntimeError):
    """A run that had to stop; the message names the step, the reason and what is there. code: of the process."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def reason(error: BaseException) -> str:
    """The last line of an error, with its type; an actor's error is told as the error that it was there."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    words = [line.strip() for line in str(cause).splitlines() if line.strip()]
    last = words[-1].partition(" Some common causes include")[0] if words else "no further word"
    return f"{type(cause).__name__}: {last}"


class StopRequest:
    """SIGTERM (a job's stop, a spot notice) and SIGINT (Ctrl-C): the first one interrupts what can be repeated, the
    second ends the process at once.

    requested: the signal that came, if any.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._holds, self._told = 0, False

    @property
    def code(self) -> int:
        """Exit code of a process that a signal ended, as shells have it."""
        return 128 + (self.requested or signal.SIGINT)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are taken inside; after Ray has started, which takes SIGTERM too. KeyboardInterrupt is raised."""
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside nothing is interrupted: KeyboardInterrupt comes at the end, of the outermost where they nest."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self.requested is not None and not self._holds and not self._told:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            os._exit(128 + number)
        self.requested = signal.Signals(number)
        if not self._holds:
            self._tell()
