"""The trace is what Chrome's trace viewer reads: its JSON object format with complete and metadata events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sage_ray.actor_clock import ClockReport, Interval
from sage_ray.trace import Tracer, trace


def check(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The complete events of a valid trace."""
    assert set(content) <= {"traceEvents", "displayTimeUnit", "otherData", "metadata"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    named, complete = set(), []
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index") and event["args"]
            named.add((event["name"], event["pid"]))
        else:
            assert event["ph"] == "X" and math.isfinite(event["ts"]) and event["dur"] >= 0 and event["cat"]
            complete.append(event)
    assert all({("process_name", one["pid"]), ("thread_name", one["pid"])} <= named for one in complete)
    return complete


def test_phases_that_touch_the_span_are_in_it() -> None:
    phases = [Interval("denoise", 9.0, 2.0, 0), Interval("decode", 10.5, 1.0, 1), Interval("late", 30.0, 1.0, 0)]
    found = check(trace({"rollout-0": phases, "reward-0": []}, 10.0, 20.0, "iteration 2"))
    assert [(one["name"], one["ts"], one["dur"], one["tid"]) for one in found] == [
        ("denoise", -1e6, 2e6, 0),
        ("decode", 0.5e6, 1e6, 1),
    ]


def report(start_s: float, *phases: str) -> ClockReport:
    return ClockReport(start_s, 10.0, {"idle": 10.0}, tuple(Interval(name, start_s + 1, 1.0, 0) for name in phases))


def test_one_iteration_is_written_once_it_is_over(tmp_path: Path) -> None:
    tracer = Tracer(2, 5, tmp_path)
    file = tmp_path / "trace.json"
    for iteration in (1, 2, 3):
        tracer.write_when_complete(iteration)
        assert file.exists() == (iteration == 3)
        tracer.add("controller", iteration, report(10.0 * iteration, f"rollout {iteration}"))
        tracer.add("rollout-0", iteration, report(10.0 * iteration, f"denoise {iteration}"))
    names = {one["name"] for one in check(json.loads(file.read_text("utf-8")))}
    assert names == {"rollout 2", "denoise 2"}


def test_a_short_run_traces_its_last_iteration_and_null_traces_none(tmp_path: Path) -> None:
    tracer, none = Tracer(7, 1, tmp_path), Tracer(None, 1, tmp_path / "nowhere")
    for one in (tracer, none):
        one.add("controller", 1, report(0.0, "rollout"))
        one.write_when_complete(2)
    assert len(check(json.loads((tmp_path / "trace.json").read_text("utf-8")))) == 1
