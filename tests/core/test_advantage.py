"""Rewards to advantages by hand; failed, flat and small groups; properties of the normalisation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sage_ray.advantage import Normalisation, axis_advantages, combine, group_advantages

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


EXACT = Normalisation(eps=0.0, clip=np.inf)


def test_clamp_by_hand():
    rewards = np.array([[-1.0, 1.0], [-4.0, 4.0]])  # stds 1 and 4
    clamped = group_advantages(rewards, Normalisation(eps=2.0, rule="clamp"))
    np.testing.assert_array_equal(clamped.values, [[-0.5, 0.5], [-1.0, 1.0]])  # over max(1, 2) and max(4, 2)
    added = group_advantages(rewards, Normalisation(eps=2.0, rule="add"))
    np.testing.assert_allclose(added.values, [[-1 / 3, 1 / 3], [-2 / 3, 2 / 3]], rtol=1e-6)  # over 1 + 2 and 4 + 2


def test_scale_by_hand():
    assert Normalisation(eps=0.5).scale(2.0) == 2.5
    clamp = Normalisation(eps=0.5, rule="clamp")
    assert [clamp.scale(std) for std in (0.0, 0.4, 0.5, 2.0)] == [0.5, 0.5, 0.5, 2.0]


@pytest.mark.parametrize("rule", ["", "max", "Add"])
def test_unknown_rule_is_refused(rule):
    with pytest.raises(ValueError, match="rule: .* must be add or clamp"):
        Normalisation(rule=rule)


def test_global_std_by_hand():
    # Centred -1, 1 and -7, 7: sqrt((1 + 1 + 49 + 49) / 4) = 5. The groups' means, 1 and 107, take no part.
    rewards = np.array([[0.0, 2.0], [100.0, 114.0]])
    result = group_advantages(rewards, Normalisation(eps=0.0, global_std=True))
    np.testing.assert_allclose(result.values, [[-0.2, 0.2], [-1.4, 1.4]], rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, EXACT).values, [[-1, 1], [-1, 1]], rtol=1e-6)
    # eps belongs to the global std too: over 5 + 5, and over max(5, 7).
    added = group_advantages(rewards, Normalisation(eps=5.0, global_std=True)).values
    np.testing.assert_allclose(added, [[-0.1, 0.1], [-0.7, 0.7]], rtol=1e-6)
    clamped = group_advantages(rewards, Normalisation(eps=7.0, rule="clamp", global_std=True)).values
    np.testing.assert_allclose(clamped, [[-1 / 7, 1 / 7], [-1, 1]], rtol=1e-6)


def test_global_std_leaves_out_failed_members_and_singletons():
    rewards = np.array([[0.0, NAN, 2.0], [INF, 0.0, 14.0], [50.0, NAN, NAN], [NAN, NAN, NAN]])
    result = group_advantages(rewards, Normalisation(eps=0.0, global_std=True))
    np.testing.assert_allclose(result.values, [[-0.2, 0, 0.2], [0, -1.4, 1.4], [0] * 3, [0] * 3], rtol=1e-6)
    np.testing.assert_array_equal(result.weights, [[1, 0, 1], [0, 1, 1], [0] * 3, [0] * 3])
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == (7, 2, 0)


def test_min_std_asks_for_the_groups_own_std_also_with_global_std():
    rewards = np.array([[0.0, 2.0], [0.0, 14.0], [3.0, 3.0]])
    result = group_advantages(rewards, Normalisation(eps=0.0, global_std=True, min_std=2.0))
    np.testing.assert_array_equal(result.weights, [[0, 0], [1, 1], [0, 0]])
    assert not result.values[[0, 2]].any() and result.num_flat_groups == 2


def test_all_flat_with_global_std_is_no_nan():
    result = group_advantages(np.ones((2, 3)), Normalisation(eps=0.0, global_std=True))
    assert not result.values.any() and not result.weights.any() and result.num_flat_groups == 2


TWO_AXES = np.array([[[0.0, 0.0], [2.0, 0.0], [0.0, 10.0], [2.0, 10.0]]])
"""Axis 0: mean 1, std 1, so -1, 1, -1, 1. Axis 1: mean 5, std 5, so -1, -1, 1, 1."""


def test_axes_by_hand_where_reward_first_gives_another_answer():
    result = axis_advantages(TWO_AXES, (1.0, 1.0), EXACT)
    np.testing.assert_allclose(result.values, [[-2, 0, 0, 2]], rtol=1e-6)
    # Reward first: 0, 2, 10, 12 has mean 6 and std sqrt(26).
    first = group_advantages(TWO_AXES.sum(-1), EXACT)
    np.testing.assert_allclose(first.values, np.array([[-6, -4, 4, 6]]) / 26**0.5, rtol=1e-6)


def test_axis_weights_weigh_advantages_and_clip_comes_last():
    np.testing.assert_allclose(axis_advantages(TWO_AXES, (1.0, 0.5), EXACT).values, [[-1.5, 0.5, -0.5, 1.5]])
    # The sums are -8, 2, -2, 8. Clipping each axis at 2 before the sum would make the second 2 - 2 = 0.
    values = axis_advantages(TWO_AXES, (5.0, 3.0), Normalisation(eps=0.0, clip=2.0)).values
    np.testing.assert_allclose(values, [[-2, 2, -2, 2]], rtol=1e-6)


def test_axes_with_global_std_by_hand():
    # Axis 0: centred -1, 1, -7, 7 over 5; axis 1: centred -2, 2, -14, 14 over 10: the same numbers.
    axes = np.array([[[0.0, 5.0], [2.0, 9.0]], [[0.0, 28.0], [14.0, 0.0]]])
    result = axis_advantages(axes, (1.0, 0.5), Normalisation(eps=0.0, global_std=True))
    np.testing.assert_allclose(result.values, [[-0.3, 0.3], [-0.7, 0.7]], rtol=1e-6)


def test_a_flat_axis_adds_nothing_but_its_group_trains():
    axes = np.array([[[0.0, 3.0], [2.0, 3.0]], [[7.0, 1.0], [7.0, 5.0]]])
    result = axis_advantages(axes, (1.0, 0.5), EXACT)
    np.testing.assert_allclose(result.values, [[-1, 1], [-0.5, 0.5]], rtol=1e-6)
    assert result.weights.all() and result.num_flat_groups == 0


def test_a_group_with_every_weighted_axis_flat_does_not_train():
    # Group 0 is flat in both axes; group 1 varies in axis 1 only, which has no weight; group 2 trains.
    axes = np.array([[[1.0, 3.0], [1.0, 3.0]], [[7.0, 1.0], [7.0, 5.0]], [[0.0, 3.0], [2.0, 3.0]]])
    result = axis_advantages(axes, (1.0, 0.0), EXACT)
    np.testing.assert_array_equal(result.weights, [[0, 0], [0, 0], [1, 1]])
    np.testing.assert_allclose(result.values, [[0, 0], [0, 0], [-1, 1]], rtol=1e-6)
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == (0, 0, 2)
    assert axis_advantages(axes, (0.0, 1.0), EXACT).weights.tolist() == [[0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_member_with_one_bad_axis_leaves_every_axis(axis, bad):
    axes = np.array([[[0.0, 0.0], [2.0, 4.0], [90.0, 70.0]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    axes[0, 2, axis] = bad
    axes[1, :2, axis] = bad  # a singleton is left
    result = axis_advantages(axes, (1.0, 0.0), EXACT)
    np.testing.assert_allclose(result.values, [[-1, 1, 0], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(result.weights, [[1, 1, 0], [0, 0, 0]])
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == (3, 1, 0)


def test_every_axis_needs_its_weight():
    with pytest.raises(ValueError, match="zip"):
        axis_advantages(TWO_AXES, (1.0,), EXACT)


AXES = arrays(
    np.float64,
    (3, 5, 3),
    # Values from a small set, so that flat axes and flat groups are common.
    elements=st.one_of(
        st.sampled_from([0.0, 0.1, 1.0]), st.floats(-10, 10).map(lambda r: round(r, 3)), st.sampled_from([NAN, INF])
    ),
)
FLAT_AXES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=7)
HOW = st.builds(
    Normalisation,
    eps=st.sampled_from([0.0, 1e-6, 0.5]),
    rule=st.sampled_from(["add", "clamp"]),
    global_std=st.booleans(),
    clip=st.sampled_from([1.0, 5.0, np.inf]),
)


def _with_flat(axes: np.ndarray, flat: list[tuple[int, int]]) -> np.ndarray:
    for p, k in flat:
        axes[p, :, k] = np.where(np.isfinite(axes[p, :, k]), 0.1, axes[p, :, k])
    return axes


@given(AXES, FLAT_AXES, st.integers(0, 2), HOW)
def test_one_weighted_axis_is_the_reward_first_way(axes, flat, axis, how):
    axes = _with_flat(axes, flat)
    weights = tuple(float(k == axis) for k in range(3))
    by_axis = axis_advantages(axes, weights, how)
    by_reward = group_advantages(combine(axes, weights), how)
    np.testing.assert_array_equal(by_axis.values, by_reward.values)
    np.testing.assert_array_equal(by_axis.weights, by_reward.weights)
    assert by_axis.num_failed == by_reward.num_failed == (~np.isfinite(axes).all(-1)).sum()
    assert by_axis.num_small_groups == by_reward.num_small_groups
    assert by_axis.num_flat_groups == by_reward.num_flat_groups


def test_a_weight_survives_only_in_the_axis_way():
    # The limit of the equality above: reward first divides by w std, the axis way does not.
    axes = np.array([[[0.0, 5.0], [2.0, 9.0]]])
    np.testing.assert_allclose(axis_advantages(axes, (0.5, 0.0), EXACT).values, [[-0.5, 0.5]])
    np.testing.assert_allclose(group_advantages(axes @ np.array([0.5, 0.0]), EXACT).values, [[-1.0, 1.0]])


@given(AXES, FLAT_AXES, st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 3), HOW)
def test_properties_of_axes(axes, flat, axis_weights, how):
    axes = _with_flat(axes, flat)
    finite = np.isfinite(axes).all(-1)
    result = axis_advantages(axes, axis_weights, how)
    assert np.isfinite(result.values).all() and set(np.unique(result.weights)) <= {0.0, 1.0}
    assert (np.abs(result.values) <= how.clip).all()
    assert (result.values[result.weights == 0] == 0).all() and (result.weights[~finite] == 0).all()
    if how.clip == np.inf:
        np.testing.assert_allclose(result.values.sum(1), 0, atol=1e-4)
    num_small = num_flat = 0
    for row, valid, weights in zip(axes, finite, result.weights, strict=True):
        small = valid.sum() < 2
        trains = not small and any(w and np.ptp(row[valid, k]) > 0 for k, w in enumerate(axis_weights))
        np.testing.assert_array_equal(weights, valid if trains else np.zeros(5))
        num_small, num_flat = num_small + small, num_flat + (not small and not trains)
    counts = (int((~finite).sum()), num_small, num_flat)
    assert (result.num_failed, result.num_small_groups, result.num_flat_groups) == counts


@given(AXES, HOW)
def test_the_input_is_not_changed(axes, how):
    before = axes.copy()
    axis_advantages(axes, (1.0, 0.5, 0.0), how)
    np.testing.assert_array_equal(axes, before)
