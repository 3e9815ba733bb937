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


class WaitTimeoutError(TimeoutError):
    """A wait outlasted its bound; the message names what was waited for."""


def wait_all(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    """Values of all `refs` (small ones: they arrive in this process). Raises WaitTimeoutError or the task's error."""
    pending, deadline = list(refs), time.monotonic() + timeout_s
    while pending:
        left = deadline - time.monotonic()
        done, pending = ray.wait(pending, timeout=max(0.0, min(REPORT_S, left)), fetch_local=False)
        for ref in done:  # the first failure ends the wait: the others may be stuck behind it
            ray.get(ref, timeout=REPORT_S)
        if pending and left <= 0:
            num_done = len(refs) - len(pending)
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: {num_done} of {len(refs)} done")
        if not done:
            logger.warning("still waiting for %s: %d of %d done", what, len(refs) - len(pending), len(refs))
    return ray.get(list(refs), timeout=REPORT_S)


def wait_some(
    refs: Sequence[ray.ObjectRef], count: int, what: str, timeout_s: float
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """Wait until `count` of `refs` are done; (done, pending). Logs every 30 s, raises WaitTimeoutError at the bound."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        done, pending = ray.wait(
            list(refs), num_returns=count, timeout=max(0.0, min(REPORT_S, left)), fetch_local=False
        )
        if len(done) >= count:
            return done, pending
        if left <= REPORT_S:
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: {len(done)} of {len(refs)} done")
        logger.warning("still waiting for %s: %d of %d done, %.0f s left", what, len(done), len(refs), left)


def wait_future(future: Future[Any], what: str, timeout_s: float) -> Any:
    """Value of work in another thread. Raises WaitTimeoutError or the work's error."""
    deadline = time.monotonic() + timeout_s
    while not future.done():
        left = deadline - time.monotonic()
        done, _ = futures.wait([future], timeout=max(0.0, min(REPORT_S, left)))
        if not done and left <= 0:
            future.cancel()
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}")
        if not done:
            logger.warning("still waiting for %s, %.0f s left", what, left)
    return future.result()


async def wait_async(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    """As `wait_all`, while other coroutines run."""
    futures = [asyncio.wrap_future(ref.future()) for ref in refs]
    pending, deadline = set(futures), time.monotonic() + timeout_s
    while pending:
        left = deadline - time.monotonic()
        wait_s = max(0.0, min(REPORT_S, left))
        done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
        for one in done:
            one.result()
        if pending and left <= 0:
            num_done = len(futures) - len(pending)
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: {num_done} of {len(futures)} done")
        if not done:
            logger.warning("still waiting for %s: %d of %d done", what, len(futures) - len(pending), len(futures))
    return [one.result() for one in futures]
