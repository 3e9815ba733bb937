"""Rollout workers and FSDP2 ranks as real Ray actors against one plain process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.numpy import load_file

from actors.cluster import Layout, start_actor
from actors.learner_group import LearnerGroup
from actors.rollout_pool import RolloutPool
from actors.rollout_worker import RolloutWorker
from actors.stored_weights import fetched, stored_bucket
from sage_ray.config import total_optimizer_steps
from sage_ray.group_batch import GroupBatch, ReplayRules
from sage_ray.parallel import local_shards
from sage_ray.policy_update import PolicyUpdate
from sage_ray.schedule import sigma_grid
from sage_ray.training_schedule import training_schedule
from sage_ray.types import GroupRequest, Prompt
from sage_ray.weights import unpack
from tests.cluster.made import end_pool, generate
from tests.conftest import POLICY
from tests.small import load_velocity, small_config

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
CPU = Layout("cpu", 0, 0, 0)
PROMPTS = (
    "a small red circle moves left slowly on a gray background",
    "a large blue square moves up quickly on a black background",
)
STEPS = (0, 1)


def requests(group_size: int = 4, version: int = 0) -> list[GroupRequest]:
    return [
        GroupRequest(
            step=3,
            group=group,
            prompt=Prompt(group, PROMPTS[group % 2]),
            group_size=group_size,
            policy_version=version,
            seed=11,
            sigmas=tuple(map(float, sigma_grid(5, 3.0))),
            sde_type="sage_grpo",
            eta=0.5,
            sde_steps=STEPS,
            trained_steps=STEPS,
        )
        for group in range(3)
    ]


@pytest.fixture
def config(tmp_path):
    kl = ["kl.mode=dual_moving", "kl.coef=0.1", "kl.weight=0.1"]
    return small_config(tmp_path, [*kl, "optimizer.learning_rate=1e-4"])


def advantages(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three groups of four; the second group has lost a member."""
    weights = np.ones((3, 4), np.float32)
    weights[1, 2] = 0
    return np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32) * weights, weights


@pytest.fixture
def pool(config):
    made = RolloutPool(config, CPU)
    yield made
    end_pool(made)


def make_learner(config, num_ranks: int) -> LearnerGroup:
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, num_ranks=num_ranks))
    learner = LearnerGroup(config, CPU)
    learner.setup()
    return learner


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_equal_one_plain_process(config, pool, num_ranks: int) -> None:
    """Two iterations; three groups, so that two ranks hold unequal shares. Agreement through the object store is
    bitwise on the first iteration."""
    learner = make_learner(config, num_ranks)
    pool.load_weights(learner.publish(0))
    groups = [made.refs for made in generate(pool, requests())]
    plain = PolicyUpdate(
        load_velocity(POLICY, torch.float32, "cpu"),
        config.loss,
        config.kl,
        config.optimizer,
        ReplayRules(schedule_steps=training_schedule(config).rule.candidates),
        total_optimizer_steps(config),
    )
    start = {name: shard.clone() for name, shard in local_shards(plain.model).items()}
    values, weights = advantages()
    trajectories = ray.get([g.trajectory for g in groups])
    batches = [GroupBatch(t, a, w) for t, a, w in zip(trajectories, values, weights, strict=True)]
    sharded = learner.update([g.trajectory for g in groups], values, weights, len(STEPS))
    pairs = float(weights.sum() * len(STEPS)), float(weights.size * len(STEPS))
    alone = plain.update([batches], pairs[:1], all_pairs=pairs[1:])
    assert sharded["agreement/max_abs"] == alone["agreement/max_abs"] == 0.0
    assert sharded["learner/grad_norm"] == pytest.approx(alone["learner/grad_norm"], rel=1e-5)
    publication = learner.publish(1)
    received = load_velocity(POLICY, torch.float32, "cpu")
    unpack(received, ray.get(list(publication.parts)), load=stored_bucket)
    moved = apart = 0.0
    for name, shard in local_shards(received).items():
        moved += float((local_shards(plain.model)[name] - start[name]).square().sum())
        apart += float((local_shards(plain.model)[name] - shard).square().sum())
    assert moved > 0
    assert (apart / moved) ** 0.5 <= 1e-3
    assert apart**0.5 <= 1e-6
    for rank in learner.ranks:
        ray.kill(rank)


def test_a_worker_without_weights_or_with_others_refuses(config, pool) -> None:
    worker = pool.members[0]
    with pytest.raises(ray.exceptions.RayTaskError, match="this worker holds -1"):
        ray.get(worker.generate.remote(requests()[0]), timeout=120)
    learner = make_learner(config, 1)
    pool.load_weights(learner.publish(0))
    with pytest.raises(ray.exceptions.RayTaskError, match="version 1 was asked for, this worker holds 0"):
        ray.get(worker.generate.remote(requests(version=1)[0]), timeout=120)
    ray.kill(learner.ranks[0])


def test_the_next_rollout_reports_the_learners_digest(config, pool) -> None:
    learner = make_learner(config, 1)
    first = learner.publish(0)
    pool.load_weights(first)
    groups = [made.refs for made in generate(pool, requests())]
    values, weights = advantages()
    learner.update([g.trajectory for g in groups], values, weights, len(STEPS))
    second = learner.publish(1)
    assert second.digest != first.digest
    pool.load_weights(second)
    again = generate(pool, requests(version=1))
    assert {made.info.weights_digest for made in again} == {second.digest}
    ray.kill(learner.ranks[0])


