"""What evaluations leave to look at: tables, summary.json, a gallery and a contact sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from sage_ray.contact_sheet import SheetRow, contact_sheet
from sage_ray.evaluation import EvaluatedPolicy, EvaluatedSet
from sage_ray.gallery import gallery
from sage_ray.summary import compare, over_runs, over_runs_table, summary_table

MAX_COLUMNS = 5
"""Evaluated iterations of a training run that its gallery shows."""
SHEET_SCORES = ("reward", "truth")


def columns(policies: Sequence[EvaluatedPolicy]) -> list[EvaluatedPolicy]:
    """The first, the last, and some spread evenly between them."""
    count = min(MAX_COLUMNS, len(policies))
    places = {round(i * (len(policies) - 1) / max(1, count - 1)) for i in range(count)}
    return [policies[i] for i in sorted(places)]


def training_report(output: Path, policies: Sequence[EvaluatedPolicy]) -> list[Table]:
    """Files of a training run, and its table. policies: the evaluated iterations in order, from before training on."""
    first, last = policies[0], policies[-1]
    changes = compare(first, last)
    _write_json(output, {"changes": _as_json({last.name: changes})})
    gallery(output / "gallery.html", "before, during and after training", columns(policies))
    _contact_sheet(output / "contact_sheet.png", first, last)
    return [summary_table(changes, "start and end of training, difference with 95 % paired interval")]


def comparison_report(
    output: Path, policies: Sequence[EvaluatedPolicy], groups: Mapping[str, Sequence[str]]
) -> list[Table]:
    """Files of an evaluation, and its tables.

    Args:
        policies: the base, then the others. groups: name -> names of the policies that differ in their seed only; of
            two or more the gains are taken together.
    """
    base, *others = policies
    changes = {policy.name: compare(base, policy) for policy in others}
    gains = {name: over_runs([changes[run] for run in runs]) for name, runs in groups.items() if len(runs) > 1}
    _write_json(output, {"changes": _as_json(changes), "over_runs": _as_json(gains)})
    gallery(output / "gallery.html", "the base and trained policies", policies)
    _contact_sheet(output / "contact_sheet.png", base, others[-1])
    return [
        *(
            summary_table(lines, f"{base.name} and {name}, difference with 95 % paired interval", base.name, "policy")
            for name, lines in changes.items()
        ),
        *(
            over_runs_table(lines, f"{name}: mean gain over its runs with 95 % t interval")
            for name, lines in gains.items()
        ),
    ]


def _as_json(tables: Mapping[str, Sequence[NamedTuple]]) -> dict[str, list[dict[str, Any]]]:
    """Name -> its lines as objects; a number that is not finite is null."""

    def value(x: Any) -> Any:
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return {
        name: [{key: value(x) for key, x in line._asdict().items()} for line in lines] for name, lines in tables.items()
    }


def _write_json(output: Path, content: dict) -> None:
    (output / "summary.json").write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")


def _contact_sheet(path: Path, first: EvaluatedPolicy, last: EvaluatedPolicy) -> None:
    """The previews of the last set (held-out prompts where there are some) of two policies."""
    name = list(first.sets)[-1]
    old, new = first.sets[name], last.sets[name]
    rows = []
    for before, after in zip(old.previews, new.previews, strict=True):
        assert before.frames is not None and after.frames is not None
        shown = [_shown(old, before.prompt), _shown(new, after.prompt)]
        rows.append(SheetRow(old.prompts[before.prompt].text, before.frames, after.frames, *shown))
    contact_sheet(path, rows)


def _shown(evaluated: EvaluatedSet, prompt: int) -> dict[str, float]:
    video = prompt * evaluated.videos_per_prompt
    return {score: float(evaluated.scores[score][video]) for score in SHEET_SCORES if score in evaluated.scores}
