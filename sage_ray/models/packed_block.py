"""A transformer block of HunyuanVideo-1.5 in three pieces: projections in, attention, projections out.

The pieces around attention may be compiled; attention itself is one kernel that is called by name. In a backward pass
with recomputation a block keeps its inputs, and attention's output where memory allows, and runs the pieces again.

What is recomputed is not what is returned: the forward runs without gradient, exactly as a rollout does, so that a
learner's log-probs are the rollout's bit for bit although a compiled piece rounds differently under gradient.

With sequence parallelism the pieces run on a rank's share of the tokens; only around the kernel, outside of the pieces,
ranks exchange tokens for heads and back. What is kept of attention then is of the rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from torch import nn
from torch.autograd.function import once_differentiable

from sage_ray.models.attention import Attended, Tensors, best_kernel, key_mask, project_in, project_out
from sage_ray.sequence_parallel import TokenShards, to_heads, to_tokens


def attention_inputs(
    block: HunyuanVideo15TransformerBlock,
    video: torch.Tensor,
    text: torch.Tensor,
    video_modulation: torch.Tensor,
    text_modulation: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Tensors:
    """Query, key and value [B, S + L, heads, head_dim] of a block's inputs; modulations [1 or B, 6 D]."""
    video_shift, video_scale = video_modulation.chunk(6, 1)[:2]
    text_shift, text_scale = text_modulation.chunk(6, 1)[:2]
    video = block.norm1.norm(video) * (1 + video_scale[:, None]) + video_shift[:, None]
    text = block.norm1_context.norm(text) * (1 + text_scale[:, None]) + text_shift[:, None]
    return project_in(block.attn, video, text, (cos, sin))


