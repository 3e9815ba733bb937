"""Published weights: what is sent is what the receiver holds, or an error says which tensor is not."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from sage_ray.weights import WeightPart, pack, unpack


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def with_slices(part: WeightPart, *slices) -> WeightPart:
    return dataclasses.replace(part, plan=dataclasses.replace(part.plan, slices=slices))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bitwise_and_keeps_storage(dtype: torch.dtype) -> None:
    sender, receiver = net(0), net(1).to(dtype)
    addresses = [p.data_ptr() for p in receiver.parameters()]
    unpack(receiver, [pack(sender, 3, 0, dtype)])
    for a, b in zip(sender.parameters(), receiver.parameters(), strict=True):
        assert torch.equal(a.to(dtype), b)
    assert addresses == [p.data_ptr() for p in receiver.parameters()]


def test_one_changed_weight_changes_the_digest() -> None:
    sender = net(0)
    first = pack(sender, 0, 0, torch.float32).content.digest
    with torch.no_grad():
        sender[1].weight[1, 4] += 1e-7
    assert pack(sender, 0, 0, torch.float32).content.digest != first


def test_frozen_parameters_are_not_sent() -> None:
    sender = net(0)
    sender[0].requires_grad_(False)
    assert {piece.name for piece in pack(sender, 0, 0, torch.float32).plan.slices} == {"1.weight", "1.bias"}


def test_renamed_parameter_raises() -> None:
    part = pack(net(0), 0, 0, torch.float32)
    renamed = dataclasses.replace(part.plan.slices[0], name="_orig_mod.0.weight")
    with pytest.raises(ValueError, match=r"_orig_mod\.0\.weight"):
        unpack(net(1), [with_slices(part, renamed, *part.plan.slices[1:])])


def test_nothing_sent_raises() -> None:
    part = pack(net(0), 0, 0, torch.float32)
    with pytest.raises(ValueError, match="no parameter was sent"):
        unpack(net(1), [with_slices(part)])


def test_missing_slice_raises() -> None:
    part = pack(net(0), 0, 0, torch.float32)
    half = dataclasses.replace(part.plan.slices[0], shape=(2, 3))
    with pytest.raises(ValueError, match="15 elements, 6 were sent"):
        unpack(net(1), [with_slices(part, half, *part.plan.slices[1:])])


def test_a_parameter_that_was_not_sent_is_noticed() -> None:
    sender, receiver = net(0), net(1)
    names = frozenset(name for name, _ in sender.named_parameters())
    unpack(receiver, [pack(sender, 0, 0, torch.float32)], names)
    sender[1].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"1\.bias was not sent"):
        unpack(receiver, [pack(sender, 0, 0, torch.float32)], names)


def test_float32_sent_to_a_bfloat16_receiver_raises() -> None:
    with pytest.raises(ValueError, match="sent as float32, the receiver holds"):
        unpack(net(1).bfloat16(), [pack(net(0), 0, 0, torch.float32)])


def test_mixed_versions_raise() -> None:
    with pytest.raises(ValueError, match=r"versions \[0, 1\]"):
        unpack(net(1), [pack(net(0), 0, 0, torch.float32), pack(net(0), 1, 1, torch.float32)])


def test_flipped_byte_is_noticed() -> None:
    part = pack(net(0), 5, 2, torch.float32)
    bucket = copy.deepcopy(part.buckets[0])
    bucket[part.plan.slices[1].start] ^= 1
    with pytest.raises(RuntimeError, match=r"version 5: 0\.bias is not what was sent"):
        unpack(net(1), [dataclasses.replace(part, buckets=(bucket,))])


class Tied(nn.Module):
    """Two names for one weight, and a buffer that both sides compute for themselves."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(3.0))


def test_tied_weights_arrive_under_both_names_and_stay_tied() -> None:
    sender, receiver = Tied(0), Tied(1)
    part = pack(sender, 1, 0, torch.float32)
    assert [piece.name for piece in part.plan.slices] == ["embed.weight"]
    unpack(receiver, [part], frozenset({"embed.weight"}))
    assert receiver.head.weight is receiver.embed.weight
    assert torch.equal(receiver.head.weight, sender.embed.weight)
    assert receiver.state_dict().keys() == sender.state_dict().keys()
    for name, value in receiver.state_dict().items():
        assert torch.equal(value, sender.state_dict()[name]), name
