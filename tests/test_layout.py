"""Which device every pool gets, as a table."""

import dataclasses

import pytest

from actors.layout import Layout, plan_layout
from sage_ray.config import Config, ConfigError


def config(rollouts: int, rewards: int, ranks: int, device: str = "auto") -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        rollout=dataclasses.replace(base.rollout, num_workers=rollouts),
        reward=dataclasses.replace(base.reward, num_workers=rewards),
        learner=dataclasses.replace(base.learner, num_ranks=ranks),
        cluster=dataclasses.replace(base.cluster, device=device),
    )


@pytest.mark.parametrize(
    ("pools", "num_gpus", "layout"),
    [
        ((2, 1, 1), 0, Layout("cpu", 0, 0, 0)),
        ((2, 1, 1), 1, Layout("cuda", 1 / 4, 1 / 4, 1 / 4)),
        ((2, 1, 1), 2, Layout("cuda", 1 / 2, 1 / 2, 1 / 2)),
        ((2, 1, 1), 3, Layout("cuda", 1 / 2, 1 / 2, 1 / 2)),
        ((2, 1, 1), 4, Layout("cuda", 1, 1, 1)),
        ((4, 1, 3), 8, Layout("cuda", 1, 1, 1)),
    ],
)
def test_layout(pools: tuple[int, int, int], num_gpus: int, layout: Layout) -> None:
    assert plan_layout(config(*pools), num_gpus) == layout


def test_an_evaluation_has_no_learner() -> None:
    """Two rollout workers and a reward worker, whatever learner.num_ranks says."""
    assert plan_layout(config(2, 1, 8), 3, num_ranks=0) == Layout("cuda", 1, 1, 1)
    assert plan_layout(config(2, 1, 8), 1, num_ranks=0) == Layout("cuda", 1 / 3, 1 / 3, 1 / 3)


def test_a_rollout_group_has_a_gpu_for_each_of_its_actors() -> None:
    mine = config(2, 1, 3)
    mine.rollout.sp_size = mine.rollout.gpus_per_group = 2
    assert plan_layout(mine, 8) == Layout("cuda", 1, 1, 1)
    alone = config(1, 1, 1)
    alone.rollout.sp_size = alone.rollout.gpus_per_group = 2
    for few in (1, 3):
        with pytest.raises(ConfigError, match=f"1 rollout groups of 2, .* need 4 GPUs, the cluster has {few}"):
            plan_layout(alone, few)


def test_learner_ranks_never_share_a_gpu() -> None:
    with pytest.raises(ConfigError, match="2 learner ranks need 4 GPUs, the cluster has 3"):
        plan_layout(config(1, 1, 2), 3)


def test_cpu_on_a_gpu_machine_takes_no_gpu() -> None:
    assert plan_layout(config(1, 1, 1, "cpu"), 8) == Layout("cpu", 0, 0, 0)


def test_a_reward_worker_with_a_share_of_its_own() -> None:
    mine = config(1, 1, 1)
    mine.reward.gpus_per_worker = 0.1
    assert plan_layout(mine, 1) == Layout("cuda", 0.45, 0.1, 0.45)
    assert plan_layout(mine, 3) == Layout("cuda", 1, 0.1, 1)
    mine.reward.gpus_per_worker = 0
    assert plan_layout(mine, 2) == Layout("cuda", 1, 0, 1)


def test_a_reward_worker_has_part_of_a_rollout_workers_gpu() -> None:
    """Where every GPU is a rollout worker's or a learner's."""
    mine = config(1, 1, 3)
    mine.reward.gpus_per_worker = 0.1
    assert plan_layout(mine, 4) == Layout("cuda", 0.9, 0.1, 1)
    assert plan_layout(mine, 5) == Layout("cuda", 1, 0.1, 1)
    mine.reward.num_workers, mine.rollout.num_workers = 3, 2
    assert plan_layout(mine, 5) == Layout("cuda", 0.8, 0.1, 1)
    with pytest.raises(ConfigError, match="need 5.3[0-9]* GPUs, the cluster has 4"):
        plan_layout(mine, 4)
    mine.cluster.share_gpu = False
    with pytest.raises(ConfigError, match="the cluster has 5"):
        plan_layout(mine, 5)


def test_cuda_graphs_need_a_gpu() -> None:
    mine = config(1, 1, 1, "cpu")
    mine.rollout.cuda_graphs = True
    with pytest.raises(ConfigError, match="rollout.cuda_graphs=True: needs GPUs"):
        plan_layout(mine, 8)
