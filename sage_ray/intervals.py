"""Intervals of a mean difference: a bootstrap over prompts within one evaluation, Student's t over a few seeds.

Not here: corrections for small samples. A percentile bootstrap is too narrow below about 20 prompts (with 5 prompts a
nominal 95 % interval holds the truth about 85 times in 100); docs/evaluation.md says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Numbers = Sequence[float] | np.ndarray
"""[n] numbers."""

RESAMPLES = 10_000
SEED = 2603
"""Of the resampling; the same everywhere, so that a table can be made again."""
BLOCK = 2**22
"""Draws at once: 64 MB."""


class Interval(NamedTuple):
    """A mean and its 95 % interval; unbounded where one value says nothing about its error."""

    mean: float
    low: float
    high: float


def bootstrap_interval(differences: Numbers, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """Mean of paired differences with its percentile bootstrap interval (2.5 % and 97.5 % of the resampled means).

    Args:
        differences: [P], finite: after - before of each prompt, the mean over its videos where it has several (videos
            of one prompt are no independent evidence). Their order changes nothing.

    Raises:
        ValueError: P = 0 or a value is not finite.
    """
    values = np.sort(np.asarray(differences, dtype=np.float64))
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"differences {list(values.shape)}: must be [n] finite numbers with n >= 1")
    mean = float(values.mean())
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    generator = np.random.Generator(np.random.Philox(seed))
    size = max(1, BLOCK // len(values))
    counts = [min(size, resamples - first) for first in range(0, resamples, size)]
    means = [values[generator.integers(0, len(values), (count, len(values)))].mean(1) for count in counts]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(mean, float(low), float(high))


def interval_over_runs(gains: Numbers) -> Interval:
    """Mean gain of runs that differ in their seed only, with its t interval; too few for a bootstrap.

    Args: gains: [n], finite, one mean difference a run. With n = 1 the interval is unbounded.
    """
    values = np.asarray(gains, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"gains {list(values.shape)}: must be [n] finite numbers with n >= 1")
    mean, error = float(values.mean()), mean_error(values)
    return Interval(mean, mean - error, mean + error)


def mean_error(values: Numbers) -> float:
    """Half width of the 95 % t interval of the mean of [n] finite values; infinite for n = 1."""
    count = len(values)
    if count < 2:
        return math.inf
    return t_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


def t_quantile(degrees: int) -> float:
    """The t with 95 % of Student's distribution inside [-t, t], degrees >= 1 (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    if degrees < 1:
        raise ValueError(f"degrees={degrees}: must be at least 1")
    low, high = 1.9, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _inside(t: float, degrees: int) -> float:
    """Probability of [-t, t]: the finite series in the angle whose tangent is t / sqrt(degrees)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term, series = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        series += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (angle + math.sin(angle) * series) * 2 / math.pi if odd else math.sin(angle) * series
