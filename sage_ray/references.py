"""Reference policies (moving anchor, previous step) as copies of the policy's local shards.

A reference is swapped into the live module for a no-grad forward and swapped back: no second module, 1/N of the
memory, right for any sharding. Copies are held in the compute dtype, which is what a forward reads anyway; the live
float32 weights wait in a stash meanwhile, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sage_ray.parallel import local_shards, reshard


class ReferenceBank:
    """Named copies of a model's trainable local shards."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        self._stash: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def snapshot(self, name: str) -> None:
        """Copy the live weights into reference `name`."""
        shards = local_shards(self.model)
        copies = self._copies.setdefault(name, {})
        for key, shard in shards.items():
            if key in copies:
                copies[key].copy_(shard)
            else:
                copies[key] = shard.detach().to(self.dtype, copy=True)

    @torch.no_grad()
    def blend(self, name: str, weight: float) -> None:
        """Move reference `name` towards the live weights: copy <- copy + weight (live - copy)."""
        copies = self._copies[name]
        for key, shard in local_shards(self.model).items():
            copies[key].lerp_(shard.to(self.dtype), weight)

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
                    self._stash[key] = torch.empty_like(shard)
                self._stash[key].copy_(shard)
            shard.copy_(source[key])
        reshard(self.model)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is held."""
        return [tensor for held in (*self._copies.values(), self._stash) for tensor in held.values()]

    def names(self) -> tuple[str, ...]:
        """References that have been taken."""
        return tuple(self._copies)
