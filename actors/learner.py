"""The learner: FSDP2 ranks that hold policy, optimizer, moving anchor and previous step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

from actors.clocked import Clocked, phase
from actors.cluster import free_address
from actors.stored_weights import store_bucket
from actors.weight_ends import WeightSender
from sage_ray import structured_log
from sage_ray.agreement import NonFiniteError
from sage_ray.checkpoint import Checkpointer
from sage_ray.checkpoint_store import CheckpointStore
from sage_ray.checksum import Content
from sage_ray.config import Config, total_optimizer_steps
from sage_ray.config_load import to_yaml
from sage_ray.device_memory import forget_peak, peak_bytes
from sage_ray.group_batch import GroupBatch, ReplayRules, count_all_pairs, count_pairs
from sage_ray.memory_report import MemoryPart, learner_memory
from sage_ray.models.packed_velocity import TORCH_DTYPES
from sage_ray.models.stock_velocity import velocity_kind
from sage_ray.parallel import load_sharded, sequence_group, start_process_group
from sage_ray.parked import Parked
from sage_ray.policy_files import gather_policy, write_policy
from sage_ray.policy_update import PolicyUpdate, all_finite
from sage_ray.training_schedule import training_schedule
from sage_ray.types import Trajectory
from sage_ray.weights import WeightPart, pack

Rows = Mapping[int, np.ndarray] | np.ndarray
"""[P, G] of an iteration, or rows [G] by group number."""


class LearnerRank(Clocked, WeightSender):
    """One rank of the learner group."""

    def __init__(self, config: Config, rank: int, device: str):
        self.speaks_for(config)
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        self.config, self.rank, self.device = config, rank, device
        self.world_size = config.learner.num_ranks
        self.parked = Parked()

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this rank's host."""
        return free_address()

    @phase("load")
    def setup(self, address: str, port: int) -> int:
        """Join the group, load and shard the policy; returns the number of trainable parameters."""
        config = self.config
        start_process_group(
            self.rank, self.world_size, address, port, device=self.device, timeout_s=config.learner.timeout_s
        )
        model = load_sharded(
            Path(config.model.path) / "transformer",
            TORCH_DTYPES[config.model.dtype],
            config.lora,
            config.seed,
            self.world_size,
            self.device,
            velocity_kind(config.model),
        )
        model.share_tokens(sequence_group(config.learner.sp_size, config.learner.timeout_s))
        model.transformer.gradient_checkpointing = config.model.gradient_checkpointing
        rules = ReplayRules(
            guidance_scale=config.sampling.guidance_scale,
            last_step=config.sampling.last_step,
            schedule_steps=training_schedule(config).rule.candidates,
        )
        self.update_rule = PolicyUpdate(
            model,
            config.loss,
            config.kl,
            config.optimizer,
            rules,
            total_optimizer_steps(config),
            config.learner,
        )
        self.checkpointer = Checkpointer(config.learner.timeout_s, config.checkpoint)
        return sum(p.numel() for p in self.update_rule.trainable)

    def memory(self) -> list[MemoryPart]:
        """What this rank keeps, part by part."""
        return learner_memory(self.update_rule, self.config)

    @phase("turn")
    def leave(self) -> int:
        """Weights, optimizer state, references and averages wait on the host; bytes freed on the device."""
        return 0 if self.parked.is_parked else self.parked.park(*self.update_rule.held_tensors())

    @phase("turn")
    def enter(self) -> None:
        """Everything comes back to the device."""
        self.parked.unpark()

    @phase("fetch")
    def missing(self, numbers: Sequence[int], trajectories: Sequence[ray.ObjectRef], bound_s: float) -> list[int]:
        """Numbers of the trajectories that are lost, or do not come within the bound."""
        refs = list(trajectories)
        there = set(ray.wait(refs, num_returns=len(refs), timeout=bound_s)[0]) if refs else set()
        return [number for number, ref in zip(numbers, refs, strict=True) if ref not in there or _is_lost(ref)]

    @phase("update")
    def update(
        self,
        trajectories: Sequence[ray.ObjectRef],
        plan: Sequence[Sequence[int]],
        advantages_PG: np.ndarray,
        weights_PG: np.ndarray,
        num_trained_steps: int,
    ) -> dict[str, float]:
        """Learn from this rank's share of one iteration.

        Consumes: references of all trajectories (only this rank's are fetched), the plan of groups for every
        optimizer step (a negative number -(g + 1) is group g with weight 0), advantages and weights of all groups.
        Produces: metrics with the policy version; raises NonFiniteError or DisagreementError before stepping.
        """
        self._begin()
        batches = [self._fetch(trajectories, groups, advantages_PG, weights_PG) for groups in plan]
        loss = self.config.loss
        weighted = count_pairs(weights_PG, loss.num_updates, num_trained_steps) * loss.num_epochs
        every = count_all_pairs(*weights_PG.shape, loss.num_updates, num_trained_steps) * loss.num_epochs
        return self._finished(self.update_rule.update(batches, weighted, self.world_size, every))

    @phase("update")
    def begin(self) -> None:
        """An iteration begins whose groups come bit by bit: `accumulate`, `step`, ..., `finish`."""
        self._begin()
        self.update_rule.begin(self.config.loss.num_updates)

    @phase("update")
    def accumulate(
        self,
        trajectories: Mapping[int, ray.ObjectRef],
        groups: Sequence[int],
        advantages: Rows,
        weights: Rows,
        num_pairs: float,
        last: bool,
    ) -> None:
        """Add the gradient of this rank's share of some groups, in order, to the next optimizer step.

        Consumes: by group number, of this rank's groups at least: references, rows [G] of advantages and weights; which
        groups are this rank's (as in `update`); num_pairs, last: see PolicyUpdate.accumulate.
        """
        start = time.monotonic()
        batch = self._fetch(trajectories, groups, advantages, weights)
        self.update_rule.accumulate(batch, num_pairs, self.world_size, last)
        self._busy_s += time.monotonic() - start

    @phase("update")
    def step(self, num_pairs: float) -> None:
        """Take the optimizer step. num_pairs: weighted pairs of all ranks."""
        start = time.monotonic()
        self.update_rule.step(num_pairs)
        self._busy_s += time.monotonic() - start

    @phase("update")
    def finish(self) -> dict[str, float]:
        """Metrics of the iteration with the policy version."""
        return self._finished(self.update_rule.metrics())

    def _begin(self) -> None:
        forget_peak()
        self._fetch_s, self._busy_s, self._began = 0.0, 0.0, time.monotonic()

    def _finished(self, metrics: dict[str, float]) -> dict[str, float]:
        rule = self.update_rule
        if not all_finite(rule.model):
            raise NonFiniteError(f"policy version {rule.version}: a weight is not finite")
        memory = {"memory/learner_peak_bytes": float(peak)} if (peak := peak_bytes()) else {}
        busy_s = (self._busy_s or time.monotonic() - self._began) - self._fetch_s
        times = {"learner/fetch_s": self._fetch_s, "learner/update_s": busy_s}
        structured_log.note(version=rule.version)
        return {**metrics, **memory, **times, "policy_version": float(rule.version)}

    @phase("fetch")
    def _fetch(
        self,
        trajectories: Mapping[int, ray.ObjectRef] | Sequence[ray.ObjectRef],
        groups: Sequence[int],
        advantages: Rows,
        weights: Rows,
    ) -> list[GroupBatch]:
        """This rank's groups, in order; only their trajectories are fetched."""
        start, mine = time.monotonic(), sorted({g if g >= 0 else -g - 1 for g in groups})
        fetched = dict(zip(mine, ray.get([trajectories[g] for g in mine]), strict=True))
        self._fetch_s += time.monotonic() - start
        return [self._batch(fetched, g, advantages, weights) for g in groups]

    @staticmethod
    def _batch(fetched: dict[int, Trajectory], group: int, advantages: Rows, weights: Rows) -> GroupBatch:
        number = group if group >= 0 else -group - 1
        return GroupBatch(fetched[number], advantages[number], weights[number] * (group >= 0))

    @phase("publish")
    def publish(self, average: bool = False) -> tuple[WeightPart, Content]:
        """This rank's part of the present version, and what it contains; of the weights' moving average on request."""
        with self.published(average) as (model, version, dtype):
            part = pack(model, version, self.rank, dtype, store_bucket)
        return part, part.content

    @contextmanager
    def published(self, average: bool) -> Iterator[tuple[nn.Module, int, torch.dtype]]:
        rule = self.update_rule
        with rule.averaged_weights() if average else nullcontext():
            yield rule.model, rule.version, TORCH_DTYPES[self.config.model.dtype]

    @phase("save")
    def save(self, place: str, note: dict[str, Any]) -> None:
        """Copy everything that a resumed run needs, and begin to write the checkpoint `place` (FOLDER_OR_URL/NAME):
        every rank its shards, and rank 0 the policy for people. `saved` says what became of it.

        Args: note: what trainer.json holds of the run's position.
        """
        rule, adapter = self.update_rule, bool(self.config.lora.rank)
        states = gather_policy(rule, adapter=adapter, keep=self.rank == 0)
        write = partial(write_policy, transformer=rule.model.transformer, states=states, adapter=adapter)
        folder, _, name = place.rpartition("/")
        self.checkpointer.save(rule, CheckpointStore(folder), name, to_yaml(self.config), note, write)

    def saved(self, wait: bool) -> str | None:
        """The checkpoint that was written since the last call, if any. Raises: CheckpointError."""
        return self.checkpointer.finished(wait)

    @phase("restore")
    def load(self, place: str) -> int:
        """Go on from a complete checkpoint; the policy version. Raises: CheckpointError, ValueError."""
        folder, _, name = place.rpartition("/")
        self.checkpointer.load(self.update_rule, CheckpointStore(folder).read(name))
        return self.update_rule.version


def _is_lost(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref)
    except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError):
        return True
    return False
