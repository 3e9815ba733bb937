"""One place of a sweep: a process that makes runs one after the other, with actors that stay between them.

It is the controller of its runs, as `launch.py train` is of one. What only people look at (tables, gallery, curves)
is left out; a run's evaluation after training is made once, with further judges that the training does not pay for.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from actors import cluster
from actors.cluster import Layout
from actors.controller import Controller
from actors.evaluator import Evaluator
from actors.reward_service import RewardService
from actors.stop import StopRequest
from actors.warm import WarmActors
from sage_ray.checks import CheckedRun, check
from sage_ray.config import Config
from sage_ray.config_load import open_output
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.experiment.log_progress import LogProgress
from sage_ray.experiment.spec import Job
from sage_ray.experiment.stored import ROWS, VIDEOS, store
from sage_ray.reward_parts import RewardParts
from sage_ray.rewards.batching import batch_videos
from sage_ray.rewards.build import part_weights
from sage_ray.row_file import write_rows

RESERVE_S = 5.0
"""A run is begun when the last one would have ended so long before the deadline."""


class OutOfTimeError(RuntimeError):
    """The sweep's time was up before the run was finished."""


@dataclass(frozen=True)
class Place:
    """Where a host works. gpus: its part of the GPUs, 0 is the CPU; runs, scratch: folders of stored runs and of work;
    deadline: time.time() at which it stops, None is never."""

    gpus: float
    runs: str
    scratch: str
    deadline: float | None = None


class RunHost:
    """Makes runs and stores them."""

    def __init__(self, place: Place):
        torch.set_num_threads(1)
        self.place, self.warm = place, WarmActors()
        self.last_s = 0.0
        cluster.make_actor, cluster.end_actor = self.warm.make, self.warm.kill

    def run(self, job: Job) -> dict[str, Any]:
        """Make a run, from its configuration to the stored folder. Returns key, status (made, or no time) and seconds.

        Raises: what a run raises; its actors are ended, so that another try begins with new ones.
        """
        start = time.monotonic()
        if not self._has_time(self.last_s + RESERVE_S):
            return {"key": job.key, "status": "no time", "seconds": 0.0}
        scratch = Path(self.place.scratch) / job.key
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            note = self._make(job, scratch)
            self.warm.release()
        except OutOfTimeError:
            self.warm.end()
            return {"key": job.key, "status": "no time", "seconds": time.monotonic() - start}
        except BaseException:
            self.warm.end()
            raise
        seconds = time.monotonic() - start
        self.last_s = seconds
        store(scratch, Path(self.place.runs) / job.key, note | {"seconds": round(seconds, 1)}, job.keep_videos)
        shutil.rmtree(scratch)
        return {"key": job.key, "status": "made", "seconds": seconds, "start_s": note["start_s"]}

    def _has_time(self, seconds: float) -> bool:
        return self.place.deadline is None or time.time() + seconds < self.place.deadline

    def _layout(self, config: Config) -> Layout:
        """Every actor of a run has the same part of the host's part of a GPU."""
        if not self.place.gpus:
            return Layout("cpu", 0, 0, 0)
        count = config.rollout.num_workers + config.reward.num_workers + config.learner.num_ranks
        share = math.floor(1e4 * self.place.gpus / count) / 1e4
        return Layout("cuda", share, share, share)

    def _make(self, job: Job, scratch: Path) -> dict[str, Any]:
        """Train (unless it is the base) and evaluate; what run.json says."""
        began = time.monotonic()
        checked = check([Path(file) for file in job.files], [*job.settings, f"output_dir={scratch}"])
        config = checked.config
        config.checkpoint.keep_last = 1
        open_output(config)
        progress = LogProgress(scratch / "log.txt", config.num_iterations)
        controller = Controller(checked, self._layout(config), progress, StopRequest())  # type: ignore[arg-type]
        try:
            self.warm.wait(config.cluster.start_timeout_s)
            controller.start()
            started = time.monotonic()
            if job.trains:
                controller.run_sync(after_iteration=self._look_at_clock)
            trained = time.monotonic()
            self._evaluate(job, controller, checked, scratch, progress)
        finally:
            controller.close()
        times = {"start_s": started - began, "train_s": trained - started, "evaluate_s": time.monotonic() - trained}
        return {"key": job.key, "trains": job.trains, "wanted_by": list(job.wanted_by), **_where(config)} | {
            name: round(seconds, 2) for name, seconds in times.items()
        }

    def _look_at_clock(self, iteration: int) -> None:
        if not self._has_time(0):
            raise OutOfTimeError(f"after iteration {iteration}")

    def _evaluate(
        self, job: Job, controller: Controller, checked: CheckedRun, scratch: Path, progress: LogProgress
    ) -> None:
        """Every score of every video under the last weights, with the judges beside the run's reward."""
        source = controller.rollouts
        if job.judges:
            judged = check(
                [Path(file) for file in (*job.files, *job.judges)],
                [*job.settings, f"output_dir={scratch / 'judged'}"],
                trains=False,
            ).config
            source.rewards.close()
            self.warm.release([worker.actor for worker in source.rewards.workers])
            source.rewards = RewardService(judged, self._layout(judged), batch_videos(judged))
            self.warm.wait(judged.cluster.start_timeout_s)
            parts = source.rewards.start()
            source.parts = RewardParts(parts, part_weights(judged.reward, parts))
        evaluator = Evaluator(checked, source, progress)  # type: ignore[arg-type]
        policy = evaluator.evaluate("trained" if job.trains else "base", "final", keep_frames=False)
        write_rows(scratch / ROWS, EvaluationRow, evaluation_rows([policy]))
        if job.keep_videos:
            assert (scratch / VIDEOS).is_dir()


def _where(config: Config) -> dict[str, Any]:
    """Machine and versions."""
    names = sorted({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})
    kinds = sorted({r.removeprefix("accelerator_type:") for r in ray.cluster_resources() if "accelerator_type" in r})
    return {
        "device": "+".join(kinds) or f"{platform.machine()} CPU",
        "nodes": len(names),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "python": platform.python_version(),
        "seed": config.seed,
        "date": time.strftime("%Y-%m-%d"),
    }
