"""The controller beside 1,000 rollout workers: `python -m bench.controller_scale [--workers 1000] [--ranks 64] [...]`.

The real Controller.run_async drives actors that compute nothing (`bench/stand_ins.py`): delays are drawn, some rollouts
are slow, some reward batches raise, some videos have no score. Measured of the driver, which is the controller:

- CPU seconds of an iteration, all threads, and their share of a real iteration: as long as the simulation predicts for
  the official recipe with these pools, and for the fastest that those groups could be learned;
- bytes through its TCP connections (`ss`), and what it reads from the object store, for every video;
- resident memory after every iteration and its slope; lengths of the queues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray

import actors.cluster
from actors.cluster import Layout, start_ray
from actors.controller import Controller
from actors.stop import StopRequest
from bench.stand_ins import CHUNKS, TENSORS, Delays, Hosts
from bench.timeline import ROOT
from sage_ray.balance import Split, predicted_costs, simulate
from sage_ray.checks import CheckedRun
from sage_ray.config import Config
from sage_ray.config_load import load_config
from sage_ray.cost import H100, Dims
from sage_ray.data.prompts import read_prompts
from sage_ray.progress import Progress

REAL = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
SAMPLE_S, SAID = 0.25, 20
WARM_UP = 0.25
"""Share of the iterations that is left out of the slope of the memory: buffers and caches fill up."""


@dataclass
class Readings:
    """Of the driver. cpu_s, rss_bytes, wall_s: at the end of every iteration; rewards: videos waiting for a score, as
    sampled."""

    cpu_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    rewards: list[int] = field(default_factory=list)

    def take(self) -> None:
        """At the end of an iteration."""
        self.cpu_s.append(time.process_time())
        self.rss_bytes.append(rss_bytes())
        self.wall_s.append(time.monotonic())


def rss_bytes() -> int:
    """Resident memory of this process without what it shares with others, such as the object store."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def tcp_bytes() -> int:
    """Sent and received by this process's TCP connections that are open now."""
    lines = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    total = 0
    for head, info in zip(lines, lines[1:], strict=False):
        if f"pid={os.getpid()}," in head:
            total += sum(map(int, re.findall(r"bytes_(?:acked|received):(\d+)", info)))
    return total


def slope(values: Sequence[float]) -> tuple[float, float]:
    """(slope of an iteration, upper end of its 95 % interval), by least squares."""
    y, x = np.asarray(values, float), np.arange(len(values), dtype=float)
    x -= x.mean()
    rate = float(x @ y / (x @ x))
    rest = y - y.mean() - rate * x
    error = math.sqrt(float(rest @ rest) / max(1, len(y) - 2) / float(x @ x))
    return rate, rate + 1.96 * error


def settings(parsed: argparse.Namespace, folder: Path) -> Config:
    """The small world's, with these pools."""
    words = [
        f"output_dir={folder / 'run'}", f"num_iterations={parsed.iterations}", f"save_interval={parsed.iterations}",
        f"data.num_prompts={parsed.groups}", f"data.group_size={parsed.videos}", "evaluation.num_prompts=0",
        f"rollout.num_workers={parsed.workers}", f"learner.num_ranks={parsed.ranks}", "reward.truth=null",
        f"reward.num_workers={parsed.rewards}", "overlap.enabled=true", f"overlap.max_policy_age={parsed.age}",
        "loss.importance_cap=2.0", "kl.previous=iteration_start", f"cluster.object_store_bytes={parsed.store_bytes}",
        "cluster.device=cpu", "cluster.num_cpus=2", "cluster.start_timeout_s=900",
    ]  # fmt: skip
    return load_config([ROOT / "configs" / "shapes_cpu.yaml"], words)


def drive(config: Config, delays: Delays, readings: Readings) -> Controller:
    """The whole run, from the first actor to the last checkpoint; Ray must run."""
    hosts = Hosts(delays, {"RolloutWorker": 2, "RewardWorker": 1, "LearnerRank": 1})
    usual = actors.cluster.make_actor, actors.cluster.end_actor
    actors.cluster.make_actor, actors.cluster.end_actor = hosts.make, hosts.end  # type: ignore[assignment]
    ended = threading.Event()
    try:
        checked = CheckedRun(config, read_prompts([Path(file) for file in config.data.prompts]), [])
        controller = Controller(checked, Layout("cpu", 0, 0, 0), Progress(config.num_iterations), StopRequest())
        try:
            controller.start()
            watcher = threading.Thread(target=_sample, args=(controller, readings, ended), daemon=True)
            watcher.start()
            readings.take()

            def at_the_end_of(iteration: int) -> bool:
                readings.take()
                if iteration % SAID == 0:
                    print(
                        f"after {iteration}: {readings.cpu_s[-1]:.1f} CPU s, RSS {rss_bytes() / 1e6:.1f} MB, ", end=""
                    )
                    print(f"{tcp_bytes() / 1e6:.1f} MB through TCP", flush=True)
                return False

            controller.run_async(lambda iteration: None, at_the_end_of)
        finally:
            ended.set()
            controller.close()
    finally:
        actors.cluster.make_actor, actors.cluster.end_actor = usual
        hosts.close()
    return controller


