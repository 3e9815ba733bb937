"""What a run achieved: curves and a table of start and end values with their uncertainty.

Metric names that the curve reads (see metrics.py), with axis total, VQ, MQ or TA:
  reward/<axis>, truth/<axis>                            training, per iteration
  evaluation/<set>/<measure>/<axis>                      set training or held_out, measure reward or truth
  evaluation/<set>/<measure>/<axis>_error                half width of its 95 % interval, optional
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from sage_ray.metrics import read_metrics
from sage_ray.types import AXES

Numbers = Sequence[float] | np.ndarray
"""[n] numbers."""

PANELS = ("total", *AXES)
MEASURES = ("reward", "truth")
SETS = {"training": "tab:blue", "held_out": "tab:orange"}
"""Set of evaluated prompts -> its colour."""


class Change(NamedTuple):
    """One line of the summary. difference, low, high: mean of end - start and its 95 % interval over pairs."""

    prompts: str
    score: str
    num_pairs: int
    num_failed: int
    start: float
    end: float
    difference: float
    low: float
    high: float


def t_quantile(degrees: int) -> float:
    """The t with 95 % of Student's distribution inside [-t, t], degrees >= 1 (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    if degrees < 1:
        raise ValueError(f"degrees={degrees}: must be at least 1")
    low, high = 1.9, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _inside(t: float, degrees: int) -> float:
    """Probability of [-t, t]: the finite series in the angle whose tangent is t / sqrt(degrees)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term, series = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        series += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (angle + math.sin(angle) * series) * 2 / math.pi if odd else math.sin(angle) * series


def paired_interval(before: Numbers, after: Numbers) -> tuple[float, float, float]:
    """Mean of after - before with its 95 % paired t interval.

    Args:
        before, after: [n], finite, the same prompt and noise at each place. With n = 1 the interval is unbounded.

    Returns:
        (mean difference, low, high).

    Raises:
        ValueError: lengths differ, n = 0 or a value is not finite.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        raise ValueError(f"before {list(first.shape)}, after {list(second.shape)}: must be [n] and [n] with n >= 1")
    difference = second - first
    if not np.isfinite(difference).all():
        raise ValueError("before, after: must be finite; leave out pairs with a failed score")
    mean, error = float(difference.mean()), mean_error(difference)
    return mean, mean - error, mean + error


def mean_error(values: Numbers) -> float:
    """Half width of the 95 % t interval of the mean of [n] finite values; infinite for n = 1."""
    count = len(values)
    if count < 2:
        return math.inf
    return t_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


def summary(scores: Mapping[str, Mapping[str, tuple[Numbers, Numbers]]], videos_per_prompt: int = 1) -> list[Change]:
    """Start and end of every score; pairs with a failed (not finite) score are left out and counted.

    Args:
        scores: prompts ("training", "held_out") -> score ("reward", "reward VQ", "truth" ...) -> (before [n],
            after [n]), one value per evaluated video in the same order.
        videos_per_prompt: so many values in a row share a prompt; they are no independent evidence, so the interval is
            that of their means.
    """
    return [
        _change(
            prompts,
            score,
            np.asarray(pair[0], dtype=np.float64),
            np.asarray(pair[1], dtype=np.float64),
            videos_per_prompt,
        )
        for prompts, measured in scores.items()
        for score, pair in measured.items()
    ]


def _change(prompts: str, score: str, before: np.ndarray, after: np.ndarray, per_prompt: int) -> Change:
    if before.shape != after.shape:
        raise ValueError(f"{prompts} {score}: {len(before)} values before and {len(after)} after must be pairs")
    if len(before) % per_prompt:
        raise ValueError(f"{prompts} {score}: {len(before)} values are not {per_prompt} for every prompt")
    finite = np.isfinite(before) & np.isfinite(after)
    num_pairs, num_failed = int(finite.sum()), int((~finite).sum())
    if not num_pairs:
        return Change(prompts, score, 0, num_failed, *[math.nan] * 5)
    kept = finite.reshape(-1, per_prompt)
    means = [
        np.where(kept, values.reshape(-1, per_prompt), 0).sum(1)[kept.any(1)] / kept.sum(1)[kept.any(1)]
        for values in (before, after)
    ]
    interval = paired_interval(*means)
    return Change(prompts, score, num_pairs, num_failed, float(means[0].mean()), float(means[1].mean()), *interval)


def summary_table(scores: Mapping[str, Mapping[str, tuple[Numbers, Numbers]]], videos_per_prompt: int = 1) -> Table:
    """`summary` as a table for the terminal."""
    title = "start and end of training, difference with 95 % paired interval"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading in ("prompts", "score"):
        table.add_column(heading, no_wrap=True)
    for heading in ("videos", "start", "end", "difference", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for line in summary(scores, videos_per_prompt):
        if previous not in (None, line.prompts):
            table.add_section()
        failed = f" ({line.num_failed} failed)" if line.num_failed else ""
        interval = f"{line.low:+.3f} to {line.high:+.3f}" if math.isfinite(line.low) else "unknown"
        numbers = [f"{line.start:.3f}", f"{line.end:.3f}", f"{line.difference:+.3f}", interval]
        table.add_row(
            line.prompts if line.prompts != previous else "",
            line.score,
            f"{line.num_pairs}{failed}",
            *(numbers if line.num_pairs else ["-"] * 4),
        )
        previous = line.prompts
    return table


def reward_curve(path: str | Path, metrics_jsonl: str | Path) -> None:
    """Draws reward and truth, total and each axis, over iterations as PNG.

    Lines are training rollouts, points with error bars are evaluations. Panels without data are left out.

    Raises:
        ValueError: the file holds none of the metrics named above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    names = {name for row in rows for name, value in row.items() if value is not None}
    panels = [(measure, axis) for measure in MEASURES for axis in PANELS if _drawn(measure, axis) & names]
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
