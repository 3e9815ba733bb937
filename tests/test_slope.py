"""What tells whether a process grows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.slope import upper_slope


def test_a_line_has_its_slope_and_no_doubt() -> None:
    slope, bound = upper_slope([3.0 + 0.25 * i for i in range(50)])
    assert slope == pytest.approx(0.25)
    assert bound == pytest.approx(0.25)


def test_peaks_are_no_slope() -> None:
    values = np.full(50, 400.0)
    values[[7, 20, 21, 33, 48]] += (5, 100, 300, 40, 1000)
    assert upper_slope(values.tolist()) == (0.0, 0.0)


def test_growth_by_steps_of_an_allocator_is_growth() -> None:
    slope, bound = upper_slope([400 + (i // 8) for i in range(50)])
    assert slope == pytest.approx(0.125, rel=0.15)
    assert bound > 0.125


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.93), (0.5, 0.9), (0.8, 0.85)])
def test_the_bound_is_seldom_too_low(correlation: float, least: float) -> None:
    draws = np.random.default_rng(0).normal(size=(1000, 150))
    values = np.zeros_like(draws)
    for i in range(1, draws.shape[1]):
        values[:, i] = correlation * values[:, i - 1] + draws[:, i]
    assert np.mean([upper_slope(row[100:].tolist())[1] > 0 for row in values]) > least


def test_few_values_have_no_slope() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        upper_slope([1.0] * 19)
