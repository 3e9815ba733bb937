"""KL terms, anchor moves and the lambda controller by hand-computed numbers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.config import KL_MODES
from sage_ray.config_check import CHOICES
from sage_ray.trust_region import KL_TERMS, SCHEDULES, KLController, anchor_moves_at

TARGET = 1e-5


def controller(direction="paper", start=1e-7, largest=TARGET, smallest=1e-7, warmup_steps=100) -> KLController:
    return KLController(start=start, largest=largest, smallest=smallest, warmup_steps=warmup_steps, direction=direction)


def after_warmup(kl: float, direction="paper") -> KLController:
    made = controller(direction)
    for _ in range(100):
        made.tick(kl)
    return made


@pytest.mark.parametrize(
    ("mode", "anchor", "moves", "previous"),
    [
        ("none", False, False, False),
        ("fixed", True, False, False),
        ("stepwise", False, False, True),
        ("moving", True, True, False),
        ("dual_moving", True, True, True),
    ],
)
def test_terms(mode, anchor, moves, previous):
    terms = KL_TERMS[mode]
    assert (terms.anchor, terms.moves, terms.previous) == (anchor, moves, previous)


def test_the_table_has_every_mode_of_the_config():
    assert set(KL_TERMS) == set(KL_MODES)


def test_anchor_moves_every_interval_but_not_at_version_zero():
    assert [v for v in range(31) if anchor_moves_at(v, 10)] == [10, 20, 30]
    assert [v for v in range(4) if anchor_moves_at(v, 1)] == [1, 2, 3]


def test_warmup_is_linear_in_optimizer_steps():
    made = controller()
    assert made.value == 1e-7
    values = [made.tick(1.0) for _ in range(100)]  # KL far above target: no feedback during the warm-up
    # 1e-7 + 9.9e-6 n / 100.
    assert values[0] == pytest.approx(1.99e-7, rel=1e-12)
    assert values[49] == pytest.approx(5.05e-6, rel=1e-12)
    assert values[99] == pytest.approx(1e-5, rel=1e-12)
    assert made.value == values[99] and made.num_steps == 100


def test_paper_weakens_when_kl_is_large_and_recovers():
    made = after_warmup(2e-5)
    assert made.tick(2e-5) == pytest.approx(9e-6, rel=1e-9)
    assert made.tick(2e-5) == pytest.approx(8.1e-6, rel=1e-9)
    # Mean of the last 10 with n zeros is 2e-5 (10 - n) / 10: 1.8e-5, 1.6e-5 shrink, then 1.4e-5 holds.
    assert made.tick(0.0) == pytest.approx(7.29e-6, rel=1e-9)
    assert made.tick(0.0) == pytest.approx(6.561e-6, rel=1e-9)
    assert made.tick(0.0) == pytest.approx(6.561e-6, rel=1e-9)
    for _ in range(4):  # 1.2e-5, 1.0e-5, 0.8e-5, 0.6e-5: inside [0.5, 1.5] target
        made.tick(0.0)
    assert made.value == pytest.approx(6.561e-6, rel=1e-9)
    assert made.tick(0.0) == pytest.approx(7.2171e-6, rel=1e-9)  # mean 0.4e-5: x 1.1


def test_ppo_is_the_reverse():
    weak = after_warmup(0.0, "ppo")
    assert weak.tick(0.0) == pytest.approx(9e-6, rel=1e-9)
    strong = after_warmup(2e-5, "ppo")
    strong.value = 5e-6
    assert strong.tick(2e-5) == pytest.approx(5.5e-6, rel=1e-9)


def test_value_stays_between_smallest_and_largest():
    made = after_warmup(0.0)
    assert made.tick(0.0) == 1e-5  # 1.1e-5 would be above kl.weight
    made = after_warmup(1.0)
    values = [made.tick(1.0) for _ in range(60)]  # 0.9^44 < 1e-2
    assert values[-1] == 1e-7 and min(values) == 1e-7


def test_the_feedback_mean_covers_ten_values():
    made = after_warmup(0.0)
    # One value of 1.6e-4 among ten: mean 1.6e-5, above 1.5e-5 until it leaves the window.
    values = [made.tick(kl) for kl in [1.6e-4] + [0.0] * 10]
    assert values[:10] == pytest.approx([1e-5 * 0.9**n for n in range(1, 11)], rel=1e-9)
    assert values[10] == pytest.approx(1e-5 * 0.9**10 * 1.1, rel=1e-9)
    # 1.4e-4 gives 1.4e-5: inside the dead zone.
    assert after_warmup(0.0).tick(1.4e-4) == pytest.approx(1e-5, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "factor"), [(1.52e-5, 0.9), (1.48e-5, 1.0), (1.0e-5, 1.0), (0.52e-5, 1.0), (0.48e-5, 1.1)]
)
def test_the_dead_zone_ends_at_half_and_one_and_a_half_times_the_target(kl, factor):
    made = after_warmup(kl)
    made.value = 5e-6
    assert made.tick(kl) == pytest.approx(5e-6 * factor, rel=1e-12)


def test_fixed_schedule_of_figure_7():
    made = controller(start=1e-5, smallest=1e-5)
    assert {round(made.tick(kl), 15) for kl in [0.0, 1.0] * 100} == {1e-5}


def test_direction_must_be_known():
    with pytest.raises(ValueError, match="direction: 'up' must be paper or ppo"):
        controller("up")


@given(st.lists(st.floats(0, 5e-5), min_size=35, max_size=60), st.integers(0, 35), st.sampled_from(["paper", "ppo"]))
def test_a_resumed_controller_goes_on_as_if_nothing_happened(kls, cut, direction):
    straight, first = (controller(direction, warmup_steps=20) for _ in range(2))
    expected = [straight.tick(kl) for kl in kls]
    got = [first.tick(kl) for kl in kls[:cut]]
    second = controller(direction, warmup_steps=20)
    second.load_state_dict(first.state_dict())
    got += [second.tick(kl) for kl in kls[cut:]]
    assert got == expected and second.state_dict() == straight.state_dict()


def test_state_is_a_copy():
    made = controller()
    made.tick(1.0)
    state = made.state_dict()
    made.tick(2.0)
    assert state == {"value": pytest.approx(1.99e-7), "num_steps": 1, "recent": [1.0]}


def scheduled(schedule: str, largest=TARGET, warmup_steps=100) -> KLController:
    return KLController(
        start=1e-7,
        largest=largest,
        smallest=1e-7,
        warmup_steps=warmup_steps,
        direction="paper",
        schedule=schedule,
    )


@pytest.mark.parametrize("kl", [0.0, 1e-5, 1.0])
def test_fixed_is_the_largest_from_before_the_first_tick(kl):
    made = scheduled("fixed")
    assert made.value == 1e-5
    assert {made.tick(kl) for _ in range(150)} == {1e-5}
    assert made.value == 1e-5 and made.num_steps == 150


@pytest.mark.parametrize("kl", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1e-5, {1: 1.99e-7, 50: 5.05e-6, 100: 1e-5, 101: 1e-5, 150: 1e-5}),  # 1e-7 + 9.9e-6 n / 100
        (1e-6, {1: 1.09e-7, 50: 5.5e-7, 100: 1e-6, 101: 1e-6, 150: 1e-6}),  # 1e-7 + 9e-7 n / 100
    ],
)
def test_two_stage_by_hand_whatever_the_kl(largest, expected, kl):
    made = scheduled("two_stage", largest)
    assert made.value == 1e-7
    values = [made.tick(kl) for _ in range(150)]
    for tick, value in expected.items():
        assert values[tick - 1] == pytest.approx(value, rel=1e-12), tick
    assert set(values[100:]) == {largest}


def test_without_warmup_two_stage_is_the_largest_at_the_first_tick():
    assert scheduled("two_stage", warmup_steps=0).tick(1.0) == 1e-5


def test_feedback_is_the_default_and_follows_the_kl():
    named, default = scheduled("feedback"), controller()
    kls = [2e-5] * 103 + [0.0] * 12
    values = [named.tick(kl) for kl in kls]
    assert values == [default.tick(kl) for kl in kls]
    # 103 ticks of twice the target: three tenths taken off; see test_paper_weakens_... for the rest.
    assert values[99] == pytest.approx(1e-5, rel=1e-12)
    assert values[102] == pytest.approx(1e-5 * 0.9**3, rel=1e-9)
    # Zeros: means 1.8e-5 and 1.6e-5 weaken, 1.4e-5 .. 0.6e-5 hold, 0.4e-5, 0.2e-5, 0 and 0 .. strengthen.
    assert values[104] == values[109] == pytest.approx(1e-5 * 0.9**5, rel=1e-9)
    assert values[112] == pytest.approx(1e-5 * 0.9**5 * 1.1**3, rel=1e-9)


@given(st.lists(st.floats(0, 5e-5), min_size=1, max_size=40))
def test_schedules_agree_during_the_warm_up(kls):
    two_stage, feedback = scheduled("two_stage", warmup_steps=40), scheduled("feedback", warmup_steps=40)
    assert [two_stage.tick(kl) for kl in kls] == [feedback.tick(kl) for kl in kls]


@pytest.mark.parametrize("schedule", ["fixed", "two_stage", "feedback"])
@given(kls=st.lists(st.floats(0, 5e-5), min_size=35, max_size=60), cut=st.integers(0, 35))
def test_every_schedule_resumes_identically(schedule, kls, cut):
    straight, first, second = (scheduled(schedule, warmup_steps=20) for _ in range(3))
    expected = [straight.tick(kl) for kl in kls]
    got = [first.tick(kl) for kl in kls[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value
    got += [second.tick(kl) for kl in kls[cut:]]
    assert got == expected and second.state_dict() == straight.state_dict()


@pytest.mark.parametrize("schedule", ["", "constant", "Fixed", "two-stage"])
def test_schedule_must_be_known(schedule):
    with pytest.raises(ValueError, match=f"schedule: '{schedule}' must be one of fixed, two_stage, feedback"):
        scheduled(schedule)


def test_the_schedules_are_those_of_the_config():
    assert set(SCHEDULES) == set(CHOICES["kl.schedule"])
