"""The learner: FSDP2 ranks that hold policy, optimizer, moving anchor and previous step."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import ray
import torch
from safetensors.torch import save_file

from sage_ray.agreement import NonFiniteError
from sage_ray.config import Config, total_optimizer_steps
from sage_ray.device_memory import forget_peak, peak_bytes
from sage_ray.group_batch import GroupBatch, ReplayRules, count_pairs
from sage_ray.models.lora import adapter_state, save_adapter
from sage_ray.models.packed_velocity import TORCH_DTYPES
from sage_ray.models.stock_velocity import velocity_kind
from sage_ray.parallel import load_sharded, reshard, start_process_group
from sage_ray.parked import Parked
from sage_ray.policy_update import PolicyUpdate, all_finite
from sage_ray.training_schedule import training_schedule
from sage_ray.types import Trajectory
from sage_ray.weights import WeightPart, pack


class LearnerRank:
    """One rank of the learner group."""

    def __init__(self, config: Config, rank: int, device: str):
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        self.config, self.rank, self.device = config, rank, device
        self.world_size = config.learner.num_ranks
        self.parked = Parked()

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this rank's host."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

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
            config.learner.videos_per_pass,
        )
        return sum(p.numel() for p in self.update_rule.trainable)

    def leave(self) -> int:
        """Weights, optimizer state, references and averages wait on the host; bytes freed on the device."""
        return 0 if self.parked.is_parked else self.parked.park(*self.update_rule.held_tensors())

    def enter(self) -> None:
        """Everything comes back to the device."""
        self.parked.unpark()

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
        start = time.monotonic()
        forget_peak()
        mine = sorted({g if g >= 0 else -g - 1 for groups in plan for g in groups})
        fetched = dict(zip(mine, ray.get([trajectories[g] for g in mine]), strict=True))
        fetch_s = time.monotonic() - start
        batches = [[self._batch(fetched, g, advantages_PG, weights_PG) for g in groups] for groups in plan]
        pairs = count_pairs(weights_PG, self.config.loss.num_updates, num_trained_steps) * self.config.loss.num_epochs
        metrics = self.update_rule.update(batches, pairs, self.world_size)
        if not all_finite(self.update_rule.model):
            raise NonFiniteError(f"policy version {self.update_rule.version}: a weight is not finite")
        memory = {"memory/learner_peak_bytes": float(peak)} if (peak := peak_bytes()) else {}
        return {
            **metrics,
            **memory,
            "learner/fetch_s": fetch_s,
            "learner/update_s": time.monotonic() - start - fetch_s,
            "policy_version": float(self.update_rule.version),
        }

    @staticmethod
    def _batch(fetched: dict[int, Trajectory], group: int, advantages: np.ndarray, weights: np.ndarray) -> GroupBatch:
        number = group if group >= 0 else -group - 1
        return GroupBatch(fetched[number], advantages[number], weights[number] * (group >= 0))

    def publish(self, average: bool = False) -> tuple[WeightPart, str]:
        """This rank's part of the present version, and its digest; of the moving average of the weights on request."""
        rule = self.update_rule
        with rule.averaged_weights() if average else nullcontext():
            part = pack(rule.model, rule.version, self.rank, TORCH_DTYPES[self.config.model.dtype])
        return part, part.digest

    def save(self, folder: str) -> str:
        """Write the policy as diffusers' transformer folder, or its adapter alone, and beside it the moving average of
        its weights where one is kept; rank 0 writes, beside, then renames. Returns the path."""
        rule, adapter = self.update_rule, bool(self.config.lora.rank)
        reshard(rule.model)
        states = {"": self._state(adapter)}
        if self.config.optimizer.ema_decay is not None:
            with rule.averaged_weights():
                states["_average"] = self._state(adapter)
        if self.rank == 0:
            _write_checkpoint(Path(folder), rule, states, adapter)
        return folder

    def _state(self, adapter: bool) -> dict[str, torch.Tensor]:
        """Whole weights on the CPU under the names of their file; every rank takes part. Copies: on a CPU they would be
        the live weights, which other weights may be swapped into before they are written."""
        rule = self.update_rule
        state = adapter_state(rule.model.transformer) if adapter else _full_state(rule)
        return {name: tensor.clone() if tensor.device == rule.device else tensor for name, tensor in state.items()}


def _full_state(rule: PolicyUpdate) -> dict[str, torch.Tensor]:
    """Whole weights under diffusers' names, on the CPU."""
    return {
        name.removeprefix("transformer."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for name, p in rule.model.named_parameters()
    }


def _write_checkpoint(
    folder: Path, rule: PolicyUpdate, states: dict[str, dict[str, torch.Tensor]], adapter: bool
) -> None:
    """states: suffix of the folder ("" or "_average") -> tensors."""
    partial = folder.with_name(folder.name + ".partial")
    for suffix, state in states.items():
        if adapter:
            save_adapter(rule.model.transformer, partial / f"adapter{suffix}", state)
            continue
        target = partial / f"transformer{suffix}"
        target.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, target / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        rule.model.transformer.save_config(target)
    trainer = {"policy_version": rule.version, "kl_controller": rule.controller.state_dict()}
    (partial / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n", "utf-8")
    os.replace(partial, folder)
