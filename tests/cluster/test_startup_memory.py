"""What two learner ranks and a rollout worker of the small world say of their memory when they have started."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch

from actors.cluster import Layout, start_actor
from actors.learner_group import LearnerGroup
from actors.rollout_worker import RolloutWorker
from actors.startup_memory import startup_memory
from sage_ray.memory_report import MemoryPart
from tests.conftest import POLICY
from tests.small import load_velocity, small_config

CPU = Layout("cpu", 0, 0, 0)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_two_ranks_hold_the_policy_once_and_say_so(tmp_path: Path) -> None:
    config = small_config(tmp_path, ["learner.num_ranks=2", "optimizer.name=adamw", "kl.mode=dual_moving"])
    learner, worker = LearnerGroup(config, CPU), start_actor(RolloutWorker, 0, config, "cpu")
    num_trained = learner.setup()
    ranks: list[dict[str, MemoryPart]] = [
        {part.name: part for part in ray.get(rank.memory.remote(), timeout=60)} for rank in learner.ranks
    ]
    numbers = {"masters": 4, "gradients": 4, "optimizer": 8, "references": 2 * 4 + 4}
    if not config.learner.shard_gradients:  # several passes: every rank's gradients are whole in between
        numbers["gradients"] = 8
    for name, each in numbers.items():
        assert sum(parts[name].full for parts in ranks) == each * num_trained, name
    assert {parts["masters"].now for parts in ranks} != {0}
    frozen = sum(p.numel() for p in load_velocity(POLICY, torch.float32, "cpu").parameters()) - num_trained
    assert sum(parts["frozen base"].full for parts in ranks) == 4 * frozen
    lines = startup_memory(config, learner.ranks[0], worker)
    assert [line.split(":")[0] for line in lines] == ["memory of a learner rank", "memory of a rollout worker"]
    assert all(word in lines[0] for word in ("masters", "gradients", "optimizer", "references", "now 0.00 MiB"))
    assert "weights" in lines[1] and "VAE" in lines[1] and "on the host text encoders" in lines[1]
    for actor in (*learner.ranks, worker):
        ray.kill(actor)
