"""The sigma grid: the only clock. sigma runs from 1 (noise) to 0 (video)."""

from __future__ import annotations

import math

import numpy as np


def sigma_grid(num_steps: int, shift: float) -> np.ndarray:
    """Shifted grid s = shift u / (1 + (shift - 1) u) over u = linspace(1, 0, N + 1).

    Args:
        num_steps: N >= 1. shift: > 0; 1 leaves the grid uniform, larger values spend steps on noise.
    Returns: float64 [N + 1], strictly falling from 1 to 0.
    Raises: ValueError naming the rule.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps: {num_steps} must be at least 1")
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift: {shift} must be a finite number above 0")
    uniform = np.linspace(1.0, 0.0, num_steps + 1)
    grid = shift * uniform / (1 + (shift - 1) * uniform)
    # For shift < 1 the denominator rounds, and a first sigma of 1 - 1e-15 would give flow_grpo a std of 1e7.
    grid[0] = 1.0
    return grid


def timestep(sigma: float) -> float:
    """The model's timestep 1000 sigma, rounded once to float32; never an integer, never bf16."""
    return float(np.float32(1000.0 * sigma))
