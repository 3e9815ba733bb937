"""The table of evaluated videos: one row a video and policy, in parquet (see row_file)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sage_ray.evaluation import EvaluatedPolicy, EvaluatedSet
from sage_ray.types import AXES, Prompt


@dataclass(frozen=True)
class EvaluationRow:
    """One video of one policy. A score that failed, or that the run does not have, is None."""

    policy: str
    prompts: str
    """The set: training or held_out."""
    prompt: str
    prompt_index: int
    """Row of the prompt file."""
    sample: int
    """Number of the video among those of its prompt."""
    policy_version: int
    reward: float | None
    VQ: float | None = None
    MQ: float | None = None
    TA: float | None = None
    overall: float | None = None
    """VideoAlign's VQ + MQ + TA."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """Further parts of the reward, and measures."""
    truth: float | None = None
    truth_VQ: float | None = None
    truth_MQ: float | None = None
    truth_TA: float | None = None
    match: float | None = None
    failure: str | None = None
    """Why there is no reward."""


def evaluation_rows(policies: Sequence[EvaluatedPolicy]) -> list[EvaluationRow]:
    """Rows of every policy, set and video, in order."""
    return [
        EvaluationRow(
            policy=policy.name,
            prompts=name,
            prompt=evaluated.prompts[place // evaluated.videos_per_prompt].text,
            prompt_index=evaluated.prompts[place // evaluated.videos_per_prompt].index,
            sample=place % evaluated.videos_per_prompt,
            policy_version=policy.version,
            failure=failure or None,
            **_scores({score: values[place] for score, values in evaluated.scores.items()}),
        )
        for policy in policies
        for name, evaluated in policy.sets.items()
        for place, failure in enumerate(evaluated.failures)
    ]


def evaluated_policy(name: str, rows: Sequence[EvaluationRow]) -> EvaluatedPolicy:
    """What `evaluation_rows` made rows of; it has no previews, and no score that every video failed to get."""
    sets = {}
    for which in dict.fromkeys(row.prompts for row in rows):
        mine = [row for row in rows if row.prompts == which]
        table = [_named_scores(row) for row in mine]
        scores = {key: np.array([np.nan if line[key] is None else line[key] for line in table]) for key in table[0]}
        kept = {key: values for key, values in scores.items() if key == "reward" or np.isfinite(values).any()}
        prompts = tuple(Prompt(row.prompt_index, row.prompt) for row in mine if row.sample == 0)
        sets[which] = EvaluatedSet(prompts, kept, tuple(row.failure or "" for row in mine))
    return EvaluatedPolicy(name, rows[0].policy_version, sets)


def _named_scores(row: EvaluationRow) -> dict[str, float | None]:
    """Score -> value of one video, as `evaluated_set` names them, in its order."""
    axes = {f"reward {axis}": getattr(row, axis) for axis in AXES}
    parts = {f"reward {part}": value for part, value in row.parts.items()}
    truth = {f"truth {axis}": getattr(row, f"truth_{axis}") for axis in AXES}
    head, tail = {"reward": row.reward}, {"overall": row.overall, "truth": row.truth}
    return head | axes | parts | tail | truth | {"match": row.match}


def _scores(values: dict[str, np.floating]) -> dict:
    """Columns of one video's scores."""
    numbers = {score: float(value) if np.isfinite(value) else None for score, value in values.items()}
    parts = {score.removeprefix("reward "): n for score, n in numbers.items() if score.startswith("reward ")}
    columns = {score: numbers.get(score) for score in ("reward", "overall", "truth", "match")}
    columns |= {f"truth_{axis}": numbers.get(f"truth {axis}") for axis in AXES}
    columns |= {axis: parts.pop(axis, None) for axis in AXES}
    return columns | {"parts": parts}
