"""What the learner is given: groups with advantages, cut into passes over (group, step) rows; how groups are
shared out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sage_ray.models.condition import ConditionTensors, condition_tensors
from sage_ray.transition import Coefficients, Step, coefficients
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


@dataclass(frozen=True)
class Place:
    """Where a log-prob belongs: one video of a group at one denoising step. iteration: counted from 1."""

    worker: str
    iteration: int
    group: int
    video: int
    step: int
    policy_version: int

    def __str__(self) -> str:
        return (
            f"{self.worker}: iteration {self.iteration}, group {self.group}, video {self.video}, denoising step "
            f"{self.step}, policy version {self.policy_version}"
        )


@dataclass
class Pass:
    """One forward and backward: R (group, step) rows of n videos each, B = R * n, on the device.

    conditions, negatives: R rows; coefs: of the steps that occur; step: the one step, or int64 [B];
    latents, latents_next: float32 [B, C, F, H, W]; places: B; advantages, weights, scale (S_t), rollout_log_prob:
    float32 [B];
    old_log_prob: [B], what the ratio starts from, by the learner's forward (None while that is the live policy);
    behaviour_log_prob: [B] by the policy that sampled, where that is older than the iteration (None where it is not);
    references: name -> velocity.
    """

    conditions: ConditionTensors
    negatives: ConditionTensors | None
    coefs: Coefficients
    step: Step
    latents: torch.Tensor
    latents_next: torch.Tensor
    places: list[Place]
    advantages: torch.Tensor
    weights: torch.Tensor
    scale: torch.Tensor
    rollout_log_prob: torch.Tensor
    old_log_prob: torch.Tensor | None = None
    behaviour_log_prob: torch.Tensor | None = None
    references: dict[str, torch.Tensor] = field(default_factory=dict)

    def sigmas(self, sigma: float | np.ndarray) -> np.ndarray:
        """Of the rows, [1 or R], from the one sigma or those of all videos [B]."""
        return np.atleast_1d(sigma)[:: len(self.latents) // len(self.conditions.text)]


@dataclass(frozen=True)
class _Row:
    """Some videos of a group at one step: n positions in it."""

    group: GroupBatch
    coefs: Coefficients
    latents: torch.Tensor
    log_probs: torch.Tensor
    column: int
    videos: slice

    @property
    def step(self) -> int:
        return int(self.group.trajectory.trained_steps[self.column])

    @property
    def places(self) -> list[Place]:
        """Of the n videos."""
        t, videos = self.group.trajectory, range(self.videos.start, self.videos.stop)
        return [Place(t.worker, t.step + 1, t.group, video, self.step, t.policy_version) for video in videos]

    def state(self, state: int) -> torch.Tensor:
        """The latents [n, ...] at a place of the sigma grid."""
        return self.latents[self.videos, int(np.flatnonzero(self.group.trajectory.states == state)[0])]


def passes_of(
    groups: Sequence[GroupBatch],
    rules: ReplayRules,
    scale: Callable[[Coefficients, int], float],
    device: torch.device | str,
    videos_per_pass: int | None = None,
) -> list[Pass]:
    """The passes over groups, in the order in which their steps are trained.

    As many for the same number of groups and trained steps, whatever the prompts are: all ranks make the same calls.

    Args:
        scale: S_t of a step. videos_per_pass: at most; divides the group size where it is smaller; None is one group.
    """
    rows = [row for group in groups for row in _rows(group, rules, device, videos_per_pass)]
    if not rows:
        return []
    size = rows[0].videos.stop - rows[0].videos.start
    together = max(1, (videos_per_pass or size) // size)
    return [_pass(rows[i : i + together], rules, scale, device) for i in range(0, len(rows), together)]


def _rows(group: GroupBatch, rules: ReplayRules, device: torch.device | str, per_pass: int | None) -> list[_Row]:
    t = group.trajectory
    sde_steps = tuple(int(k) for k in t.sde_steps)
    coefs = coefficients(t.sde_type, t.sigmas, t.eta, last_step=rules.last_step, sde_steps=sde_steps)
    latents = torch.from_numpy(np.array(t.latents)).to(device)
    # A video that left its group may be broken; its row still runs, so it must not spread NaN to the weights.
    latents[torch.from_numpy(np.array(group.weights) == 0)] = 0.0
    log_probs = torch.from_numpy(np.array(t.log_probs)).to(device)
    size = min(per_pass or len(latents), len(latents))
    return [
        _Row(group, coefs, latents, log_probs, column, slice(start, start + size))
        for column in range(len(t.trained_steps))
        for start in range(0, len(latents), size)
    ]


def _pass(
    rows: Sequence[_Row], rules: ReplayRules, scale: Callable[[Coefficients, int], float], device: torch.device | str
) -> Pass:
    guided = [row.group.trajectory.negative for row in rows if row.group.trajectory.negative is not None]
    size, steps = rows[0].videos.stop - rows[0].videos.start, [row.step for row in rows]

    def videos(parts: Iterable[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(np.float32)).to(device)

    return Pass(
        conditions=condition_tensors([row.group.trajectory.condition for row in rows], device),
        negatives=condition_tensors(guided, device) if guided else None,
        coefs=_joint_coefficients(rows, rules),
        step=steps[0] if len(set(steps)) == 1 else np.repeat(steps, size),
        latents=torch.cat([row.state(row.step) for row in rows]),
        latents_next=torch.cat([row.state(row.step + 1) for row in rows]),
        places=[place for row in rows for place in row.places],
        advantages=videos(row.group.advantages[row.videos] for row in rows),
        weights=videos(row.group.weights[row.videos] for row in rows),
        scale=videos(np.full(size, scale(row.coefs, row.step)) for row in rows),
        rollout_log_prob=torch.cat([row.log_probs[row.videos, row.column] for row in rows]),
    )


def _joint_coefficients(rows: Sequence[_Row], rules: ReplayRules) -> Coefficients:
    """Coefficients in which every step of the rows is stochastic; a step's own do not depend on the others."""
    t = rows[0].group.trajectory
    for row in rows:
        other = row.group.trajectory
        if (t.sde_type, t.eta, t.sigmas.tolist()) != (other.sde_type, other.eta, other.sigmas.tolist()):
            raise ValueError(f"groups {t.group} and {other.group} were sampled differently and cannot share a pass")
    steps = sorted({row.step for row in rows})
    return coefficients(t.sde_type, t.sigmas, t.eta, last_step=rules.last_step, sde_steps=steps)


def count_pairs(weights_PG: np.ndarray, num_updates: int, num_trained_steps: int) -> list[float]:
    """Global number of weighted (sample, trained step) pairs of every optimizer step; weights_PG: [P, G]."""
    return [float(share.sum() * num_trained_steps) for share in np.split(weights_PG, num_updates)]


def count_all_pairs(num_groups: int, group_size: int, num_updates: int, num_trained_steps: int) -> list[float]:
    """As `count_pairs`, with every pair: known before any reward is."""
    return [float(num_groups // num_updates * group_size * num_trained_steps)] * num_updates


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
