"""One iteration of the learner: trajectories and advantages in, optimizer steps out.

The same class runs a plain module in one process and an FSDP2 module on every rank. A rank holds some of the groups;
sums are divided by global counts, so the number of ranks changes nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from sage_ray.config import KLConfig, LossConfig, OptimizerConfig
from sage_ray.equalizer import equalizer_scales
from sage_ray.loss import policy_loss
from sage_ray.models.hunyuan_video import PackedVelocity, condition_tensors, guided_velocity
from sage_ray.parallel import local_shards, max_over_ranks, reshard, sum_over_ranks
from sage_ray.references import ReferenceBank
from sage_ray.sampler import replay
from sage_ray.transition import Coefficients, coefficients, gaussian_kl
from sage_ray.trust_region import KL_TERMS, KLController, anchor_moves_at
from sage_ray.types import Trajectory

SUMS = ("loss", "kl_anchor", "kl_previous", "kl", "clipped", "ratio", "pairs")


class NonFiniteError(FloatingPointError):
    """Loss, gradient or weights are not finite; nothing was stepped."""


class DisagreementError(RuntimeError):
    """Rollout and learner score the same step differently by more than loss.max_disagreement."""


@dataclass(frozen=True)
class GroupBatch:
    """One group to learn from. advantages, weights: float32 [G]; weight 0 rows run and count for nothing."""

    trajectory: Trajectory
    advantages: np.ndarray
    weights: np.ndarray


@dataclass
class Row:
    """One (group, step) micro-batch on the device; references: name -> velocity [G, ...]."""

    group: GroupBatch
    coefs: Coefficients
    step: int
    latents: torch.Tensor
    latents_next: torch.Tensor
    rollout_log_prob: torch.Tensor
    old_log_prob: torch.Tensor | None
    references: dict[str, torch.Tensor]


class PolicyUpdate:
    """Policy, optimizer, references and KL controller of one rank.

    Args:
        model: PackedVelocity with float32 weights, plain or sharded. guidance_scale: that of the rollout.
        last_step: sampling.last_step of the rollout.
    """

    def __init__(
        self,
        model: PackedVelocity,
        loss: LossConfig,
        kl: KLConfig,
        optimizer: OptimizerConfig,
        guidance_scale: float,
        last_step: str = "ode",
    ):
        self.model, self.loss, self.kl = model, loss, kl
        self.guidance_scale, self.last_step = guidance_scale, last_step
        self.device = next(model.parameters()).device
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.max_grad_norm = optimizer.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.trainable,
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.version = 0
        self.terms = KL_TERMS[kl.mode]
        self.controller = KLController(
            start=kl.coef,
            largest=kl.weight,
            smallest=kl.min_coef,
            warmup_steps=kl.warmup_steps,
            direction=kl.direction,
        )
        self.bank = ReferenceBank(model, model.dtype)
        for name, needed in (("anchor", self.terms.anchor), ("previous", self.terms.previous)):
            if needed:
                self.bank.snapshot(name)

    def update(
        self, groups: Sequence[Sequence[GroupBatch]], num_pairs: Sequence[float], world_size: int = 1
    ) -> dict[str, float]:
        """Take one optimizer step per entry of `groups` (this rank's share of each).

        Args:
            groups: this rank's groups for every optimizer step, in order.
            num_pairs: global number of weighted (sample, trained step) pairs of every optimizer step.
        Returns: metrics, the same on every rank, averaged over the optimizer steps.
        Raises: NonFiniteError, DisagreementError.
        """
        if len(groups) > 1:
            self.bank.snapshot("sampling")
        if self.kl.previous == "iteration_start" and self.terms.previous:
            self.bank.snapshot("previous")
        metrics = [
            self._optimizer_step(batch, pairs, world_size, first=index == 0)
            for index, (batch, pairs) in enumerate(zip(groups, num_pairs, strict=True))
        ]
        return {key: float(np.mean([m[key] for m in metrics])) for key in metrics[0]}

    def _optimizer_step(
        self, batch: Sequence[GroupBatch], num_pairs: float, world_size: int, first: bool
    ) -> dict[str, float]:
        if num_pairs == 0:
            return self._report(torch.zeros(len(SUMS)), torch.zeros(1), 0.0, stepped=0.0)
        rows = [row for group in batch for row in self._rows(group)]
        self._reference_passes(rows, first)
        sums, disagreement = torch.zeros(len(SUMS), device=self.device), torch.zeros(1, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for index, row in enumerate(rows):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index == len(rows) - 1)
            loss, row_sums, delta = self._row_loss(row, num_pairs)
            (loss * world_size).backward()
            sums += row_sums
            disagreement = torch.maximum(disagreement, delta)
        sums, disagreement = sum_over_ranks(sums), max_over_ranks(disagreement)
        self._check_agreement(float(disagreement))
        grad_norm = self._step(float(sums[SUMS.index("loss")]))
        self.controller.tick(float(sums[SUMS.index("kl")]))
        return self._report(sums, disagreement, grad_norm, stepped=1.0)

    def _rows(self, group: GroupBatch) -> list[Row]:
        """The (group, step) micro-batches of one group, on the device."""
        t = group.trajectory
        coefs = coefficients(
            t.sde_type, t.sigmas, t.eta, last_step=self.last_step, sde_steps=tuple(int(k) for k in t.sde_steps)
        )
        position = {int(state): i for i, state in enumerate(t.states)}
        latents = torch.from_numpy(np.array(t.latents)).to(self.device)
        # A video that left its group may be broken; its row still runs, so it must not spread NaN to the weights.
        latents[torch.from_numpy(np.array(group.weights) == 0)] = 0.0
        log_probs = torch.from_numpy(np.array(t.log_probs)).to(self.device)
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
            for k, step in enumerate(t.sde_steps)
        ]

    def _velocity(self, trajectory: Trajectory):
        """velocity(latents, sigma) under the live weights, guided as in the rollout."""
        condition = condition_tensors(trajectory.condition, self.device)
        negative = None if trajectory.negative is None else condition_tensors(trajectory.negative, self.device)
        return lambda latents, sigma: guided_velocity(
            self.model, latents, sigma, condition, negative, self.guidance_scale
        )

    def _replay(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        return replay(
            self._velocity(row.group.trajectory),
            row.coefs,
            row.step,
            row.latents,
            row.latents_next,
            published_cps=self.loss.cps_log_prob == "published",
        )

    @torch.no_grad()
    def _reference_passes(self, rows: list[Row], first: bool) -> None:
        """Velocities under anchor and previous step, and old log-probs once the policy has moved since sampling."""
        names = [n for n, needed in (("anchor", self.terms.anchor), ("previous", self.terms.previous)) if needed]
        for name in names:
            with self.bank.use(name):
                for row in rows:
                    row.references[name] = self._replay(row)[1]
        if not first:
            with self.bank.use("sampling"):
                for row in rows:
                    row.old_log_prob = self._replay(row)[0]
        reshard(self.model)

    def _row_loss(self, row: Row, num_pairs: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss share of this row, SUMS shares, |rollout - learner| log-prob of a row sampled by these weights)."""
        log_prob, velocity = self._replay(row)
        weights = torch.from_numpy(np.array(row.group.weights)).to(self.device)
        advantages = torch.from_numpy(np.array(row.group.advantages)).to(self.device)
        old = log_prob.detach() if row.old_log_prob is None else row.old_log_prob
        policy = policy_loss(
            log_prob, old, advantages, weights, clip_range=self.loss.clip_range, scale=self._scale(row)
        )
        zero = torch.zeros((), device=self.device)
        terms = {
            name: (gaussian_kl(row.coefs, row.step, velocity, row.references[name]) * weights).sum() / num_pairs
            for name in row.references
        }
        anchor, previous = terms.get("anchor", zero), terms.get("previous", zero)
        kl = self.kl.moving_weight * anchor + self.kl.step_weight * previous
        loss = policy.sum / num_pairs + self.controller.value * kl
        sums = torch.stack(
            [
                loss.detach(),
                anchor.detach(),
                previous.detach(),
                kl.detach(),
                policy.num_clipped.float(),
                (policy.ratio * weights).sum(),
                weights.sum(),
            ]
        )
        delta = torch.where(weights > 0, (old - row.rollout_log_prob).abs(), zero).max().reshape(1)
        return loss, sums, delta

    def _scale(self, row: Row) -> float:
        """S_t of the row's step from all stochastic steps of its schedule; 1 without equalizer."""
        if not self.loss.equalizer:
            return 1.0
        published = self.loss.cps_log_prob == "published"
        return float(equalizer_scales(row.coefs.gradient_scale(published_cps=published))[row.step])

    def _check_agreement(self, disagreement: float) -> None:
        allowed = self.loss.max_disagreement
        if allowed is None:
            allowed = self.loss.clip_range / 10 if self.model.dtype == torch.float32 else math.inf
        if not math.isfinite(disagreement):
            raise NonFiniteError(f"policy version {self.version}: a replayed log-prob is {disagreement}")
        if disagreement > allowed:
            raise DisagreementError(
                f"learner and rollout log-probs differ by {disagreement:.3g} nats per dimension, {allowed:.3g} is "
                "allowed (loss.max_disagreement); weights, conditions or sampling settings of rollout and learner "
                "are not the same"
            )

    def _step(self, loss: float) -> float:
        """Clip, check, keep the previous step, step, move the anchor. Returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"policy version {self.version}: loss {loss}, gradient norm {grad_norm}")
        if self.terms.previous and self.kl.previous == "last_step":
            self.bank.snapshot("previous")
        reshard(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        if self.terms.moves and anchor_moves_at(self.version, self.kl.anchor_interval):
            self.bank.snapshot("anchor")
        return grad_norm

    def _report(
        self, sums: torch.Tensor, disagreement: torch.Tensor, grad_norm: float, stepped: float
    ) -> dict[str, float]:
        values = dict(zip(SUMS, sums.tolist(), strict=True))
        pairs = max(values["pairs"], 1.0)
        return {
            "loss/total": values["loss"],
            "loss/ratio_mean": values["ratio"] / pairs,
            "loss/clip_share": values["clipped"] / pairs,
            "kl/anchor": values["kl_anchor"],
            "kl/previous": values["kl_previous"],
            "kl/lambda": self.controller.value,
            "learner/grad_norm": grad_norm,
            "learner/stepped": stepped,
            "agreement/max_abs": float(disagreement),
        }


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


@torch.no_grad()
def all_finite(model: torch.nn.Module) -> bool:
    """Whether every local weight is finite."""
    return all(bool(torch.isfinite(shard).all()) for shard in local_shards(model).values())
