"""Temporal gradient equalizer: every step's policy gradient at one scale (eq. 9, 39)."""

from __future__ import annotations

import numpy as np


def equalizer_scales(gradient_scale: np.ndarray) -> np.ndarray:
    """S_t = median(n) / n_t over all stochastic steps of the schedule, not only the trained ones.

    The median is the lower of the two middle values, as torch.median gives in the official code.

    Args: gradient_scale: float64 [N], n_t > 0, nan at deterministic steps.
    Returns: float64 [N], nan at deterministic steps. Raises: ValueError when no step is stochastic or n_t is not > 0.
    """
    on = ~np.isnan(gradient_scale)
    if not on.any():
        raise ValueError("gradient_scale: no stochastic step to equalize")
    values = np.sort(gradient_scale[on])
    if not (np.isfinite(values).all() and values[0] > 0):
        raise ValueError(f"gradient_scale: {values[0]} must be finite and above 0 at stochastic steps")
    return values[(len(values) - 1) // 2] / gradient_scale
