"""Sequence parallel groups of 2 and 4 give what one process gives: velocities, gradients, learning, bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sage_ray.sequence_parallel import TokenShards
from tests.small import ROOT

Numbers = dict[str, float]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> Numbers:
    file: Path = tmp_path_factory.mktemp("ranks") / "numbers.json"
    command = [sys.executable, "-m", "tests.models.sequence_parallel_ranks", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text("utf-8"))


def test_two_and_four_ranks_equal_one(numbers: Numbers) -> None:
    """27 video tokens; texts of 7, of 7 and 5, and of 3 tokens (with 4 ranks one has none); three ways to the gradient.
    Velocity and every gradient, relative to its largest value."""
    found = {name: value for name, value in numbers.items() if ", texts " in name}
    assert len(found) == 2 * 3 * 3
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("name", ["guidance", "adapters", "compiled"])
def test_other_models_too(numbers: Numbers, name: str) -> None:
    assert numbers[name] <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rollout_group_and_a_learner_compute_the_same_bits(numbers: Numbers, dtype: str) -> None:
    """Plain and frozen without gradient; FSDP2 over dp 2 x sp 2, recomputed, with gradient."""
    assert numbers[f"rollout and learner, torch.{dtype}"] == 0.0
    assert numbers[f"sp 2, torch.{dtype}"] <= (1e-6 if dtype == "float32" else 1e-2)


def test_dp_2_x_sp_2_learns_what_one_process_learns(numbers: Numbers) -> None:
    """Three groups, sampled by a rollout group of two; nothing is counted once for every rank of a group. The weights'
    distance is relative to how far they moved."""
    assert numbers["agreement"] == 0.0
    assert max(value for name, value in numbers.items() if name.startswith("metric ")) <= 1e-5
    assert numbers["weights after a step"] <= 1e-4


def test_a_swapped_reference_is_a_module_of_its_own(numbers: Numbers) -> None:
    assert numbers["swapped reference"] == 0.0


class Group:
    """A process group of four, as far as places go."""

    def size(self) -> int:
        return 4


@pytest.mark.parametrize(("num_video", "num_text"), [(27, 7), (8, 3), (3, 1), (4, 4)])
def test_places_are_all_tokens_in_order(monkeypatch, num_video: int, num_text: int) -> None:
    monkeypatch.setattr("sage_ray.sequence_parallel.dist.get_world_size", Group.size)
    shards = TokenShards(Group(), num_video, num_text)  # type: ignore[arg-type]
    places = list(shards.places())
    assert [token for p in places for token in range(p.joint.start, p.joint.stop)] == list(range(num_video + num_text))
    assert all(p.local.stop - p.local.start == p.joint.stop - p.joint.start for p in places)
    assert max(p.local.stop for p in places) <= shards.num_local == -(-num_video // 4) + -(-num_text // 4)
