"""Markdown tables of an experiment: levels and gains with intervals over seeds, claims with verdicts, KL shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sage_ray.experiment.claims import Verdict, judge
from sage_ray.experiment.results import HACKING, SET, SPREAD, SPREAD_METRIC, Results
from sage_ray.experiment.spec import BASE
from sage_ray.intervals import Interval, interval_over_runs

MEASURES = ("overall", "VQ", "MQ", "TA")
LABELS = {
    "overall": "Overall",
    "clip": "CLIPScore",
    "pick": "PickScore",
    HACKING: "hacking gap",
    SPREAD: "reward spread",
}
SHARE = "kl/gradient_share"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, sign: bool = True) -> str:
    """Three decimals; no -0.000."""
    if not math.isfinite(value):
        return "-"
    return f"{round(value, 3) + 0.0:{'+' if sign else ''}.3f}"


def interval(found: Interval | None, sign: bool = True) -> str:
    """Mean and its interval; the mean alone where one run says nothing about its error."""
    if found is None:
        return "-"
    if not math.isfinite(found.low):
        return number(found.mean, sign)
    return f"{number(found.mean, sign)} ({number(found.low, sign)} to {number(found.high, sign)})"


def gains(results: Results) -> str:
    """One row a cell: n, and the mean gain of every measure over the base; the base's own row has levels."""
    measures = [*MEASURES, *results.judges(), "truth", "match", HACKING]
    headings = ["cell", "paper", "n", *(LABELS.get(name, name) for name in measures)]
    rows = []
    for cell in results.experiment.cells:
        if cell.name == BASE:
            config = _some_config(results)
            levels = [
                "0" if m == HACKING else number(float(np.nanmean(results.values(results.base, m, config))), False)
                for m in measures
            ]
            rows.append([f"{cell.label} (level)", cell.note, "1", *levels])
            continue
        found = [results.outcomes(cell.name, measure) for measure in measures]
        cells = [interval(interval_over_runs(list(one.values())) if one else None) for one in found]
        rows.append([cell.label, cell.note, str(len(found[0])), *cells])
    return table(headings, rows)


def _some_config(results: Results):
    """Of any run, for the weights of the level of truth; the base's own where nothing is trained yet."""
    return next((run.config for runs in results.runs.values() for run in runs.values()), results.base.config)


def exploration(results: Results) -> str:
    """Mean and spread of the training reward at the end of training, and the KL's share of the gradient."""
    headings = [
        "cell",
        "n",
        "reward gained",
        "spread of reward in a group",
        "KL weight",
        "KL's share of the gradient norm",
    ]
    rows = []
    for cell in results.experiment.cells:
        runs = results.runs.get(cell.name, {})
        if not runs:
            continue
        kl = next(iter(runs.values())).config.kl
        shares = [s for run in runs.values() if (s := _share(run.metrics)) is not None]
        rows.append(
            [
                cell.label,
                str(len(runs)),
                interval(interval_over_runs(list(results.outcomes(cell.name, "reward").values()))),
                interval(interval_over_runs(list(results.outcomes(cell.name, SPREAD).values())), sign=False),
                "-" if kl.mode == "none" else f"{kl.weight:g} ({kl.schedule})",
                f"{np.mean(shares):.2g}" if shares else "-",
            ]
        )
    return table(headings, rows)


def _share(metrics: Sequence[dict]) -> float | None:
    """Mean of a run's measurements."""
    values = [line[SHARE] for line in metrics if line.get(SHARE) is not None]
    return float(np.mean(values)) if values else None


def verdicts(results: Results) -> tuple[str, list[Verdict]]:
    """The claims' table."""
    found = [judge(results, claim) for claim in results.experiment.claims]
    headings = ["claim", "source", "measure", "n", "difference, 95 % over seeds", "over prompts", "verdict"]
    rows = [
        [
            one.claim.text,
            one.claim.source,
            LABELS.get(one.claim.measure, one.claim.measure),
            str(len(one.seeds)),
            interval(one.difference),
            interval(one.over_prompts),
            f"**{one.verdict}**",
        ]
        for one in found
    ]
    return table(headings, rows), found


WORDS = (
    f"Gains on {SET.replace('_', '-')} prompts over the policy before training, same prompts and noise; mean over "
    "seeds with 95 % t interval where n > 1. Units: the scores' own; hacking gap in standard deviations over the "
    f"base's videos (reward gained minus truth gained). Spread: {SPREAD_METRIC} over the last third of the iterations."
)
