"""Divergence on synthetic curves: loud when reward and judges part, silent otherwise."""

import math

import numpy as np
import pytest

from sage_ray.divergence import JUDGES, REWARD, Divergence, trend

TRUTH, HELD_OUT = JUDGES[:2]
SHARP = "frames/high_frequency"


def told(curves: dict[str, list], watch: Divergence | None = None) -> list[tuple[int, str]]:
    """(iteration from 1, warning) of a run with these curves."""
    watch = watch or Divergence()
    rows = zip(*curves.values(), strict=True)
    return [(i, text) for i, row in enumerate(rows, start=1) for text in watch.update(dict(zip(curves, row)))]


def line(start: float, end: float, count: int = 60, noise: float = 0.02, seed: int = 0) -> list[float]:
    return list(np.linspace(start, end, count) + np.random.default_rng(seed).normal(0, noise, count))


def test_a_line_by_hand():
    """y = 0 1 2 3 4 7: S_xx 17.5, S_xy 22.5, slope 9 / 7, residual square S_yy - S_xy^2 / S_xx."""
    found = trend(list(enumerate([0.0, 1, 2, 3, 4, 7])))
    s_yy = (0 + 1 + 4 + 9 + 16 + 49) - 17**2 / 6
    error = math.sqrt((s_yy - 22.5**2 / 17.5) / 4 / 17.5)
    assert found is not None
    assert found == pytest.approx((5 * 9 / 7, 9 / 7 / error))


def test_lines_without_noise_or_points():
    assert trend([(i, 2.0 * i) for i in range(6)]) == pytest.approx((10, math.inf))
    assert trend([(i, -2.0 * i) for i in range(6)]) == pytest.approx((-10, -math.inf))
    assert trend([(i, 0.1) for i in range(50)]) == (0, 0)
    assert trend([(i, 0.0) for i in range(50)]) == (0, 0)
    assert trend([(i, float(i)) for i in range(5)]) is None


def test_silent_when_both_rise():
    curves = {
        REWARD: line(0, 1),
        TRUTH: line(0, 1, seed=1),
        HELD_OUT: line(0, 1, seed=2),
        SHARP: line(0.2, 0.2, seed=3),
    }
    assert told(curves) == []


def test_silent_when_both_fall_or_only_truth_falls():
    assert told({REWARD: line(1, 0), TRUTH: line(1, 0, seed=1)}) == []
    assert told({REWARD: [0.3] * 60, TRUTH: line(1, 0, seed=1)}) == []


def test_a_reward_of_noise_seldom_passes_for_one_that_rises():
    """Truth falls in all of 60 iterations, so only the reward's noise is tested: at most one run in ten warns."""
    runs = [told({REWARD: line(0, 0, seed=seed), TRUTH: line(1, 0, seed=1000 + seed)}) for seed in range(200)]
    assert sum(bool(run) for run in runs) <= 20


@pytest.mark.parametrize("judge", JUDGES)
def test_a_judge_that_falls_is_told_once_with_numbers(judge):
    ((iteration, text),) = told({REWARD: [i / 10 for i in range(60)], judge: [5 - i / 5 for i in range(60)]})
    assert iteration == 20
    assert text == (
        f"iterations 1 to 20: reward/total rose by 1.9 (inf standard errors), but {judge} fell by 3.8 (inf standard "
        "errors): the policy may exploit the reward"
    )


def test_with_noise_the_parting_is_found_within_two_windows():
    rise = line(0, 2, 100)
    truth = line(0, 0.5, 50, seed=1) + line(0.5, -0.5, 50, seed=2)
    ((iteration, text),) = told({REWARD: rise, TRUTH: truth})
    assert 55 <= iteration <= 80
    assert "reward/total rose by 0.3" in text or "reward/total rose by 0.4" in text


def test_rare_evaluations_are_compared_over_their_own_iterations():
    """One evaluation in ten: the sixth is at iteration 51, so the line of both begins at iteration 1."""
    count = 80
    held_out = [1 - i / 100 if i % 10 == 0 else None for i in range(count)]
    ((iteration, text),) = told({REWARD: [i / 10 for i in range(count)], HELD_OUT: held_out})
    assert iteration == 51
    assert text.startswith("iterations 1 to 51: reward/total rose by 5 ") and f"{HELD_OUT} fell by 0.5 " in text


def test_told_again_after_it_has_cleared():
    fall, rise = [1 - i / 40 for i in range(40)], [i / 40 for i in range(40)]
    found = told({REWARD: [i / 10 for i in range(120)], TRUTH: fall + rise + fall})
    assert len(found) == 2 and found[0][0] == 20 and 85 <= found[1][0] <= 105


def test_a_pause_of_the_reward_does_not_clear_a_cause():
    reward = [i / 10 for i in range(40)] + [4 - i / 10 for i in range(30)] + [1 + i / 10 for i in range(40)]
    assert len(told({REWARD: reward, TRUTH: [-i / 10 for i in range(110)]})) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_high_frequency_that_leaves_its_start(sign):
    frames = line(0.5, 0.5, 30, 0.01, 1) + line(0.5, 0.5 + 0.4 * sign, 30, 0.01, 2)
    ((iteration, text),) = told({REWARD: line(0, 1), SHARP: frames})
    assert 31 <= iteration <= 45
    assert f"{SHARP} went from 0.5" in text or f"{SHARP} went from 0.49" in text
    assert f"({'+' if sign > 0 else '-'}" in text and "standard deviations of its start" in text


