"""Ulysses sequence parallelism (arXiv:2309.14509): every rank of a group has a share of the tokens, and in attention
all tokens of a share of the heads.

Video and text tokens are each cut into equal shares, with zeros behind the last token where they do not divide.
Attention gets all video tokens, then all text tokens, in order and without those zeros, so its masks are what they are
without a group.

What is computed from gathered tokens is the same on every rank and counts once, so a rank's gradient of a parameter is
the part that its own tokens have in it: the sum over the group is the gradient.

The collectives are those that NCCL and gloo both have, for tensors on their own device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]


class _Place(NamedTuple):
    """Tokens of one rank's share: where they lie in [video share, text share], and where among all S + L tokens."""

    rank: int
    local: slice
    joint: slice


@dataclass(frozen=True)
class TokenShards:
    """How one forward's tokens lie over a group of P ranks: s = ceil(S / P) video and l = ceil(L / P) text tokens each.

    num_video, num_text: S and L.
    """

    group: dist.ProcessGroup
    num_video: int
    num_text: int

    @property
    def size(self) -> int:
        """P."""
        return dist.get_world_size(self.group)

    @property
    def num_local(self) -> int:
        """s + l."""
        return self.share(self.num_video) + self.share(self.num_text)

    def share(self, total: int) -> int:
        """Places for tokens of a stream that each rank has: ceil(total / P)."""
        return -(-total // self.size)

    def cut(self, tokens: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's share of one stream's tokens, which lie along `dim`; differentiable."""
        total = tokens.shape[dim]
        share = self.share(total)
        start = min(dist.get_rank(self.group) * share, total)
        kept = tokens.narrow(dim, start, min(share, total - start))
        missing = share - kept.shape[dim]
        if missing:
            kept = functional.pad(kept, (0, 0) * (tokens.dim() - 1 - dim) + (0, missing))
        return kept.contiguous()

    def places(self) -> Iterator[_Place]:
        """Of every rank's tokens of both streams, padding left out."""
        first_local = first_joint = 0
        for total in (self.num_video, self.num_text):
            share = self.share(total)
            for rank in range(self.size):
                start = min(rank * share, total)
                num = min(share, total - start)
                if num:
                    joint = slice(first_joint + start, first_joint + start + num)
                    yield _Place(rank, slice(first_local, first_local + num), joint)
            first_local, first_joint = first_local + share, first_joint + total


def to_heads(shards: TokenShards, *tensors: torch.Tensor) -> Tensors:
    """[B, s + l, heads, head_dim] of this rank's tokens to [B, S + L, heads / P, head_dim] of its heads, each;
    differentiable. One collective."""
    return _Exchange.apply(shards, True, *tensors)


def to_tokens(shards: TokenShards, *tensors: torch.Tensor) -> Tensors:
    """[B, S + L, heads / P, head_dim] of this rank's heads to [B, s + l, heads, head_dim] of its tokens, zero where
    there is none, each; inverse and transpose of `to_heads`, differentiable. One collective."""
    return _Exchange.apply(shards, False, *tensors)


def gather_video(shards: TokenShards, tokens: torch.Tensor) -> torch.Tensor:
    """All video tokens [B, S, C] from this rank's [B, s, C]; differentiable where every rank goes on with the same."""
    return _Gather.apply(shards, tokens)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards: TokenShards, heads: bool, *tensors: torch.Tensor) -> Tensors:
        ctx.shards, ctx.heads = shards, heads
        return (_heads_of if heads else _tokens_of)(shards, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor):
        return None, None, *(_tokens_of if ctx.heads else _heads_of)(ctx.shards, gradients)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards: TokenShards, tokens: torch.Tensor) -> torch.Tensor:
        ctx.shards = shards
        parts = tokens.new_empty(shards.size, *tokens.shape)
        dist.all_gather(list(parts), tokens.contiguous(), group=shards.group)
        return parts.movedim(0, 1).flatten(1, 2)[:, : shards.num_video].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        return None, ctx.shards.cut(gradient)


def _heads_of(shards: TokenShards, tensors: Sequence[torch.Tensor]) -> Tensors:
    """`to_heads`, without gradient."""
    first, ranks = tensors[0], shards.size
    batch, num_local, heads, head_dim = first.shape
    sent = first.new_empty(ranks, len(tensors), batch, num_local, heads // ranks, head_dim)
    for number, tensor in enumerate(tensors):
        sent[:, number] = tensor.unflatten(2, (ranks, -1)).movedim(2, 0)
    received = _all_to_all(shards, sent)
    num_tokens = shards.num_video + shards.num_text
    whole = first.new_empty(len(tensors), batch, num_tokens, heads // ranks, head_dim)
    for place in shards.places():
        whole[:, :, place.joint] = received[place.rank, :, :, place.local]
    return whole.unbind()


def _tokens_of(shards: TokenShards, tensors: Sequence[torch.Tensor]) -> Tensors:
    """`to_tokens`, without gradient."""
    first = tensors[0]
    batch, _, heads, head_dim = first.shape
    sent = first.new_zeros(shards.size, len(tensors), batch, shards.num_local, heads, head_dim)
    for place in shards.places():
        for number, tensor in enumerate(tensors):
            sent[place.rank, number, :, place.local] = tensor[:, place.joint]
    received = _all_to_all(shards, sent)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in received.unbind(1))


def _all_to_all(shards: TokenShards, sent: torch.Tensor) -> torch.Tensor:
    """Part r of dim 0 to rank r; part r of the result is from rank r."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=shards.group)
    return received
