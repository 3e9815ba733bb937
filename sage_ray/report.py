"""The curve of a run: reward and truth over its iterations. (summary.py has the table of start and end.)

Metric names that it reads (see metrics.py), with part total, VQ, MQ, TA or a further part of the reward:
  reward/<part>, truth/<part>                            training, per iteration
  evaluation/<set>/<measure>/<part>                      set training or held_out, measure reward or truth
  evaluation/<set>/<measure>/<part>_error                half width of its 95 % interval, optional
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_ray.metrics import read_metrics
from sage_ray.types import AXES

MEASURES = ("reward", "truth")
SETS = {"training": "tab:blue", "held_out": "tab:orange"}
"""Set of evaluated prompts -> its colour."""


def reward_curve(path: str | Path, metrics_jsonl: str | Path, parts: Sequence[str] = AXES) -> None:
    """Draws reward and truth, total and each part, over iterations as PNG.

    Lines are training rollouts, points with error bars are evaluations. Panels without data are left out.

    Args: parts: of the run's reward, measures without a weight among them.

    Raises:
        ValueError: the file holds none of the metrics named above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    names = {name for row in rows for name, value in row.items() if value is not None}
    panels = [(measure, part) for measure in MEASURES for part in ("total", *parts) if _drawn(measure, part) & names]
    if not panels:
        raise ValueError(f"{metrics_jsonl}: holds no reward/<axis> and no truth/<axis>")
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * lines + 0.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for place, (measure, axis) in enumerate(panels, start=1):
        _panel(figure.add_subplot(lines, columns, place), rows, measure, axis)
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _drawn(measure: str, axis: str) -> set[str]:
    """Names of the metrics of one panel."""
    return {f"{measure}/{axis}", *(f"evaluation/{which}/{measure}/{axis}" for which in SETS)}


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], measure: str, axis: str) -> None:
    steps, values = _series(rows, f"{measure}/{axis}")
    if steps:
        marker = "." if len(steps) < 50 else ""
        axes.plot(steps, values, color="0.45", linewidth=1, marker=marker, label="training rollouts")
    for which, colour in SETS.items():
        name = f"evaluation/{which}/{measure}/{axis}"
        steps, values = _series(rows, name)
        if steps:
            errors = dict(zip(*_series(rows, f"{name}_error")))
            bars = [errors.get(step, 0.0) for step in steps]
            label = f"evaluation, {which.replace('_', ' ')} prompts"
            axes.errorbar(steps, values, bars, color=colour, marker="o", capsize=3, linestyle="--", label=label)
    axes.set_title(f"{measure} {axis}", fontsize=10)
    axes.set_xlabel("iteration", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric where it has a value."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
