"""Published weights on the way through a store: every learner rank packs its own shards into buckets, a receiver writes
them into its parameters' slices.

Nothing is gathered, and the receiver's parameters keep their storage. A part says what its shards contain; the receiver
looks at its own parameters after writing, so a skipped or renamed tensor cannot pass unnoticed. On GPUs buckets go
through pinned memory, and one is copied to or from the device while the next one is stored or read.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sage_ray.checksum import Content, merge
from sage_ray.parallel import local_shards
from sage_ray.weight_plan import BUCKET_BYTES, Plan, check_plans, drain, fill, held_content, plan_weights, sent_content


@dataclass(frozen=True)
class WeightPart:
    """One rank's share of a policy version. buckets: uint8 arrays, or what a store gave for each."""

    version: int
    rank: int
    plan: Plan
    content: Content
    buckets: tuple[Any, ...]


@torch.no_grad()
def pack(
    model: nn.Module,
    version: int,
    rank: int,
    dtype: torch.dtype,
    store: Callable[[np.ndarray], Any] = np.copy,
    bucket_bytes: int = BUCKET_BYTES,
) -> WeightPart:
    """This rank's trainable shards in `dtype`, in aligned buckets.

    Args: store: is given one bucket after the other, in memory that is used again; what it returns is kept.
    """
    shards, plan = local_shards(model), plan_weights(model, dtype, bucket_bytes)
    device = next(model.parameters()).device
    buckets, ring = [], _Ring(plan, device)
    for number in range(len(plan.sizes) + 1):
        if number < len(plan.sizes):
            with ring.slot(number) as (on_device, _):
                fill(on_device, number, plan, shards)
                ring.to_host(number)
        if number:
            buckets.append(store(ring.host(number - 1)))
    return WeightPart(version, rank, plan, sent_content(plan, shards), tuple(buckets))


def load_array(bucket: np.ndarray) -> np.ndarray:
    """A bucket that is there already."""
    return bucket


@torch.no_grad()
def unpack(
    model: nn.Module,
    parts: Sequence[WeightPart],
    expected: frozenset[str] | None = None,
    load: Callable[[Any], np.ndarray] = load_array,
) -> Content:
    """Write the parts of one version into a plain (unsharded) model, in place; what the model then contains.

    Args: expected: names that must all be sent, and no other; None takes what comes. load: a bucket's bytes.

    Raises: ValueError when versions differ, a name or shape does not match, a dtype differs, an element of a sent
    parameter is not covered, or an expected name is missing; RuntimeError when the model's bytes differ from those
    that were sent.
    """
    if len({part.version for part in parts}) != 1:
        raise ValueError(f"weights: parts of versions {sorted({part.version for part in parts})} cannot be mixed")
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    check_plans(parameters, [part.plan for part in parts], expected)
    for part in parts:
        ring = _Ring(part.plan, next(model.parameters()).device)
        for number, bucket in enumerate(part.buckets):
            with ring.slot(number) as (on_device, on_host):
                ring.wait(number)  # the slot's last copy still reads
                on_host.copy_(_tensor(load(bucket))[: on_host.numel()])
                ring.to_device(number)
                drain(on_device, number, part.plan, parameters)
        ring.finish()
    return verify(parts[0].version, held_content(parts[0].plan, parameters), merge([part.content for part in parts]))


def verify(version: int, held: Content, sent: Content) -> Content:
    """The content that is held. Raises RuntimeError, with a tensor's name, when it is not what was sent."""
    if held.digest != sent.digest:
        raise RuntimeError(
            f"weights of version {version}: {held.difference(sent)} is not what was sent (digest {held.digest} after "
            f"loading, {sent.digest} was sent)"
        )
    return held


class _Ring:
    """Two buckets on the host and, on GPUs, two on the device with a stream each; on a CPU they are the same."""

    def __init__(self, plan: Plan, device: torch.device):
        self.sizes, size, self.on_gpu = plan.sizes, max(plan.sizes, default=0), device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(2)]
        self._devices, self._streams = self._hosts, []
        if self.on_gpu:
            self._devices = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def slot(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bucket on the device, bucket on the host) of a number; inside, work is queued on its stream."""
        size, slot = self.sizes[number], number % 2
        with torch.cuda.stream(self._streams[slot]) if self.on_gpu else contextlib.nullcontext():
            yield self._devices[slot][:size], self._hosts[slot][:size]

    def to_host(self, number: int) -> None:
        """Queue the copy of a bucket from the device."""
        if self.on_gpu:
            self._hosts[number % 2].copy_(self._devices[number % 2], non_blocking=True)

    def to_device(self, number: int) -> None:
        """Queue the copy of a bucket to the device."""
        if self.on_gpu:
            self._devices[number % 2].copy_(self._hosts[number % 2], non_blocking=True)

    def host(self, number: int) -> np.ndarray:
        """A bucket's bytes, once they are there."""
        self.wait(number)
        return self._hosts[number % 2][: self.sizes[number]].numpy()

    def wait(self, number: int) -> None:
        """For what is queued on a number's stream."""
        if self.on_gpu:
            self._streams[number % 2].synchronize()

    def finish(self) -> None:
        """For everything."""
        for stream in self._streams:
            stream.synchronize()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A view of an array that may be read-only; it is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