def block_outputs(
    block: HunyuanVideo15TransformerBlock,
    video: torch.Tensor,
    text: torch.Tensor,
    video_modulation: torch.Tensor,
    text_modulation: torch.Tensor,
    joint: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's outputs from its inputs and attention's output [B, heads, S + L, head_dim]."""
    attended_video, attended_text = project_out(block.attn, joint, video.shape[1])
    streams = (
        (video, attended_video, video_modulation, block.norm2, block.ff),
        (text, attended_text, text_modulation, block.norm2_context, block.ff_context),
    )
    first, second = (_feed_forward(*stream) for stream in streams)
    return first, second


def _feed_forward(
    x: torch.Tensor, attended: torch.Tensor, modulation: torch.Tensor, norm: nn.Module, feed_forward: nn.Module
) -> torch.Tensor:
    _, _, gate_attention, shift, scale, gate = (part[:, None] for part in modulation.chunk(6, 1))
    x = x + attended * gate_attention
    return x + gate * feed_forward(norm(x) * (1 + scale) + shift)


VARIANTS = 64
"""Of a compiled piece: with gradient and without, the last block (whose text is dropped), batches. Beyond it torch runs
a piece as it is written, with other bits."""


@dataclass(frozen=True)
class BlockPieces:
    """How a block's pieces are run. keep_attention: keep its output where blocks are recomputed."""

    inputs: Callable[..., Tensors] = attention_inputs
    outputs: Callable[..., tuple[torch.Tensor, torch.Tensor]] = block_outputs
    keep_attention: bool = True


def compiled_pieces(keep_attention: bool, backend: str | Callable = "inductor") -> BlockPieces:
    """Pieces that are compiled once for all blocks and every batch and size of video, for any number of text tokens.

    Kernels are chosen by rule, never by measuring or by what was compiled before, so that every process runs the same
    ones.
    """
    options = {"options": {"deterministic": True}} if backend == "inductor" else {}
    inputs, outputs = (
        torch.compile(piece, backend=backend, dynamic=False, **options) for piece in (attention_inputs, block_outputs)
    )

    def any_text(run: Callable, *text: int) -> Callable:
        def marked(block: nn.Module, *tensors: torch.Tensor):
            torch._dynamo.config.recompile_limit = VARIANTS  # settings are each thread's own
            for place in text:
                torch._dynamo.maybe_mark_dynamic(tensors[place], 2 if tensors[place].dim() == 4 else 1)
            return run(block, *tensors)

        return marked

    return BlockPieces(any_text(inputs, 1), any_text(outputs, 1, 4), keep_attention)


def use_pieces(block: HunyuanVideo15TransformerBlock, pieces: BlockPieces) -> None:
    """Let a block's forward run in `pieces`; its parameters and their names stay."""
    block.pieces = pieces  # type: ignore[assignment]
    block.forward = MethodType(_forward, block)


def _forward(
    block: HunyuanVideo15TransformerBlock,
    video: torch.Tensor,
    text: torch.Tensor,
    time: torch.Tensor,
    text_mask: torch.Tensor | None,
    rotary: Tensors,
    recompute: bool = False,
    shards: TokenShards | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video [B, S, D] and text [B, L, D] after the block.

    Args: time: [1 or B, D]. text_mask: valid text, bool [B, L], None where all is. rotary: cos and sin [S, head_dim].
        recompute: keep little for the backward pass and run the pieces again there.
        shards: video, text and rotary are this rank's shares of the tokens; text_mask is of all text tokens.
    """
    pieces: BlockPieces = block.pieces  # type: ignore[assignment]
    modulations = (
        block.norm1.linear(block.norm1.silu(time)),
        block.norm1_context.linear(block.norm1_context.silu(time)),
    )
    mask = key_mask(text_mask, video.shape[1] if shards is None else shards.num_video)
    if recompute and torch.is_grad_enabled():
        return _Recomputed.apply(block, mask, rotary, shards, video, text, *modulations, *_trained(block))
    query, key, value = _to_kernel(pieces.inputs(block, video, text, *modulations, *rotary), shards)
    joint = _own_tokens(best_kernel(query, mask).forward(query, key, value).output, shards)
    return pieces.outputs(block, video, text, *modulations, joint)


def _trained(block: nn.Module) -> list[nn.Parameter]:
    """Trained parameters that the pieces read; the modulations are made outside of them."""
    return [p for name, p in block.named_parameters() if p.requires_grad and not name.startswith("norm1")]


def _to_kernel(tensors: Tensors, shards: TokenShards | None) -> Tensors:
    """Each [B, own tokens, heads, head_dim] as the kernel takes it: [B, own heads, S + L, head_dim]."""
    tensors = tensors if shards is None else to_heads(shards, *tensors)
    return tuple(x.transpose(1, 2) for x in tensors)


def _from_kernel(tensors: Tensors, shards: TokenShards | None) -> Tensors:
    """The transpose of `_to_kernel`."""
    tensors = tuple(x.transpose(1, 2) for x in tensors)
    return tensors if shards is None else to_tokens(shards, *tensors)


def _own_tokens(joint: torch.Tensor, shards: TokenShards | None) -> torch.Tensor:
    """Attention's output [B, own heads, S + L, head_dim] as `block_outputs` takes it: [B, heads, own tokens, ...]."""
    return joint if shards is None else _from_kernel((joint,), shards)[0].transpose(1, 2)


def _own_heads(gradient: torch.Tensor, shards: TokenShards | None) -> torch.Tensor:
    """The transpose of `_own_tokens`."""
    return gradient if shards is None else _to_kernel((gradient.transpose(1, 2),), shards)[0]


class _Recomputed(torch.autograd.Function):
    """A block's pieces, run again in the backward pass. Inputs: video, text, two modulations, trained parameters."""

    @staticmethod
    def forward(ctx, block, mask, rotary, shards, *tensors):
        pieces: BlockPieces = block.pieces
        inputs = [x.detach() for x in tensors[:4]]
        query, key, value = _to_kernel(pieces.inputs(block, *inputs, *rotary), shards)
        kernel = best_kernel(query, mask)
        attended = kernel.forward(query, key, value)
        ctx.block, ctx.rotary, ctx.kernel, ctx.shards = block, rotary, kernel, shards
        ctx.kept = (attended.output.detach(), attended.saved) if pieces.keep_attention else None
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return pieces.outputs(block, *inputs, _own_tokens(attended.output, shards))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        block, kernel, pieces, shards = ctx.block, ctx.kernel, ctx.block.pieces, ctx.shards
        parameters, needed = _trained(block), ctx.needs_input_grad[4:8]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        wanted = [*(x for x in inputs if x.requires_grad), *parameters]
        projected = None
        if ctx.kept is None:
            projected = _with_grad(pieces.inputs, block, *inputs, *ctx.rotary)
            attended = kernel.forward(*_to_kernel(_detached(projected), shards))
        else:
            attended, ctx.kept = Attended(*ctx.kept), None
        joint = _own_tokens(attended.output, shards).detach().requires_grad_()
        results = _with_grad(pieces.outputs, block, *inputs, joint)
        arrived = [(result, g) for result, g in zip(results, gradients, strict=True) if g is not None]
        joint_gradient, *first = _gradients([r for r, _ in arrived], [joint, *wanted], [g for _, g in arrived])
        del results, arrived, joint
        if projected is None:
            projected = _with_grad(pieces.inputs, block, *inputs, *ctx.rotary)
        assert joint_gradient is not None
        second: list[torch.Tensor | None] = [None] * len(wanted)
        if any(x.requires_grad for x in projected):  # not before the first adapted layer; the same on every rank
            query, key, value = _to_kernel(_detached(projected), shards)
            qkv_gradients = kernel.backward(_own_heads(joint_gradient, shards), query, key, value, attended)
            pairs = zip(projected, _from_kernel(qkv_gradients, shards), strict=True)
            outputs, arrived = zip(*((x, g) for x, g in pairs if x.requires_grad), strict=True)
            second = _gradients(outputs, wanted, arrived)
        summed = iter([_sum(a, b) for a, b in zip(first, second, strict=True)])
        return None, None, None, None, *(next(summed) if need else None for need in needed), *summed


def _detached(tensors: Tensors) -> Tensors:
    return tuple(x.detach() for x in tensors)


def _with_grad(run: Callable, *arguments):
    with torch.enable_grad():
        return run(*arguments)


def _gradients(outputs, inputs, gradients) -> list[torch.Tensor | None]:
    """As autograd.grad; None for an input that was not used."""
    return list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b
