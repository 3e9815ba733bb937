"""One iteration of the learner: trajectories and advantages in, optimizer steps out.

The same class runs a plain module in one process and an FSDP2 module on every rank. A rank holds some of the groups;
sums are divided by global counts, so the number of ranks changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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

SUMS = ("loss", "kl_anchor", "kl_previous", "kl", "clipped", "ratio", "pairs", "importance", "importance_squared")
NORMALISED = 4
"""So many of SUMS, the first ones, are divided by the number of pairs."""
AVERAGE = "average"


@dataclass
class _OpenStep:
    """An optimizer step whose gradient is being gathered.

    num_pairs: what the gradient is divided by meanwhile; sums: [len(SUMS)], of this rank; waiting: passes of a step
    that measures the KL's share, which run at its end, twice; kl_norm: of the KL's own gradient.
    """

    num_pairs: float
    sums: torch.Tensor
    waiting: list[Pass] = field(default_factory=list)
    kl_norm: float | None = None


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
        self.version = self._first_version = 0
        self._open: _OpenStep | None = None
        self._reports: list[dict[str, float]] = []
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
        self,
        groups: Sequence[Sequence[GroupBatch]],
        num_pairs: Sequence[float],
        world_size: int = 1,
        all_pairs: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per entry of `groups` (this rank's share of each): `begin`, then `accumulate` and
        `step` for every one.

        Args:
            groups: this rank's groups for every optimizer step, in order; later epochs repeat them.
            num_pairs: global number of weighted (sample, trained step) pairs of every optimizer step.
            all_pairs: of all pairs, weighted or not; None is num_pairs.
        Returns: metrics, the same on every rank, averaged over the optimizer steps; agreement is over all pairs.
        Raises: NonFiniteError, DisagreementError; the step that it is about is not taken.
        """
        self.begin(len(groups))
        for batch, weighted, every in zip(groups, num_pairs, all_pairs or num_pairs, strict=True):
            if weighted:
                self.accumulate(batch, every, world_size)
            self.step(weighted)
        return self.metrics()

    def begin(self, num_steps: int = 1) -> None:
        """An iteration of `num_steps` optimizer steps begins; its fresh trajectories were made by the live weights."""
        self._reports, self._open, self._first_version = [], None, self.version
        if num_steps > 1:
            self.bank.snapshot("sampling")
        if self.kl.previous == "iteration_start" and self.terms.previous:
            self.bank.snapshot("previous")

    def accumulate(self, batch: Sequence[GroupBatch], num_pairs: float, world_size: int = 1, last: bool = True) -> None:
        """Add the gradient of some groups of the next optimizer step, all of one policy version, in order.

        Args:
            num_pairs: of all ranks' groups of the whole step; those without weight count here, `step` puts it right.
            last: no other call comes before `step`.
        Raises: NonFiniteError, DisagreementError.
        """
        if self._open is None:
            self.optimizer.zero_grad(set_to_none=True)
            self._open = _OpenStep(num_pairs, torch.zeros(len(SUMS), device=self.device))
        passes = self._passes(batch)
        verifiable = self._reference_passes(passes)
        if self._measures_share():
            self._open.waiting += passes
            if not last:
                return
            passes = self._open.waiting
            self._accumulate(passes, world_size, last, policy=False)
            self._open.kl_norm = _norm(self.trainable)
            self._open.sums.zero_()
            replayed = self._accumulate(passes, world_size, last, kl=False)
        else:
            replayed = self._accumulate(passes, world_size, last)
        if verifiable:
            self.agreement.check(passes, replayed)

    def step(self, num_pairs: float) -> None:
        """Step with what was accumulated; not, where no pair has a weight.

        Args: num_pairs: global number of weighted pairs of this step.
        Raises: NonFiniteError.
        """
        opened, self._open = self._open, None
        if opened is None or num_pairs == 0:
            self.optimizer.zero_grad(set_to_none=True)
            self._reports.append({"kl/lambda": self.controller.value, "learner/stepped": 0.0})
            return
        sums, factor = sum_over_ranks(opened.sums, self.model.sp_size), opened.num_pairs / num_pairs
        if factor != 1:
            sums[:NORMALISED] *= factor
            for parameter in self.trainable:
                if parameter.grad is not None:
                    parameter.grad *= factor
        norms = {} if opened.kl_norm is None else {"kl": opened.kl_norm * factor}
        norms["total"] = self._step(float(sums[SUMS.index("loss")]))
        self.controller.tick(float(sums[SUMS.index("kl")]))
        self._reports.append(self._report(sums, norms))

    def metrics(self) -> dict[str, float]:
        """Of the optimizer steps since `begin`, averaged; the same on every rank. Agreement is told once."""
        keys = {key: None for m in self._reports for key in m}
        means = {key: float(np.mean([m[key] for m in self._reports if key in m])) for key in keys}
        return means | self.agreement.metrics()

    def _passes(self, batch: Sequence[GroupBatch]) -> list[Pass]:
        return passes_of(batch, self.rules, self._scale, self.device, self.learner.videos_per_pass)

    def _measures_share(self) -> bool:
        """Whether the KL's own gradient is measured at this step: its backward runs first, the policy's adds to it.

        It is the last step of an interval: the first may follow a move of the anchor, where the KL is zero.
        """
        has_terms, interval = self.terms.anchor or self.terms.previous, self.kl.share_interval
        return bool(has_terms and interval and self.version % interval == interval - 1)

    def _accumulate(
        self, passes: list[Pass], world_size: int, last: bool, policy: bool = True, kl: bool = True
    ) -> list[torch.Tensor]:
        """Add the gradient of the chosen parts to .grad, and to the open step's sums; log-probs of every pass under the
        weights that sampled.

        The sums are those of the whole loss, whatever is chosen. A rank's gradient is a part of the sum, of its groups
        and its tokens; FSDP2 takes the mean over world_size ranks.
        """
        assert self._open is not None
        replayed = []
        for index, one in enumerate(passes):
            if isinstance(self.model, FSDPModule):
                sync = self.learner.shard_gradients or (last and index == len(passes) - 1)
                self.model.set_requires_gradient_sync(sync)
            policy_part, kl_part, pass_sums, sampled = self._pass_loss(one, self._open.num_pairs)
            parts = [part for part, chosen in ((policy_part, policy), (kl_part, kl)) if chosen]
            (sum(parts[1:], parts[0]) * world_size).backward()
            self._open.sums += pass_sums
            replayed.append(sampled)
        return replayed

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
    def _reference_passes(self, passes: list[Pass]) -> bool:
        """Velocities under anchor and previous step, and the log-probs that ratios start from where the live weights
        are not those that sampled. Returns whether the gate can compare: the sampling weights are here.

        With trajectories of the step before, one pass under the previous step serves its KL and the old log-probs.
        """
        stale = any(place.policy_version != self._first_version for one in passes for place in one.places)
        first = self.version == self._first_version
        holds_sampler = stale and first and self._previous_sampled(passes)
        for name in self.held:
            with self.bank.use(name):
                for one in passes:
                    log_prob, one.references[name] = self._replay(one)
                    if holds_sampler and name == "previous":
                        one.behaviour_log_prob = log_prob
        if stale and not holds_sampler:
            for one in passes:
                one.behaviour_log_prob = one.rollout_log_prob
        if not first and (not stale or self.loss.importance_cap is not None):
            with self.bank.use("sampling"):
                for one in passes:
                    one.old_log_prob = self._replay(one)[0]
        elif stale and self.loss.importance_cap is None:
            for one in passes:
                one.old_log_prob = one.behaviour_log_prob
        reshard(self.model)
        return holds_sampler or not stale

    def _previous_sampled(self, passes: list[Pass]) -> bool:
        """Whether the weights before the last optimizer step, which are held, made these trajectories."""
        if "previous" not in self.held or self.kl.previous != "last_step":
            return False
        return all(place.policy_version == self.version - 1 for one in passes for place in one.places)

    def _pass_loss(self, one: Pass, num_pairs: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(policy part, KL part, SUMS shares, log-prob [B] under the weights that sampled) of a pass."""
        log_prob, velocity = self._replay(one)
        weights = one.weights
        old = log_prob.detach() if one.old_log_prob is None else one.old_log_prob
        sampled = old if one.behaviour_log_prob is None else one.behaviour_log_prob
        scale = one.scale
        if self.loss.importance_cap is not None and one.behaviour_log_prob is not None:
            scale = scale * torch.exp(old - sampled).clamp(max=self.loss.importance_cap)
        policy = policy_loss(log_prob, old, one.advantages, weights, clip_range=self.loss.clip_range, scale=scale)
        zero = torch.zeros((), device=self.device)
        terms = {
            name: (gaussian_kl(one.coefs, one.step, velocity, one.references[name]) * weights).sum() / num_pairs
            for name in one.references
        }
        if self.terms.previous and self.kl.previous == "rollout":
            terms["previous"] = ((sampled - log_prob) * weights).sum() / num_pairs
        anchor, previous = terms.get("anchor", zero), terms.get("previous", zero)
        kl = self.kl.moving_weight * anchor + self.kl.step_weight * previous
        policy_part, kl_part = policy.sum / num_pairs, self.controller.value * kl
        shares = (policy_part + kl_part, anchor, previous, kl, policy.num_clipped.float())
        importance = torch.exp(torch.where(weights > 0, log_prob.detach() - sampled, 0.0))
        counts = (policy.ratio * weights).sum(), weights.sum(), (importance * weights).sum()
        sums = torch.stack([*(s.detach() for s in shares), *counts, (importance**2 * weights).sum()])
        return policy_part, kl_part, sums, sampled

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
            "policy/effective_sample_size": values["importance"] ** 2 / (pairs * values["importance_squared"] or 1.0),
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
