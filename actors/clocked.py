"""What every actor class has beside its work: a clock, a name, log lines that say who speaks."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.metrics import Counter

from actors.stacks import answer_with_stacks
from sage_ray.actor_clock import ActorClock, ClockReport
from sage_ray.config import Config
from sage_ray.structured_log import log_to_stderr, note
from sage_ray.throughput import Device, measure_device
from sage_ray.watched import ACTOR_PHASES, ACTOR_WALL, FAMILIES

logger = logging.getLogger("sage_ray")
EXPORT_S = 1.0
Method = TypeVar("Method", bound=Callable[..., Any])


class Clocked:
    """A base class of actors. In a plain process, without Ray, there is a clock and nothing is exported.

    clock: begins with the first phase; name: the actor's, else the class's.
    """

    @functools.cached_property
    def clock(self) -> ActorClock:
        clock = ActorClock()
        if _actor_name():
            log_to_stderr(actor=self.actor_name)
            answer_with_stacks()
            _begin_export(clock, self.actor_name)
        return clock

    @functools.cached_property
    def actor_name(self) -> str:
        return _actor_name() or type(self).__name__

    def speaks_for(self, config: Config) -> None:
        """Lines of this actor's log are of this run."""
        note(run=Path(config.output_dir).name)

    def clock_report(self) -> ClockReport:
        """What this actor did since the last report."""
        return self.clock.report()

    def device_rate(self, device: str, dtype: str) -> Device:
        """Name and peak rate of the device that this actor computes on."""
        return measure_device(device, dtype)

    def __repr__(self) -> str:
        return self.actor_name


def phase(name: str) -> Callable[[Method], Method]:
    """A method of a Clocked class that is a phase of its clock, and a line in the actor's log when it is over."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def timed(self: Clocked, *arguments: Any, **named: Any) -> Any:
            start = time.monotonic()
            with self.clock.phase(name):
                found = method(self, *arguments, **named)
            logger.info("%s: %.3f s", name, time.monotonic() - start)
            return found

        return timed  # type: ignore[return-value]

    return decorate


def role_of(name: str) -> str:
    """The role in an actor's name: "rollout-0.1" is a rollout."""
    return name.partition("-")[0]


def _actor_name() -> str:
    """Without the job's number that `start_actor` appends; empty outside an actor."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    name = context.get_actor_name() if context.get_actor_id() else None
    return (name or "").partition("@")[0]


def _begin_export(clock: ActorClock, name: str) -> None:
    """Export this clock instead of the one before: an actor that is renewed (actors/warm.py) has a new one."""
    first = not _exported
    _exported[:] = [(clock, name)]
    if first:
        threading.Thread(target=_export, name="clock", daemon=True).start()


_exported: list[tuple[ActorClock, str]] = []


def _export() -> None:
    """Keep the counters of this actor's seconds current, as long as its process lives."""
    families = FAMILIES[ACTOR_PHASES], FAMILIES[ACTOR_WALL]
    phases, wall = (Counter(one.name, one.description, one.labels) for one in families)
    told: tuple[ActorClock | None, float, dict[str, float]] = None, 0.0, {}
    while True:
        clock, name = _exported[0]
        seconds, totals = clock.totals()
        before_s, before = told[1:] if told[0] is clock else (0.0, {})
        tags = {"actor": name, "role": role_of(name)}
        for label, value in totals.items():
            if value > before.get(label, 0.0):
                phases.inc(value - before.get(label, 0.0), {**tags, "phase": label})
        if seconds > before_s:
            wall.inc(seconds - before_s, tags)
        told = clock, seconds, totals
        time.sleep(EXPORT_S)
