"""Rollout workers of the small world in this process, what they are asked for, and what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from actors.rollout_worker import RolloutWorker
from sage_ray.models.lora import adapt
from sage_ray.schedule import sigma_grid
from sage_ray.types import GroupRequest, Prompt
from sage_ray.weights import WeightPart, pack
from tests.conftest import POLICY
from tests.small import load_velocity, small_config

TEXTS = ("a small red circle moves left slowly on a gray background", "a red circle", "a blue square moves up")
SIGMAS = tuple(map(float, sigma_grid(4, 3.0)))


def requests(count: int = 3, version: int = 0, group_size: int = 4) -> list[GroupRequest]:
    return [
        GroupRequest(
            step=2,
            group=group,
            prompt=Prompt(group, TEXTS[group % len(TEXTS)]),
            group_size=group_size,
            policy_version=version,
            seed=5,
            sigmas=SIGMAS,
            sde_type="sage_grpo",
            eta=0.5,
            sde_steps=(0, 1, 2),
            trained_steps=(2, 0),
        )
        for group in range(count)
    ]


def worker(tmp_path: Path, *overrides: str, version: int = 0) -> RolloutWorker:
    """A worker that holds the shipped policy and claims `version`."""
    made = RolloutWorker(small_config(tmp_path, overrides), "cpu")
    made.version = version
    return made


def publication(version: int, factor: float, lora: Sequence[str] = ()) -> tuple[int, str, WeightPart]:
    """Arguments of load_weights: the shipped policy, or adapters on it, with trainable weights that are `factor` times
    themselves (adapters: shifted by factor - 1)."""
    velocity = load_velocity(POLICY, torch.float32, "cpu")
    if lora:
        adapt(velocity, small_config(Path("."), lora).lora, 0, dtype=torch.float32)
    with torch.no_grad():
        for parameter in velocity.parameters():
            if parameter.requires_grad:
                parameter.add_(factor - 1.0) if lora else parameter.mul_(factor)
    part = pack(velocity, version, 0, torch.float32)
    return version, part.content.digest, part


def equal(one: tuple, other: tuple) -> bool:
    """Whether two answers of generate hold the same bits, times aside."""
    assert len(one) == len(other) > 0 and len(one) % 3 == 0
    return all(
        np.array_equal(a.latents, b.latents)
        and np.array_equal(a.log_probs, b.log_probs)
        and np.array_equal(one[i + 1], other[i + 1])
        and (one[i + 2].group, one[i + 2].policy_version) == (other[i + 2].group, other[i + 2].policy_version)
        and one[i + 2].weights_digest == other[i + 2].weights_digest
        for i in range(0, len(one), 3)
        for a, b in [(one[i], other[i])]
    )
