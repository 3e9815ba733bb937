"""The asynchronous ring: the same bits as the synchronous one at age 0, and at age 1 whatever the workers' speed."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import ray

from actors.cluster import Layout, start_actor
from actors.controller import Controller
from actors.rollout_group import RolloutGroup
from actors.rollout_worker import RolloutWorker
from actors.stop import StopRequest
from sage_ray.checks import CheckedRun
from sage_ray.data.prompts import read_prompts
from sage_ray.metrics import read_lines, read_metrics
from sage_ray.progress import Progress
from sage_ray.rollout_log import read_rollouts
from tests.cluster.made import end_controller
from tests.cluster.test_resume import Run
from tests.small import small_config

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
WORDS = """data.num_prompts=4 data.group_size=2 num_iterations=3 sampling.num_steps=4 kl.mode=dual_moving
kl.anchor_interval=2 kl.share_interval=2 learner.videos_per_pass=2 save_interval=3 reward.max_batch_tokens=1""".split()
AGE_1 = ("overlap.enabled=true", "overlap.max_policy_age=1")


class SlowWorker(RolloutWorker):
    """Takes its time."""

    def generate(self, *requests):
        time.sleep(0.5)
        return super().generate(*requests)


class Ended(NamedTuple):
    """What a whole run left. digest: of the last published weights; versions: that made an iteration's videos; looked:
    after which iterations workers held which version."""

    digest: str
    metrics: list[dict]
    versions: dict[int, set[int]]
    looked: list[tuple[int, int]]


def run(folder: Path, *overrides: str, slow: bool = False, due: tuple[int, ...] = ()) -> Ended:
    """Three iterations. slow: the first of the workers is; due: iterations after which an evaluation would come."""
    config = small_config(folder, [*WORDS, *overrides])
    checked = CheckedRun(config, read_prompts([Path(file) for file in config.data.prompts]), [])
    controller = Controller(checked, Layout("cpu", 0, 0, 0), Progress(config.num_iterations), StopRequest())
    pool, looked = controller.rollouts.rollouts, []
    if slow:
        ray.kill(pool.members[0])
        pool.staff.seats[0].group = RolloutGroup((start_actor(SlowWorker, 0, config, "cpu", "slow"),))
    controller.start()

    def look(iteration: int) -> None:
        held = {ray.get(member.holds.remote()) for member in pool.members}
        assert held == {(controller.version, controller.published.digest)}
        looked.append((iteration, controller.rollouts.version))

    if config.overlap.enabled:
        controller.run_async(look, due.__contains__)
    else:
        controller.run_sync(lambda iteration: None)
    end_controller(controller)
    rows = read_rollouts(controller.output / "rollouts")
    versions = {n: {row.policy_version for row in rows if row.iteration == n} for n in range(1, 4)}
    metrics = read_metrics(controller.output / "metrics.jsonl")
    return Ended(controller.published.digest, metrics, versions, looked)


NUMBERS = ("loss/total", "learner/grad_norm", "kl/anchor", "kl/previous", "reward/total", "agreement/max_abs")


def numbers(ended: Ended) -> list[list[float]]:
    return [[line[name] for name in NUMBERS] for line in ended.metrics]


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("sync"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_age_0_is_the_synchronous_ring_bit_for_bit(sync: Ended, ranks: int, tmp_path: Path) -> None:
    """Groups come one by one to one learner rank, and two by two to two ranks, which padding makes uneven."""
    words = (f"learner.num_ranks={ranks}", *(["data.num_prompts=3"] if ranks == 2 else []))
    straight = sync if ranks == 1 else run(tmp_path / "sync", *words)
    ended = run(tmp_path, "overlap.enabled=true", "overlap.max_policy_age=0", "rollout.num_workers=2", *words)
    assert ended.digest == straight.digest
    assert numbers(ended) == numbers(straight)
    assert ended.versions == {1: {0}, 2: {1}, 3: {2}}
    assert [line["policy/age"] for line in ended.metrics] == [0, 0, 0]


def test_age_1_gives_the_same_numbers_with_any_workers(sync: Ended, tmp_path: Path) -> None:
    """Every iteration after the first is made by the weights of one publish ago, which the gate still compares."""
    alone = run(tmp_path / "alone", *AGE_1)
    uneven = run(tmp_path / "uneven", *AGE_1, "rollout.num_workers=3", slow=True, due=(1, 3))
    assert alone.digest == uneven.digest != sync.digest
    assert numbers(alone) == numbers(uneven)
    for ended in (alone, uneven):
        assert ended.versions == {1: {0}, 2: {0}, 3: {1}}
        assert [line["policy/age"] for line in ended.metrics] == [0, 1, 1]
        assert all(line["agreement/max_abs"] < 1e-5 for line in ended.metrics)
        assert all(0.9 < line["policy/effective_sample_size"] <= 1.0001 for line in ended.metrics)
        for pool in ("rollout", "reward", "learner"):
            shares = [line[f"pool/{pool}_busy"] for line in ended.metrics]
            assert 0 < max(shares) <= 1 and min(shares) >= 0
    assert uneven.looked == [(1, 1), (3, 3)]


def test_a_disagreement_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"loss.max_disagreement"):
        run(tmp_path, *AGE_1, "loss.max_disagreement=1e-30", "rollout.groups_per_task=3")


@pytest.mark.timeout(600)
def test_a_run_that_is_told_to_stop_saves_and_goes_on_with_fresh_rollouts(tmp_path: Path) -> None:
    """Rollouts for the next iterations are under way when the signal comes."""
    words = (*AGE_1, "evaluation.num_prompts=0", "optimizer.ema_decay=null", "save_interval=100")
    first = Run(tmp_path / "run", *words)
    first.until("iteration 2/4  reward")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 128 + signal.SIGTERM, first.lines
    assert "Traceback" not in "".join(first.lines)
    stopped = next(line for line in first.lines if line.startswith("stopped: by SIGTERM after iteration "))
    assert "resume=auto goes on" in stopped
    finished = int(stopped.removeprefix("stopped: by SIGTERM after iteration ").partition(";")[0])
    second = Run(tmp_path / "run", *words, "resume=auto")
    assert second.end() == 0, second.lines
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    ages = [0, 1, 1, 1]
    ages[finished:] = [0, 1, 1, 1][: 4 - finished]
    assert [line["policy/age"] for line in lines] == ages
