"""Tensors that leave their device while somebody else needs its memory, and come back in place.

The storages are emptied and refilled: tensors, views, parameters and FSDP2's flat shards that look at them stay what
they are. Nobody may read or write them meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Parked:
    """What `park` took off a device, until `unpark`.

    A frozen tensor's host copy is kept for the next time: it is copied off its device once.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    @property
    def is_parked(self) -> bool:
        """Whether tensors are away."""
        return bool(self._away)

    @torch.no_grad()
    def park(self, changing: Iterable[torch.Tensor], frozen: Iterable[torch.Tensor] = ()) -> int:
        """Copy the tensors' storages to the host and free them; bytes freed. Raises RuntimeError when already parked.

        Args: changing: tensors that may have been written since the last time. frozen: those that never are.
        """
        if self._away:
            raise RuntimeError("parked already")
        storages = {storage.data_ptr(): (storage, False) for storage in _storages(frozen)}
        storages |= {storage.data_ptr(): (storage, True) for storage in _storages(changing)}
        for storage, changes in storages.values():
            self._away.append((storage, self._host_copy(storage, changes)))
        _synchronize(self._away)
        for storage, _ in self._away:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._away):
            torch.cuda.empty_cache()
        return sum(host.numel() for _, host in self._away)

    @torch.no_grad()
    def unpark(self) -> None:
        """Bring everything back; does nothing when nothing is away."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        _synchronize(self._away)
        self._away = []

    def _host_copy(self, storage: torch.UntypedStorage, changes: bool) -> torch.Tensor:
        """uint8, pinned where the storage is on a GPU; buffers are used again."""
        key = storage._cdata  # the identity of a storage: its address differs after every return
        held = self._kept.get(key)
        if held is None:
            on_gpu = storage.device.type == "cuda"
            held = storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            self._kept[key] = held
            changes = True
        if changes:
            held[1].copy_(_bytes(storage), non_blocking=True)
        return held[1]


def tensors_of(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(trained parameters and buffers, frozen parameters) of a module, plain or sharded."""
    parameters = list(module.parameters())
    changing = [p for p in parameters if p.requires_grad]
    return [*changing, *module.buffers()], [p for p in parameters if not p.requires_grad]


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Of the local shards of the tensors that have any bytes."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return [t.untyped_storage() for t in local if t.untyped_storage().nbytes()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(away: list[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    if any(storage.device.type == "cuda" for storage, _ in away):
        torch.cuda.synchronize()
