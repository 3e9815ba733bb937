"""Published weights: every learner rank packs its own shards, a receiver writes them into its parameters' slices.

Nothing is gathered, and the receiver's parameters keep their storage. A part carries the digest of its bytes; the
receiver digests its own parameters after writing, so a skipped or renamed tensor cannot pass unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from sage_ray.parallel import local_shards
from sage_ray.shards import local_extent

ALIGNMENT = 64
"""Bytes; tensors start at multiples of it inside a bucket."""
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Slice:
    """Where one shard lies: in its bucket (byte offset) and in the full parameter (offset and shape)."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    bucket: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class WeightPart:
    """One rank's share of a policy version. buckets: uint8 arrays; digest: hex of the payload bytes in order."""

    version: int
    rank: int
    dtype: str
    slices: tuple[Slice, ...]
    buckets: tuple[np.ndarray, ...]
    digest: str


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the bytes of a tensor, uint8 [num_bytes] (numpy has no bfloat16).

    On the CPU too: a storage that numpy has seen can never be resized again, so its weights could not leave (Parked).
    """
    return tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()


def pack(model: nn.Module, version: int, rank: int, dtype: torch.dtype) -> WeightPart:
    """This rank's trainable shards in `dtype`, packed into aligned buckets."""
    parameters = dict(model.named_parameters())
    slices: list[Slice] = []
    buckets: list[np.ndarray] = []
    pending: list[tuple[int, np.ndarray]] = []
    digest, position = hashlib.blake2b(digest_size=16), 0

    def close_bucket() -> None:
        bucket = np.zeros(position, np.uint8)
        for start, data in pending:
            bucket[start : start + data.size] = data
        buckets.append(bucket)
        pending.clear()

    for name, shard in local_shards(model).items():
        if shard.numel() == 0:
            continue
        data = as_bytes(shard.to(dtype))
        digest.update(data.tobytes())
        slices.append(Slice(name, *local_extent(parameters[name]), len(buckets), position, data.size))
        pending.append((position, data))
        position += -(-data.size // ALIGNMENT) * ALIGNMENT
        if position >= BUCKET_BYTES:
            close_bucket()
            position = 0
    close_bucket()
    return WeightPart(version, rank, str(dtype).split(".")[1], tuple(slices), tuple(buckets), digest.hexdigest())


@torch.no_grad()
def unpack(model: nn.Module, parts: Sequence[WeightPart], expected: frozenset[str] | None = None) -> None:
    """Write the parts of one version into a plain (unsharded) model, in place.

    Args: expected: names that must all be sent, and no other; None takes what comes.

    Raises: ValueError when versions differ, a name or shape does not match, a dtype differs, an element of a sent
    parameter is not covered, or an expected name is missing; RuntimeError when the model's bytes differ from those
    that were sent.
    """
    parameters = dict(model.named_parameters())
    _check(parameters, parts, expected)
    for part in parts:
        for piece, target in _targets(parameters, part):
            data = part.buckets[piece.bucket][piece.start : piece.start + piece.num_bytes]
            target.copy_(torch.from_numpy(np.array(data)).view(getattr(torch, part.dtype)).view(piece.shape))
    for part in parts:
        digest = hashlib.blake2b(digest_size=16)
        for _, target in _targets(parameters, part):
            digest.update(as_bytes(target).tobytes())
        if digest.hexdigest() != part.digest:
            raise RuntimeError(
                f"weights of version {part.version}, learner rank {part.rank}: digest {digest.hexdigest()} after "
                f"loading, {part.digest} was sent"
            )


def _targets(parameters: dict[str, nn.Parameter], part: WeightPart) -> Iterator[tuple[Slice, torch.Tensor]]:
    for piece in part.slices:
        index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        yield piece, parameters[piece.name].data[index]


def _check(parameters: dict[str, nn.Parameter], parts: Sequence[WeightPart], expected: frozenset[str] | None) -> None:
    if len({part.version for part in parts}) != 1:
        raise ValueError(f"weights: parts of versions {sorted({part.version for part in parts})} cannot be mixed")
    covered: dict[str, int] = {}
    for part in parts:
        for piece in part.slices:
            if piece.name not in parameters:
                raise ValueError(f"weights: parameter {piece.name} was sent, the receiver has no such parameter")
            parameter = parameters[piece.name]
            if str(parameter.dtype).split(".")[1] != part.dtype:
                raise ValueError(
                    f"weights: {piece.name} was sent as {part.dtype}, the receiver holds {parameter.dtype}"
                )
            if any(o + n > size for o, n, size in zip(piece.offset, piece.shape, parameter.shape, strict=True)):
                raise ValueError(f"weights: {piece.name} {piece.shape} at {piece.offset} exceeds {parameter.shape}")
            covered[piece.name] = covered.get(piece.name, 0) + int(np.prod(piece.shape))
    if not covered:
        raise ValueError("weights: no parameter was sent")
    if expected is not None and covered.keys() != expected:
        missing = sorted(expected ^ covered.keys())
        raise ValueError(f"weights: {len(missing)} trainable parameters differ, {missing[0]} was not sent or is frozen")
    for name, count in covered.items():
        if count != parameters[name].numel():
            raise ValueError(f"weights: {name} has {parameters[name].numel()} elements, {count} were sent")


def combined_digest(digests: Sequence[str]) -> str:
    """Digest of a whole version from its parts' digests, in rank order."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
