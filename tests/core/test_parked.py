"""Tensors leave their storage and come back bit for bit, where every view and parameter finds them."""

import gc

import pytest
import torch
from torch import nn

from sage_ray import parked
from sage_ray.parked import ALIGNMENT, Parked, host_buffers, tensors_of


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_everything_comes_back_bitwise_in_place() -> None:
    whole = torch.randn(6, 5)
    view, odd = whole[1:4, ::2], torch.randn(7, dtype=torch.bfloat16)
    nothing, tied = torch.empty(0), whole.t()
    parameter = nn.Parameter(torch.randn(3))
    tensors = [view, odd, nothing, tied, whole, parameter]
    before = [t.detach().clone() for t in tensors]
    host = Parked()
    assert not host.is_parked
    assert host.park(tensors[:3], tensors[3:]) == 6 * 5 * 4 + 7 * 2 + 3 * 4
    assert host.is_parked and nbytes(*tensors) == 0
    host.unpark()
    host.unpark()
    assert not host.is_parked
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    whole[2, 2] = 9.0
    assert view[1, 1] == 9.0 and tied[2, 2] == 9.0


def test_parking_twice_is_refused() -> None:
    host = Parked()
    host.park([torch.ones(1)])
    with pytest.raises(RuntimeError, match="parked already"):
        host.park([torch.ones(1)])


def test_memory_that_numpy_shares_cannot_leave_and_then_nothing_does() -> None:
    mine, shared, host = torch.ones(3), torch.ones(3), Parked()
    shared.numpy()
    with pytest.raises(RuntimeError, match="clone it first"):
        host.park([mine], [shared])
    assert not host.is_parked and mine.tolist() == shared.tolist() == [1.0] * 3


def test_what_may_change_is_copied_every_time_and_what_is_frozen_once() -> None:
    changing, frozen = torch.zeros(4), torch.zeros(4)
    host = Parked()
    for value in (1.0, 2.0, 3.0):
        changing.fill_(value)
        frozen.fill_(value)
        host.park([changing], [frozen])
        host.unpark()
        assert changing.tolist() == [value] * 4 and frozen.tolist() == [1.0] * 4
    host.park([changing, frozen], [frozen])
    host.unpark()
    assert frozen.tolist() == [1.0] * 4


def test_a_frozen_tensor_that_was_left_out_or_resized_is_copied_again() -> None:
    frozen, other = torch.zeros(4), torch.zeros(2)
    host = Parked()
    for tensors in ([frozen], [other], [frozen]):
        host.park([], tensors)
        host.unpark()
        frozen.add_(1.0)
    assert frozen.tolist() == [3.0] * 4
    frozen.resize_(1000).fill_(5.0)
    host.park([], [frozen])
    host.unpark()
    assert frozen.tolist() == [5.0] * 1000


def test_a_tensor_that_its_owner_drops_is_not_kept_alive() -> None:
    host, mine = Parked(), torch.ones(1000)
    host.park([mine])
    host.unpark()
    storage = parked.StorageWeakRef(mine.untyped_storage())
    assert not storage.expired()
    del mine
    gc.collect()
    assert storage.expired()


def test_host_memory_is_cut_from_slabs(monkeypatch) -> None:
    monkeypatch.setattr(parked, "SLAB_BYTES", 4 * ALIGNMENT)
    sizes = [1, ALIGNMENT, ALIGNMENT + 1, 9 * ALIGNMENT, 3, 5]
    buffers = host_buffers(sizes, pin_memory=False)
    assert [b.numel() for b in buffers] == sizes
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert all(bool((buffer == number).all()) for number, buffer in enumerate(buffers))
    slabs = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers}
    assert list(slabs.values()) == [4 * ALIGNMENT, 9 * ALIGNMENT, 2 * ALIGNMENT]


def test_a_module_is_split_into_what_training_changes_and_the_rest() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    changing, frozen = tensors_of(model)
    assert {id(t) for t in frozen} == {id(t) for t in model[0].parameters()}
    assert {id(t) for t in changing} == {id(t) for t in (*model[1].parameters(), *model[1].buffers())}
