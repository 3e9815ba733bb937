"""The real controller over actors that compute nothing: whole runs, failures included, and what is measured of them."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.learner import LearnerRank
from actors.reward_worker import RewardWorker
from actors.rollout_worker import RolloutWorker
from bench.controller_scale import Readings, drive, options, real_step_s, rss_bytes, settings, slope, summary
from bench.stand_ins import ROLES, Delays, Handle, StandIn
from sage_ray.metrics import read_metrics
from sage_ray.rollout_log import read_rollouts

SMALL = "--workers 6 --ranks 3 --rewards 2 --groups 7 --videos 2 --age 1 --iterations 4".split()


@pytest.mark.parametrize("real", [RolloutWorker, RewardWorker, LearnerRank])
def test_stand_ins_are_called_as_the_real_ones(real: type) -> None:
    """Every verb is one of the real class, with as many arguments."""
    fake = ROLES[real.__name__]
    verbs = [
        name for name in dir(fake) if not name.startswith("_") and inspect.iscoroutinefunction(getattr(fake, name))
    ]
    for name in set(verbs) - {"pause"}:
        mine, theirs = (_parameters(getattr(one, name)) for one in (fake, real))
        if mine[-1].kind is not inspect.Parameter.VAR_POSITIONAL:
            assert len(mine) == len(theirs), name
        assert len(mine) <= len(theirs), name


def _parameters(method: Callable[..., object]) -> list[inspect.Parameter]:
    """Without the one that Ray adds to a class which it has made an actor of."""
    return [one for one in inspect.signature(method).parameters.values() if not one.name.startswith("_ray_")]


def test_a_handle_has_the_verbs_of_its_class_only() -> None:
    handle = Handle(None, "RewardWorker", "reward-0")  # type: ignore[arg-type]
    assert not hasattr(handle, "generate") and issubclass(ROLES["RewardWorker"], StandIn)


def test_slope_by_hand() -> None:
    """2 an iteration without noise; noise makes the bound wider, and a flat line's interval holds 0."""
    assert slope([3, 5, 7, 9]) == pytest.approx((2, 2))
    rate, upper = slope([1, -1] * 20)
    assert -0.01 < rate < 0 < upper < 0.05


def test_the_step_of_the_real_size_is_longer_with_fewer_ranks() -> None:
    few, many = (
        options().parse_args([*SMALL, "--workers", "1000", "--groups", "64", "--ranks", ranks]) for ranks in ("8", "64")
    )
    assert real_step_s(few, 1) > 7 * real_step_s(many, 1) > 7 * 3 * real_step_s(many, 8)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_with_failures_comes_to_its_end(tmp_path: Path) -> None:
    """7 groups of 2 videos on 3 ranks (three chunks, padded), 4 iterations."""
    parsed, readings = options().parse_args(SMALL), Readings()
    config = settings(parsed, tmp_path)
    config.reward.max_failed_share = 1.0
    delays = Delays(generate_s=0.05, score_s=0.01, accumulate_s=0.02, load_s=0.01, errors=0.3, unscored=0.1, broken=0.1)
    controller = drive(config, delays, readings)
    assert controller.finished == controller.version == 4 and controller.checkpoint.endswith("000004")
    rows = read_rollouts(tmp_path / "run" / "rollouts")
    assert [sum(row.iteration == n for row in rows) for n in (1, 2, 3, 4)] == [14] * 4
    assert {row.policy_version for row in rows if row.iteration == 4} == {2}
    assert any(row.failure for row in rows) and controller.rollouts.rewards.counts["errors"] > 0
    metrics = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "policy/age" in row]
    assert [row["stand_in/groups"] for row in metrics] == [3] * 4  # of rank 0: groups 0, 3, 6
    assert len(readings.cpu_s) == 5 and readings.cpu_s == sorted(readings.cpu_s)
    found = summary(parsed, readings, 56_000, controller)
    assert found["kB a video through TCP"] == pytest.approx(1.0)
    assert 0 < found["RSS last, MB"] < rss_bytes() / 1e6 + 500
