"""A trace of one iteration in the JSON format of Chrome's trace viewer, which Perfetto opens too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_ray.actor_clock import ClockReport, Interval

FILE_NAME = "trace.json"
MICRO = 1e6


def trace(intervals: Mapping[str, Sequence[Interval]], start_s: float, end_s: float, about: str) -> dict[str, Any]:
    """One process an actor, one thread a lane; phases that overlap the span, whole.

    Args:
        intervals: actor -> its phases. start_s, end_s: seconds since the epoch; the trace's time begins at the first.
        about: a line about the trace.
    """
    events: list[dict[str, Any]] = []
    for pid, (actor, phases) in enumerate(intervals.items(), start=1):
        inside = [one for one in phases if one.start_s < end_s and one.start_s + one.seconds > start_s]
        events.append(_name("process_name", pid, 0, actor))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        events += [_name("thread_name", pid, lane, f"thread {lane}") for lane in sorted({one.lane for one in inside})]
        events += [
            {
                "ph": "X",
                "name": one.phase,
                "cat": actor.partition("-")[0],
                "pid": pid,
                "tid": one.lane,
                "ts": (one.start_s - start_s) * MICRO,
                "dur": one.seconds * MICRO,
            }
            for one in sorted(inside, key=lambda one: one.start_s)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": about}}


def write_trace(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes folder/trace.json; it appears complete."""
    partial = folder / f".{FILE_NAME}.partial"
    partial.write_text(json.dumps(content, allow_nan=False), "utf-8")
    os.replace(partial, folder / FILE_NAME)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


class Tracer:
    """Keeps the phases of one iteration until every actor has answered for it, and writes them."""

    def __init__(self, iteration: int | None, num_iterations: int, output: Path):
        """iteration: the last one where it comes after the run's end; None traces nothing."""
        self.iteration = None if iteration is None else min(iteration, num_iterations)
        self.output = output
        self._span: tuple[float, float] | None = None
        self._intervals: dict[str, list[Interval]] = {}

    def add(self, actor: str, iteration: int, report: ClockReport) -> None:
        """A report for an iteration; the controller's gives the span. The next one's may hold phases that began in
        it."""
        if self.iteration is None or iteration not in (self.iteration, self.iteration + 1):
            return
        self._intervals.setdefault(actor, []).extend(report.intervals)
        if actor == "controller" and iteration == self.iteration:
            self._span = report.start_s, report.start_s + report.wall_s

    def write_when_complete(self, iteration: int) -> None:
        """Once a later iteration is finished; then never again."""
        if self.iteration is None or self._span is None or iteration <= self.iteration:
            return
        about = f"iteration {self.iteration} of {self.output.name}"
        ordered = {"controller": self._intervals.pop("controller"), **dict(sorted(self._intervals.items()))}
        write_trace(self.output, trace(ordered, *self._span, about))
        self.iteration, self._intervals = None, {}
