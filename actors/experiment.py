"""Make the runs of experiments (configs/experiment/) that are not stored yet, the most important first."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from sage_ray.experiment.spec import ROOT, Job, queue, read_budget, read_experiment
from sage_ray.experiment.stored import is_stored

RUNS = ROOT / "docs" / "results" / "runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="files of configs/experiment, in order of importance")
    parser.add_argument("--budget", default="gpu", help="what all cells share: a file of configs/experiment/budget")
    parser.add_argument("--seeds", help="as in 0,1,2; the budget's where not given")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time, on all cards together")
    parser.add_argument("--budget-minutes", type=float, help="begin no run that would end later, and stop those there")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the stored runs")
    parser.add_argument("--scratch", type=Path, default=Path("outputs/sweep"), help="folder for the work")
    parser.add_argument("--max-tier", type=int, help="leave out cells of later tiers")
    parser.add_argument("--list", action="store_true", help="say what would be made, start nothing")
    parser.add_argument("--scheduler", choices=("tune", "plain"), default="tune", help="plain: without Ray Tune")


def missing_jobs(parsed: argparse.Namespace) -> tuple[list[Job], int]:
    """(runs to be made in order, number of those already stored). Raises: ValueError."""
    experiments = [read_experiment(name) for name in parsed.names]
    seeds = None if parsed.seeds is None else _seeds(parsed.seeds)
    jobs = queue(experiments, read_budget(parsed.budget), seeds, parsed.max_tier)
    missing = [job for job in jobs if not is_stored(parsed.runs, job.key)]
    return missing, len(jobs) - len(missing)


def _seeds(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise ValueError(f"--seeds {words!r}: must be whole numbers with commas between") from None


def run(parsed: argparse.Namespace) -> str:
    """The sweep; a line about it. Raises: ValueError for bad input, RuntimeError when a run failed twice."""
    began = time.time()
    if parsed.at_once < 1:
        raise ValueError(f"--at-once {parsed.at_once}: must be at least 1")
    jobs, num_stored = missing_jobs(parsed)
    print(f"{num_stored} runs are stored, {len(jobs)} are missing", flush=True)
    if parsed.list or not jobs:
        for job in jobs:
            print(f"{job.key}  {' '.join(job.wanted_by)}")
        return str(parsed.runs)
    import ray

    from actors.sweep import Sweep, plain_sweep, start_ray, tune_sweep

    scratch, runs = parsed.scratch.resolve(), parsed.runs.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        num_gpus = start_ray(parsed.at_once, scratch)
        deadline = None if parsed.budget_minutes is None else began + 60 * parsed.budget_minutes
        sweep = Sweep(jobs, runs, scratch, min(parsed.at_once, len(jobs)), num_gpus, deadline)
        print(f"{sweep.at_once} at once on {num_gpus} GPUs, ready after {time.time() - began:.0f} s", flush=True)
        made = (tune_sweep if parsed.scheduler == "tune" else plain_sweep)(sweep, lambda line: print(line, flush=True))
    finally:
        ray.shutdown()
    counts = Counter(result["status"] for result in made)
    minutes = (time.time() - began) / 60
    each = f", {num_gpus * minutes / counts['made']:.2f} GPU-minutes a run" if num_gpus and counts["made"] else ""
    print(f"{dict(counts)} in {minutes:.1f} minutes{each}", flush=True)
    if counts["failed"]:
        failed = [f"{result['key']} ({result['reason']})" for result in made if result["status"] == "failed"]
        raise ValueError(f"{len(failed)} runs failed twice: {'; '.join(failed)}")
    return str(parsed.runs)
