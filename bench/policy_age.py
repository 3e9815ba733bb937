"""Learning from older policies: `python -m bench.policy_age outputs/age [--gpus 2] [--at-once 6] [key=value ...]`.

Trains configs/shapes_gpu.yaml in the asynchronous ring with overlap.max_policy_age 0 and 1, five seeds each, and
compares what held-out prompts gain. `--draw` only compares runs that are there, and draws their curves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from sage_ray.intervals import Interval, interval_over_runs
from sage_ray.metrics import read_metrics

ROOT = Path(__file__).parents[1]
AGES = (0, 1)
MEASURES = ("reward", "truth")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def train(folder: Path, age: int, seed: int, cards: SimpleQueue, settings: Sequence[str]) -> str:
    """One run on the next free card; a line about it. Raises SystemExit when it fails."""
    name, card, start = f"age_{age}_seed_{seed}", cards.get(), time.monotonic()
    words = ["overlap.enabled=true", f"overlap.max_policy_age={age}", f"seed={seed}", "evaluation.interval=0"]
    command = [sys.executable, "launch.py", "train", "--config", "configs/shapes_gpu.yaml", *words]
    environment = {**os.environ, **({} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)})}
    with (folder / f"{name}.log").open("w") as log:
        streams = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
        done = subprocess.run([*command, f"output_dir={folder / name}", *settings], **streams)
    cards.put(card)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{(folder / f'{name}.log').read_text()[-2000:]}")
    rows = [row for row in read_metrics(folder / name / "metrics.jsonl") if "phase/update_s" in row]
    each_s = (rows[-1]["time_s"] - rows[0]["time_s"]) / max(1, len(rows) - 1)
    return f"{name}: {time.monotonic() - start:.0f} s, {each_s:.2f} s an iteration"


def gains(folder: Path, age: int) -> dict[str, np.ndarray]:
    """What held-out prompts gained from the first to the last evaluation, measure -> one value per seed."""
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for run in sorted(folder.glob(f"age_{age}_seed_*/metrics.jsonl")):
        rows = read_metrics(run)
        for measure, values in found.items():
            seen = [row[key] for row in rows if (key := f"evaluation/held_out/{measure}/total") in row]
            values.append(seen[-1] - seen[0])
    return {measure: np.array(values) for measure, values in found.items()}


def compare(folder: Path) -> dict[str, Interval]:
    """Print and return mean gains with 95 % intervals over seeds, and the difference of the ages, seed by seed."""
    every, result = [gains(folder, age) for age in AGES], {}
    for measure in MEASURES:
        for age, found in zip(AGES, every, strict=True):
            result[f"{measure}, age {age}"] = interval_over_runs(found[measure])
        result[f"{measure}, age 1 - age 0"] = interval_over_runs(every[1][measure] - every[0][measure])
    for name, (mean, low, high) in result.items():
        print(f"held-out {name:22} {mean:+.3f} ({low:+.3f} to {high:+.3f})", flush=True)
    return result


def draw(folder: Path, file: Path) -> None:
    """Training rewards and truths over iterations, a line per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(MEASURES))
    for age in AGES:
        for run in sorted(folder.glob(f"age_{age}_seed_*/metrics.jsonl")):
            rows = [row for row in read_metrics(run) if "reward/total" in row]
            for panel, measure in zip(panels, MEASURES, strict=True):
                steps, values = [row["step"] for row in rows], [row[f"{measure}/total"] for row in rows]
                panel.plot(steps, values, color=COLOURS[age], lw=0.9, alpha=0.8, label=f"policy age {age}")
    for panel, measure in zip(panels, MEASURES, strict=True):
        panel.set_title(f"{measure} of the training rollouts", fontsize=10)
        panel.set_xlabel("iteration")
        panel.grid(alpha=0.3)
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, help="a new folder; with --draw one that holds runs")
    parser.add_argument("--gpus", type=int, default=1, help="cards that the runs are spread over; 0 is the CPU")
    parser.add_argument("--at-once", type=int, default=3, help="runs at once, on all cards together")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draw", type=Path, metavar="PNG", help="train nothing; draw the runs that are there")
    parsed, settings = parser.parse_known_args(arguments)
    folder, start = parsed.output.resolve(), time.monotonic()
    if parsed.draw is not None:
        draw(folder, parsed.draw)
    else:
        folder.mkdir(parents=True)
        cards: SimpleQueue = SimpleQueue()
        for number in range(parsed.at_once):
            cards.put(number % parsed.gpus if parsed.gpus else None)
        runs = [(age, seed) for seed in range(parsed.seeds) for age in AGES]
        with ThreadPoolExecutor(parsed.at_once) as pool:
            for line in pool.map(lambda run: train(folder, *run, cards, settings), runs):
                print(line, flush=True)
        print(f"{len(runs)} runs, {parsed.at_once} at once: {time.monotonic() - start:.0f} s", flush=True)
    (folder / "compared.json").write_text(json.dumps(compare(folder), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
