"""Figures of an experiment from stored runs, as PNG: curves over iterations, mean over seeds with their range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_ray.experiment.results import SPREAD_METRIC, Results

CURVES = {
    "curves": (("reward/total", "training reward"), ("truth/total", "truth of the same videos")),
    "exploration": (("reward/total", "training reward, mean"), (SPREAD_METRIC, "training reward, std in a group")),
}
"""Kind of figure -> its panels: metric and title."""


def new_figure(columns: int, width: float = 4.2, height: float = 3.4) -> tuple[Any, Sequence[Any]]:
    """(figure, panels in one row); imports matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
    return figure, panels


def save(figure: Any, path: Path) -> Path:
    """Write the PNG, with one legend for all panels."""
    handles = {label: h for panel in figure.axes for h, label in zip(*panel.get_legend_handles_labels())}
    if handles:
        columns = min(4, len(handles))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def series(lines: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(iterations [T], values [runs, T]) where every run has the metric."""
    curves = [{line["step"]: line[metric] for line in run if line.get(metric) is not None} for run in lines]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return np.array(steps), np.array([[curve[step] for step in steps] for curve in curves])


def curves(results: Results, path: Path) -> Path | None:
    """The experiment's figure; None when no run is stored."""
    cells = [cell for cell in results.experiment.cells if results.runs.get(cell.name)]
    if not cells:
        return None
    kinds = CURVES[results.experiment.figure or "curves"]
    figure, panels = new_figure(len(kinds))
    for panel, (metric, title) in zip(panels, kinds, strict=True):
        for number, cell in enumerate(cells):
            steps, values = series([run.metrics for run in results.runs[cell.name].values()], metric)
            label, colour = f"{cell.label} (n = {len(values)})", f"C{number % 10}"
            style = "-" if number < 10 else "--"
            panel.plot(steps, values.mean(0), style, color=colour, lw=1.2, label=label)
            panel.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.12, lw=0)
        panel.set_title(f"{title} (mean and range over seeds)", fontsize=9)
        panel.set_xlabel("iteration", fontsize=8)
    return save(figure, path)
