"""How fast the small world's ring turns: `python -m bench.shapes_speed [--iterations 8] [--runs 3] [key=value ...]`.

Trains configs/shapes_gpu.yaml for a few iterations, without evaluation, in three ways: every group and step in a
forward of its own, as the first version did; as the file says; and as the file says in several processes that share
the machine. Prints medians over the iterations but the first two (warm-up): seconds of each phase, iterations per
minute (wall clock from one iteration's end to the next), videos per second.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from sage_ray.metrics import read_metrics

ROOT = Path(__file__).parents[1]
FIRST = ("learner.videos_per_pass=null", "rollout.groups_per_task=1", "rollout.cuda_graphs=false")
PHASES = ("phase/rollout_s", "phase/update_s", "phase/publish_s")
WARM_UP = 2


def start(folder: Path, settings: list[str]) -> subprocess.Popen:
    """One training run in a process of its own; its words go to a file beside its folder."""
    command = [sys.executable, str(ROOT / "launch.py"), "train", "--config", str(ROOT / "configs/shapes_gpu.yaml")]
    log = folder.with_suffix(".log").open("w")
    return subprocess.Popen([*command, f"output_dir={folder}", *settings], stdout=log, stderr=log, cwd=ROOT)


def measure(name: str, folders: list[Path]) -> None:
    """Print one line: medians over the iterations of all runs, and the rate of all runs together."""
    phases, seconds = {phase: [] for phase in PHASES}, []
    for folder in folders:
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "phase/update_s" in row][WARM_UP - 1 :]
        seconds.append(np.median(np.diff([row["time_s"] for row in rows])))
        for phase in PHASES:
            phases[phase] += [row[phase] for row in rows[1:]]
    each = "  ".join(f"{p.removeprefix('phase/')} {np.median(values):6.3f}" for p, values in phases.items())
    rate, data = sum(1 / second for second in seconds), OmegaConf.load(folders[0] / "config.yaml").data
    print(f"{name:34} {each}  iteration_s {np.median(seconds):6.3f}  ", end="")
    print(f"iterations/min {60 * rate:6.1f}  videos/s {data.num_prompts * data.group_size * rate:7.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3, help="runs that share the machine in the last line")
    parsed, settings = parser.parse_known_args()
    settings = [*settings, f"num_iterations={parsed.iterations}", "evaluation.num_prompts=0", "save_interval=10000"]
    folder = Path(tempfile.mkdtemp())
    ways = [("one group at a time", list(FIRST), 1), ("shapes_gpu.yaml", [], 1)]
    if parsed.runs > 1:
        ways.append((f"shapes_gpu.yaml, {parsed.runs} runs at once", [], parsed.runs))
    for number, (name, own, runs) in enumerate(ways):
        folders = [folder / f"{number}_{seed}" for seed in range(runs)]
        processes = [start(f, [*settings, *own, f"seed={seed}"]) for seed, f in enumerate(folders)]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"{name}: a run failed\n{folders[0].with_suffix('.log').read_text()[-2000:]}")
        measure(name, folders)


if __name__ == "__main__":
    main()
