"""Tensors that leave their device while somebody else needs its memory, and come back in place.

The storages are emptied and refilled: tensors, views, parameters and FSDP2's flat shards that look at them stay what
they are. Nobody may read or write them meanwhile, not even to print them: that ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

SLAB_BYTES = 2**30
"""Most bytes of host memory that are pinned at once, unless one storage is larger."""
ALIGNMENT = 512


class Parked:
    """What `park` took off a device, until `unpark`.

    A frozen tensor's host copy is kept for the next time: it is copied off its device once. What is not parked the next
    time is forgotten, and a tensor that its owner drops is not kept alive.

    Args:
        shared: other processes want the memory: the whole device is waited for, and torch's cache is emptied. Otherwise
            the memory stays with this process, and only the calling stream is waited for: the tensors must have been
            used there.
    """

    def __init__(self, shared: bool = True) -> None:
        self._shared = shared
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._kept: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}

    @property
    def is_parked(self) -> bool:
        """Whether tensors are away."""
        return bool(self._away)

    @torch.no_grad()
    def park(self, changing: Iterable[torch.Tensor], frozen: Iterable[torch.Tensor] = ()) -> int:
        """Copy the tensors' storages to the host and free them; bytes freed.

        Raises: RuntimeError, before anything leaves, when parked already or when numpy or a file shares a storage.

        Args: changing: tensors that may have been written since the last time. frozen: those that never are.
        """
        if self._away:
            raise RuntimeError("parked already")
        # The identity of a storage, which also lies behind several tensors; its address differs after every return.
        storages = {storage._cdata: storage for storage in _storages(frozen)}
        changes = {storage._cdata: storage for storage in _storages(changing)}
        storages |= changes
        if not all(storage.resizable() for storage in storages.values()):
            raise RuntimeError("a tensor whose memory numpy or a file shares cannot be parked; clone it first")
        new = self._keep(storages)
        for key, storage in storages.items():
            if key in changes or key in new:
                self._kept[key][1].copy_(_bytes(storage), non_blocking=True)
        self._wait(storages.values())
        self._away = [(storage, self._kept[key][1]) for key, storage in storages.items()]
        for storage in storages.values():
            storage.resize_(0)
        if self._shared and _on_gpu(storages.values()):
            torch.cuda.empty_cache()
        return sum(host.numel() for _, host in self._away)

    @torch.no_grad()
    def unpark(self) -> None:
        """Bring everything back; does nothing when nothing is away."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        self._wait(storage for storage, _ in self._away)
        self._away = []

    def _keep(self, storages: dict[int, torch.UntypedStorage]) -> set[int]:
        """Give every storage a buffer on the host, the one it had where there is one; keys of those that are new."""
        self._kept = {
            key: (storage, host)
            for key, (storage, host) in self._kept.items()
            if key in storages and host.numel() == storages[key].nbytes()
        }
        new = {key: storage for key, storage in storages.items() if key not in self._kept}
        buffers = host_buffers([storage.nbytes() for storage in new.values()], pin_memory=_on_gpu(new.values()))
        for (key, storage), buffer in zip(new.items(), buffers, strict=True):
            self._kept[key] = StorageWeakRef(storage), buffer
        return set(new)

    def _wait(self, storages: Iterable[torch.UntypedStorage]) -> None:
        if _on_gpu(storages):
            torch.cuda.synchronize() if self._shared else torch.cuda.current_stream().synchronize()


def host_buffers(sizes: Sequence[int], *, pin_memory: bool) -> list[torch.Tensor]:
    """uint8 tensors of `sizes` bytes, cut from slabs: torch rounds every pinned allocation up to a power of two."""
    slabs, places = [0], []
    for size in sizes:
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if slabs[-1] and slabs[-1] + room > SLAB_BYTES:
            slabs.append(0)
        places.append((len(slabs) - 1, slabs[-1]))
        slabs[-1] += room
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory) for size in slabs]
    return [memory[slab][start : start + size] for (slab, start), size in zip(places, sizes, strict=True)]


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


def _on_gpu(storages: Iterable[torch.UntypedStorage]) -> bool:
    return any(storage.device.type == "cuda" for storage in storages)
