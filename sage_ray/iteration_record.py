"""What an iteration leaves behind: numbers for the curves, and one row per video for the rollout log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sage_ray.advantage import Advantages
from sage_ray.reward_parts import RewardParts
from sage_ray.rollout_log import RolloutRow
from sage_ray.types import AXES, GroupInfo, Prompt, Scores


def iteration_metrics(
    scores: Sequence[Scores], infos: Sequence[GroupInfo], advantages: Advantages, parts: RewardParts
) -> dict[str, float]:
    """Means over the videos that were scored, counters of those that were not, and seconds summed over workers."""
    axes_PGK = np.stack([score.axes for score in scores])
    metrics = {
        "reward/failed": float(advantages.num_failed),
        "reward/small_groups": float(advantages.num_small_groups),
        "reward/flat_groups": float(advantages.num_flat_groups),
        "rollout/denoise_s": float(sum(info.denoise_s for info in infos)),
        "rollout/decode_s": float(sum(info.decode_s for info in infos)),
        "reward/score_s": float(sum(score.seconds for score in scores)),
        "reward/std_in_group": _mean([_std(parts.total(group)) for group in axes_PGK]),
        "reward/total": _mean(parts.total(axes_PGK)),
    }
    if size := sum(info.trajectory_bytes for info in infos):
        metrics |= {"bytes/trajectories": float(size), "bytes/frames": float(sum(info.frames_bytes for info in infos))}
    if peak := max((info.peak_bytes for info in infos), default=0):
        metrics["memory/rollout_peak_bytes"] = float(peak)
    metrics |= {f"reward/{name}": _mean(axes_PGK[..., k]) for k, name in enumerate(parts.names)}
    metrics |= {"reward_std/total": _std(parts.total(axes_PGK))}
    metrics |= {f"reward_std/{name}": _std(axes_PGK[..., k]) for k, name in enumerate(parts.names)}
    truths = [score.truth for score in scores if score.truth is not None]
    if truths:
        metrics |= _truth_means(np.stack(truths), parts)
    for name in dict.fromkeys(name for score in scores for name in score.frames):
        metrics[f"frames/{name}"] = _mean([s.frames[name] for s in scores if name in s.frames])
    return metrics


def _truth_means(truth_PG3: np.ndarray, parts: RewardParts) -> dict[str, float]:
    means = {f"truth/{axis}": _mean(truth_PG3[..., k]) for k, axis in enumerate(AXES)}
    return {"truth/total": _mean(parts.truth_total(truth_PG3))} | means


def _mean(values) -> float:
    """Mean of the finite values, nan when there is none."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return float(array.mean()) if array.size else float("nan")


def _std(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.std()) if finite.size else float("nan")


def rollout_rows(
    iteration: int,
    prompts: Sequence[Prompt],
    scores: Sequence[Scores],
    infos: Sequence[GroupInfo],
    advantages: Advantages,
    parts: RewardParts,
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
            reward=_number(parts.total(score.axes[sample])),
            advantage=float(advantages.values[g, sample]) if advantages.weights[g, sample] > 0 else None,
            generate_s=info.denoise_s + info.decode_s,
            score_s=score.seconds,
            failure=(score.reasons[sample] or None) if score.reasons else None,
            parts={name: _number(score.axes[sample, k]) for k, name in enumerate(parts.names) if name not in AXES},
            frames={name: _number(values[sample]) for name, values in score.frames.items()},
            **{name: _number(score.axes[sample, k]) for k, name in enumerate(parts.names) if name in AXES},
            **({} if score.truth is None else _truth(score.truth[sample], parts)),
        )
        for g, (prompt, score, info) in enumerate(zip(prompts, scores, infos, strict=True))
        for sample in range(len(score.axes))
    ]


def _truth(axes: np.ndarray, parts: RewardParts) -> dict[str, float | None]:
    return {"truth": _number(parts.truth_total(axes))} | {
        f"truth_{axis}": _number(axes[k]) for k, axis in enumerate(AXES)
    }


def _number(value: float | np.ndarray) -> float | None:
    """A finite number, or None for a failed score."""
    return float(value) if np.isfinite(value) else None
