"""Watching never ends a run, and says what failed."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from actors.controller import Controller
from actors.layout import Layout
from actors.stop import StopRequest
from actors.telemetry import FAULTS, Telemetry
from sage_ray.checks import CheckedRun
from sage_ray.data.prompts import read_prompts
from sage_ray.metrics import read_lines
from sage_ray.progress import Progress
from sage_ray.structured_log import read_log
from tests.cluster.made import end_controller
from tests.small import small_config


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_once_a_kind(fault: type[Exception], caplog) -> None:
    def broken() -> None:
        raise fault("no space left")

    watcher = types.SimpleNamespace(_told=set())
    for _ in range(3):
        Telemetry._guard(watcher, "the run page", broken)
    Telemetry._guard(watcher, "metrics", broken)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"{what} could not be written, the run goes on" for what in ("the run page", "metrics")]
    assert "no space left" in caplog.text


def test_what_is_meant_to_end_a_run_does() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Telemetry._guard(types.SimpleNamespace(_told=set()), "the run page", interrupted)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_page_and_clocks_cannot_be_written_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, ["data.num_prompts=2", "sampling.num_steps=5", "watch.page_interval_s=0"])
    run = CheckedRun(config, read_prompts([Path(file) for file in config.data.prompts]), [])
    controller = Controller(run, Layout("cpu", 0, 0, 0), Progress(1), StopRequest())
    folder = tmp_path / "run"
    (folder / "run.html" / "in the way").mkdir(parents=True)
    (folder / "actors.jsonl").mkdir()
    try:
        controller.start()
        controller.run_sync(lambda iteration: None)
    finally:
        controller.close()
        end_controller(controller)
    (line,) = read_lines(folder / "metrics.jsonl")
    assert line["throughput/videos_per_s"] > 0 and line["policy_version"] == 1
    told = [one for one in read_log(folder) if one["level"] == "WARNING" and "could not be written" in one["message"]]
    assert {one["message"].partition(" could")[0] for one in told} == {"the run page", "the actors' clocks"}
    assert all("Error" in one["exception"] for one in told)
