"""Rewards to group-normalised advantages. A failed score never becomes a number."""

from __future__ import annotations

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


def group_advantages(rewards_PG: np.ndarray, *, eps: float, clip: float, min_std: float) -> Advantages:
    """A_i = (r_i - mean) / (std + eps) in each group, clipped to [-clip, clip] (eq. 34, 35; population std).

    Args: rewards_PG: float64 [P, G], nan or inf marks a failed member, which leaves its group.
    """
    finite = np.isfinite(rewards_PG)
    values, weights = np.zeros(rewards_PG.shape), np.zeros(rewards_PG.shape)
    num_small = num_flat = 0
    for p, (row, valid) in enumerate(zip(rewards_PG, finite, strict=True)):
        if valid.sum() < 2:
            num_small += 1
            continue
        members = row[valid]
        std = members.std()
        if std < min_std:
            num_flat += 1
            continue
        values[p, valid] = np.clip((members - members.mean()) / (std + eps), -clip, clip)
        weights[p, valid] = 1.0
    return Advantages(values.astype(np.float32), weights.astype(np.float32), int((~finite).sum()), num_small, num_flat)
