"""HunyuanVideo-1.5's VAE decoder in chunks of latent frames: a whole decode's pixels, but for rounding.

The decoder never looks ahead in time: convolutions are padded in front, norms and shortcuts see one position, and a
latent frame attends to itself and those before it. So convolutions keep the last frames of their input from chunk to
chunk where a whole decode has them at hand, and nothing is computed twice or blended. Attention is at latent resolution
and runs over the whole video first, a frame at a time instead of under an S x S mask.

Measured on an H200 (bench.py): 81 frames of 480 x 832 in bfloat16 by chunks of 1, 2 and 4 take 9.0, 12.1 and 18.1 GiB,
weights of 2.3 counted, and 3.2, 3.0 and 2.9 s; at once 56.9 GiB and 3.2 s. More frames take no more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15AttnBlock,
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15Decoder3D,
    HunyuanVideo15ResnetBlock,
    HunyuanVideo15UpBlock3D,
    HunyuanVideo15Upsample,
)
from torch import nn
from torch.nn import functional

Past = dict[nn.Module, torch.Tensor]
"""Causal convolution -> the last frames of its input, as many as it is padded by in time."""


def decoded_chunks(decoder: HunyuanVideo15Decoder3D, latents: torch.Tensor, num_frames: int) -> Iterator[torch.Tensor]:
    """Pixels [B, 3, T, H, W] in [-1, 1] of every `num_frames` latent frames in turn; to be run without gradient.

    Args: latents: [B, C, F, h, w] in the decoder's dtype, scaling divided out.
    """
    past: Past = {}
    for chunk in _middle(decoder, latents).split(num_frames, 2):
        for block in decoder.up_blocks:
            chunk = _up(block, chunk, past)
        chunk = _convolved(decoder.conv_out, decoder.conv_act(decoder.norm_out(chunk)), past)
        yield chunk


def _middle(decoder: HunyuanVideo15Decoder3D, latents: torch.Tensor) -> torch.Tensor:
    """Everything at latent resolution, of all frames: [B, D, F, h, w]."""
    x = decoder.conv_in(latents) + latents.repeat_interleave(decoder.repeat, 1)
    middle = decoder.mid_block
    x = middle.resnets[0](x)
    for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
        x = resnet(x if attention is None else _attended(attention, x))
    return x


def _attended(block: HunyuanVideo15AttnBlock, x: torch.Tensor) -> torch.Tensor:
    """x plus its attention: every frame's positions to all positions of the frames up to it."""
    normed, area = block.norm(x), x.shape[3] * x.shape[4]

    def tokens(project: nn.Module) -> torch.Tensor:
        return project(normed).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()

    query, key, value = tokens(block.to_q), tokens(block.to_k), tokens(block.to_v)
    ends = range(area, query.shape[2] + 1, area)
    frames = [
        functional.scaled_dot_product_attention(query[:, :, end - area : end], key[:, :, :end], value[:, :, :end])
        for end in ends
    ]
    return block.proj_out(torch.cat(frames, 2).squeeze(1).transpose(1, 2).reshape(x.shape)) + x


def _up(block: HunyuanVideo15UpBlock3D, x: torch.Tensor, past: Past) -> torch.Tensor:
    for resnet in block.resnets:
        x = _resnet(resnet, x, past)
    for upsampler in block.upsamplers or ():
        x = _upsampled(upsampler, x, past)
    return x


def _resnet(block: HunyuanVideo15ResnetBlock, x: torch.Tensor, past: Past) -> torch.Tensor:
    hidden = _convolved(block.conv1, block.nonlinearity(block.norm1(x)), past)
    hidden = _convolved(block.conv2, block.nonlinearity(block.norm2(hidden)), past)
    return hidden + (x if block.conv_shortcut is None else block.conv_shortcut(x))


def _upsampled(block: HunyuanVideo15Upsample, x: torch.Tensor, past: Past) -> torch.Tensor:
    """Twice the height and width; where the block adds frames, two for one, but one for a video's first."""
    first = block.conv not in past
    hidden = _convolved(block.conv, x, past)
    if not block.add_temporal_upsample:
        return _unfolded(hidden, 1) + _unfolded(x.repeat_interleave(block.repeats, 1), 1)
    parts = []
    if first:
        head, shortcut = _unfolded(hidden[:, :, :1], 1), _unfolded(x[:, :, :1], 1)
        # Of two frames' channels the second half is dropped: before the first frame there is none.
        parts = [head.chunk(2, 1)[0] + shortcut.repeat_interleave(block.repeats // 2, 1)]
        hidden, x = hidden[:, :, 1:], x[:, :, 1:]
    if hidden.shape[2]:
        parts.append(_unfolded(hidden, 2) + _unfolded(x, 2).repeat_interleave(block.repeats, 1))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _unfolded(x: torch.Tensor, times: int) -> torch.Tensor:
    """Channels into space and time: [B, times * 4 * c, T, H, W] to [B, c, times * T, 2 H, 2 W]."""
    x = x.unflatten(1, (times, 2, 2, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _convolved(causal: HunyuanVideo15CausalConv3d, x: torch.Tensor, past: Past) -> torch.Tensor:
    """A causal convolution after the frames that it has seen; before a video's first frame stands that frame."""
    *spatial, num_before, _ = causal.time_causal_padding
    before = past[causal] if causal in past else x[:, :, :1].expand(-1, -1, num_before, -1, -1)
    x = torch.cat([before, x], 2)
    past[causal] = x[:, :, x.shape[2] - num_before :].clone()
    return causal.conv(functional.pad(x, (*spatial, 0, 0), mode=causal.pad_mode))
