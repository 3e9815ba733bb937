"""A transformer block of HunyuanVideo-1.5 in three pieces: projections in, attention, projections out.

The pieces around attention may be compiled; attention itself is one kernel that is called by name. In a backward pass
with recomputation a block keeps its inputs, and attention's output where memory allows, and runs the pieces again.

What is recomputed is not what is returned: the forward runs without gradient, exactly as a rollout does, so that a
learner's log-probs are the rollout's bit for bit although a compiled piece rounds differently under gradient.
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


@dataclass(frozen=True)
class BlockPieces:
    """How a block's pieces are run. keep_attention: keep its output where blocks are recomputed."""

    inputs: Callable[..., Tensors] = attention_inputs
    outputs: Callable[..., tuple[torch.Tensor, torch.Tensor]] = block_outputs
    keep_attention: bool = True


def compiled_pieces(keep_attention: bool, backend: str = "inductor") -> BlockPieces:
    """Pieces that are compiled once for all blocks, for a fixed number of video tokens and any number of text tokens.

    Kernels are chosen by rule, never by measuring, so that every process runs the same ones.
    """
    options = {"options": {"deterministic": True}} if backend == "inductor" else {}
    # Variants of one piece: with gradient and without, the last block (whose text is dropped), batch sizes.
    torch._dynamo.config.recompile_limit = 64
    inputs, outputs = (torch.compile(piece, backend=backend, **options) for piece in (attention_inputs, block_outputs))

    def any_text(run: Callable, *text: int) -> Callable:
        def marked(block: nn.Module, *tensors: torch.Tensor):
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video [B, S, D] and text [B, L, D] after the block.

    Args: time: [1 or B, D]. text_mask: valid text, bool [B, L], None where all is. rotary: cos and sin [S, head_dim].
        recompute: keep little for the backward pass and run the pieces again there.
    """
    pieces: BlockPieces = block.pieces  # type: ignore[assignment]
    modulations = (
        block.norm1.linear(block.norm1.silu(time)),
        block.norm1_context.linear(block.norm1_context.silu(time)),
    )
    mask = key_mask(text_mask, video.shape[1])
    if recompute and torch.is_grad_enabled():
        return _Recomputed.apply(block, mask, rotary, video, text, *modulations, *_trained(block))
    query, key, value = _heads_first(pieces.inputs(block, video, text, *modulations, *rotary))
    joint = best_kernel(query, mask).forward(query, key, value).output
    return pieces.outputs(block, video, text, *modulations, joint)


def _trained(block: nn.Module) -> list[nn.Parameter]:
    """Trained parameters that the pieces read; the modulations are made outside of them."""
    return [p for name, p in block.named_parameters() if p.requires_grad and not name.startswith("norm1")]


def _heads_first(qkv: Tensors) -> Tensors:
    return tuple(x.transpose(1, 2) for x in qkv)


class _Recomputed(torch.autograd.Function):
    """A block's pieces, run again in the backward pass. Inputs: video, text, two modulations, trained parameters."""

    @staticmethod
    def forward(ctx, block, mask, rotary, *tensors):
        pieces: BlockPieces = block.pieces
        inputs = [x.detach() for x in tensors[:4]]
        query, key, value = _heads_first(pieces.inputs(block, *inputs, *rotary))
        kernel = best_kernel(query, mask)
        attended = kernel.forward(query, key, value)
        ctx.block, ctx.rotary, ctx.kernel = block, rotary, kernel
        ctx.kept = (attended.output.detach(), attended.saved) if pieces.keep_attention else None
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return pieces.outputs(block, *inputs, attended.output)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        block, kernel, pieces = ctx.block, ctx.kernel, ctx.block.pieces
        parameters, needed = _trained(block), ctx.needs_input_grad[3:7]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        wanted = [*(x for x in inputs if x.requires_grad), *parameters]
        projected = None
        if ctx.kept is None:
            projected = _with_grad(pieces.inputs, block, *inputs, *ctx.rotary)
            attended = kernel.forward(*(x.detach() for x in _heads_first(projected)))
        else:
            attended, ctx.kept = Attended(*ctx.kept), None
        joint = attended.output.detach().requires_grad_()
        results = _with_grad(pieces.outputs, block, *inputs, joint)
        arrived = [(result, g) for result, g in zip(results, gradients, strict=True) if g is not None]
        joint_gradient, *first = _gradients([r for r, _ in arrived], [joint, *wanted], [g for _, g in arrived])
        del results, arrived, joint
        if projected is None:
            projected = _with_grad(pieces.inputs, block, *inputs, *ctx.rotary)
        assert joint_gradient is not None
        heads_first = [x.detach() for x in _heads_first(projected)]
        qkv_gradients = _heads_first(kernel.backward(joint_gradient, *heads_first, attended))
        second = _gradients(projected, wanted, qkv_gradients)
        summed = iter([_sum(a, b) for a, b in zip(first, second, strict=True)])
        return None, None, None, *(next(summed) if need else None for need in needed), *summed


def _with_grad(run: Callable, *arguments):
    with torch.enable_grad():
        return run(*arguments)


def _gradients(outputs, inputs, gradients) -> list[torch.Tensor | None]:
    """As autograd.grad; None for an input that was not used."""
    return list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b
