"""What an iteration leaves behind: numbers for the curves, and one row per video for the rollout log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sage_ray.advantage import Advantages, combine
from sage_ray.rollout_log import RolloutRow
from sage_ray.types import AXES, GroupInfo, Prompt, Scores

AxisWeights = tuple[float, float, float]


def iteration_metrics(
    scores: Sequence[Scores], infos: Sequence[GroupInfo], advantages: Advantages, weights: AxisWeights
) -> dict[str, float]:
    """Means over the videos that were scored, counters of those that were not, and seconds summed over workers."""
    metrics = {
        "reward/failed": float(advantages.num_failed),
        "reward/small_groups": float(advantages.num_small_groups),
        "reward/flat_groups": float(advantages.num_flat_groups),
        "rollout/denoise_s": float(sum(info.denoise_s for info in infos)),
        "rollout/decode_s": float(sum(info.decode_s for info in infos)),
        "reward/score_s": float(sum(score.seconds for score in scores)),
    }
    axes_PG3 = np.stack([score.axes for score in scores])
    metrics["reward/std_in_group"] = float(np.nanmean([np.nanstd(combine(s.axes, weights)) for s in scores]))
    metrics |= _means("reward", axes_PG3, weights)
    truths = [score.truth for score in scores if score.truth is not None]
    return metrics | (_means("truth", np.stack(truths), weights) if truths else {})


def _means(name: str, axes_PG3: np.ndarray, weights: AxisWeights) -> dict[str, float]:
    means = {f"{name}/{axis}": float(np.nanmean(axes_PG3[..., k])) for k, axis in enumerate(AXES)}
    return {f"{name}/total": float(np.nanmean(combine(axes_PG3, weights)))} | means


def rollout_rows(
    iteration: int,
    prompts: Sequence[Prompt],
    scores: Sequence[Scores],
    infos: Sequence[GroupInfo],
    advantages: Advantages,
    weights: AxisWeights,
) -> list[RolloutRow]:
    """One row per video, in group order; failed numbers are None."""
    return [
        RolloutRow(
            iteration=iteration,
            prompt=prompt.text,
            prompt_index=prompt.index,
            seed=prompt.seed,
            group=info.group,
            sample=sample,
            policy_version=info.policy_version,
            reward=_number(combine(score.axes[sample], weights)),
            advantage=float(advantages.values[g, sample]) if advantages.weights[g, sample] > 0 else None,
            generate_s=info.denoise_s + info.decode_s,
            score_s=score.seconds,
            **{axis: _number(score.axes[sample, k]) for k, axis in enumerate(AXES)},
            **({} if score.truth is None else _truth(score.truth[sample], weights)),
        )
        for g, (prompt, score, info) in enumerate(zip(prompts, scores, infos, strict=True))
        for sample in range(len(score.axes))
    ]


def _truth(axes: np.ndarray, weights: AxisWeights) -> dict[str, float | None]:
    return {"truth": _number(combine(axes, weights))} | {
        f"truth_{axis}": _number(axes[k]) for k, axis in enumerate(AXES)
    }


def _number(value: float | np.ndarray) -> float | None:
    """A finite number, or None for a failed score."""
    return float(value) if np.isfinite(value) else None
