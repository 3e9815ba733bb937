"""Intervals: by hand, by what must not change them, and by how often they hold the truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.intervals import bootstrap_interval, interval_over_runs, mean_error, t_quantile

NUMBERS = st.lists(st.floats(-10, 10), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_t_quantile_is_the_printed_table(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_t_quantile_refuses_no_freedom():
    with pytest.raises(ValueError, match="degrees=0: must be at least 1"):
        t_quantile(0)


def test_interval_over_runs_by_hand():
    """Gains 1, 2, 3, 4, 5: mean 3, standard deviation sqrt(2.5), t(4) = 2.776445."""
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert interval_over_runs([1, 2, 3, 4, 5]) == pytest.approx((3, 3 - half, 3 + half), abs=1e-5)
    assert mean_error([1, 2, 3, 4, 5]) == pytest.approx(half, abs=1e-5)
    assert interval_over_runs([3]) == (3, -math.inf, math.inf)


def test_bootstrap_of_two_prompts_by_hand():
    """Resampled means of 0 and 2 are 0, 1, 2 with chances 1/4, 1/2, 1/4: the 2.5 % and 97.5 % points are 0 and 2."""
    assert bootstrap_interval([0, 2]) == (1, 0, 2)


def test_bootstrap_of_a_share_by_hand():
    """Of 10 prompts 1 gained 1: a resampled mean is Binomial(10, 0.1) / 10, whose quantiles are 0 and 0.3."""
    assert bootstrap_interval([0.0] * 9 + [1.0]) == pytest.approx((0.1, 0.0, 0.3))


def test_one_prompt_says_nothing_about_its_error():
    assert bootstrap_interval([2]) == (2, -math.inf, math.inf)


@given(NUMBERS, st.randoms(use_true_random=False))
def test_the_order_of_prompts_changes_nothing(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert bootstrap_interval(shuffled, resamples=200) == bootstrap_interval(values, resamples=200)


@given(st.floats(-1e6, 1e6), st.integers(2, 50))
def test_a_constant_difference_has_no_width(difference, count):
    mean, low, high = bootstrap_interval([difference] * count, resamples=200)
    assert mean == low == high == pytest.approx(difference)


@given(NUMBERS, st.floats(-5, 5), st.floats(0.1, 10))
def test_the_interval_moves_and_grows_with_the_values(values, shift, scale):
    mean, low, high = bootstrap_interval(values, resamples=200)
    moved = bootstrap_interval(scale * np.array(values) + shift, resamples=200)
    assert moved == pytest.approx((scale * mean + shift, scale * low + shift, scale * high + shift), abs=1e-6)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_blocks_of_resamples_are_one_stream(monkeypatch):
    values = np.random.default_rng(0).normal(size=30)
    whole = bootstrap_interval(values)
    monkeypatch.setattr("sage_ray.intervals.BLOCK", 30 * 1000)
    assert bootstrap_interval(values) == whole


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """400 data sets of 48 prompts with mean 0.3; of 400 at 95 % the share has a standard error of 1.1 %."""
    data = np.random.default_rng(1).normal(0.3, 1.0, (400, 48))
    intervals = [bootstrap_interval(row, resamples=1000) for row in data]
    assert 0.91 < np.mean([low <= 0.3 <= high for _, low, high in intervals]) < 0.98
    lengths = np.mean([high - low for _, low, high in intervals])
    assert lengths == pytest.approx(2 * 1.96 / math.sqrt(48), rel=0.05)


@pytest.mark.parametrize("interval", [bootstrap_interval, interval_over_runs])
@pytest.mark.parametrize("values", [[], [[1]], [1, math.nan], [1, math.inf]])
def test_refusals(interval, values):
    with pytest.raises(ValueError, match="finite numbers with n >= 1"):
        interval(values)
