"""Rewards to group-normalised advantages. A failed score never becomes a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Advantages:
    """values, weights: float32 [P, G]; weight 0 marks a row that must not train (value 0 there).

    num_failed: members without a finite reward; num_small_groups: groups with fewer than two finite members;
    num_flat_groups: groups whose std is below the minimum.
    """

    values: np.ndarray
    weights: np.ndarray
    num_failed: int
    num_small_groups: int
    num_flat_groups: int


def combine(axes: np.ndarray, weights: tuple[float, float, float]) -> np.ndarray:
    """R = w_vq VQ + w_mq MQ + w_ta TA (eq. 33). axes: [..., 3]; returns [...]; nan where an axis is not finite."""
    finite = np.isfinite(axes).all(-1)
    return np.where(finite, np.where(np.isfinite(axes), axes, 0.0) @ np.asarray(weights, np.float64), np.nan)


@dataclass(frozen=True)
class Normalisation:
    """How rewards become advantages.

    eps: added to the std with rule "add", the smallest std with rule "clamp"; above 0. global_std: divide by the
    population std of the centred rewards of all groups that train instead of each group's own. min_std: a group whose
    own std is below it trains nothing. clip: advantages end in [-clip, clip].
    """

    eps: float = 1e-6
    rule: str = "add"
    global_std: bool = False
    min_std: float = 1e-8
    clip: float = 5.0

    def __post_init__(self) -> None:
        if self.rule not in ("add", "clamp"):
            raise ValueError(f"rule: {self.rule!r} must be add or clamp")
        if self.min_std < 0 or self.eps < 0 or self.eps + self.min_std == 0:
            raise ValueError(f"eps: {self.eps} and min_std: {self.min_std} must be >= 0, and not both 0")
        if not self.clip > 0:
            raise ValueError(f"clip: {self.clip} must be above 0")

    def scale(self, std: float) -> float:
        """The number that centred rewards are divided by."""
        return std + self.eps if self.rule == "add" else max(std, self.eps)


def group_advantages(rewards_PG: np.ndarray, how: Normalisation) -> Advantages:
    """A_i = (r_i - mean) / scale(std) in each group, clipped (eq. 34, 35; population std).

    Args: rewards_PG: float64 [P, G], nan or inf marks a failed member, which leaves its group.
    """
    return axis_advantages(rewards_PG[..., None], (1.0,), how)


def axis_advantages(axes_PGK: np.ndarray, axis_weights: Sequence[float], how: Normalisation) -> Advantages:
    """Every axis normalised in its group, then summed by weight and clipped (DanceGRPO's way with several rewards).

    An axis that is flat in a group adds nothing there; a group in which every weighted axis is flat trains nothing.

    Args: axes_PGK: float64 [P, G, K]; a member with any axis not finite has failed and leaves its group.
    """
    finite = np.isfinite(axes_PGK).all(-1)
    small = finite.sum(1) < 2
    valid = finite & ~small[:, None]
    values, trains = np.zeros(finite.shape), np.zeros(len(finite), bool)
    for axis, weight in zip(np.moveaxis(axes_PGK, -1, 0), axis_weights, strict=True):
        normalised, varies = _normalised(axis, valid, how)
        if weight != 0:
            values += weight * normalised
            trains |= varies
    weights = (valid & trains[:, None]).astype(np.float32)
    values = np.clip(values, -how.clip, how.clip).astype(np.float32) * weights
    return Advantages(values, weights, int((~finite).sum()), int(small.sum()), int((~small & ~trains).sum()))


def _normalised(rewards_PG: np.ndarray, valid_PG: np.ndarray, how: Normalisation) -> tuple[np.ndarray, np.ndarray]:
    """(centred rewards over their scale, 0 outside of `valid_PG` and in flat groups; bool [P], the group varies)."""
    centred, varies = np.zeros(rewards_PG.shape), np.zeros(len(rewards_PG), bool)
    stds = np.zeros(len(rewards_PG))
    for p, (row, valid) in enumerate(zip(rewards_PG, valid_PG, strict=True)):
        if not valid.any():
            continue
        members = row[valid]
        stds[p] = members.std()
        varies[p] = stds[p] >= how.min_std
        if varies[p]:
            centred[p, valid] = members - members.mean()
    if how.global_std:
        kept = centred[valid_PG & varies[:, None]]
        stds[:] = np.sqrt((kept**2).mean()) if kept.size else 0.0
    for p in np.flatnonzero(varies):
        centred[p] /= how.scale(stds[p])
    return centred, varies
