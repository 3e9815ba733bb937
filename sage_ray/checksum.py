"""A checksum of weights that runs where they lie, on a CPU or a GPU, and adds over shards.

A parameter's bytes, in order, are read as 64-bit words and cut into chunks of `CHUNK_WORDS`. Every chunk gives two sums
modulo 2^64, sum(word * a[place]) and sum(high half of word * b[place]), with odd multipliers a, b that differ in their
lowest bits. Names, shapes, dtype and all sums are then hashed on the host. So one changed element always changes a
sum, and so does a swap of two elements that differ: within a chunk a difference of d = odd * 2^v in a word's low half
(v < 32) times a difference of multipliers (2^u, u < 24) cannot vanish modulo 2^64, nor can one in the high half in the
second sum; over chunks each chunk sees a change of its own. Damage of many places is missed by chance only. It is no
defence against somebody who wants to deceive.

A shard's sums are those of the whole parameter with zeros elsewhere, so sums of all ranks add up to the whole's.

On a GPU a small tensor takes as long as its launches. Small parts of one shape that begin at one place of their
parameters meet the same multipliers, so they are stacked and summed together; each keeps its own sums.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHUNK_WORDS = 2**23
"""64 MiB, more than any tensor of the real model: two such arrays, and the products of one, are the most memory that a
checksum takes."""
BATCH_BYTES, SMALL_BYTES = 24 * 2**20, 2**22
"""What is stacked at a time, and the largest part that is worth it. From 32 MiB on a CPU maps new pages every time."""
LOW, WORD = 2 * CHUNK_WORDS, 8
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Piece = tuple[str, torch.Tensor, int]
"""Name, contiguous part of a parameter, and the element of the parameter at which the part begins."""


@dataclass(frozen=True)
class Content:
    """What weights are, without their bytes. dtype: of every tensor; shapes: full shapes by name; sums: uint64
    [chunks, 2] as bytes. Equal contents have equal digests."""

    dtype: str
    shapes: Shapes
    sums: bytes

    @functools.cached_property
    def digest(self) -> str:
        """Hex of 128 bits of everything."""
        head = repr((self.dtype, self.shapes)).encode()
        return hashlib.blake2b(len(head).to_bytes(8, "little") + head + self.sums, digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(math.prod(shape) for _, shape in self.shapes) * getattr(torch, self.dtype).itemsize

    def difference(self, other: Content) -> str | None:
        """Name of the first tensor in which two contents differ, None where they are equal."""
        if self.dtype != other.dtype or self.shapes != other.shapes:
            return _first_unlike(self, other)
        mine, theirs = _table(self.sums), _table(other.sums)
        for name, rows in chunk_rows(self.shapes, self.dtype).items():
            if not np.array_equal(mine[rows], theirs[rows]):
                return name
        return None


def merge(contents: Sequence[Content]) -> Content:
    """The content of all shards together. Raises ValueError where they are not of the same model."""
    first = contents[0]
    for other in contents[1:]:
        if (other.dtype, other.shapes) != (first.dtype, first.shapes):
            raise ValueError(f"weights: shards of different models, {first.difference(other)} differs")
    total = np.sum([_table(content.sums) for content in contents], axis=0, dtype=np.uint64)
    return Content(first.dtype, first.shapes, total.tobytes())


@torch.no_grad()
def content(shapes: Shapes, pieces: Iterable[Piece], dtype: torch.dtype, cast: bool = False) -> Content:
    """The content of some pieces of a model whose trainable parameters have `shapes`; zeros stand for what is missing.

    Args: pieces: all on one device. cast: pieces of other dtypes count as what they become in `dtype`.

    Raises: ValueError when a piece is not of `dtype` (without `cast`) or lies outside of its parameter.
    """
    name_of, rows = str(dtype).removeprefix("torch."), chunk_rows(shapes, str(dtype).removeprefix("torch."))
    table = np.zeros((sum(len(r) for r in rows.values()), 2), np.uint64)
    places, low_sums, high_sums = [], [], []
    for names, start, batch in _batches(_checked(shapes, pieces, dtype, cast)):
        for chunk, low, high in _chunk_sums(batch.to(dtype), start):
            places += [rows[name][chunk] for name in names]
            low_sums.append(low)
            high_sums.append(high)
    if places:
        found = torch.stack([torch.cat(low_sums), torch.cat(high_sums)], 1)
        np.add.at(table, places, found.cpu().numpy().view(np.uint64))
    return Content(name_of, shapes, table.tobytes())


def chunk_rows(shapes: Shapes, dtype: str) -> dict[str, range]:
    """Name -> rows of its chunks in the table of sums."""
    size, rows, begin = getattr(torch, dtype).itemsize, {}, 0
    for name, shape in shapes:
        count = -(-math.prod(shape) * size // (CHUNK_WORDS * WORD))
        rows[name] = range(begin, begin + count)
        begin += count
    return rows


def _checked(shapes: Shapes, pieces: Iterable[Piece], dtype: torch.dtype, cast: bool) -> Iterator[Piece]:
    sizes = {name: math.prod(shape) for name, shape in shapes}
    for name, tensor, start in pieces:
        if not tensor.is_contiguous():
            raise ValueError(f"checksum: {name} must be contiguous")
        held = dtype if cast else tensor.dtype
        if held != dtype or start + tensor.numel() > sizes[name]:
            raise ValueError(f"checksum: {name} holds {tensor.numel()} {held} from {start}, not {dtype} inside")
        yield name, tensor, start


def _batches(pieces: Iterable[Piece]) -> Iterator[tuple[list[str], int, torch.Tensor]]:
    """(names, start, [names, elements]): a large piece alone and not copied, small ones with their like."""
    waiting: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        _, tensor, start = piece
        key, most = (tensor.shape, tensor.dtype, start), 1
        if 0 < tensor.nbytes <= SMALL_BYTES:
            most = max(1, BATCH_BYTES // tensor.nbytes)
        waiting.setdefault(key, []).append(piece)
        if len(waiting[key]) == most:
            yield _stacked(waiting.pop(key))
    for alike in waiting.values():
        yield _stacked(alike)


def _stacked(alike: list[Piece]) -> tuple[list[str], int, torch.Tensor]:
    tensors, start = [tensor for _, tensor, _ in alike], alike[0][2]
    batch = torch.stack(tensors) if len(tensors) > 1 else tensors[0]
    return [name for name, _, _ in alike], start, batch.reshape(len(tensors), tensors[0].numel())


def _chunk_sums(batch: torch.Tensor, start: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(chunk, both sums, int64 [count]) for every chunk that is touched by parts [count, elements] of as many
    parameters, which begin at one element of them."""
    size, chunk_bytes = batch.element_size(), CHUNK_WORDS * WORD
    position, end = start * size, (start + batch.shape[1]) * size
    while position < end:
        chunk, offset = divmod(position, chunk_bytes)
        stop = min(end, (chunk + 1) * chunk_bytes)
        word, lead = divmod(offset, WORD)
        words = _words(batch[:, position // size - start : stop // size - start], lead)
        last = word + words.shape[1]
        low, high = _multipliers(batch.device, 1 << (last - 1).bit_length())
        yield chunk, _weighted(words, low[word:last]), _weighted(_high_halves(words), high[word:last])
        position = stop


def _weighted(words: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """sum(words * multipliers) modulo 2^64 of every row."""
    return torch.mv(words, multipliers) if _multiplies(words.device) else (words * multipliers).sum(1)


def _high_halves(words: torch.Tensor) -> torch.Tensor:
    """Signed; a view where the product widens it."""
    return words >> 32 if _multiplies(words.device) else words.view(torch.int32)[:, 1::2]


def _multiplies(device: torch.device) -> bool:
    """Whether there are products of integer matrices: CUDA has none, on a CPU they are up to ten times as fast."""
    return device.type == "cpu"


def _words(parts: torch.Tensor, lead: int) -> torch.Tensor:
    """int64 [count, n] of the bytes of parts that begin `lead` bytes into a word; a copy where they are not aligned."""
    size, num_bytes = parts.element_size(), parts.shape[1] * parts.element_size()
    places = (lead, num_bytes, parts.data_ptr(), parts.storage_offset() * size, parts.stride(0) * size)
    if all(place % WORD == 0 for place in places):
        return parts.view(torch.int64)
    words = torch.zeros(len(parts), -(-(lead + num_bytes) // WORD), dtype=torch.int64, device=parts.device)
    words.view(torch.uint8)[:, lead : lead + num_bytes] = parts.view(torch.uint8)
    return words


@functools.cache
def _multipliers(device: torch.device, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 [count] of odd numbers on a device; their lowest 24 bits are 2 * place + 1, the others as if drawn."""
    both = []
    for stream in range(2):
        places = np.arange(count, dtype=np.uint64)
        mixed = (places + np.uint64(1 + (stream << 40))) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        numbers = (mixed & ~np.uint64(LOW - 1)) | (2 * places + np.uint64(1))
        both.append(torch.from_numpy(numbers.view(np.int64)).to(device))
    return both[0], both[1]


def _table(sums: bytes) -> np.ndarray:
    return np.frombuffer(sums, np.uint64).reshape(-1, 2)


def _first_unlike(one: Content, other: Content) -> str:
    if one.dtype != other.dtype:
        return f"dtype ({one.dtype}, {other.dtype})"
    mine, theirs = dict(one.shapes), dict(other.shapes)
    unlike = [name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name)]
    return unlike[0] if unlike else "the order of tensors"