def test_a_statistic_without_noise_may_move_by_6_percent():
    rise = [i / 10 for i in range(40)]
    assert told({REWARD: rise, SHARP: [0.5] * 20 + [0.529] * 20}) == []
    ((_, text),) = told({REWARD: rise, SHARP: [0.5] * 20 + [0.531] * 20})
    assert "went from 0.5 to 0.531 (+6.2 standard deviations" in text


def test_frames_that_change_without_a_rising_reward_are_no_hacking():
    assert told({REWARD: line(1, 0), SHARP: line(0.2, 0.9)}) == []


def test_two_causes_are_two_warnings_in_order():
    rise, fall = [i / 10 for i in range(40)], [-i / 10 for i in range(40)]
    found = told({SHARP: [1 + i for i in rise], HELD_OUT: fall, TRUTH: fall, REWARD: rise})
    assert [next(name for name in (TRUTH, HELD_OUT, SHARP) if name in text) for _, text in found] == [
        TRUTH,
        HELD_OUT,
        SHARP,
    ]


def noise_run(seed: int, slope: float) -> list:
    random = np.random.default_rng(seed)
    names = [*JUDGES, *(f"frames/{letter}" for letter in "abcdef")]
    curves = {name: list(random.normal(0.3, 0.1, 200)) for name in names}
    curves[REWARD] = list(random.normal(0, 1, 200) + slope * np.arange(200))
    return told(curves)


@pytest.mark.parametrize(("slope", "most"), [(0.0, 2), (0.2, 10)])
def test_noise_alone_is_silent(slope, most):
    """200 runs of 200 iterations: with noise in everything at most 1 % warn; with a reward that rises all the time and
    nine measures that are noise, at most 5 %."""
    assert sum(bool(noise_run(seed, slope)) for seed in range(200)) <= most


def test_missing_none_and_not_finite_are_no_points():
    rise = [i / 10 for i in range(60)]
    assert told({REWARD: rise}) == []
    assert told({REWARD: rise, TRUTH: [None] * 60, HELD_OUT: [math.nan] * 60, SHARP: [math.inf] * 60}) == []
    gaps = [None if i % 3 == 0 else math.nan if i % 3 == 1 else -float(i) for i in range(60)]
    ((iteration, _),) = told({REWARD: rise, TRUTH: gaps})
    assert iteration == 20
    assert told({TRUTH: gaps}) == []
    assert told({"loss": gaps, "reward/VQ": rise}) == []


def test_nothing_is_said_before_the_window_is_full():
    rise, fall = [float(i) for i in range(50)], [-float(i) for i in range(50)]
    assert told({REWARD: rise, TRUTH: fall}, Divergence(window=33))[0][0] == 33


def test_the_same_curves_give_the_same_warnings():
    curves = {REWARD: line(0, 1), TRUTH: line(1, 0, seed=1), SHARP: line(0, 1, seed=2)}
    assert told(curves) == told(curves) != []


@pytest.mark.parametrize(
    ("arguments", "told_rule"),
    [
        ({"window": 5}, "window=5: must be at least 6 iterations"),
        ({"rise_errors": 0}, "rise_errors=0: must be positive"),
        ({"fall_errors": -1.0}, "fall_errors=-1.0: must be positive"),
        ({"frame_deviations": math.nan}, "frame_deviations=nan: must be positive"),
    ],
)
def test_wrong_arguments_are_named(arguments, told_rule):
    with pytest.raises(ValueError, match=told_rule):
        Divergence(**arguments)


def test_a_resumed_run_warns_as_one_that_went_on():
    """Lines of metrics.jsonl: an evaluation's line belongs to the iteration that follows it."""
    curves = {REWARD: line(0, 2), TRUTH: line(1, 0, seed=1), SHARP: [*line(1, 1, 30, seed=2), *line(2, 2, 30, seed=3)]}
    rows = [dict(zip(curves, row)) | {"alarms/divergence": 0.0} for row in zip(*curves.values(), strict=True)]
    lines = []
    for i, row in enumerate(rows):
        lines += [{"step": i, HELD_OUT: 1 - 0.01 * i}] if i % 5 == 0 else []
        lines.append({"step": i + 1, **row})
    straight, said = Divergence(), []
    noted: dict = {}
    for entry in lines:
        noted |= entry
        if REWARD in entry:
            said.append(straight.update(noted))
            noted = {}
    cut = 41  # after an evaluation, before its iteration
    while REWARD in lines[cut - 1]:
        cut += 1
    resumed, again = Divergence(), []
    noted = resumed.replay(lines[:cut])
    assert HELD_OUT in noted
    for entry in lines[cut:]:
        noted |= entry
        if REWARD in entry:
            again.append(resumed.update(noted))
            noted = {}
    assert again == said[-len(again) :] and any(said)
