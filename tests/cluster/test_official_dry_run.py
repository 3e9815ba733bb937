"""The official recipes without their GPUs: planned, placed by real Ray on fake devices, and the learner's mesh, shards
and state at the real size on a fake process group and the meta device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.real_size import SIZES, blank
from bench.ring import RINGS
from sage_ray.config import Config
from sage_ray.config_check import validate
from sage_ray.config_load import load_config
from sage_ray.cost import H100, Dims
from sage_ray.group_batch import ReplayRules
from sage_ray.memory_report import TOLERANCE, learner_memory
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.parallel import shard
from sage_ray.policy_update import PolicyUpdate
from sage_ray.prediction import predict
from tests.small import ROOT

SHAPES = ROOT / "assets" / "shapes"
FOLDERS = [f"model.path={SHAPES / 'policy'}", f"reward.path={SHAPES / 'reward' / 'VideoReward'}"]
Places = dict[str, tuple[str, str | None, list[str] | None]]
"""Actor -> node of its reserved place, node and GPUs where it was started (None: it was not)."""


def recipe(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


def placed(tmp_path: Path, nodes: int, gpus: int, every: int, file: Path, words: list[str]) -> Places:
    result = tmp_path / "places.json"
    sizes = [str(number) for number in (nodes, gpus, every)]
    command = [sys.executable, "-m", "tests.cluster.fake_gpus", str(result), *sizes, str(file), *FOLDERS, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


@pytest.mark.cluster
def test_eight_gpus_have_an_actor_each(tmp_path: Path) -> None:
    found = placed(tmp_path, 1, 8, 1, recipe("official_8gpu"), [])
    roles = Counter(name.partition("-")[0] for name in found)
    assert roles == {"learner": 4, "rollout": 3, "reward": 1}
    assert sorted(gpu for _, _, ids in found.values() for gpu in ids or ()) == [str(gpu) for gpu in range(8)]


@pytest.mark.cluster
def test_sixty_four_gpus_are_full_and_the_learner_is_on_two_nodes(tmp_path: Path) -> None:
    """Eight nodes of eight. Every 13th actor is really started: on the node of its place, with one of its GPUs."""
    found = placed(tmp_path, 8, 8, 13, recipe("official_64gpu"), [])
    assert list(Counter(node for node, _, _ in found.values()).values()) == [8] * 8
    assert len({node for name, (node, _, _) in found.items() if name.startswith("learner")}) == 2
    started = [(node, where, ids) for node, where, ids in found.values() if where is not None]
    assert len(started) == 5 and len(found) == 64
    assert all(node == where and len(ids) == 1 for node, where, ids in started)


@pytest.mark.cluster
def test_the_reward_worker_of_a_small_ring_is_on_the_rollouts_gpu(tmp_path: Path) -> None:
    """1 + 3 on four GPUs: the learner has three of its own."""
    ring = RINGS[4, 1]
    small = ["cluster.object_store_bytes=80000000"]
    found = placed(tmp_path, 1, 4, 1, ring.file, [*ring.words.split(), *small])
    gpus = {name: ids or [] for name, (_, _, ids) in found.items()}
    assert gpus["reward-0"] == gpus["rollout-0"]
    assert sorted([*gpus["rollout-0"], *(gpu for rank in range(3) for gpu in gpus[f"learner-{rank}"])]) == list("0123")


@pytest.fixture
def ranks() -> Iterator[None]:
    """The process group that a test makes ends with it."""
    yield
    dist.destroy_process_group()


def real_rule(config: Config, rank: int) -> PolicyUpdate:
    """What LearnerRank.setup makes, without storage, as one of learner.num_ranks."""
    size = config.learner.num_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    transformer = blank(SIZES["official"])
    transformer.context_embedder_2.to_empty(device="cpu")
    for parameter in transformer.context_embedder_2.parameters():
        torch.nn.init.ones_(parameter)  # zeros would freeze it
    model = shard(PackedVelocity(transformer, torch.bfloat16).to("meta"), size, "cpu")
    return PolicyUpdate(model, config.loss, config.kl, config.optimizer, ReplayRules(), 10, config.learner)


@pytest.mark.parametrize(
    ("name", "num_ranks", "rank"),
    [("official_8gpu", 4, 0), ("official_8gpu", 4, 3), ("official_64gpu", 16, 15), ("official_64gpu", 64, 0)],
)
@pytest.mark.usefixtures("ranks")
def test_shards_of_the_real_model_are_what_the_plan_says(name: str, num_ranks: int, rank: int) -> None:
    """References stay on the device, where the plan counts them too. 64: every GPU learns."""
    words = [f"learner.num_ranks={num_ranks}", "learner.reference_offload=false", "sampling.shift=5"]
    config = load_config([recipe(name)], words)
    validate(config)
    rule = real_rule(config, rank)
    dims = Dims.of(rule.model.transformer.config)
    planned = predict(config, dims, 20, H100()).learner_bytes
    parts = {part.name: part for part in learner_memory(rule, config)}
    for part in ("masters", "gradients", "optimizer", "references"):
        assert parts[part].full == pytest.approx(planned[part], rel=0.01), part
    held = sum(part.full for part in parts.values())
    assert held == pytest.approx(sum(planned[p] for p in planned if p in parts), rel=TOLERANCE / 10)
    assert parts["masters"].now == parts["masters"].full and parts["optimizer"].now == 0
    assert sum(p.numel() for p in rule.model.parameters()) == pytest.approx(8.327e9, rel=1e-3)
    assert {tuple(p.device_mesh.shape) for p in rule.model.parameters()} == {(num_ranks,)}