def _sample(controller: Controller, readings: Readings, ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_S):
        readings.rewards.append(controller.rollouts.rewards.num_pending)


def real_step_s(parsed: argparse.Namespace, learner_sp: int) -> float:
    """Predicted seconds of an iteration of the official recipe with these pools, each learner rank on `learner_sp`
    GPUs."""
    words = ["data.batch_size=null", f"data.num_prompts={parsed.groups}", f"data.group_size={parsed.videos}"]
    config = load_config([ROOT / "configs" / "official_8gpu.yaml"], words)
    costs, split = predicted_costs(config, REAL, 20, H100()), Split(parsed.workers, parsed.ranks, 1, learner_sp)
    return simulate(costs, split, split.gpus, parsed.age).iteration_s


def summary(parsed: argparse.Namespace, readings: Readings, tcp: int, controller: Controller) -> dict[str, float]:
    """Everything that is said of a run."""
    count, videos = len(readings.cpu_s) - 1, parsed.groups * parsed.videos
    cpu_s = (readings.cpu_s[-1] - readings.cpu_s[0]) / count
    wall_s = (readings.wall_s[-1] - readings.wall_s[0]) / count
    kept = readings.rss_bytes[1 + int(WARM_UP * count) :]
    rate, upper = slope(kept) if len(kept) > 2 else (math.nan, math.nan)
    halves = [statistics.mean(np.diff(part)) for part in np.array_split(readings.cpu_s, 2) if len(part) > 1]
    steps = {"as many GPUs": real_step_s(parsed, 1), "8 GPUs a learner rank": real_step_s(parsed, 8)}
    contents = parsed.ranks * (TENSORS * 55 + CHUNKS * 16)
    found: dict[str, float] = {
        "iterations": count,
        "videos an iteration": videos,
        "wall s an iteration, stand-ins": wall_s,
        "driver CPU s an iteration": cpu_s,
        "driver CPU s an iteration, first half": halves[0],
        "driver CPU s an iteration, second half": halves[-1],
        "driver CPU ms a video": 1000 * cpu_s / videos,
        "driver CPU share of the stand-ins' wall, %": 100 * cpu_s / wall_s,
        "shortest step of which it is 2 %, s": cpu_s / 0.02,
        "kB a video through TCP": tcp / count / videos / 1000,
        "kB a video read from the store (checksums)": contents / videos / 1000,
        "RSS first, MB": readings.rss_bytes[0] / 1e6,
        "RSS after warm-up, MB": kept[0] / 1e6,
        "RSS last, MB": kept[-1] / 1e6,
        "RSS slope, MB an iteration": rate / 1e6,
        "RSS slope, upper 95 %, MB an iteration": upper / 1e6,
        "videos waiting for a score, median": statistics.median(readings.rewards or [0]),
        "videos waiting for a score, most": max(readings.rewards or [0]),
    }
    for name, step_s in steps.items():
        found |= {f"predicted step, {name}, s": step_s, f"driver share of it, {name}, %": 100 * cpu_s / step_s}
    return found | {f"reward service: {kind}": n for kind, n in controller.rollouts.rewards.counts.items()}


def options() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=1000, help="rollout workers")
    parser.add_argument("--ranks", type=int, default=64, help="learner ranks")
    parser.add_argument("--rewards", type=int, default=16, help="reward workers")
    parser.add_argument("--groups", type=int, default=256, help="prompts an iteration")
    parser.add_argument("--videos", type=int, default=4, help="videos of each")
    parser.add_argument("--age", type=int, default=3, help="policy age: so many iterations are made at once, and one")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--store-bytes", type=int, default=2_000_000_000, help="object store")
    parser.add_argument("--folder", type=Path, help="for the run's files; else a temporary one")
    parser.add_argument("--json", type=Path, help="where the numbers are written too")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Drive, and say what it took."""
    parsed, readings = options().parse_args(arguments), Readings()
    with tempfile.TemporaryDirectory() as temporary:
        config = settings(parsed, parsed.folder or Path(temporary))
        start_ray(config)
        try:
            before = tcp_bytes()
            controller = drive(config, Delays(), readings)
            found = summary(parsed, readings, tcp_bytes() - before, controller)
        finally:
            ray.shutdown()
    for name, value in found.items():
        print(f"{name:52} {value:12.4g}", flush=True)
    if parsed.json:
        parsed.json.write_text(json.dumps(found | {"readings": vars(readings)}), "utf-8")
    return found


if __name__ == "__main__":
    main()
