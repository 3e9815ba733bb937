"""Equalizer scales by hand and by their invariant S_t n_t = median."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.equalizer import equalizer_scales
from sage_ray.schedule import sigma_grid
from sage_ray.transition import coefficients

NAN = float("nan")


def test_lower_median_of_an_even_number_by_hand():
    # Sorted 1, 2, 4, 8: the lower middle is 2.
    np.testing.assert_array_equal(equalizer_scales(np.array([8.0, 1.0, 4.0, 2.0])), [0.25, 2.0, 0.5, 1.0])


def test_deterministic_steps_take_no_part_by_hand():
    # Sorted 1, 2, 4 without the nan entries: the median is 2.
    np.testing.assert_array_equal(equalizer_scales(np.array([NAN, 4.0, 1.0, 2.0, NAN])), [NAN, 0.5, 2.0, 1.0, NAN])


def test_one_stochastic_step_is_left_alone():
    np.testing.assert_array_equal(equalizer_scales(np.array([NAN, 0.3, NAN])), [NAN, 1.0, NAN])


@given(st.lists(st.one_of(st.just(NAN), st.floats(1e-6, 1e6)), min_size=1, max_size=60))
def test_every_step_gets_the_median_gradient(values):
    scale = np.array(values)
    on = np.isfinite(scale)
    if not on.any():
        with pytest.raises(ValueError, match="no stochastic step"):
            equalizer_scales(scale)
        return
    scales = equalizer_scales(scale)
    median = sorted(scale[on])[(on.sum() - 1) // 2]
    np.testing.assert_allclose((scales * scale)[on], median, rtol=1e-12)
    assert (scales[scale == median] == 1).all()
    # S <= 1 on at least half of the steps and >= 1 on at least half.
    assert (scales[on] >= 1).sum() * 2 >= on.sum() and (scales[on] <= 1).sum() * 2 >= on.sum()
    assert np.isnan(scales[~on]).all()


def test_one_is_at_the_golden_median_step():
    """sage, eta .5, last step sde: the lower median sits at step 9, S falls from 8.15 to .055."""
    coefs = coefficients("sage_grpo", sigma_grid(20, 5.0), 0.5, last_step="sde")
    scales = equalizer_scales(coefs.gradient_scale())
    assert np.flatnonzero(scales == 1).tolist() == [9]
    assert scales[0] == pytest.approx(8.150620244304084) and scales[-1] == pytest.approx(0.05514415602041598)


@pytest.mark.parametrize("values", [[NAN, NAN], [1.0, 0.0], [1.0, -2.0], [1.0, np.inf], [np.inf, np.inf]])
def test_refusals(values):
    with pytest.raises(ValueError, match="gradient_scale"):
        equalizer_scales(np.array(values))


def test_true_median_of_an_even_number_by_hand():
    # Sorted 1, 2, 4, 8: the mean of the middle two is 3. Nan entries take no part.
    scales = equalizer_scales(np.array([8.0, NAN, 1.0, 4.0, 2.0]), median="true")
    np.testing.assert_array_equal(scales, [0.375, NAN, 3.0, 0.75, 1.5])


def test_both_medians_agree_on_an_odd_number():
    values = np.array([4.0, 1.0, 2.0])
    np.testing.assert_array_equal(equalizer_scales(values, median="true"), [0.5, 2.0, 1.0])
    np.testing.assert_array_equal(equalizer_scales(values, median="lower"), [0.5, 2.0, 1.0])


def test_eps_by_hand():
    # It is added to n_t and not to the median: 2 / (8 + 2), 2 / (1 + 2), 2 / (4 + 2), 2 / (2 + 2).
    scales = equalizer_scales(np.array([8.0, 1.0, NAN, 4.0, 2.0]), eps=2.0)
    np.testing.assert_allclose(scales, [1 / 5, 2 / 3, NAN, 1 / 3, 1 / 2], rtol=1e-15)
    # With the true median 3: 3 / 10, 3 / 3, 3 / 6, 3 / 4.
    scales = equalizer_scales(np.array([8.0, 1.0, 4.0, 2.0]), median="true", eps=2.0)
    np.testing.assert_allclose(scales, [0.3, 1.0, 0.5, 0.75], rtol=1e-15)


POSITIVE = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60)


@given(POSITIVE)
def test_the_step_at_the_lower_median_is_left_alone_without_eps_only(values):
    scale = np.array(values)
    at = np.argsort(scale, kind="stable")[(len(scale) - 1) // 2]
    assert equalizer_scales(scale)[at] == equalizer_scales(scale, median="lower", eps=0.0)[at] == 1
    assert equalizer_scales(scale, eps=0.1 * scale[at])[at] == pytest.approx(1 / 1.1, rel=1e-12)


@given(POSITIVE)
def test_true_median_is_at_least_the_lower_one_and_at_most_the_upper_one(values):
    scale = np.array(values)
    target = equalizer_scales(scale, median="true") * scale
    np.testing.assert_allclose(target, target[0], rtol=1e-12)
    low, high = np.sort(scale)[[(len(scale) - 1) // 2, len(scale) // 2]]
    assert target[0] == pytest.approx((low + high) / 2, rel=1e-12)


@given(POSITIVE, st.floats(0, 10))
def test_eps_weakens_every_scale(values, eps):
    scale = np.array(values)
    plain, damped = equalizer_scales(scale), equalizer_scales(scale, eps=eps)
    assert (damped > 0).all() and (damped <= plain).all()
    np.testing.assert_allclose(damped * (scale + eps), plain * scale, rtol=1e-12)


@pytest.mark.parametrize("median", ["", "upper", "Lower", "mean", None])
def test_unknown_median_is_refused(median):
    with pytest.raises(ValueError, match="median: .* must be lower or true"):
        equalizer_scales(np.array([1.0, 2.0]), median=median)


@pytest.mark.parametrize("eps", [-1e-9, -1.0, NAN, np.inf])
def test_bad_eps_is_refused(eps):
    with pytest.raises(ValueError, match="eps: .* must be a finite number >= 0"):
        equalizer_scales(np.array([1.0, 2.0]), eps=eps)


@pytest.mark.parametrize("median", ["lower", "true"])
@pytest.mark.parametrize("values", [[NAN, NAN], [], [1.0, 0.0], [1.0, -2.0], [1.0, np.inf]])
def test_eps_and_median_do_not_excuse_bad_scales(values, median):
    with pytest.raises(ValueError, match="gradient_scale"):
        equalizer_scales(np.array(values), median=median, eps=1.0)
