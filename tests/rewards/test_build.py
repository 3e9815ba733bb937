"""Scorers from settings: names and weights of parts, bad settings, the token budget; and no number out of nowhere."""

import re
from pathlib import Path

import numpy as np
import pytest

import actors
import sage_ray
from sage_ray.config import ConfigError, RewardConfig, ScorerConfig
from sage_ray.iteration_record import iteration_metrics
from sage_ray.reward_parts import RewardParts
from sage_ray.rewards.batching import batch_videos, video_tokens
from sage_ray.rewards.build import build_scorers, check_scorers, part_weights
from sage_ray.rewards.video_input import ClipRules
from sage_ray.types import Scores
from tests.conftest import REWARD
from tests.small import small_config

NAN = float("nan")
MINE = "tests.cluster.scorers:Brightness"


def mine(**weights: float) -> dict[str, ScorerConfig]:
    return {"mine": ScorerConfig(kind=MINE, weights=weights, options={"folder": "."})}


def extra(**settings) -> RewardConfig:
    """The shipped VideoAlign and one more scorer called x."""
    return RewardConfig(path=str(REWARD), extra={"x": ScorerConfig(**settings)})


def test_weights_by_name():
    parts = ("VQ", "MQ", "TA", "mine.brightness", "mine.frames")
    assert part_weights(RewardConfig(extra=mine(frames=0.25)), parts) == (0.5, 0.5, 1.0, 0.0, 0.25)
    assert part_weights(RewardConfig(setting="A"), parts[:3]) == (1.0, 1.0, 1.0)
    assert part_weights(RewardConfig(path=None, extra=mine(brightness=2)), parts[3:]) == (2.0, 0.0)
    single = {"clip": ScorerConfig(kind="clip_score", path="x", weights={"CLIP": 3})}
    assert part_weights(RewardConfig(path=None, extra=single), ("clip",)) == (3.0,)


def test_a_weight_without_a_part_and_a_reward_without_a_weight():
    parts = ("mine.brightness", "mine.frames")
    with pytest.raises(ConfigError, match="has no part 'dark'; there are mine.brightness, mine.frames"):
        part_weights(RewardConfig(path=None, extra=mine(dark=1)), parts)
    with pytest.raises(ConfigError, match="no part has a weight"):
        part_weights(RewardConfig(path=None, extra=mine()), parts)


def test_videoalign_and_a_class_of_ones_own_together():
    scorers = build_scorers(RewardConfig(path=str(REWARD), dtype="float32", extra=mine()), "cpu")
    assert [named.parts for named in scorers] == [("VQ", "MQ", "TA"), ("mine.brightness", "mine.frames")]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (RewardConfig(path=None), "needs reward.extra"),
        (RewardConfig(path="nowhere"), "reward.path='nowhere': nowhere: must be a VideoAlign directory"),
        (extra(kind="clip"), "reward.extra.x.kind='clip': must be one of"),
        (extra(kind="clip_score"), "reward.extra.x.path=None"),
        (extra(kind="clip_score", path="no"), "reward.extra.x.path='no'"),
        (extra(kind="http", url="ftp://a"), "reward.extra.x.url='ftp://a'"),
        (extra(kind="clip_score", path="no", weights={"nope": 1.0}), "has no part 'nope'; there is CLIP"),
        (extra(kind=MINE, weights={"brightness": NAN}), "reward.extra.x.weights.brightness=nan: must be finite"),
        (RewardConfig(path=None, extra={"x": ScorerConfig(kind=MINE)}), "no part has a weight"),
        (RewardConfig(path=str(REWARD), extra={"VQ": ScorerConfig(kind=MINE)}), "must not be one of VQ, MQ, TA"),
    ],
)
def test_bad_settings(reward, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_scorers(reward)


def test_tokens_of_one_video_by_hand():
    """81 frames at 24 fps: 81 / 24 * 2 = 6.75, rounded to 6, 3 pairs; 480x832 shrinks to 336x588 = 12 x 21."""
    rules = ClipRules(2.0, None, 200704)
    assert video_tokens(81, 480, 832, 24.0, rules) == 3 * 12 * 21
    assert video_tokens(9, 32, 32, 8.0, rules) == 2 * 12 * 12


def test_batches_follow_the_budget(tmp_path):
    for budget, videos in ((65536, 227), (288, 1), (100, 1), (600, 2)):
        assert batch_videos(small_config(tmp_path, [f"reward.max_batch_tokens={budget}"])) == videos


def test_a_measure_that_fails_fails_nothing_and_a_needed_part_fails_the_video():
    parts = RewardParts(("VQ", "MQ", "TA", "measure", "mine"), (0.5, 0.5, 0.0, 0.0, 2.0))
    axes = np.array([[1, 1, 9, NAN, 1], [1, 1, 9, 5, NAN], [1, 1, NAN, 5, 1]], np.float64)
    np.testing.assert_array_equal(parts.total(axes), [3.0, NAN, NAN])
    assert parts.truth_total(np.array([1.0, 2.0, 4.0])) == 1.5
    assert RewardParts(("mine",), (1.0,)).truth_total(np.array([1.0, 2.0, 4.0])) == 7.0


def test_metrics_of_parts_and_frames_leave_failures_out():
    from sage_ray.advantage import Normalisation, group_advantages

    parts = RewardParts(("mine",), (1.0,))
    scores = [
        Scores(np.array([[1.0], [NAN]]), None, None, 1.0, ("", "broken"), {"contrast": np.array([0.2, NAN])}),
        Scores(np.array([[3.0], [5.0]]), None, None, 2.0, ("", ""), {"contrast": np.array([0.4, 0.6])}),
    ]
    advantages = group_advantages(np.stack([parts.total(s.axes) for s in scores]), Normalisation())
    metrics = iteration_metrics(scores, [], advantages, parts)
    assert metrics["reward/total"] == metrics["reward/mine"] == 3.0 and metrics["reward/failed"] == 1.0
    assert metrics["frames/contrast"] == pytest.approx(0.4) and metrics["reward/score_s"] == 3.0
    assert metrics["reward/std_in_group"] == 0.5


def test_no_source_turns_a_failed_score_into_a_number():
    """nan_to_num, fillna and where(isnan) with a number would."""
    forbidden = re.compile(r"nan_to_num|fillna|(?<!allow_)nan=|where\([^)]*isnan")
    files = [
        file
        for package in (actors, sage_ray)
        for file in Path(str(package.__file__)).parent.rglob("*.py")
        if "shapes" not in file.parts
    ]
    assert len(files) > 40
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            assert not forbidden.search(line), f"{file}: {line.strip()}"
