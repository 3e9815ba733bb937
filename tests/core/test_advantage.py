"""Rewards to advantages by hand; failed, flat and small groups; properties of the normalisation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sage_ray.advantage import Normalisation, combine, group_advantages

NAN, INF = float("nan"), float("inf")
RULES = Normalisation(eps=1e-6, clip=5.0, min_std=1e-8)
REWARDS = arrays(np.float64, (3, 5), elements=st.floats(-10, 10).map(lambda r: round(r, 3)))


def test_by_hand():
    # Mean 5, population std 2 (the sample std would be 2.138).
    result = group_advantages(np.array([[2.0, 4, 4, 4, 5, 5, 7, 9]]), Normalisation(eps=0.0, clip=5.0, min_std=1e-8))
    np.testing.assert_array_equal(result.values, [[-1.5, -0.5, -0.5, -0.5, 0, 0, 1, 2]])
    np.testing.assert_array_equal(result.weights, np.ones((1, 8)))
    assert result.values.dtype == result.weights.dtype == np.float32
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == (0, 0, 0)


def test_eps_is_added_to_the_std():
    # Mean 0, std 1: +-1 / (1 + 1).
    result = group_advantages(np.array([[-1.0, 1.0]]), Normalisation(eps=1.0, clip=5.0, min_std=1e-8))
    np.testing.assert_array_equal(result.values, [[-0.5, 0.5]])


def test_clip():
    # One of 101 is 1: mean 1/101, A = 10 for it and -0.1 for the others.
    rewards = np.zeros((1, 101))
    rewards[0, 7] = 1.0
    for sign in (1, -1):
        values = group_advantages(sign * rewards, Normalisation(eps=0.0, clip=5.0, min_std=1e-8)).values[0]
        assert values[7] == sign * 5.0
        np.testing.assert_allclose(np.delete(values, 7), -0.1 * sign, rtol=1e-6)


def test_failed_members_leave_their_group():
    rewards = np.array([[1.0, NAN, 3.0, INF], [0.0, 2.0, -INF, 4.0]])
    result = group_advantages(rewards, Normalisation(eps=0.0, clip=5.0, min_std=1e-8))
    # [1, 3]: mean 2, std 1. [0, 2, 4]: mean 2, std sqrt(8/3).
    np.testing.assert_allclose(result.values, [[-1, 0, 1, 0], [-(1.5**0.5), 0, 0, 1.5**0.5]], rtol=1e-6)
    np.testing.assert_array_equal(result.weights, [[1, 0, 1, 0], [1, 1, 0, 1]])
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == (3, 0, 0)


def test_small_and_flat_groups_contribute_nothing():
    rewards = np.array([
        [NAN, NAN, NAN],  # no finite member
        [0.7, NAN, NAN],  # singleton
        [0.1, 0.1, 0.1],  # flat; its mean rounds, so the std is 1.4e-17 and not 0
        [0.5, NAN, 0.5],  # flat after a failure
        [1.0, 2.0, 3.0],
    ])  # fmt: skip
    result = group_advantages(rewards, RULES)
    np.testing.assert_array_equal(result.weights, [[0, 0, 0]] * 4 + [[1, 1, 1]])
    np.testing.assert_array_equal(result.values[:4], np.zeros((4, 3)))
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == (6, 2, 2)


def test_groups_of_one():
    result = group_advantages(np.array([[3.0], [4.0]]), RULES)
    assert not result.weights.any() and not result.values.any() and result.num_small_groups == 2


def test_min_std_is_the_threshold():
    rewards = np.array([[0.0, 2.0]])  # std 1
    assert group_advantages(rewards, Normalisation(eps=1e-6, clip=5.0, min_std=1.0)).weights.all()
    assert not group_advantages(rewards, Normalisation(eps=1e-6, clip=5.0, min_std=1.0 + 1e-12)).weights.any()


@given(REWARDS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=8))
def test_properties(rewards, failures):
    for p, g in failures:
        rewards[p, g] = NAN
    result = group_advantages(rewards, Normalisation(eps=1e-6, clip=np.inf, min_std=1e-8))
    assert np.isfinite(result.values).all() and set(np.unique(result.weights)) <= {0.0, 1.0}
    assert (result.values[result.weights == 0] == 0).all() and (result.weights[np.isnan(rewards)] == 0).all()
    np.testing.assert_allclose(result.values.sum(1), 0, atol=1e-5)
    for row, values, weights in zip(rewards, result.values, result.weights, strict=True):
        trains = np.isfinite(row).sum() >= 2 and np.nanmax(row) > np.nanmin(row)
        assert weights.any() == trains
        if trains:
            assert weights.sum() == np.isfinite(row).sum()
            assert np.sqrt((values[weights > 0] ** 2).mean()) == pytest.approx(1, abs=0.01)
            assert row[np.argmax(np.where(weights > 0, values, -np.inf))] == np.nanmax(row)


@given(REWARDS, st.permutations(range(3)), st.permutations(range(5)))
def test_arrival_order_does_not_matter(rewards, groups, members):
    plain = group_advantages(rewards, RULES)
    mixed = group_advantages(rewards[groups][:, members], RULES)
    np.testing.assert_allclose(mixed.values, plain.values[groups][:, members], atol=2e-6)
    np.testing.assert_array_equal(mixed.weights, plain.weights[groups][:, members])


@given(REWARDS)
def test_a_group_depends_on_itself_only(rewards):
    together = group_advantages(rewards, RULES)
    for p in range(3):
        np.testing.assert_array_equal(group_advantages(rewards[p : p + 1], RULES).values[0], together.values[p])


def test_combine_by_hand():
    axes = np.array([[[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]]])
    np.testing.assert_array_equal(combine(axes, (0.5, 0.5, 1.0)), [[4.5, -0.25]])
    np.testing.assert_array_equal(combine(axes, (1.0, 1.0, 1.0)), [[6.0, -0.5]])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_combine_never_turns_a_failed_axis_into_a_number(axis, bad):
    axes = np.ones((2, 3))
    axes[1, axis] = bad
    weights = np.ones(3)
    weights[axis] = 0.0  # not even when the failed axis has no weight
    result = combine(axes, tuple(weights))
    assert result[0] == 2.0 and np.isnan(result[1])
