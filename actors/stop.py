"""The end of a run that cannot go on: one error with one line, whatever went wrong on whichever actor."""

from __future__ import annotations

import ray

ENDS = (ray.exceptions.RayError, TimeoutError, RuntimeError, OSError, ValueError)
"""What ends a run with a line; anything else is our own mistake and keeps its traceback."""


class RunStoppedError(RuntimeError):
    """A run that had to stop; the message names the step, the reason and what is there."""


def reason(error: BaseException) -> str:
    """The last line of an error, with its type; an actor's error is told as the error that it was there."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    words = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {words[-1] if words else 'no further word'}"
