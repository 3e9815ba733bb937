"""Bytes of every part by hand, before the first update and after it, and what is said about the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sage_ray.cost import H100, Dims
from sage_ray.group_batch import GroupBatch, ReplayRules
from sage_ray.memory_report import MemoryPart, expected_memory, learner_memory, memory_lines, rollout_memory
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.policy_update import PolicyUpdate
from sage_ray.prediction import predict
from tests.learner.tiny_rule import step, tiny_rule
from tests.rollout.small_rollout import requests, worker
from tests.small import small_config

MATRICES, VECTOR, FROZEN = 2 * 256 * 64, 256, 3
"""Numbers in tiny_rule's weights."""
GIB = 2**30


def sizes(parts: list[MemoryPart], which: str = "full") -> dict[str, int]:
    return {part.name: getattr(part, which) for part in parts}


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("muon", MATRICES + 2 * VECTOR), ("adamw", 2 * MATRICES + 2 * VECTOR)]
)
def test_every_part_of_a_learner_by_hand(tmp_path: Path, optimizer: str, moments: int) -> None:
    """float32 masters and moments; two bfloat16 references and a float32 average, both with a float32 stash."""
    config, rule = small_config(tmp_path, ["optimizer.ema_decay=0.5"]), tiny_rule(optimizer=optimizer)
    trained = MATRICES + VECTOR
    full = {
        "frozen base": 4 * FROZEN,
        "masters": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": 4 * moments,
        "references": (2 * 2 + 4) * trained,
        "moving average": (4 + 4) * trained,
    }
    before = learner_memory(rule, config)
    assert sizes(before) == full
    waiting = {"gradients": 0, "optimizer": 0, "references": 2 * 2 * trained, "moving average": 4 * trained}
    assert sizes(before, "now") == full | waiting
    step(rule)
    with rule.bank.use("anchor"), rule.averaged_weights():
        pass
    for parameter in rule.trainable:
        parameter.grad = torch.zeros_like(parameter)
    assert sizes(learner_memory(rule, config), "now") == full


def test_what_was_foreseen_is_there_after_an_update_of_the_small_world(tmp_path: Path, monkeypatch) -> None:
    """Two references by name, and a third for the second optimizer step; with a frozen byT5 projection."""
    config = small_config(tmp_path, ["loss.num_epochs=2", "kl.mode=dual_moving"])
    rollout = worker(tmp_path)
    trajectory = rollout.generate(requests(1)[0])[0]
    model = PackedVelocity(HunyuanVideo.load(Path(config.model.path)).velocity.transformer.requires_grad_(True))
    rule = PolicyUpdate(model, config.loss, config.kl, config.optimizer, ReplayRules(config.sampling.guidance_scale), 2)
    foreseen = learner_memory(rule, config)
    seen: list[list[MemoryPart]] = []
    stepped = rule.optimizer.step
    monkeypatch.setattr(rule.optimizer, "step", lambda: (seen.append(learner_memory(rule, config)), stepped()))
    ones = torch.ones(4).numpy()
    batch = [GroupBatch(trajectory, ones, ones)]
    rule.update([batch, batch], [8.0, 8.0])
    numbers = sum(p.numel() for p in rule.trainable)
    assert sizes(foreseen)["masters"] == sizes(foreseen)["gradients"] == 4 * numbers
    assert sizes(foreseen)["references"] == (3 * 4 + 4) * numbers
    assert sizes(seen[-1], "now") == sizes(foreseen)


def test_offloaded_references_are_on_the_host(tmp_path: Path) -> None:
    config, rule = small_config(tmp_path), tiny_rule()
    rule.bank.offload = True
    (references,) = [part for part in learner_memory(rule, config) if part.name == "references"]
    assert references.on_host and references.full == 8 * (MATRICES + VECTOR)
    masters = MemoryPart("masters", 2**20, 2**20)
    (line,) = memory_lines("learner rank", [masters, references], None)
    assert line == "memory of a learner rank: 1.00 MiB = masters 1.00 MiB; on the host references 0.25 MiB"


def test_a_rollout_worker_of_the_small_world(tmp_path: Path) -> None:
    made = worker(tmp_path)
    model, found = made.model, sizes(made.memory())
    assert found["weights"] == 4 * sum(p.numel() for p in model.velocity.parameters())
    assert found["VAE"] == 4 * sum(p.numel() for p in model.vae.parameters())
    assert found == sizes(rollout_memory(model), "now") and found["text encoders"] > 0
    before = found
    made.leave()
    assert sizes(made.memory()) == before  # nothing is read: a look at weights that are away would end the process


def test_parts_beside_the_plan() -> None:
    parts = [MemoryPart("masters", 20 * GIB, 20 * GIB), MemoryPart("optimizer", 0, 12 * GIB)]
    plan = {"masters": 20.5 * GIB, "optimizer": 10.0 * GIB, "activations": 5.0 * GIB}
    line, warning = memory_lines("learner rank", parts, plan)
    assert line == (
        "memory of a learner rank: 37.00 GiB (plan 35.50 GiB) = masters 20.00 GiB (plan 20.50 GiB) + "
        "optimizer 12.00 GiB (plan 10.00 GiB, now 0.00 MiB) + activations 5.00 GiB (by the plan)"
    )
    assert warning == "warning: memory of a learner rank: optimizer takes 12.00 GiB, the plan says 10.00 GiB"


def test_a_part_that_the_plan_does_not_know_is_warned_of_when_it_is_large() -> None:
    masters, plan = MemoryPart("masters", 20 * GIB, 20 * GIB), {"masters": 20.0 * GIB}
    for size, count in ((GIB // 10, 1), (GIB, 2)):
        assert len(memory_lines("learner rank", [masters, MemoryPart("frozen base", size, size)], plan)) == count


def test_nothing_is_expected_of_a_small_model(tmp_path: Path) -> None:
    assert expected_memory(small_config(tmp_path)) is None


def test_muon_keeps_one_moment_of_adapters_too(tmp_path: Path) -> None:
    """Every adapter is a matrix."""
    real = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
    config = small_config(tmp_path, ["lora.rank=32", "optimizer.name=muon"])
    assert predict(config, real, 1, H100()).learner_bytes["optimizer"] == 4 * real.lora_parameters(32)
