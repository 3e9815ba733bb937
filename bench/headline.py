"""The headline runs: `python -m bench.headline outputs/headline [--at-once 6] [key=value ...]`.

Trains configs/shapes_gpu.yaml with sage_grpo (three seeds) and, with the same budget and no setting of their own, with
dance_grpo, flow_grpo and cps (one seed each; fixed KL and no equalizer, as in the paper's Table 2). Then evaluates the
base and all six together on the same prompts and noise, with 40 ODE steps and the small world's own CLIP as a further
judge, and draws the curves. Several runs share the card, `--at-once` of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sage_ray.metrics import read_metrics
from sage_ray.types import AXES

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
BASELINE = ("kl.mode=fixed", "loss.equalizer=false")
RUNS = {f"sage_{seed}": (f"seed={seed}",) for seed in SEEDS} | {
    name: ("seed=0", f"sampling.sde_type={name}_grpo" if name != "cps" else "sampling.sde_type=cps", *BASELINE)
    for name in ("dance", "flow", "cps")
}
COLOURS = {"sage": "tab:blue", "dance": "tab:green", "flow": "tab:orange", "cps": "tab:red"}
PANELS = ("total", *AXES)
MEASURES = ("reward", "truth")


def launch(log: Path, *arguments: str) -> float:
    """Run launch.py with its words in `log`; seconds that it took. Raises SystemExit when it fails."""
    start = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run([sys.executable, "launch.py", *arguments], cwd=ROOT, stdout=file, stderr=file)
    if done.returncode:
        raise SystemExit(f"{log}: exit code {done.returncode}\n{log.read_text()[-2000:]}")
    return time.monotonic() - start


def train(name: str, folder: Path, settings: list[str]) -> str:
    """One run; a line about it."""
    file, output = "configs/shapes_gpu.yaml", folder / name
    seconds = launch(folder / f"{name}.log", "train", "--config", file, f"output_dir={output}", *RUNS[name], *settings)
    rows = [row for row in read_metrics(output / "metrics.jsonl") if "phase/update_s" in row]
    turned_s = rows[-1]["time_s"] - rows[0]["time_s"]
    each = f"{60 * (len(rows) - 1) / turned_s:.1f} iterations/min with evaluations" if turned_s else "one iteration"
    return f"{name}: {len(rows)} iterations in {seconds:.0f} s with start and evaluations; {each}"


def evaluate(folder: Path, settings: list[str]) -> None:
    """Base and last checkpoints together."""
    given = []
    for name in RUNS:
        last = max((folder / name / "checkpoints").iterdir())
        given += ["--checkpoint", f"{name.partition('_')[0]}={last}"]
    files = ["--config", str(folder / "sage_0" / "config.yaml"), "--config", "configs/judge_clip.yaml"]
    words = [f"output_dir={folder / 'compared'}", "evaluation.num_steps=40", *settings]
    seconds = launch(folder / "compared.log", "evaluate", *files, *given, *words)
    print((folder / "compared.log").read_text())
    print(f"evaluated {len(RUNS) + 1} policies in {seconds:.0f} s", flush=True)


def curves(folder: Path) -> None:
    """Training rollouts (lines) and held-out evaluations (points) of every run, total and each axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(PANELS), 6.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(MEASURES), len(PANELS))
    for name in RUNS:
        rows, method = read_metrics(folder / name / "metrics.jsonl"), name.partition("_")[0]
        for line, measure in zip(panels, MEASURES, strict=True):
            for panel, axis in zip(line, PANELS, strict=True):
                panel.set_title(f"{measure} {axis}", fontsize=10)
                panel.grid(alpha=0.3)
                for key, style in ((f"{measure}/{axis}", "-"), (f"evaluation/held_out/{measure}/{axis}", "o--")):
                    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                    label = f"{method}, {'training rollouts' if style == '-' else 'held-out evaluation'}"
                    panel.plot(*zip(*points), style, color=COLOURS[method], lw=0.8, ms=3.5, alpha=0.8, label=label)
    handles = {label: h for panel in figure.axes for h, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(folder / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--at-once", type=int, default=6, help="runs that share the machine")
    parsed, settings = parser.parse_known_args()
    folder = parsed.output.resolve()
    folder.mkdir(parents=True)
    start = time.monotonic()
    with ThreadPoolExecutor(parsed.at_once) as pool:
        for line in pool.map(lambda name: train(name, folder, settings), RUNS):
            print(line, flush=True)
    seconds = time.monotonic() - start
    print(
        f"{len(RUNS)} runs, {parsed.at_once} at once: {seconds:.0f} s, {seconds / 60 / len(RUNS):.2f} GPU-minutes a run"
    )
    curves(folder)
    evaluate(folder, settings)


if __name__ == "__main__":
    main()
