"""Reference policies (moving anchor, previous step) as copies of the policy's local shards.

A reference is swapped into the live module for a no-grad forward and swapped back: no second module, 1/N of the
memory, right for any sharding. Copies are held in the compute dtype, which is what a forward reads anyway; the live
float32 weights wait in a stash meanwhile, so nothing is rounded. Copies and stash may lie in pinned host memory
instead, from where a swap is as fast as the bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sage_ray.parallel import local_shards, reshard


class ReferenceBank:
    """Named copies of a model's trainable local shards; offload: they are kept in host memory."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, offload: bool = False):
        self.model, self.dtype, self.offload = model, dtype, offload
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        self._stash: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def snapshot(self, name: str) -> None:
        """Copy the live weights into reference `name`."""
        shards = local_shards(self.model)
        copies = self._copies.setdefault(name, {})
        for key, shard in shards.items():
            if key not in copies:
                copies[key] = self._empty(shard, self.dtype)
            _copy(copies[key], shard)

    @torch.no_grad()
    def blend(self, name: str, weight: float) -> None:
        """Move reference `name` towards the live weights: copy <- copy + weight (live - copy)."""
        copies = self._copies[name]
        for key, shard in local_shards(self.model).items():
            copy = copies[key].to(shard.device, non_blocking=True)
            _copy(copies[key], copy.lerp(shard.to(self.dtype), weight))

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Run the live module with the weights of reference `name`; raises KeyError for an unknown name."""
        copies = self._copies[name]
        self._write(copies, keep=True)
        try:
            yield
        finally:
            self._write(self._stash, keep=False)

    @torch.no_grad()
    def _write(self, source: dict[str, torch.Tensor], keep: bool) -> None:
        for key, shard in local_shards(self.model).items():
            if keep:
                if key not in self._stash:
                    self._stash[key] = self._empty(shard, shard.dtype)
                _copy(self._stash[key], shard)
            _copy(shard, source[key])
        reshard(self.model)

    def _empty(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.offload:
            return torch.empty_like(shard, dtype=dtype)
        return torch.empty(shard.shape, dtype=dtype, pin_memory=shard.device.type == "cuda")

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is held on the model's device."""
        device = next(self.model.parameters()).device
        return [tensor for tensor in self.all_tensors() if tensor.device == device]

    def all_tensors(self) -> list[torch.Tensor]:
        """Everything that is held, in host memory too: copies, and the stash once a reference was used."""
        return [tensor for some in (*self._copies.values(), self._stash) for tensor in some.values()]

    def copies(self, name: str) -> dict[str, torch.Tensor]:
        """The local shards of reference `name` by parameter; KeyError for an unknown name."""
        return self._copies[name]

    def names(self) -> tuple[str, ...]:
        """References that have been taken."""
        return tuple(self._copies)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in stream order: what the device runs next sees it. Converts on the device, which is the faster side."""
    if target.device == source.device:
        target.copy_(source)
    elif source.device.type == "cpu":
        target.copy_(source.to(target.device, non_blocking=True))
    else:
        target.copy_(source.to(target.dtype), non_blocking=True)
