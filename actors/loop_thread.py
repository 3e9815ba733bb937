"""An event loop in a thread of its own, beside what the calling thread waits for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from actors.wait import REPORT_S, wait_future

logger = logging.getLogger("sage_ray")
Value = TypeVar("Value")


class LoopThread:
    """Runs coroutines that other threads give it, until `close`."""

    def __init__(self, name: str):
        self.name, self._loop = name, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Begin some work; its value, some time. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call something in the thread, soon."""
        self._loop.call_soon_threadsafe(act, *arguments)

    def run(self, work: Coroutine[Any, Any, Value], what: str, timeout_s: float) -> Value:
        """Value of some work. Raises WaitTimeoutError or the work's error."""
        return wait_future(self.submit(work), what, timeout_s)

    def close(self) -> None:
        """Cancel all work and end the thread. Raises nothing: it runs while another error is on its way."""
        if not self._thread.is_alive():
            return
        try:
            self.submit(_cancel_all()).result(timeout=REPORT_S)
        except TimeoutError:
            logger.warning("%s did not end its work within %.0f s", self.name, REPORT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=REPORT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
