"""The reward service under load: workers that die, hang and fail. Nothing is lost, invented or given twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import ray

from actors.cluster import Layout
from actors.reward_service import RewardService
from actors.rollout_group import GroupRefs
from sage_ray.types import GroupRequest, Prompt, Scores
from tests.small import small_config

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
CAPTION = "a small red circle moves left slowly on a gray background"
GROUP_SIZE = 4


def group(number: int, prompt: str, frames: np.ndarray) -> GroupRefs:
    """A finished group of the rollout pool, as far as the service looks at it."""
    request = GroupRequest(
        step=0,
        group=number,
        prompt=Prompt(number, prompt),
        group_size=len(frames),
        policy_version=0,
        seed=0,
        sigmas=(1.0, 0.0),
        sde_type="ode",
        eta=0.0,
        sde_steps=(),
    )
    nothing = ray.put(None)
    return GroupRefs(request, nothing, ray.put(frames), nothing)


def clips(number: int, size: int = 8) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, (GROUP_SIZE, 3, size, size, 3), np.uint8)


def brightness_service(tmp_path: Path, workers: int, *overrides: str) -> RewardService:
    extra = (
        f"{{mine: {{kind: 'tests.cluster.scorers:Brightness', weights: {{brightness: 1}}, "
        f"options: {{folder: {tmp_path}}}}}}}"
    )
    config = small_config(
        tmp_path,
        [
            "reward.path=null",
            f"reward.extra={extra}",
            "reward.truth=null",
            f"reward.num_workers={workers}",
            *overrides,
        ],
    )
    service = RewardService(config, Layout("cpu", 0, 0, 0), batch_videos=16)
    assert service.start() == ("mine.brightness", "mine.frames")
    return service


def collect(service: RewardService, futures: Sequence[Future[Scores]]) -> list[Scores]:
    return [service.result(future, "groups") for future in futures]


def end(service: RewardService) -> None:
    service.close()
    for worker in service.workers:
        ray.kill(worker.actor)


def test_two_hundred_videos_with_one_worker_killed_and_one_hung(tmp_path: Path) -> None:
    """50 groups of 4 on three workers. The first video of the prompt "die" kills its worker, "hang" hangs another."""
    service = brightness_service(tmp_path, 3, "reward.timeout_s=8")
    commands = {10: "hang", 20: "die", 30: "error", 40: "nan"}
    frames = [clips(number) for number in range(50)]
    futures: list[Future[Scores]] = [
        service.score(group(number, commands.get(number, "fine"), video), GROUP_SIZE)
        for number, video in enumerate(frames)
    ]
    try:
        scores = collect(service, futures)
    finally:
        end(service)
    assert (tmp_path / "hang").exists() and (tmp_path / "die").exists()
    for number, (score, video) in enumerate(zip(scores, frames, strict=True)):
        expected = video.reshape(GROUP_SIZE, -1).mean(1)
        if commands.get(number) in ("error", "nan"):
            assert np.isnan(score.axes[:, 0]).all() and all(score.reasons)
        else:
            np.testing.assert_array_equal(score.axes[:, 0], expected)
            np.testing.assert_array_equal(score.axes[:, 1], 3.0)
            assert score.reasons == ("",) * GROUP_SIZE
    assert scores[30].reasons[0] == "ValueError: this prompt cannot be scored"
    assert scores[40].reasons[0] == "a score is not finite" and np.isfinite(scores[40].axes[:, 1]).all()
    assert service.counts["deaths"] >= 1 and service.counts["timeouts"] >= 1
    assert service.counts["failed"] == 2 * GROUP_SIZE
    assert service.num_pending == 0 and not service._queue


def test_too_many_failures_stop_the_run_with_the_reason(tmp_path: Path) -> None:
    service = brightness_service(tmp_path, 1, "reward.max_failed_share=0.4")
    try:
        one_of_three = [service.score(group(n, "error" if n == 0 else "fine", clips(n)), GROUP_SIZE) for n in range(3)]
        scores = collect(service, one_of_three)
        service.check_failures(scores)
        assert sum(bool(reason) for score in scores for reason in score.reasons) == 4
        half = [service.score(group(n, "error" if n == 0 else "fine", clips(n)), GROUP_SIZE) for n in range(2)]
        with pytest.raises(RuntimeError, match=r"4 of 8 videos .*max_failed_share=0.4.*cannot be scored"):
            service.check_failures(collect(service, half))
    finally:
        end(service)


def test_no_worker_left_fails_everything_in_bounded_time(tmp_path: Path) -> None:
    """The only worker dies and cannot be started again: its class is gone."""
    service = brightness_service(tmp_path, 1, "cluster.start_timeout_s=60", "reward.max_failed_share=1")
    service.config.reward.extra["mine"].kind = "tests.cluster.scorers:Gone"
    try:
        futures = [service.score(group(n, "die" if n == 0 else "fine", clips(n)), GROUP_SIZE) for n in range(3)]
        scores = collect(service, futures)
    finally:
        end(service)
    assert any(reason == "no reward worker is left" for score in scores for reason in score.reasons)
    for score in scores:
        for row, reason in zip(score.axes, score.reasons, strict=True):
            assert np.isfinite(row).all() if not reason else np.isnan(row).all()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Iterator[RewardService]:
    """The shipped reward in one worker, a video at a time."""
    config = small_config(tmp_path_factory.mktemp("shipped"), ["reward.max_batch_tokens=1"])
    service = RewardService(config, Layout("cpu", 0, 0, 0), batch_videos=1)
    assert service.start() == ("VQ", "MQ", "TA")
    yield service
    end(service)


def test_videoalign_and_truth_in_one_worker(shipped: RewardService) -> None:
    """A group with a float clip loses the group's scores and no other's."""
    good = np.random.default_rng(0).integers(0, 255, (GROUP_SIZE, 9, 32, 32, 3), np.uint8)
    futures = [shipped.score(group(n, CAPTION, v), GROUP_SIZE) for n, v in enumerate((good, good.astype(np.float32)))]
    fine, bad = (future.result(timeout=120) for future in futures)
    assert fine.axes.shape == (GROUP_SIZE, 3) and np.isfinite(fine.axes).all() and np.isfinite(fine.truth).all()
    assert "high_frequency" in fine.frames
    assert np.isnan(bad.axes).all() and "uint8" in bad.reasons[0]


def test_a_worker_leaves_and_comes_back_and_is_replaced_when_it_dies_meanwhile(shipped: RewardService) -> None:
    before = collect(shipped, [shipped.score(group(0, CAPTION, clips(0, 32)), GROUP_SIZE)])[0]
    num_bytes = shipped.leave()
    assert num_bytes > 0 and shipped.leave() == 0
    ray.kill(shipped.workers[0].actor)
    shipped.enter()
    after = collect(shipped, [shipped.score(group(1, CAPTION, clips(0, 32)), GROUP_SIZE)])[0]
    np.testing.assert_array_equal(after.axes, before.axes)
    assert shipped.counts["deaths"] == 1
    assert shipped.leave() == num_bytes  # it waits for the new worker
    shipped.enter()
    shipped.layout = Layout("cuda", 0.5, 0, 0.5)  # beside others on GPUs, a worker on the CPU is in nobody's way
    assert shipped.leave() == 0


def test_a_measure_that_fails_costs_no_video(tmp_path: Path) -> None:
    """A part without a weight that is nan, or whose scorer raises, leaves VideoAlign's reward and fails nothing."""
    extra = "{mine: {kind: 'tests.cluster.scorers:Brightness', options: {folder: .}}}"
    config = small_config(tmp_path, [f"reward.extra={extra}", "reward.truth=null", "reward.max_failed_share=0"])
    service = RewardService(config, Layout("cpu", 0, 0, 0), batch_videos=8)
    assert service.start() == ("VQ", "MQ", "TA", "mine.brightness", "mine.frames")
    try:
        asked = enumerate(("nan", "error"))
        futures = [service.score(group(n, prompt, clips(n, 32)), GROUP_SIZE) for n, prompt in asked]
        scores = collect(service, futures)
        service.check_failures(scores)
    finally:
        end(service)
    for score in scores:
        assert np.isfinite(score.axes[:, :3]).all() and np.isnan(score.axes[:, 3]).all()
        assert score.reasons == ("",) * GROUP_SIZE
    assert service.counts["measure_failures"] == GROUP_SIZE and not service.counts["retries"]


def test_an_error_in_the_service_itself_is_told_to_whoever_waits(tmp_path: Path) -> None:
    service = brightness_service(tmp_path, 1, "reward.timeout_s=3", "reward.max_failed_share=1")

    def broken(*arguments):
        raise KeyError("a fault of our own")

    service._start_worker = broken
    try:
        with pytest.raises(RuntimeError, match="the reward service broke: KeyError"):
            collect(service, [service.score(group(0, "die", clips(0)), GROUP_SIZE)])
    finally:
        service.close()
