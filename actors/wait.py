"""Bounded waits. Every wait on Ray says what it waits for, every 30 s, and ends in an error that says it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import ray

logger = logging.getLogger("sage_ray")
REPORT_S = 30.0
LATE_S = 5.0
"""A wait that comes back later than this after its end has found its own process stopped."""


class WaitTimeoutError(TimeoutError):
    """A wait outlasted its bound; the message names what was waited for."""


class Deadline:
    """A bound whose time stands still while this process does (SIGSTOP, a suspended machine): who was waited for may
    have answered meanwhile.

    left: seconds.
    """

    def __init__(self, timeout_s: float):
        self.left, self._mark, self._asked = timeout_s, time.monotonic(), 0.0

    def step(self) -> float:
        """Seconds to wait before `passed` is called: until the bound, or until something should be said."""
        self._mark, self._asked = time.monotonic(), max(0.0, min(REPORT_S, self.left))
        return self._asked

    def passed(self) -> None:
        """The wait is over."""
        self.left -= min(time.monotonic() - self._mark, self._asked + LATE_S)


def wait_all(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    """Values of all `refs` (small ones: they arrive in this process). Raises WaitTimeoutError or the task's error."""
    pending, deadline = list(refs), Deadline(timeout_s)
    while pending:
        over = deadline.left <= 0
        done, pending = ray.wait(pending, timeout=deadline.step(), fetch_local=False)
        deadline.passed()
        for ref in done:  # the first failure ends the wait: the others may be stuck behind it
            ray.get(ref, timeout=REPORT_S)
        if pending and over:
            num_done = len(refs) - len(pending)
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: {num_done} of {len(refs)} done")
        if not done:
            logger.warning("still waiting for %s: %d of %d done", what, len(refs) - len(pending), len(refs))
    return ray.get(list(refs), timeout=REPORT_S)


def wait_future(future: Future[Any], what: str, timeout_s: float) -> Any:
    """Value of work in another thread. Raises WaitTimeoutError or the work's error."""
    deadline = Deadline(timeout_s)
    while not future.done():
        over = deadline.left <= 0
        done, _ = futures.wait([future], timeout=deadline.step())
        deadline.passed()
        if not done and over:
            future.cancel()
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}")
        if not done:
            logger.warning("still waiting for %s, %.0f s left", what, deadline.left)
    return future.result()


async def wait_async(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    """As `wait_all`, while other coroutines run."""
    futures = [asyncio.wrap_future(ref.future()) for ref in refs]
    for one in futures:
        one.add_done_callback(_look_at)
    pending, deadline = set(futures), Deadline(timeout_s)
    while pending:
        over = deadline.left <= 0
        done, pending = await asyncio.wait(pending, timeout=deadline.step(), return_when=asyncio.FIRST_EXCEPTION)
        deadline.passed()
        for one in done:
            one.result()
        if pending and over:
            num_done = len(futures) - len(pending)
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: {num_done} of {len(futures)} done")
        if not done:
            logger.warning("still waiting for %s: %d of %d done", what, len(futures) - len(pending), len(futures))
    return [one.result() for one in futures]


def _look_at(future: asyncio.Future[Any]) -> None:
    """Nobody may be left to do so, which asyncio would report."""
    if not future.cancelled():
        future.exception()
