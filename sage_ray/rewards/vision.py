"""Qwen2-VL's vision tower over a batch of clips of one grid, with VideoAlign's rule for the rotary tables.

The weights live in transformers' own modules; only the walk through them is here, because stock code loops over
frame pairs, and because releases differ in the precision of the rotary tables and in what the tower returns.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sage_ray.rewards.video_input import MERGE, Grid

THETA = 10000.0


def vision_features(visual: nn.Module, flat: torch.Tensor, grid: Grid, rotary_dtype: torch.dtype) -> torch.Tensor:
    """Merged vision tokens. Attention is full inside a frame pair and blind to all others.

    Args: visual: Qwen2-VL's tower. flat: [B * t * h * w, 1176] in merge order. grid: (t, h, w).
        rotary_dtype: precision of the rotary tables.
    Returns: [B * t * h * w / 4, hidden], the tower's pooled output.
    """
    _, height, width = grid
    hidden = functional.linear(flat, visual.patch_embed.proj.weight.flatten(1)).unflatten(0, (-1, height * width))
    cos, sin = rotary_tables(visual, height, width, rotary_dtype)
    for block in visual.get_submodule("blocks").children():
        attn = block.attn
        query, key, value = attn.qkv(block.norm1(hidden)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (rotate(x, cos, sin) for x in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + attn.proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return visual.merger(hidden.flatten(0, 1))


def rotary_tables(visual: nn.Module, height: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [h * w, head_dim] in merge order; every step before the last is rounded to `dtype`."""
    attn = visual.blocks[0].attn
    device = attn.proj.weight.device
    half = attn.proj.in_features // attn.num_heads // 2
    frequencies = (1.0 / (THETA ** (torch.arange(0, half, 2, dtype=torch.float32, device=device) / half))).to(dtype)
    places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [merge_order(place, height, width).to(device, dtype)[:, None] * frequencies for place in places]
    doubled = torch.cat(angles + angles, 1)
    return doubled.cos().float(), doubled.sin().float()


def merge_order(place: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[h, w] flattened as patches are: 2 x 2 neighbours follow each other."""
    return place.reshape(height // MERGE, MERGE, width // MERGE, MERGE).permute(0, 2, 1, 3).flatten()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float32 of x [..., S, D], which keeps its dtype."""
    first, second = x.float().chunk(2, -1)
    half = first.shape[-1]
    cos, sin = cos[:, :half], sin[:, :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
