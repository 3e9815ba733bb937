"""Tables (Markdown) and figures (PNG) of experiments, from stored runs and from what is computed here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sage_ray.experiment import gradient_norm, noise_regimes
from sage_ray.experiment.claims import MATTERS, MIN_SEEDS, Verdict
from sage_ray.experiment.figures import curves
from sage_ray.experiment.results import Results, cost, read_results
from sage_ray.experiment.spec import FOLDER, ROOT, Experiment, read_budget, read_experiment
from sage_ray.experiment.tables import WORDS, exploration, gains, verdicts

OUT = ROOT / "docs" / "results"
COMPUTED: dict[str, Callable[[Path], Path]] = {"figure4": gradient_norm.report, "figure9": noise_regimes.report}
"""Experiments without runs: they are computed from the policy's folder, or from the formulas alone."""
RULE = (
    f"Verdicts: difference between runs of the same seed; fewer than {MIN_SEEDS} seeds, or a 95 % t interval that "
    f"holds 0: not resolvable here; above 0: reproduced; below 0, or within {MATTERS:g} standard deviations of 0 on "
    "both sides: not reproduced. Nothing is corrected for the number of claims."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="files of configs/experiment, figure4, figure9, or all"
    )
    parser.add_argument("--budget", default="gpu", help="what the cells share: a file of configs/experiment/budget")
    parser.add_argument("--runs", type=Path, default=OUT / "runs", help="folder of the stored runs")
    parser.add_argument("--out", type=Path, default=OUT / "experiments", help="folder for tables and figures")


def run(parsed: argparse.Namespace) -> Path:
    """Write NAME.md and NAME.png for every name. Raises: ValueError."""
    named = (
        [*COMPUTED, *sorted(file.stem for file in FOLDER.glob("*.yaml"))] if parsed.names == ["all"] else parsed.names
    )
    experiments = [read_experiment(name) for name in named if name not in COMPUTED]
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name in named:
        if name in COMPUTED:
            print(f"wrote {COMPUTED[name](parsed.out)}")
    budget = read_budget(parsed.budget)
    for experiment in experiments:
        results = read_results(experiment, budget, parsed.runs)
        print(f"wrote {write(experiment, results, parsed.out, parsed.budget)}")
    return parsed.out


def write(experiment: Experiment, results: Results, out: Path, budget: str) -> Path:
    """The page of one experiment."""
    lines = [f"# {experiment.title}", "", *_head(experiment, results, budget), "", WORDS, "", gains(results), ""]
    if any(results.runs.values()):
        lines += [exploration(results), ""]
    figure = curves(results, out / f"{experiment.name}.png")
    if figure is not None:
        lines += [f"![{experiment.title}]({figure.name})", ""]
    if experiment.claims:
        table, found = verdicts(results)
        lines += ["## Claims", "", RULE, "", table, "", _count(found)]
    path = out / f"{experiment.name}.md"
    path.write_text("\n".join(lines).rstrip() + "\n", "utf-8")
    return path


def _head(experiment: Experiment, results: Results, budget: str) -> list[str]:
    """Commands, seeds, hardware and cost."""
    runs = [run for seeds in results.runs.values() for run in seeds.values()]
    extra = f" --budget {budget}" if budget != "gpu" else ""
    commands = [
        f"    python launch.py experiment {experiment.name}{extra}",
        f"    python launch.py report {experiment.name}{extra}",
    ]
    if not runs:
        return [*commands, "", "No run is stored yet."]
    minutes, devices = cost(runs)
    seeds = sorted({seed for cell in results.runs.values() for seed in cell})
    missing = [name for name, cell in results.runs.items() if not cell]
    words = (
        f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}, on {', '.join(devices)}; {minutes:.1f} minutes added up"
    )
    if missing:
        words += f" (some ran at the same time). Not run yet: {', '.join(missing)}"
    else:
        words += " (some ran at the same time)"
    if experiment.about:
        words += f". {experiment.about}"
    return [*commands, "", f"{words}."]


def _count(found: list[Verdict]) -> str:
    counts: dict[str, int] = {}
    for one in found:
        counts[one.verdict] = counts.get(one.verdict, 0) + 1
    return f"{len(found)} claims: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}."
