"""A PolicyUpdate whose steps are pure functions of their number, without a forward pass: for checkpoints."""

from __future__ import annotations

import torch
from torch import nn

from sage_ray.checkpoint import Checkpointer
from sage_ray.checkpoint_store import CheckpointStore, checkpoint_name
from sage_ray.config import KLConfig, LossConfig, OptimizerConfig
from sage_ray.group_batch import ReplayRules
from sage_ray.policy_update import PolicyUpdate


class Weights(nn.Module):
    """Matrices, a vector and a frozen parameter."""

    dtype, sp_size = torch.bfloat16, 1

    def __init__(self, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"wide": (size, 64), "tall": (64, size), "vector": (size,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def tiny_rule(size: int = 256, optimizer: str = "muon") -> PolicyUpdate:
    """Anchor, previous step and moving average are kept."""
    settings = OptimizerConfig(name=optimizer, learning_rate=0.01, ema_decay=0.5, muon_dtype="float32")
    kl = KLConfig(mode="dual_moving", anchor_interval=3, weight=0.1, coef=0.01, warmup_steps=2)
    return PolicyUpdate(Weights(size), LossConfig(), kl, settings, ReplayRules(), 100)  # type: ignore[arg-type]


def step(rule: PolicyUpdate) -> None:
    """The optimizer step that follows the present version."""
    generator = torch.Generator().manual_seed(100 + rule.version)
    for parameter in rule.trainable:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    rule._step(0.0)
    rule.controller.tick(0.3 / rule.version)


def begin_save(rule: PolicyUpdate, checkpointer: Checkpointer, store: CheckpointStore) -> None:
    """Begin to write the present version; the file for people holds its number."""

    def write_policy(folder) -> None:
        (folder / "transformer").mkdir(exist_ok=True)
        (folder / "transformer" / "weights").write_text(str(rule.version))

    note = {"iteration": rule.version, "identity": {}, "counters": {}}
    checkpointer.save(rule, store, checkpoint_name(rule.version), "seed: 0\n", note, write_policy)
