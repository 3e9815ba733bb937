"""Which steps are stochastic and which are trained: by hand, and as properties of every rule."""

import inspect
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.step_plan import StepPlan, StepRule

TEN = tuple(range(10))
KEYS = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 10_000), st.integers(0, 10_000))
SHARES = st.floats(0.01, 1.0)


@st.composite
def rules(draw: st.DrawFn) -> StepRule:
    candidates = tuple(sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=25))))
    numbers = {"candidates": candidates, "trained_fraction": draw(SHARES), "permute": draw(st.booleans())}
    if not draw(st.booleans()):
        return StepRule(sde_fraction=draw(SHARES), **numbers)
    return StepRule(
        window_size=draw(st.integers(1, len(candidates))),
        move=draw(st.sampled_from(["none", "slide", "random"])),
        stride=draw(st.integers(1, 7)),
        interval=draw(st.integers(1, 7)),
        **numbers,
    )


def starts(rule: StepRule, iterations: range, group: int = 0) -> list[int]:
    return [rule.at(0, iteration, group).sde_steps[0] for iteration in iterations]


def test_the_plain_rule_trains_every_step():
    plan = StepRule((2, 3, 5, 7), permute=False).at(0, 0, 0)
    assert plan == StepPlan(sde_steps=(2, 3, 5, 7), trained_steps=(2, 3, 5, 7))


def test_permute_off_takes_the_first_steps_in_order():
    rule = StepRule((2, 3, 5, 7, 11), trained_fraction=0.6, permute=False)
    assert {rule.at(0, iteration, group).trained_steps for iteration in range(5) for group in range(5)} == {(2, 3, 5)}
    window = StepRule(TEN, window_size=4, move="slide", stride=3, trained_fraction=0.5, permute=False)
    assert window.at(0, 1, 0) == StepPlan(sde_steps=(3, 4, 5, 6), trained_steps=(3, 4))


def test_a_permuted_fraction_trains_every_step_at_some_time():
    rule = StepRule(TEN, trained_fraction=0.3)
    plans = [rule.at(0, 0, group) for group in range(200)]
    assert {step for plan in plans for step in plan.trained_steps} == set(TEN)
    assert {plan.trained_steps[0] for plan in plans} == set(TEN)
    assert all(plan.sde_steps == TEN for plan in plans)


@pytest.mark.parametrize(("changed", "other"), [("seed", (1, 0, 0)), ("iteration", (0, 1, 0)), ("group", (0, 0, 1))])
def test_the_order_of_twenty_steps_depends_on(changed, other):
    rule = StepRule(tuple(range(20)))  # 1 / 20! that two draws agree
    assert rule.at(0, 0, 0).trained_steps != rule.at(*other).trained_steps, changed


def test_numbers_of_the_key_do_not_change_places():
    rule = StepRule(tuple(range(20)))
    keys = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]
    assert len({rule.at(*key).trained_steps for key in keys}) == 6


def test_all_members_share_a_plan_because_it_is_not_told_the_sample():
    assert list(inspect.signature(StepRule.at).parameters) == ["self", "seed", "iteration", "group"]


