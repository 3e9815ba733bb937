"""Where every shard of a rank's published weights lies: in the full parameter, and in the buckets that carry it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from sage_ray.checksum import Content, Shapes, content
from sage_ray.shards import local_extent

ALIGNMENT = 64
"""Bytes; tensors start at multiples of it inside a bucket."""
BUCKET_BYTES = 256 * 2**20
"""A bucket ends before the tensor that would make it larger."""


@dataclass(frozen=True)
class Slice:
    """Where one shard lies: in its bucket (byte offset) and in the full parameter (offset and shape)."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    bucket: int
    start: int
    num_bytes: int

    @property
    def room(self) -> int:
        """Bytes that it takes of its bucket, with the gap behind it."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """What one rank publishes: dtype on the way, full shapes of all that is published, its slices, bytes per bucket."""

    dtype: str
    shapes: Shapes
    slices: tuple[Slice, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the slices."""
        return sum(piece.num_bytes for piece in self.slices)

    def of_bucket(self, bucket: int) -> list[Slice]:
        """Its slices."""
        return [piece for piece in self.slices if piece.bucket == bucket]


def plan_weights(model: nn.Module, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """The plan of this rank's trainable shards; those of one shape lie one behind the other."""
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    shards, slices, sizes, position = [(name, *local_extent(p)) for name, p in trainable], [], [], 0
    kinds = list(dict.fromkeys(shape for _, shape, _ in shards))
    for name, shape, offset in sorted(shards, key=lambda shard: kinds.index(shard[1])):
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            continue
        if position and position + num_bytes > bucket_bytes:
            sizes.append(position)
            position = 0
        slices.append(Slice(name, shape, offset, len(sizes), position, num_bytes))
        position += slices[-1].room
    if position:
        sizes.append(position)
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in trainable)
    return Plan(str(dtype).removeprefix("torch."), shapes, tuple(slices), tuple(sizes))


def fill(bucket: torch.Tensor, number: int, plan: Plan, shards: Mapping[str, torch.Tensor]) -> None:
    """Copy a bucket's shards into uint8 [n], cast to the plan's dtype; what lies between them stays what it was."""
    pieces = plan.of_bucket(number)
    torch._foreach_copy_(views(bucket, pieces, plan.dtype), [shards[piece.name] for piece in pieces])


def drain(bucket: torch.Tensor, number: int, plan: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Copy a bucket's slices to their places in full parameters of the plan's dtype."""
    pieces = plan.of_bucket(number)
    torch._foreach_copy_([target(parameters, piece) for piece in pieces], views(bucket, pieces, plan.dtype))


def views(bucket: torch.Tensor, pieces: Sequence[Slice], dtype: str) -> list[torch.Tensor]:
    """Slices inside of uint8 [n], contiguous; those of one shape that follow each other are cut together."""
    elements, found = bucket.view(getattr(torch, dtype)), []
    size = elements.element_size()
    for run in _runs(pieces):
        start, room, count = run[0].start // size, run[0].room // size, run[0].num_bytes // size
        rows = elements[start : start + len(run) * room].view(len(run), room)[:, :count]
        found += rows.view(len(run), *run[0].shape).unbind()
    return found


def _runs(pieces: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Slices of one shape, each directly behind the one before."""
    numbered = enumerate(pieces)
    for _, run in groupby(numbered, lambda one: (one[1].shape, one[1].room, one[1].start - one[0] * one[1].room)):
        yield [piece for _, piece in run]


def target(parameters: Mapping[str, torch.Tensor], piece: Slice) -> torch.Tensor:
    """A slice inside of its full parameter."""
    parameter = parameters[piece.name]
    if piece.shape == tuple(parameter.shape):
        return parameter
    return parameter[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]


def sent_content(plan: Plan, shards: Mapping[str, torch.Tensor]) -> Content:
    """The content of what a rank publishes, computed from its shards and not from the buckets."""
    full = dict(plan.shapes)
    pieces = ((p.name, shards[p.name].contiguous(), _first(p, full[p.name])) for p in plan.slices)
    return content(plan.shapes, pieces, getattr(torch, plan.dtype), cast=True)


def held_content(plan: Plan, parameters: Mapping[str, torch.Tensor]) -> Content:
    """The content of a receiver's parameters, of those that a plan names."""
    pieces = ((name, parameters[name].contiguous(), 0) for name, _ in plan.shapes)
    return content(plan.shapes, pieces, getattr(torch, plan.dtype))


def check_plans(parameters: Mapping[str, torch.Tensor], plans: Sequence[Plan], expected: frozenset[str] | None) -> None:
    """Whether all ranks' plans together are what a receiver needs.

    Raises: ValueError when a name, shape or dtype does not match, an element of a sent parameter is not covered or is
    sent twice, nothing is sent, or `expected` is given and names others.
    """
    covered: dict[str, int] = {}
    for plan in plans:
        full = dict(plan.shapes)
        if plan.shapes != plans[0].shapes:
            raise ValueError("weights: learner ranks differ in what they publish")
        for piece in plan.slices:
            _check_slice(parameters, plan.dtype, piece, full.get(piece.name))
            covered[piece.name] = covered.get(piece.name, 0) + math.prod(piece.shape)
    if not covered:
        raise ValueError("weights: no parameter was sent")
    if expected is not None and covered.keys() != expected:
        missing = sorted(expected ^ covered.keys())
        raise ValueError(f"weights: {len(missing)} trainable parameters differ, {missing[0]} was not sent or is frozen")
    for name, count in covered.items():
        if count != parameters[name].numel():
            raise ValueError(f"weights: {name} has {parameters[name].numel()} elements, {count} were sent")


def _check_slice(
    parameters: Mapping[str, torch.Tensor], dtype: str, piece: Slice, full: tuple[int, ...] | None
) -> None:
    if piece.name not in parameters:
        raise ValueError(f"weights: parameter {piece.name} was sent, the receiver has no such parameter")
    parameter = parameters[piece.name]
    if str(parameter.dtype).removeprefix("torch.") != dtype:
        raise ValueError(f"weights: {piece.name} was sent as {dtype}, the receiver holds {parameter.dtype}")
    if full != tuple(parameter.shape):
        raise ValueError(f"weights: {piece.name} was sent as {full}, the receiver holds {tuple(parameter.shape)}")
    if any(o + n > size for o, n, size in zip(piece.offset, piece.shape, parameter.shape, strict=True)):
        raise ValueError(f"weights: {piece.name} {piece.shape} at {piece.offset} exceeds {tuple(parameter.shape)}")


def _first(piece: Slice, full: tuple[int, ...]) -> int:
    """The element of the full parameter at which a shard begins: FSDP2 shards along rows."""
    if piece.shape[1:] != full[1:]:
        raise ValueError(f"weights: {piece.name} is sharded along {piece.shape} of {full}, not along rows")
    return piece.offset[0] * math.prod(full[1:]) if full else 0
