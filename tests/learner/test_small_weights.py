"""Hundreds of small tensors, as adapters are: few operations for all of them, and what each would give alone."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sage_ray import checksum, weight_plan
from sage_ray.checksum import merge
from sage_ray.weight_plan import Plan, check_plans, drain, fill, held_content, plan_weights, sent_content, views
from sage_ray.weights import pack, unpack
from tests.learner.test_checksum import by_hand

Shape = tuple[int, ...]
ADAPTER = [(4, 16), (16, 4), (48, 4), (32, 4), (4, 32)]
"""A and B of a block's layers, small."""


class Tensors(nn.Module):
    """One parameter per shape."""

    def __init__(self, shapes: list[Shape], seed: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for place, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"w{place}", nn.Parameter(value))


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do. `detach` is left out: it is how `.data` of a plain parameter shows, a new name
    for memory on the host that launches nothing."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def operations_of_a_publish(num_tensors: int) -> Counter:
    """Of the second one, both ends counted."""
    shapes = [ADAPTER[place % len(ADAPTER)] for place in range(num_tensors)]
    sender, receiver = Tensors(shapes, 0), Tensors(shapes, 1, torch.bfloat16)
    unpack(receiver, [pack(sender, 1, 0, torch.bfloat16)])  # makes the multipliers, which stay
    with Operations() as counted:
        unpack(receiver, [pack(sender, 2, 0, torch.bfloat16)])
    return counted.calls


def test_a_publish_of_many_small_tensors_takes_few_operations() -> None:
    """For 500 tensors: one for each, of any kind, would be above the bound. They do not grow with the tensors."""
    operations = operations_of_a_publish(500)
    assert operations.total() <= 200, operations
    assert operations == operations_of_a_publish(250)


def rows_of(shape: Shape, rank: int, num_ranks: int) -> tuple[Shape, Shape]:
    """(shape, offset) of a shard along rows, as torch.chunk cuts; rank 0 has all of a scalar."""
    if not shape:
        return shape, ()
    size = -(-shape[0] // num_ranks)
    first, last = (min(shape[0], size * place) for place in (rank, rank + 1))
    return (last - first, *shape[1:]), (first, *(0 for _ in shape[1:]))


def sent(model: nn.Module, rank: int, num_ranks: int, dtype: torch.dtype, bucket_bytes: int) -> tuple[Plan, dict]:
    """A rank's plan and shards."""
    with patch.object(weight_plan, "local_extent", lambda p: rows_of(tuple(p.shape), rank, num_ranks)):
        plan = plan_weights(model, dtype, bucket_bytes)
    shards = {}
    for name, parameter in model.named_parameters():
        shape, offset = rows_of(tuple(parameter.shape), rank, num_ranks)
        shards[name] = parameter.data[offset[0] : offset[0] + shape[0]] if shape else parameter.data
    return plan, shards


some_shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@given(some_shapes, st.data(), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_values_and_digest_are_those_of_each_tensor_alone(kinds: list[Shape], data, num_ranks: int, seed: int) -> None:
    """Shapes that come back, shards of several ranks and some without rows, chunks and buckets of few bytes, casts."""
    shapes = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=20))
    held_in, sent_in = data.draw(st.sampled_from([(torch.float32,) * 2, (torch.float32, torch.bfloat16)]))
    limits = {key: data.draw(st.integers(1, 2000), key) for key in ("BATCH_BYTES", "SMALL_BYTES")}
    model, receiver = Tensors(shapes, seed, held_in), Tensors(shapes, seed + 1, sent_in)
    bucket_bytes, parameters = data.draw(st.integers(1, 2000)), {n: p.data for n, p in receiver.named_parameters()}
    plans, contents = [], []
    with patch.multiple(checksum, CHUNK_WORDS=32, **limits):
        for rank in range(num_ranks):
            plan, shards = sent(model, rank, num_ranks, sent_in, bucket_bytes)
            for number, size in enumerate(plan.sizes):
                bucket = torch.zeros(size, dtype=torch.uint8)
                fill(bucket, number, plan, shards)
                drain(bucket, number, plan, parameters)
            plans.append(plan)
            contents.append(sent_content(plan, shards))
        held = held_content(plans[0], parameters)
        expected = [parameter.data.to(sent_in) for parameter in model.parameters()]
        sums = b"".join(by_hand(wanted) for wanted in expected)
    check_plans(parameters, plans, frozenset(parameters))
    assert all(torch.equal(value, wanted) for value, wanted in zip(parameters.values(), expected, strict=True))
    assert held.sums == sums
    assert merge(contents) == held and merge(contents).digest == held.digest


@given(some_shapes, st.data())
@settings(max_examples=50)
def test_slices_lie_in_a_bucket_apart_and_as_shards_lie(kinds: list[Shape], data) -> None:
    """Equal strides too: with others CUDA copies a list of tensors one by one."""
    shapes = data.draw(st.lists(st.sampled_from([(), *kinds]), min_size=1, max_size=20))
    model = Tensors(shapes, 0)
    plan = plan_weights(model, torch.float32, data.draw(st.integers(1, 2000)))
    parameters = dict(model.named_parameters())
    assert sorted(piece.name for piece in plan.slices) == sorted(parameters)
    for number, size in enumerate(plan.sizes):
        bucket, pieces = torch.zeros(size, dtype=torch.uint8), plan.of_bucket(number)
        for place, (view, piece) in enumerate(zip(views(bucket, pieces, plan.dtype), pieces, strict=True)):
            assert (view.shape, view.stride()) == (parameters[piece.name].shape, parameters[piece.name].stride())
            assert view.data_ptr() == bucket.data_ptr() + piece.start and piece.start % weight_plan.ALIGNMENT == 0
            assert (view == 0).all()
            view.fill_(1 + place)
