"""Workers and learners that die, hang or give nonsense in the middle of a run: its numbers stay what they would be.

Each kind of fault by itself: tests/chaos_matrix.py.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

import pytest

from actors.controller import Controller
from actors.reward_service import FramesLostError
from tests.cluster.troubles import (
    BrokenScorer,
    BrokenWorker,
    Ended,
    killed,
    odd_actors,
    run,
    stopped,
    told,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]
heavy = pytest.mark.skipif("SAGE_HOSTS" not in os.environ, reason="takes a minute: make test-cluster runs it")
REWARD_COUNTS = tuple(f"reward_service/{name}" for name in ("deaths", "errors", "retries", "timeouts"))


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("undisturbed"))


def without_counts(ended: Ended) -> Ended:
    """Failures of reward workers are counted in the metrics."""
    kept = [{k: v for k, v in line.items() if k not in REWARD_COUNTS} for line in ended.lines]
    return Ended(ended.digest, kept, ended.said, ended.took_s)


def test_workers_that_are_killed_and_one_that_hangs(undisturbed: Ended, tmp_path: Path) -> None:
    """A rollout and a reward worker are killed in the second iteration; the other rollout worker is stopped in the
    third, with two tasks."""

    def act(controller: Controller) -> None:
        killed("rollout-0")(controller)
        killed("reward-1")(controller)
        wait_until(lambda: controller.finished == 2, "the third iteration")
        stopped("rollout-1")(controller)

    ended = run(tmp_path, trouble=act)
    assert told(ended, "rollout-0 is replaced (deaths)") and told(ended, "rollout-1 is replaced (hung)")
    assert ended.lines[-1]["reward_service/deaths"] == 1
    assert without_counts(ended).is_as(without_counts(undisturbed))


def lose_some(controller: Controller) -> None:
    """The first iteration's groups 1 and 3 are in no object store when the learner looks, and neither are the frames of
    the first group that is to be scored."""
    missing, score, lost = controller.learner.missing, controller.rollouts.rewards.score, ["frames", "trajectories"]

    def missing_once(trajectories):
        return [1, 3] if lost and lost.pop() else missing(trajectories)

    def lost_once(refs, group_size):
        if "frames" not in lost:
            return score(refs, group_size)
        lost.remove("frames")
        failed = Future()
        failed.set_exception(FramesLostError("nowhere"))
        return failed

    controller.learner.missing, controller.rollouts.rewards.score = missing_once, lost_once


def test_nothing_finite_and_a_killed_learner(undisturbed: Ended, tmp_path: Path) -> None:
    """Frames and trajectories are lost. A rollout and a reward worker make nothing but nan. The learner is killed in
    its third update and goes on from its checkpoint (that of the second may not have been whole yet); what it was to
    learn from is not made again."""
    with odd_actors({"rollout-0": BrokenWorker, "reward-0": BrokenScorer}):
        ended = run(tmp_path, trouble=killed("learner-0"), iteration=3, before=lose_some)
    assert told(ended, "the trajectories of groups [1, 3] are lost")
    assert told(ended, "rollout-0 is replaced (faulty)")
    assert told(ended, "the learner is lost", "started again from", "version_00000")
    assert told(ended, "iteration 3 learns from the rollouts that were kept")
    assert without_counts(ended).is_as(without_counts(undisturbed))


@heavy
def test_a_learner_that_is_lost_before_any_checkpoint_begins_anew(undisturbed: Ended, tmp_path: Path) -> None:
    """Two ranks, of which one is killed; numbers are those of one rank but for rounding."""
    ended = run(tmp_path, "learner.num_ranks=2", "save_interval=3", trouble=killed("learner-1"))
    assert told(ended, "the learner is lost", "started again from the start")
    assert told(ended, "going on after iteration 0")
    assert [line["step"] for line in ended.lines] == [1, 2, 3]
    for mine, theirs in zip(ended.lines, undisturbed.lines, strict=True):
        assert mine["learner/grad_norm"] == pytest.approx(theirs["learner/grad_norm"], rel=1e-3)


@heavy
def test_an_overlapping_run_outlives_its_worker(tmp_path: Path) -> None:
    """At age 0 its numbers are the same however it was disturbed."""
    words = "overlap.enabled=true", "overlap.max_policy_age=0"
    straight, ended = run(tmp_path / "straight", *words), run(tmp_path / "run", *words, trouble=killed("rollout-0"))
    assert told(ended, "rollout-0 is replaced (deaths)")
    assert without_counts(ended).is_as(without_counts(straight))
