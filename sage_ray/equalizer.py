"""Temporal gradient equalizer: every step's policy gradient at one scale (eq. 9, 39)."""

from __future__ import annotations

import numpy as np


def equalizer_scales(gradient_scale: np.ndarray, *, median: str = "lower", eps: float = 0.0) -> np.ndarray:
    """S_t = median(n) / (n_t + eps) over all stochastic steps of the schedule, not only the trained ones.

    Args:
        gradient_scale: float64 [N], n_t > 0, nan at deterministic steps.
        median: "lower" takes the lower of the two middle values, as torch.median does in the official code; "true"
            takes their mean. eps: >= 0, in the unit of n_t; 0 in the official code.
    Returns: float64 [N], nan at deterministic steps.
    Raises: ValueError for an unknown median, a negative eps, no stochastic step, or n_t not > 0.
    """
    if median not in ("lower", "true"):
        raise ValueError(f"median: {median!r} must be lower or true")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps: {eps} must be a finite number >= 0")
    on = ~np.isnan(gradient_scale)
    if not on.any():
        raise ValueError("gradient_scale: no stochastic step to equalize")
    values = np.sort(gradient_scale[on])
    if not (np.isfinite(values).all() and values[0] > 0):
        raise ValueError(f"gradient_scale: {values[0]} to {values[-1]} must be finite and above 0 at stochastic steps")
    middle = values[(len(values) - 1) // 2] if median == "lower" else np.median(values)
    return middle / (gradient_scale + eps)
