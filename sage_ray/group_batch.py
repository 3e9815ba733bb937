"""What the learner is given: groups with advantages, cut into (group, step) rows; how groups are shared out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sage_ray.transition import Coefficients, coefficients
from sage_ray.types import Trajectory


@dataclass(frozen=True)
class ReplayRules:
    """What the learner must do as the rollout did. schedule_steps: every step that may be stochastic in the run, over
    which the equalizer takes its median; None takes each trajectory's own."""

    guidance_scale: float = 1.0
    last_step: str = "ode"
    schedule_steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GroupBatch:
    """One group to learn from. advantages, weights: float32 [G]; weight 0 rows run and count for nothing."""

    trajectory: Trajectory
    advantages: np.ndarray
    weights: np.ndarray


@dataclass
class Row:
    """One (group, step) micro-batch on the device.

    latents, latents_next: float32 [G, C, F, H, W]; rollout_log_prob, old_log_prob: [G], the rollout's own and the
    sampling policy's by the learner's forward (None while that is the live policy); references: name -> velocity.
    """

    group: GroupBatch
    coefs: Coefficients
    step: int
    latents: torch.Tensor
    latents_next: torch.Tensor
    rollout_log_prob: torch.Tensor
    old_log_prob: torch.Tensor | None
    references: dict[str, torch.Tensor]


def rows_of(group: GroupBatch, last_step: str, device: torch.device | str) -> list[Row]:
    """The rows of one group, in the order in which its steps are trained."""
    t = group.trajectory
    coefs = coefficients(t.sde_type, t.sigmas, t.eta, last_step=last_step, sde_steps=tuple(int(k) for k in t.sde_steps))
    position = {int(state): i for i, state in enumerate(t.states)}
    latents = torch.from_numpy(np.array(t.latents)).to(device)
    # A video that left its group may be broken; its row still runs, so it must not spread NaN to the weights.
    latents[torch.from_numpy(np.array(group.weights) == 0)] = 0.0
    log_probs = torch.from_numpy(np.array(t.log_probs)).to(device)
    return [
        Row(
            group=group,
            coefs=coefs,
            step=int(step),
            latents=latents[:, position[int(step)]],
            latents_next=latents[:, position[int(step) + 1]],
            rollout_log_prob=log_probs[:, k],
            old_log_prob=None,
            references={},
        )
        for k, step in enumerate(t.trained_steps)
    ]


def count_pairs(weights_PG: np.ndarray, num_updates: int, num_trained_steps: int) -> list[float]:
    """Global number of weighted (sample, trained step) pairs of every optimizer step; weights_PG: [P, G]."""
    return [float(share.sum() * num_trained_steps) for share in np.split(weights_PG, num_updates)]


def split_groups(num_groups: int, num_updates: int, world_size: int) -> list[list[list[int]]]:
    """Which groups each rank takes in each optimizer step: [update][rank] -> group numbers.

    Groups are taken in order, update by update, then round-robin over ranks. A rank that would get fewer repeats
    group numbers marked as -(group + 1): it runs them with weight 0, so that all ranks make the same collective calls.
    """
    per_update = num_groups // num_updates
    plan = []
    for update in range(num_updates):
        members = list(range(update * per_update, (update + 1) * per_update))
        shares = [members[rank::world_size] for rank in range(world_size)]
        longest = max(len(share) for share in shares)
        plan.append([share + [-(members[0] + 1)] * (longest - len(share)) for share in shares])
    return plan
