"""The checksum of weights: sums over shards, and no single change goes unseen."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray import checksum
from sage_ray.checksum import LOW, Content, _multipliers, content, merge

DTYPES = (torch.bfloat16, torch.float32)
sizes = st.integers(1, 700)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    """Of 256 bytes, so that small tensors have many."""
    monkeypatch.setattr(checksum, "CHUNK_WORDS", 32)


def drawn(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of(tensor: torch.Tensor, name: str = "w") -> Content:
    return content(((name, tuple(tensor.shape)),), [(name, tensor, 0)], tensor.dtype)


def by_hand(tensor: torch.Tensor) -> bytes:
    """The definition in Python's integers."""
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words, chunk = np.frombuffer(data, np.int64), checksum.CHUNK_WORDS
    low, high = (table.numpy() for table in _multipliers(torch.device("cpu"), 32))
    sums = []
    for start in range(0, len(words), chunk):
        part = [int(word) for word in words[start : start + chunk]]
        sums += [sum(w * int(m) for w, m in zip(part, low)) % 2**64]
        sums += [sum((w >> 32) * int(m) for w, m in zip(part, high)) % 2**64]
    return np.array(sums, np.uint64).tobytes()


@given(sizes, st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=30)
def test_it_is_what_it_says(size: int, dtype: torch.dtype, seed: int) -> None:
    assert of(drawn(size, dtype, seed)).sums == by_hand(drawn(size, dtype, seed))


many = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.booleans()), min_size=1, max_size=12)


@pytest.mark.parametrize("multiplies", [True, False], ids=["cpu", "cuda"])
@given(many, st.sampled_from(DTYPES), st.integers(1, 600), st.integers(0, 600), st.integers(0, 5))
@settings(max_examples=60)
def test_many_together_are_what_each_is_alone(
    multiplies: bool, drawn_shapes: list, dtype: torch.dtype, batch: int, small: int, start: int
) -> None:
    """By a GPU's formula too: float32 masters of which some have one shape, some begin inside of their parameter."""
    shapes, pieces, sums = [], [], b""
    for place, (rows, columns, inside) in enumerate(drawn_shapes):
        name, tensor, begin = f"w{place}", drawn(40 * rows * columns, torch.float32, place), start * inside
        shapes.append((name, (begin + tensor.numel(),)))
        pieces.append((name, tensor.view(40 * rows, columns), begin))
        sums += by_hand(torch.cat([torch.zeros(begin), tensor]).to(dtype))
    with patch.multiple(checksum, BATCH_BYTES=40 * batch, SMALL_BYTES=40 * small, _multiplies=lambda _: multiplies):
        assert content(tuple(shapes), pieces, dtype, cast=True).sums == sums


@given(sizes, st.sampled_from(DTYPES), st.lists(st.floats(0, 1), max_size=4))
@settings(max_examples=50)
def test_shards_add_up(size: int, dtype: torch.dtype, cuts: list[float]) -> None:
    whole = drawn(size, dtype, 1)
    edges = sorted({0, size, *(round(cut * size) for cut in cuts)})
    shapes = (("w", (size,)),)
    parts = [content(shapes, [("w", whole[a:b], a)], dtype) for a, b in zip(edges, edges[1:])]
    assert merge(parts) == of(whole) and merge(parts).digest == of(whole).digest


@given(sizes, st.sampled_from(DTYPES), st.integers(0), st.integers(0, 31))
@settings(max_examples=100)
def test_every_flipped_bit_is_seen(size: int, dtype: torch.dtype, place: int, bit: int) -> None:
    tensor = drawn(size, dtype, 2)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[place % (size * dtype.itemsize)] ^= 1 << bit % 8
    assert of(tensor).sums != of(flipped).sums and of(tensor).difference(of(flipped)) == "w"


@given(st.integers(2, 700), st.sampled_from(DTYPES), st.integers(0), st.integers(0), st.booleans())
@settings(max_examples=200)
def test_every_swap_is_seen(size: int, dtype: torch.dtype, one: int, other: int, opposite: bool) -> None:
    """Of values that differ in their sign alone too, which a plain weighted sum would lose."""
    tensor, one, other = drawn(size, dtype, 3), one % size, other % size
    if opposite:
        tensor[other] = -tensor[one]
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    assert (of(tensor).sums == of(swapped).sums) == torch.equal(tensor, swapped)


def test_names_shapes_and_dtypes_are_part_of_it() -> None:
    tensor = drawn(12, torch.float32, 4)
    others = [
        of(tensor, "v"),
        of(tensor.view(3, 4)),
        of(tensor.view(torch.int32)),
        of(torch.cat([tensor, tensor[:1] * 0])),
    ]
    assert len({one.digest for one in (of(tensor), *others)}) == 5
    assert of(tensor).difference(others[0]) == "w" and "dtype" in str(of(tensor).difference(others[2]))
    with pytest.raises(ValueError, match="shards of different models, w differs"):
        merge([of(tensor), others[0]])


def test_what_does_not_fit_raises() -> None:
    with pytest.raises(ValueError, match="w holds 12 torch.float32 from 1, not torch.float32 inside"):
        content((("w", (12,)),), [("w", drawn(12, torch.float32, 0), 1)], torch.float32)
    with pytest.raises(ValueError, match="w holds 12 torch.float32 from 0, not torch.bfloat16 inside"):
        content((("w", (12,)),), [("w", drawn(12, torch.float32, 0), 0)], torch.bfloat16)
    with pytest.raises(ValueError, match="w holds 12 torch.bfloat16 from 1, not torch.bfloat16 inside"):
        content((("w", (12,)),), [("w", drawn(12, torch.float32, 0), 1)], torch.bfloat16, cast=True)
    with pytest.raises(ValueError, match="w must be contiguous"):
        of(drawn(12, torch.float32, 0).view(3, 4).T)


def test_multipliers_are_odd_and_differ_in_their_lowest_bits() -> None:
    for table in _multipliers(torch.device("cpu"), 4096):
        numbers = table.numpy().view(np.uint64)
        assert (numbers % 2 == 1).all() and len(np.unique(numbers % LOW)) == 4096