@given(rules(), st.lists(KEYS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_one_key_has_one_plan_whatever_was_asked_before(rule, keys, random):
    expected = {key: rule.at(*key) for key in keys}
    again = keys * 2
    random.shuffle(again)
    assert all(rule.at(*key) == expected[key] for key in again)


@given(rules(), KEYS)
def test_trained_steps_are_stochastic_and_stochastic_ones_are_candidates(rule, key):
    plan = rule.at(*key)
    assert set(plan.trained_steps) <= set(plan.sde_steps) <= set(rule.candidates)
    assert len(set(plan.trained_steps)) == len(plan.trained_steps)
    assert list(plan.sde_steps) == sorted(set(plan.sde_steps))
    assert all(type(step) is int for step in plan.sde_steps + plan.trained_steps)


@given(rules(), st.lists(KEYS, min_size=1, max_size=5))
def test_every_group_of_every_iteration_trains_the_same_number(rule, keys):
    assert 1 <= rule.num_trained <= len(rule.candidates)
    assert {len(rule.at(*key).trained_steps) for key in keys} == {rule.num_trained}
    assert len({len(rule.at(*key).sde_steps) for key in keys}) == 1


@given(rules(), KEYS)
def test_permutation_changes_nothing_but_the_order(rule, key):
    numbers = {**vars(rule), "trained_fraction": 1.0}
    mixed = StepRule(**{**numbers, "permute": True}).at(*key)
    plain = StepRule(**{**numbers, "permute": False}).at(*key)
    assert plain.trained_steps == plain.sde_steps == mixed.sde_steps == tuple(sorted(mixed.trained_steps))


@given(rules(), KEYS)
def test_a_fraction_does_not_move_the_stochastic_steps(rule, key):
    whole = StepRule(**{**vars(rule), "trained_fraction": 1.0}).at(*key)
    part = rule.at(*key)
    assert part.sde_steps == whole.sde_steps
    assert part.trained_steps == whole.trained_steps[: rule.num_trained]


def test_a_window_that_stays():
    rule = StepRule((4, 6, 8, 10), window_size=2, permute=False)
    plans = {rule.at(seed, iteration, group) for seed in range(3) for iteration in range(5) for group in range(5)}
    assert plans == {StepPlan(sde_steps=(4, 6), trained_steps=(4, 6))}


def test_a_sliding_window_by_hand():
    # Ten candidates, four at a time: places 0..6.
    rule = StepRule(TEN, window_size=4, move="slide")
    assert starts(rule, range(9)) == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert rule.at(0, 6, 0).sde_steps == (6, 7, 8, 9)


def test_a_sliding_window_with_stride_and_interval_by_hand():
    # Two iterations at a place, then three further: 0, 3, 6, then 9 mod 7 = 2, 12 mod 7 = 5, 15 mod 7 = 1.
    rule = StepRule(TEN, window_size=4, move="slide", stride=3, interval=2)
    assert starts(rule, range(12)) == [0, 0, 3, 3, 6, 6, 2, 2, 5, 5, 1, 1]
    assert {rule.at(seed, 4, group).sde_steps for seed in range(3) for group in range(5)} == {(6, 7, 8, 9)}


def test_a_window_counts_candidates_and_not_steps():
    rule = StepRule((1, 2, 4, 8, 16), window_size=2, move="slide", stride=2)
    assert [rule.at(0, i, 0).sde_steps for i in range(4)] == [(1, 2), (4, 8), (1, 2), (4, 8)]  # places 0..3


def test_a_window_as_long_as_the_candidates_cannot_move():
    for move in ("none", "slide", "random"):
        assert {StepRule(TEN, window_size=10, move=move).at(0, i, i).sde_steps for i in range(20)} == {TEN}


def test_random_windows_reach_every_place_and_are_windows():
    rule = StepRule(TEN, window_size=4, move="random")
    plans = [rule.at(0, iteration, group).sde_steps for iteration in range(20) for group in range(20)]
    counts = {place: sum(plan == TEN[place : place + 4] for plan in plans) for place in range(7)}
    # 400 draws over 7 places: mean 57, deviation 7; 4 deviations either way.
    assert sum(counts.values()) == 400 and all(29 <= count <= 85 for count in counts.values()), counts


def test_random_windows_differ_between_groups_and_between_iterations():
    rule = StepRule(TEN, window_size=4, move="random")
    assert len({rule.at(0, 0, group).sde_steps for group in range(30)}) > 3
    assert len({rule.at(0, iteration, 0).sde_steps for iteration in range(30)}) > 3


def test_an_sde_fraction_is_drawn_for_every_group_and_iteration():
    rule = StepRule(tuple(range(20)), sde_fraction=0.5)
    plans = [rule.at(0, i, g).sde_steps for i in range(6) for g in range(6)]
    assert {len(plan) for plan in plans} == {10}
    assert len(set(plans)) == 36  # of 184,756 subsets
    assert {step for plan in plans for step in plan} == set(range(20))


def test_a_fraction_of_a_fraction_by_hand():
    # floor(.5 * 10) = 5 stochastic, floor(.5 * 5) = 2 trained.
    rule = StepRule(TEN, sde_fraction=0.5, trained_fraction=0.5)
    assert rule.num_trained == 2 and len(rule.at(0, 0, 0).sde_steps) == 5


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [
        (10, 0.3, 3),
        (10, 0.7, 7),
        (10, 1 - 0.9, 1),
        (10, 1 - 0.8, 2),  # 1.9999999999999996
        (50, 0.58, 29),  # 28.999999999999996
        (22, 15 / 22, 15),  # 14.999999999999998
        (10, 0.39, 3),
        (10, 0.399999, 3),  # rounded down: the slack is for noise only
        (10, 0.001, 1),
        (1, 0.5, 1),
        (10, 1.0, 10),
    ],
)
def test_shares_are_rounded_down_without_float_noise(count, fraction, expected):
    candidates = tuple(range(count))
    assert StepRule(candidates, trained_fraction=fraction).num_trained == expected
    assert len(StepRule(candidates, sde_fraction=fraction).at(0, 0, 0).sde_steps) == expected


@given(st.integers(1, 100), st.integers(1, 1000))
def test_a_share_in_thousandths_is_exact(count, thousandths):
    rule = StepRule(tuple(range(count)), trained_fraction=thousandths / 1000)
    assert rule.num_trained == max(1, math.floor(Fraction(thousandths, 1000) * count))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"candidates": ()}, r"candidates: \(\) must hold at least one step"),
        ({"candidates": (1, 1)}, r"candidates: \(1, 1\) must be strictly ascending"),
        ({"candidates": (2, 1)}, r"candidates: \(2, 1\) must be strictly ascending"),
        ({"window_size": 4, "move": "jump"}, "move: 'jump' must be one of none, slide, random"),
        ({"window_size": 4, "move": "slide", "stride": 0}, "stride: 0 must be at least 1"),
        ({"window_size": 4, "move": "slide", "interval": 0}, "interval: 0 must be at least 1"),
        ({"window_size": 0}, r"window_size: 0 must be in \[1, 10\]"),
        ({"window_size": 11}, r"window_size: 11 must be in \[1, 10\]"),
        ({"window_size": 4, "sde_fraction": 0.5}, "sde_fraction: 0.5 must be 1 with a window"),
        ({"move": "slide"}, "move: 'slide' needs window_size"),
        ({"move": "random"}, "move: 'random' needs window_size"),
        *[
            ({name: bad}, rf"{name}: {bad} must be in \(0, 1\]")
            for name in ("sde_fraction", "trained_fraction")
            for bad in (0.0, -0.5, 1.01, float("nan"))
        ],
    ],
)
def test_refusals(numbers, message):
    with pytest.raises(ValueError, match=message):
        StepRule(**{"candidates": TEN, **numbers})
