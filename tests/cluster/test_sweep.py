"""Sweeps on real Ray: what is missing is made, failures are tried again, a host's next run is as its first."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from actors.run_host import Place, RunHost
from actors.sweep import Sweep, plain_sweep, start_ray, tune_sweep
from sage_ray.experiment.spec import Cell, Job, job_of, read_budget
from sage_ray.experiment.stored import is_stored, read_run

pytestmark = pytest.mark.cluster
heavy = pytest.mark.skipif("SAGE_HOSTS" not in os.environ, reason="takes minutes: make test-cluster runs it")
SMALL = ("evaluation.num_prompts=1", "evaluation.num_steps=2", "data.group_size=2")
TIMED = (
    "phase/",
    "pool/",
    "publish/",
    "time",
    "learner/fetch",
    "learner/update",
    "reward/score",
    "busy",
    "idle",
    "throughput",
)


def job(name: str, *settings: str) -> Job:
    """A smoke run under a key of its own."""
    made = job_of(Cell(name, name, (*SMALL, *settings)), read_budget("smoke"), 0)
    return dataclasses.replace(made, key=f"{name}/seed_0")


@pytest.fixture
def sweep_ray(tmp_path: Path, no_ray: None) -> None:
    start_ray(1, tmp_path)


@heavy
def test_a_plain_sweep_goes_on_after_a_failure_and_renews_its_actors(tmp_path: Path, sweep_ray: None) -> None:
    """The same settings twice: the second run gets the first one's actors and gives the same numbers."""
    jobs = [job("broken", "model.path=nowhere"), job("first"), job("second")]
    said: list[str] = []
    sweep = Sweep(jobs, tmp_path / "runs", tmp_path / "work", at_once=1, num_gpus=0)
    results = {result["key"]: result for result in plain_sweep(sweep, said.append)}
    assert [results[one.key]["status"] for one in jobs] == ["failed", "made", "made"]
    assert sum("try" in line and "model.path='nowhere'" in line for line in said) == 2
    assert not is_stored(tmp_path / "runs", "broken/seed_0")
    first, second = (read_run(tmp_path / "runs" / name / "seed_0") for name in ("first", "second"))
    assert [_numbers(line) for line in first.metrics] == [_numbers(line) for line in second.metrics]
    assert first.metrics[0]["reward/total"] is not None and first.rows == second.rows
    assert "clip" in first.rows[0].parts and {row.prompts for row in first.rows} == {"held_out"}
    assert not (tmp_path / "work" / "first").exists() or not any((tmp_path / "work" / "first").iterdir())


def _numbers(line: dict) -> dict:
    """Without what is a time."""
    return {name: value for name, value in line.items() if not name.startswith(TIMED) and not name.endswith("_s")}


@heavy
def test_tune_makes_runs_and_tells_failures(tmp_path: Path, sweep_ray: None) -> None:
    jobs = [job("broken", "model.path=nowhere"), dataclasses.replace(job("base"), trains=False)]
    sweep = Sweep(jobs, tmp_path / "runs", tmp_path / "work", at_once=1, num_gpus=0)
    results = {result["key"]: result for result in tune_sweep(sweep, lambda line: None)}
    assert [results[one.key]["status"] for one in jobs] == ["failed", "made"]
    assert "model.path" in results["broken/seed_0"]["reason"]
    base = read_run(tmp_path / "runs" / "base" / "seed_0")
    assert base.metrics == [] and base.rows[0].reward is not None


def test_no_run_begins_when_the_time_is_up(tmp_path: Path) -> None:
    host = RunHost(Place(0.0, str(tmp_path / "runs"), str(tmp_path / "work"), deadline=time.time()))
    assert host.run(job("late"))["status"] == "no time"
    assert not (tmp_path / "work").exists()


def test_hosts_share_cards_in_equal_parts(tmp_path: Path) -> None:
    def bundles(at_once: int, num_gpus: int) -> list[dict[str, float]]:
        return Sweep([], tmp_path, tmp_path, at_once, num_gpus).bundles

    assert bundles(3, 1) == [{"CPU": 0.001}, {"GPU": 0.3333}]
    assert bundles(7, 2) == [{"CPU": 0.001}, {"GPU": 0.25}]
    assert bundles(2, 2) == [{"CPU": 0.001}, {"GPU": 1.0}]
    assert bundles(4, 0) == [{"CPU": 0.001}]
