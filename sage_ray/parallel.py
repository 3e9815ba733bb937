"""FSDP2 over the learner's ranks: process groups, mesh and sharding of the velocity model.

Rank r is member r % sp_size of the sequence parallel group r // sp_size. Weights are sharded over all ranks; the ranks
of one group compute the same videos, each on its share of the tokens.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sage_ray.config import LoraConfig
from sage_ray.models.lora import PREFIX, adapt, adapter_values
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.streamed import blank_transformer, fill

PORTS = range(20000, 32768)
"""Above those of Ray's workers, below those that Linux gives to whoever asks for any: nobody takes one by chance
between `free_port` and its use."""


def free_port() -> int:
    """A port of this machine on which nobody listens, for a process group. Raises OSError when a hundred are taken."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"of a hundred ports in {PORTS.start}-{PORTS.stop - 1} none is free")


def start_process_group(rank: int, world_size: int, address: str, port: int, *, device: str, timeout_s: float) -> None:
    """Join the learner's process group: NCCL on cuda, gloo on cpu. Every collective is bounded by `timeout_s`."""
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def sequence_group(sp_size: int, timeout_s: float) -> dist.ProcessGroup | None:
    """This rank's sequence parallel group; every rank of the process group must ask. None alone."""
    if sp_size == 1:
        return None
    group, _ = dist.new_subgroups(sp_size, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)  # every rank is a member of one
    return group


def load_sharded(
    folder: Path,
    dtype: torch.dtype,
    lora: LoraConfig,
    seed: int,
    world_size: int,
    device: str,
    kind: Callable[..., PackedVelocity] = PackedVelocity,
) -> PackedVelocity:
    """The policy of a transformer folder over `world_size` ranks, with adapters where lora.rank asks for them.

    Every rank reads its own share of the files, once; the whole model is in no memory.

    Args:
        dtype: compute dtype. Master weights, and adapters, are float32; the frozen base under adapters is in `dtype`.
        kind: makes the model of transformer and dtype.
    """
    model, given = kind(blank_transformer(folder), dtype), {}
    if lora.rank:
        adapt(model, lora, seed, dtype=torch.float32)
        given = adapter_values(model, lora, seed)
    shard(model.to("meta"), world_size, device).to_empty(device=device)
    fill(model, folder, PREFIX, given)
    return model


def shard(model: PackedVelocity, world_size: int, device: str) -> PackedVelocity:
    """Shard every block, then the rest, over `world_size` ranks; master weights stay float32.

    Inputs are never cast by FSDP (the model casts what must be cast), so that timesteps and rotary tables stay
    float32 and a sharded forward equals the rollout worker's plain one.
    """
    mesh = init_device_mesh(device, (world_size,), mesh_dim_names=("ranks",))
    policy = MixedPrecisionPolicy(
        param_dtype=None if model.dtype == torch.float32 else model.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.transformer.transformer_blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} is not an FSDPModule after fully_shard")
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered weights. The root keeps them after a forward, and local shards written then would be ignored."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def local_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name to local shard of every trainable parameter; the whole tensor in a plain module. Reshards first."""
    reshard(model)
    return {
        name: parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def sum_over_ranks(values: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Sum a small tensor over the ranks in place, where each `copies` ranks in turn bring the same; does nothing
    without a process group."""
    if not _is_alone():
        dist.all_reduce(values)
    return values.div_(copies) if copies > 1 else values


def gather_over_ranks(values: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """[ranks / copies, *shape] from a tensor of the same shape on every rank, where each `copies` ranks in turn bring
    the same."""
    if _is_alone():
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered[::copies])


def gather_objects(value: Any, copies: int = 1) -> list[Any]:
    """Every rank's value, as `gather_over_ranks`, pickled: for small things and rare occasions."""
    if _is_alone():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered[::copies]


def _is_alone() -> bool:
    return not (dist.is_initialized() and dist.get_world_size() > 1)
