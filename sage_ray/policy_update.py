"""One iteration of the learner: trajectories and advantages in, optimizer steps out.

The same class runs a plain module in one process and an FSDP2 module on every rank. A rank holds some of the groups;
sums are divided by global counts, so the number of ranks changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from sage_ray.agreement import Agreement, NonFiniteError, allowed_disagreement
from sage_ray.config import KLConfig, LearnerConfig, LossConfig, OptimizerConfig
from sage_ray.equalizer import equalizer_scales
from sage_ray.group_batch import GroupBatch, Pass, ReplayRules, passes_of
from sage_ray.loss import policy_loss
from sage_ray.models.packed_velocity import PackedVelocity, guided_velocity
from sage_ray.optim import build_optimizer, learning_rate_factor, set_learning_rate
from sage_ray.parallel import local_shards, reshard, sum_over_ranks
from sage_ray.parked import tensors_of
from sage_ray.references import ReferenceBank
from sage_ray.sampler import replay
from sage_ray.transition import Coefficients, coefficients, gaussian_kl
from sage_ray.trust_region import KL_TERMS, KLController, anchor_moves_at

SUMS = ("loss", "kl_anchor", "kl_previous", "kl", "clipped", "ratio", "pairs")
AVERAGE = "average"


class PolicyUpdate:
    """Policy, optimizer, references and KL controller of one rank.

    Args:
        model: PackedVelocity with float32 master weights, plain or sharded; what requires a gradient is trained.
        rules: how the rollout was made. total_steps: optimizer steps of the whole run, for the learning rate.
        learner: how passes are cut (`passes_of`), gradients summed and references kept.
    """

    def __init__(
        self,
        model: PackedVelocity,
        loss: LossConfig,
        kl: KLConfig,
        optimizer: OptimizerConfig,
        rules: ReplayRules,
        total_steps: int,
        learner: LearnerConfig | None = None,
    ):
        self.model, self.loss, self.kl, self.settings, self.rules = model, loss, kl, optimizer, rules
        self.total_steps, self.learner = total_steps, learner or LearnerConfig()
        self.device = next(model.parameters()).device
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(model.named_parameters(), optimizer)
        self.version = 0
        allowed = allowed_disagreement(loss.max_disagreement, loss.clip_range, model.dtype)
        self.agreement = Agreement(allowed, model.sp_size)
        self.terms = KL_TERMS[kl.mode]
        self.controller = KLController(
            start=kl.coef,
            largest=kl.weight,
            smallest=kl.min_coef,
            warmup_steps=kl.warmup_steps,
            direction=kl.direction,
            schedule=kl.schedule,
        )
        self.bank = ReferenceBank(model, model.dtype, self.learner.reference_offload)
        holds_previous = self.terms.previous and kl.previous != "rollout"
        self.held = [n for n, needed in (("anchor", self.terms.anchor), ("previous", holds_previous)) if needed]
        for name in self.held:
            self.bank.snapshot(name)
        self.averages = ReferenceBank(model, torch.float32)
        if optimizer.ema_decay is not None:
            self.averages.snapshot(AVERAGE)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The live module holds the moving average of its weights inside; KeyError when none is kept."""
        with self.averages.use(AVERAGE):
            yield

    def held_tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(what changes, frozen weights) of everything kept on the device between two updates."""
        reshard(self.model)
        changing, frozen = tensors_of(self.model)
        states = (value for state in self.optimizer.state.values() for value in state.values())
        moments = [value for value in states if torch.is_tensor(value) and value.device.type == self.device.type]
        return [*changing, *moments, *self.bank.tensors(), *self.averages.tensors()], frozen

    def update(
        self, groups: Sequence[Sequence[GroupBatch]], num_pairs: Sequence[float], world_size: int = 1
    ) -> dict[str, float]:
        """Take one optimizer step per entry of `groups` (this rank's share of each).

        Args:
            groups: this rank's groups for every optimizer step, in order; later epochs repeat them.
            num_pairs: global number of weighted (sample, trained step) pairs of every optimizer step.
        Returns: metrics, the same on every rank, averaged over the optimizer steps; agreement is over all pairs.
        Raises: NonFiniteError, DisagreementError; the step that it is about is not taken.
        """
        if len(groups) > 1:
            self.bank.snapshot("sampling")
        if self.kl.previous == "iteration_start" and self.terms.previous:
            self.bank.snapshot("previous")
        metrics = [
            self._optimizer_step(batch, pairs, world_size, first=index == 0)
            for index, (batch, pairs) in enumerate(zip(groups, num_pairs, strict=True))
        ]
        keys = {key: None for m in metrics for key in m}
        means = {key: float(np.mean([m[key] for m in metrics if key in m])) for key in keys}
        return means | self.agreement.metrics()

    def _optimizer_step(
        self, batch: Sequence[GroupBatch], num_pairs: float, world_size: int, first: bool
    ) -> dict[str, float]:
        if num_pairs == 0:
            return {"kl/lambda": self.controller.value, "learner/stepped": 0.0}
        passes = self._passes(batch)
        self._reference_passes(passes, first)
        self.optimizer.zero_grad(set_to_none=True)
        norms = {}
        if self._measures_share():
            self._accumulate(passes, num_pairs, world_size, policy=False)
            norms["kl"] = _norm(self.trainable)
            sums, replayed = self._accumulate(passes, num_pairs, world_size, kl=False)
        else:
            sums, replayed = self._accumulate(passes, num_pairs, world_size)
        self.agreement.check(passes, replayed)
        norms["total"] = self._step(float(sums[SUMS.index("loss")]))
        self.controller.tick(float(sums[SUMS.index("kl")]))
        return self._report(sums, norms)

    def _passes(self, batch: Sequence[GroupBatch]) -> list[Pass]:
        return passes_of(batch, self.rules, self._scale, self.device, self.learner.videos_per_pass)

    def _measures_share(self) -> bool:
        """Whether the KL's own gradient is measured at this step: its backward runs first, the policy's adds to it.

        It is the last step of an interval: the first may follow a move of the anchor, where the KL is zero.
        """
        has_terms, interval = self.terms.anchor or self.terms.previous, self.kl.share_interval
        return bool(has_terms and interval and self.version % interval == interval - 1)

    def _accumulate(
        self, passes: list[Pass], num_pairs: float, world_size: int, policy: bool = True, kl: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Add the gradient of the chosen parts to .grad; (sums [len(SUMS)] of all ranks, log-probs of every pass under
        the weights that sampled).

        The sums are those of the whole loss, whatever is chosen. A rank's gradient is a part of the sum, of its groups
        and its tokens; FSDP2 takes the mean over world_size ranks.
        """
        sums, replayed = torch.zeros(len(SUMS), device=self.device), []
        for index, one in enumerate(passes):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(self.learner.shard_gradients or index == len(passes) - 1)
            policy_part, kl_part, pass_sums, old = self._pass_loss(one, num_pairs)
            parts = [part for part, chosen in ((policy_part, policy), (kl_part, kl)) if chosen]
            (sum(parts[1:], parts[0]) * world_size).backward()
            sums += pass_sums
            replayed.append(old)
        return sum_over_ranks(sums, self.model.sp_size), replayed

    def _replay(self, one: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob [B], velocity) of a pass under the live weights, guided as in the rollout."""

        def velocity(latents: torch.Tensor, sigma: float | np.ndarray) -> torch.Tensor:
            scale = self.rules.guidance_scale
            return guided_velocity(self.model, latents, one.sigmas(sigma), one.conditions, one.negatives, scale)

        return replay(velocity, one.coefs, one.step, one.latents, one.latents_next, published_cps=self._published)

    @property
    def _published(self) -> bool:
        return self.loss.cps_log_prob == "published"

    @torch.no_grad()
    def _reference_passes(self, passes: list[Pass], first: bool) -> None:
        """Velocities under anchor and previous step, and old log-probs once the policy has moved since sampling."""
        for name in self.held:
            with self.bank.use(name):
                for one in passes:
                    one.references[name] = self._replay(one)[1]
        if not first:
            with self.bank.use("sampling"):
                for one in passes:
                    one.old_log_prob = self._replay(one)[0]
        reshard(self.model)

    def _pass_loss(self, one: Pass, num_pairs: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(policy part, KL part, SUMS shares, log-prob [B] under the weights that sampled) of a pass."""
        log_prob, velocity = self._replay(one)
        weights = one.weights
        old = log_prob.detach() if one.old_log_prob is None else one.old_log_prob
        policy = policy_loss(log_prob, old, one.advantages, weights, clip_range=self.loss.clip_range, scale=one.scale)
        zero = torch.zeros((), device=self.device)
        terms = {
            name: (gaussian_kl(one.coefs, one.step, velocity, one.references[name]) * weights).sum() / num_pairs
            for name in one.references
        }
        if self.terms.previous and self.kl.previous == "rollout":
            terms["previous"] = ((old - log_prob) * weights).sum() / num_pairs
        anchor, previous = terms.get("anchor", zero), terms.get("previous", zero)
        kl = self.kl.moving_weight * anchor + self.kl.step_weight * previous
        policy_part, kl_part = policy.sum / num_pairs, self.controller.value * kl
        shares = (policy_part + kl_part, anchor, previous, kl, policy.num_clipped.float())
        sums = torch.stack([*(s.detach() for s in shares), (policy.ratio * weights).sum(), weights.sum()])
        return policy_part, kl_part, sums, old

    def _scale(self, coefs: Coefficients, step: int) -> float:
        """S_t of a step, from all steps that may be stochastic in the run; 1 without equalizer."""
        if not self.loss.equalizer:
            return 1.0
        if self.rules.schedule_steps is not None:
            steps = self.rules.schedule_steps
            coefs = coefficients(
                coefs.sde_type, coefs.sigmas, coefs.eta, last_step=self.rules.last_step, sde_steps=steps
            )
        scales = equalizer_scales(
            coefs.gradient_scale(published_cps=self._published),
            median=self.loss.equalizer_median,
            eps=self.loss.equalizer_eps,
        )
        return float(scales[step])

    def _step(self, loss: float) -> float:
        """Clip, check, keep the previous step, step, move the references. Returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.settings.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not np.isfinite([loss, grad_norm]).all():
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"policy version {self.version}: loss {loss}, gradient norm {grad_norm}")
        if self.terms.previous and self.kl.previous == "last_step":
            self.bank.snapshot("previous")
        reshard(self.model)
        set_learning_rate(self.optimizer, self.learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        if self.terms.moves and anchor_moves_at(self.version, self.kl.anchor_interval):
            self.bank.snapshot("anchor")
        if self.settings.ema_decay is not None:
            self.averages.blend(AVERAGE, 1 - self.settings.ema_decay)
        return grad_norm

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        factor = learning_rate_factor(
            self.version,
            schedule=self.settings.schedule,
            warmup_steps=self.settings.warmup_steps,
            total_steps=self.total_steps,
            floor=self.settings.min_factor,
        )
        return self.settings.learning_rate * factor

    def _report(self, sums: torch.Tensor, norms: dict[str, float]) -> dict[str, float]:
        values = dict(zip(SUMS, sums.tolist(), strict=True))
        pairs = max(values["pairs"], 1.0)
        total = norms.get("total", 0.0)
        share = {"kl/gradient_share": norms["kl"] / total if total else 0.0} if "kl" in norms else {}
        return {
            "loss/total": values["loss"],
            "loss/ratio_mean": values["ratio"] / pairs,
            "loss/clip_share": values["clipped"] / pairs,
            "kl/anchor": values["kl_anchor"],
            "kl/previous": values["kl_previous"],
            "kl/lambda": self.controller.value,
            **share,
            "learner/grad_norm": total,
            "learner/learning_rate": self.optimizer.param_groups[0]["lr"],
            "learner/stepped": 1.0,
        }


def _norm(parameters: Sequence[torch.Tensor]) -> float:
    """Global norm of the gradients, over all ranks."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@torch.no_grad()
def all_finite(model: torch.nn.Module) -> bool:
    """Whether every local weight is finite."""
    return all(bool(torch.isfinite(shard).all()) for shard in local_shards(model).values())
