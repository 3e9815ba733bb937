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
