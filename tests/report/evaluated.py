"""Evaluations made up for tests: truth and reward of given videos."""

from collections.abc import Sequence

import numpy as np

from sage_ray.evaluation import EvaluatedPolicy, EvaluatedSet, Preview, evaluated_set
from sage_ray.reward_parts import RewardParts
from sage_ray.types import AXES, Prompt, Scores

PARTS = RewardParts((*AXES, "clip"), (0.5, 0.5, 1.0, 0.0))


def group(axes: Sequence[Sequence[float]], truth: Sequence[Sequence[float]] | None = None, reason: str = "") -> Scores:
    """One prompt's videos; `reason` is that of those without a finite score."""
    values = np.array(axes, np.float64)
    return Scores(
        axes=values,
        truth=None if truth is None else np.array(truth, np.float64),
        matches=None if truth is None else np.ones(len(values)),
        seconds=0.0,
        reasons=tuple("" if np.isfinite(row[:3]).all() else reason for row in values),
    )


def policy(name: str, gain: float, prompts: Sequence[str] = ("a cat", "a dog", "a cow"), **more) -> EvaluatedPolicy:
    """Two videos a prompt; video v of prompt p has axes p + v + gain, truth the half of that, and one preview each."""
    base = [[[p + v + gain] * 3 + [90.0 + p] for v in range(2)] for p in range(len(prompts))]
    groups = [group(axes, [[x / 2 for x in row[:3]] for row in axes]) for axes in base]
    found = evaluated_set([Prompt(7 + i, text) for i, text in enumerate(prompts)], groups, PARTS)
    frames = np.full((5, 16, 16, 3), 100, np.uint8)
    previews = tuple(Preview(i, f"videos/{name}/held_out_{i:02d}.mp4", frames) for i in range(len(prompts)))
    kept = EvaluatedSet(found.prompts, found.scores, found.failures, previews)
    return EvaluatedPolicy(name, 3, {"held_out": kept} | more)
