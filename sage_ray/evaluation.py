"""One evaluation of a policy: fixed prompts and noise, every score of every video.

A score is called "reward", "reward <part>", "overall" (VideoAlign's VQ + MQ + TA), "truth", "truth <axis>" or "match".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sage_ray.config import EvaluationConfig
from sage_ray.intervals import mean_error
from sage_ray.reward_parts import RewardParts
from sage_ray.types import AXES, GroupRequest, Prompt, Scores

FIRST_GROUP = {"training": 0, "held_out": 1_000_000}
"""Prompt set -> number of its first group, which its noise depends on."""
NUM_PREVIEWS = 12
"""Videos of a set that are kept to look at."""


@dataclass(frozen=True)
class Preview:
    """The first video of a prompt. prompt: its place in the set; file: relative to the output folder; frames: some of
    them, uint8 [n, H, W, 3], for the contact sheet, or None."""

    prompt: int
    file: str
    frames: np.ndarray | None = None


@dataclass(frozen=True)
class EvaluatedSet:
    """One prompt set, V videos a prompt. scores: name -> float64 [P * V], prompt by prompt, nan where it failed;
    failures: [P * V] reasons, empty where there is a reward."""

    prompts: tuple[Prompt, ...]
    scores: dict[str, np.ndarray]
    failures: tuple[str, ...]
    previews: tuple[Preview, ...] = ()

    @property
    def videos_per_prompt(self) -> int:
        return len(self.failures) // len(self.prompts)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy under its name in tables, at its version, on every set."""

    name: str
    version: int
    sets: dict[str, EvaluatedSet]


def choose_prompts(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts in a fixed pseudo-random choice, in file order (all of them when there are fewer)."""
    order = np.random.Generator(np.random.Philox(0)).permutation(len(prompts))
    return [prompts[i] for i in sorted(order[:count])]


def preview_places(num_prompts: int) -> list[int]:
    """At most NUM_PREVIEWS places spread evenly over the prompts."""
    return sorted({round(i) for i in np.linspace(0, num_prompts - 1, min(NUM_PREVIEWS, num_prompts))})


def evaluation_requests(
    settings: EvaluationConfig,
    sigmas: tuple[float, ...],
    prompts: Sequence[Prompt],
    first_group: int,
    policy_version: int,
) -> list[GroupRequest]:
    """One group of ODE videos a prompt; the noise depends on evaluation.seed and the group's number only."""
    return [
        GroupRequest(
            step=0,
            group=first_group + i,
            prompt=prompt,
            group_size=settings.videos_per_prompt,
            policy_version=policy_version,
            seed=settings.seed,
            sigmas=sigmas,
            sde_type="ode",
            eta=0.0,
            sde_steps=(),
            evaluation=True,
        )
        for i, prompt in enumerate(prompts)
    ]


def evaluated_set(prompts: Sequence[Prompt], groups: Sequence[Scores], parts: RewardParts) -> EvaluatedSet:
    """The scores of P groups, one a prompt in order, under their names."""
    axes = np.concatenate([group.axes for group in groups])
    scores = {"reward": parts.total(axes)} | {f"reward {name}": axes[:, k] for k, name in enumerate(parts.names)}
    if set(AXES) <= set(parts.names):
        scores["overall"] = np.sum([scores[f"reward {axis}"] for axis in AXES], axis=0)
    if any(group.truth is not None for group in groups):
        unknown = np.full((len(groups[0].axes), len(AXES)), np.nan)  # of a group that was lost as a whole
        truth = np.concatenate([unknown if group.truth is None else group.truth for group in groups])
        scores |= {"truth": parts.truth_total(truth)} | {f"truth {axis}": truth[:, k] for k, axis in enumerate(AXES)}
        scores["match"] = np.concatenate([unknown[:, 0] if g.matches is None else g.matches for g in groups])
    failures = [reason for group in groups for reason in (group.reasons or ("",) * len(group.axes))]
    return EvaluatedSet(tuple(prompts), scores, tuple(failures))


def prompt_means(values: np.ndarray, videos_per_prompt: int) -> np.ndarray:
    """[P * V] to the means [P'] over the finite videos of each prompt; prompts without one are left out."""
    rows = values.reshape(-1, videos_per_prompt)
    kept = np.isfinite(rows)
    some = kept.any(1)
    return np.where(kept, rows, 0.0).sum(1)[some] / kept.sum(1)[some]


def evaluation_metrics(policy: EvaluatedPolicy) -> dict[str, float]:
    """Means over prompts, and half widths of their 95 % t intervals under the same name with _error.

    "reward VQ" is called evaluation/<set>/reward/VQ and "reward" evaluation/<set>/reward/total.
    """
    metrics = {}
    for name, evaluated in policy.sets.items():
        for score, values in evaluated.scores.items():
            measure, _, part = score.partition(" ")
            means = prompt_means(values, evaluated.videos_per_prompt)
            key = f"evaluation/{name}/{measure}/{part or 'total'}"
            metrics[key] = float(means.mean()) if len(means) else float("nan")
            metrics[f"{key}_error"] = mean_error(means)
    return metrics
