"""Sweeps: many runs on one Ray, several to a card, in a stated order.

Ray Tune makes them by default (`tune_sweep`): its grid is the list of runs that are not stored yet, in order of
importance; a run that fails is tried once more in a new process; a host process is reused for one run after the other.
What Tune itself would resume is not used: a stored run is complete, so a sweep that was stopped goes on by making
what is not there yet, whatever stopped it and on whichever machine.

`plain_sweep` gives the same hosts the same runs with Ray's core alone. It is for machines where pandas, which Tune
imports and nothing here needs, cannot be installed, and is only taken when it is asked for.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import THREAD_VARIABLES
from actors.run_host import Place, RunHost
from actors.stop import ENDS, reason
from actors.wait import REPORT_S
from sage_ray.experiment.spec import Job

SOME_CPU = 0.001
TRIES = 2
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Sweep:
    """jobs: in order. at_once: runs at the same time; num_gpus: of the machine, 0 is the CPU. deadline: time.time() at
    which runs stop, None is never."""

    jobs: Sequence[Job]
    runs: Path
    scratch: Path
    at_once: int
    num_gpus: int
    deadline: float | None = None

    @property
    def place(self) -> Place:
        """Of every host: an equal part of a GPU for each of those that share it."""
        per_card = math.ceil(self.at_once / self.num_gpus) if self.num_gpus else 0
        part = math.floor(1e4 / per_card) / 1e4 if per_card else 0.0
        return Place(part, str(self.runs), str(self.scratch), self.deadline)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What a host takes, and the actors of its runs; those on one card."""
        return [{"CPU": SOME_CPU}, *([{"GPU": self.place.gpus}] if self.num_gpus else [])]


def start_ray(at_once: int, scratch: Path) -> int:
    """An embedded Ray for the whole sweep, or the cluster that RAY_ADDRESS names; its number of GPUs."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    options: dict[str, Any] = {"namespace": "sage_ray", "logging_level": "warning", "log_to_driver": False}
    if not os.environ.get("RAY_ADDRESS"):
        from actors.orphans import watch

        own = {"address": "local", "include_dashboard": False, "object_store_memory": 300_000_000 * (1 + at_once)}
        session = ray.init(**options, **own)
        watch(session.address_info["session_dir"])
    else:
        ray.init(**options)
    return int(ray.cluster_resources().get("GPU", 0))


def plain_sweep(sweep: Sweep, tell: Tell) -> list[dict[str, Any]]:
    """Make the runs with Ray's core; what became of each: key, status (made, no time, failed), seconds."""
    waiting = deque((job, 1) for job in sweep.jobs)
    results: list[dict[str, Any]] = []
    hosts = [_start_host(sweep) for _ in range(min(sweep.at_once, len(sweep.jobs)))]
    running: dict[ray.ObjectRef, tuple[Any, Job, int]] = {}

    def submit(host: Any) -> None:
        if waiting:
            job, number = waiting.popleft()
            running[host[1].run.remote(job)] = host, job, number

    for host in hosts:
        submit(host)
    while running:
        done, _ = ray.wait(list(running), timeout=REPORT_S)
        for ref in done:
            host, job, number = running.pop(ref)
            try:
                result = ray.get(ref)
            except ENDS as error:
                tell(f"{job.key}: try {number} failed: {reason(error)}")
                ray.kill(host[1])
                ray.util.remove_placement_group(host[0])
                host = _start_host(sweep)
                result = {"key": job.key, "status": "failed", "seconds": 0.0, "reason": reason(error)}
                if number < TRIES:
                    waiting.appendleft((job, number + 1))
                    result = None
            if result is not None:
                results.append(result)
                tell(said(result, len(results), len(sweep.jobs)))
            submit(host)
    return results


def _start_host(sweep: Sweep) -> tuple[Any, Any]:
    """(placement group, host). The actors of its runs are placed in the host's group."""
    group = ray.util.placement_group(sweep.bundles, strategy="STRICT_PACK")
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": THREAD_VARIABLES}, "scheduling_strategy": strategy}
    return group, ray.remote(RunHost).options(**options).remote(sweep.place)


def said(result: dict[str, Any], number: int, total: int) -> str:
    """A line about a run that has ended."""
    start = f", of it {result['start_s']:.0f} s to start" if "start_s" in result else ""
    why = f": {result['reason']}" if "reason" in result else ""
    seconds = f" in {result['seconds']:.0f} s{start}" if result["seconds"] else ""
    return f"{number}/{total} {result['key']}: {result['status']}{seconds}{why}"


def tune_sweep(sweep: Sweep, tell: Tell) -> list[dict[str, Any]]:
    """Make the runs with Ray Tune; results as `plain_sweep`. Raises: ImportError naming what Tune lacks."""
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_AIR_NEW_OUTPUT": "0"}
    from ray import tune
    from ray.tune.logger import JsonLoggerCallback

    from actors.tune_run import Teller, TuneRun

    bundles = tune.PlacementGroupFactory(sweep.bundles, strategy="STRICT_PACK")
    teller = Teller(len(sweep.jobs), tell)
    tuner = tune.Tuner(
        tune.with_resources(TuneRun, bundles),
        param_space={"job": tune.grid_search([asdict(job) for job in sweep.jobs]), "place": asdict(sweep.place)},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=sweep.at_once,
            reuse_actors=True,
            trial_name_creator=lambda trial: trial.trial_id,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"sweep_{time.strftime('%Y%m%d_%H%M%S')}",
            storage_path=str(sweep.scratch / "tune"),
            failure_config=tune.FailureConfig(max_failures=TRIES - 1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[JsonLoggerCallback(), teller],
            verbose=0,
        ),
    )
    tuner.fit()
    return teller.results