def test_the_same_group_is_the_same_on_any_worker(config, pool) -> None:
    """Noise is keyed by (seed, step, group, sample, sde step), so re-assignment changes nothing."""
    learner = make_learner(config, 1)
    publication = learner.publish(0)
    other = start_actor(RolloutWorker, 0, config, "cpu")
    for worker in (pool.members[0], other):
        ray.get(worker.load_weights.remote(0, publication.digest, *publication.parts), timeout=120)
    request = requests()[2]
    results = [ray.get(w.generate.remote(request), timeout=120) for w in (pool.members[0], other)]
    assert np.array_equal(results[0][0].latents, results[1][0].latents)
    assert np.array_equal(results[0][0].log_probs, results[1][0].log_probs)
    assert np.array_equal(results[0][1], results[1][1])
    assert len({row.tobytes() for row in results[0][0].latents[:, 0]}) == 4
    ray.kill(other)
    ray.kill(learner.ranks[0])


KINDS = {
    "muon": ["optimizer.name=muon", "optimizer.muon_dtype=float32", "learner.shard_gradients=true"],
    "lora": ["lora.rank=3", "lora.alpha=6"],
    "large_passes": ["learner.videos_per_pass=12"],
    "two_epochs": [
        "loss.num_epochs=2",
        "kl.share_interval=1",
        "optimizer.ema_decay=0.5",
        "learner.reference_offload=true",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_with_every_optimizer_and_adapters(tmp_path, kind: str) -> None:
    """Two iterations of two groups through real actors; the anchor moves after each, so the second sees KL 0 to it."""
    kl = ["kl.mode=moving", "kl.anchor_interval=1", "kl.coef=0.1", "kl.weight=0.1"]
    config = small_config(tmp_path, [*kl, "optimizer.learning_rate=1e-4", *KINDS[kind]])
    pool = RolloutPool(config, CPU)
    values, weights = advantages()
    results = []
    for num_ranks in (1, 2):
        learner = make_learner(config, num_ranks)
        pool.load_weights(learner.publish(0))
        groups = [made.refs for made in generate(pool, requests()[:2])]
        refs = [g.trajectory for g in groups]
        first = learner.update(refs, values[:2], weights[:2], len(STEPS))
        version = int(first["policy_version"])
        second_pool = learner.publish(version)
        pool.load_weights(second_pool)
        groups = [made.refs for made in generate(pool, requests(version=version)[:2])]
        second = learner.update([g.trajectory for g in groups], values[:2], weights[:2], len(STEPS))
        allowed = 1e-6 if kind == "large_passes" else 0.0
        assert max(first["agreement/max_abs"], second["agreement/max_abs"]) <= allowed
        if kind != "two_epochs":
            assert first["kl/anchor"] == second["kl/anchor"] == 0.0
        average = kind == "two_epochs"
        parts = ray.get(list(learner.publish(int(second["policy_version"]), average).parts))
        results.append((whole_tensors(parts), first, second))
        learner.save(str(tmp_path / f"checkpoint_{num_ranks}"), {"iteration": 2})
        assert learner.saved(wait_s=60) == str(tmp_path / f"checkpoint_{num_ranks}")
        for rank in learner.ranks:
            ray.kill(rank)
    end_pool(pool)
    (one, *metrics_one), (two, *metrics_two) = results
    assert one.keys() == two.keys()
    assert all(".lora_" in name for name in one) == (kind == "lora")
    for name, tensor in one.items():
        # Ranks cut large passes differently, and a rounded gradient near zero is a whole step of its sign.
        atol = 5e-6 if kind == "large_passes" else 1e-6
        np.testing.assert_allclose(two[name], tensor, rtol=0, atol=atol, err_msg=name)
    for a, b in zip(metrics_one, metrics_two, strict=True):
        assert a.keys() == b.keys()
        assert a["learner/grad_norm"] == pytest.approx(b["learner/grad_norm"], rel=1e-4)
    for folder, tensors in ((tmp_path / "checkpoint_1", one), (tmp_path / "checkpoint_2", two)):
        assert (folder / "trainer.json").exists()
        saved = saved_tensors(folder / "adapter" if kind == "lora" else folder / "transformer")
        if kind == "two_epochs":  # what was published is the average; the live weights are others
            average = saved_tensors(folder / "transformer_average")
            assert not all(np.array_equal(average[name], saved[name]) for name in saved)
            saved = average
        if kind != "lora":
            assert all(np.array_equal(saved[name.removeprefix("transformer.")], tensors[name]) for name in tensors)


def saved_tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(next(folder.glob("*.safetensors")))


def whole_tensors(parts) -> dict[str, np.ndarray]:
    """Full float32 parameters from the parts of every rank."""
    found: dict[str, np.ndarray] = {}
    rows: dict[str, int] = {}
    for part in parts:
        for piece in part.plan.slices:
            rows[piece.name] = max(rows.get(piece.name, 0), piece.offset[0] + piece.shape[0] if piece.shape else 0)
    for part in map(fetched, parts):
        for piece in part.plan.slices:
            data = part.buckets[piece.bucket][piece.start : piece.start + piece.num_bytes].view(np.float32)
            target = found.setdefault(piece.name, np.zeros((rows[piece.name], *piece.shape[1:]), np.float32))
            target[piece.offset[0] : piece.offset[0] + piece.shape[0]] = data.reshape(piece.shape)
    return found
