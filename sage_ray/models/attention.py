"""Joint attention of video and text tokens: its projections, and the kernels that compute it.

On a CUDA card that has them, the kernels are called by name, so that rollout and learner run the same one, and so that
a backward pass can start from an output that was kept. Everywhere else it is torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn import functional

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]
HOPPER = (9, 0)
"""Compute capability from which cuDNN's attention is the fastest (585-635 TFLOP/s on an H100, flash 368)."""


class Attended(NamedTuple):
    """output: [B, heads, N, head_dim]; saved: what the kernel's backward needs beside it."""

    output: torch.Tensor
    saved: tuple


class Kernel(NamedTuple):
    """forward(query, key, value) -> Attended, differentiable by autograd too;
    backward(gradient, query, key, value, attended) -> gradients of query, key, value. All [B, heads, N, head_dim]."""

    name: str
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Attended]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Attended], Tensors]


def _cudnn_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
    # The log-sum-exp is always taken: without it cuDNN may choose another plan, with other bits.
    output, *saved = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return Attended(output, tuple(saved[:7]))


def _cudnn_backward(gradient, query, key, value, attended: Attended) -> Tensors:
    log_sum, cum_q, cum_k, max_q, max_k, seed, offset = attended.saved
    return aten._scaled_dot_product_cudnn_attention_backward(
        gradient,
        query,
        key,
        value,
        attended.output,
        log_sum,
        seed,
        offset,
        None,
        cum_q,
        cum_k,
        max_q,
        max_k,
        0.0,
        False,
    )


def _flash_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
    output, *saved = aten._scaled_dot_product_flash_attention(query, key, value)
    return Attended(output, tuple(saved[:7]))


def _flash_backward(gradient, query, key, value, attended: Attended) -> Tensors:
    log_sum, cum_q, cum_k, max_q, max_k, seed, unused = attended.saved
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, attended.output, log_sum, cum_q, cum_k, max_q, max_k, 0.0, False, seed, unused
    )


def _cpu_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
    output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return Attended(output, (log_sum,))


def _cpu_backward(gradient, query, key, value, attended: Attended) -> Tensors:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, attended.output, attended.saved[0], 0.0, False
    )


CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward)
FLASH = Kernel("flash", _flash_forward, _flash_backward)
CPU = Kernel("cpu", _cpu_forward, _cpu_backward)


def masked(mask: torch.Tensor | None) -> Kernel:
    """Torch's own choice under an optional mask bool [B, 1, 1, N]. Keeps nothing: the backward runs it again."""

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        return Attended(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), ())

    def backward(gradient, query, key, value, attended: Attended) -> Tensors:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (query, key, value)]
            return torch.autograd.grad(forward(*inputs).output, inputs, gradient)

    return Kernel("sdpa", forward, backward)


def best_kernel(query: torch.Tensor, mask: torch.Tensor | None = None) -> Kernel:
    """The fastest kernel for unmasked queries [B, heads, N, head_dim] of this device and dtype; under a mask, torch's
    own choice."""
    if mask is not None:
        return masked(mask)
    if query.device.type == "cpu":
        return CPU
    asked = SDPAParams(query, query, query, None, 0.0, False, False)
    kernels = [(CUDNN, can_use_cudnn_attention), (FLASH, can_use_flash_attention)]
    if torch.cuda.get_device_capability(query.device) < HOPPER:
        kernels.reverse()
    return next((kernel for kernel, can in kernels if can(asked)), masked(None))


def key_mask(text_mask: torch.Tensor | None, num_video_tokens: int) -> torch.Tensor | None:
    """Key mask bool [B, 1, 1, S + L] from the valid text tokens bool [B, L]; None where all are valid."""
    if text_mask is None:
        return None
    return functional.pad(text_mask, (num_video_tokens, 0), value=True)[:, None, None]


def project_in(attn: Any, video: torch.Tensor, text: torch.Tensor, rotary: Tensors) -> Tensors:
    """Query, key and value [B, S + L, heads, head_dim] of normalised video tokens [B, S, D] and text tokens [B, L, D].

    Args: attn: diffusers' Attention of a block. rotary: cos and sin [S, head_dim], of the video tokens.
    """

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (attn.heads, -1))

    query, key = attn.norm_q(split(attn.to_q(video))), attn.norm_k(split(attn.to_k(video)))
    query = apply_rotary_emb(query, rotary, sequence_dim=1)
    key = apply_rotary_emb(key, rotary, sequence_dim=1)
    text_query = attn.norm_added_q(split(attn.add_q_proj(text)))
    text_key = attn.norm_added_k(split(attn.add_k_proj(text)))
    value = torch.cat([split(attn.to_v(video)), split(attn.add_v_proj(text))], 1)
    return torch.cat([query, text_query], 1), torch.cat([key, text_key], 1), value


def project_out(attn: Any, joint: torch.Tensor, num_video_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output [B, heads, S + L, head_dim] to video [B, S, D] and text [B, L, D]."""
    tokens = joint.transpose(1, 2).flatten(2)
    video, text = tokens.split([num_video_tokens, tokens.shape[1] - num_video_tokens], 1)
    # On a slice torch picks another kernel for a frozen weight (rollout) than for a trained one (learner).
    return attn.to_out[0](video.contiguous()), attn.to_add_out(text.contiguous())


class PackedAttention:
    """The whole of it as diffusers' processor, for a stock block."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        """hidden_states [B, S, D], encoder_hidden_states [B, L, D], attention_mask bool [B, L] (valid text) or None."""
        num_video_tokens = hidden_states.shape[1]
        qkv = project_in(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in qkv)
        mask = key_mask(attention_mask, num_video_tokens)
        return project_out(attn, best_kernel(query, mask).forward(query, key, value).output, num_video_tokens)
