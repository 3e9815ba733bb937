"""The velocity as diffusers ships it: every prompt padded to full length, an S x S mask in every block.

For comparison only (model.stock_forward, bench.py): the same numbers as PackedVelocity within rounding, in about four
times the time at the real size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sage_ray.config import ModelConfig
from sage_ray.models.packed_block import BlockPieces
from sage_ray.models.packed_velocity import PackedVelocity

TEXT_TOKENS, BYT5_TOKENS, IMAGE_TOKENS = 1000, 256, 729
"""Slots that HunyuanVideo15Pipeline fills with prompt, quoted text and image."""


class StockVelocity(PackedVelocity):
    """A PackedVelocity that runs the forward of HunyuanVideo15Transformer3DModel itself."""

    def _prepare_blocks(self, pieces: BlockPieces) -> None:
        """Blocks stay as they are."""
        self.transformer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def forward(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        text: torch.Tensor,
        byt5: torch.Tensor,
        text_mask: torch.Tensor | None = None,
        byt5_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As PackedVelocity.forward, with the timestep in the compute dtype as the pipeline gives it. Raises ValueError
        for a prompt longer than its slots."""
        batch, config = len(latents), self.transformer.config
        zeros = latents.new_zeros(batch, config.in_channels - latents.shape[1], *latents.shape[2:])
        texts, text_masks = _padded(text.to(self.dtype), text_mask, TEXT_TOKENS, batch)
        byt5s, byt5_masks = _padded(byt5.to(self.dtype), byt5_mask, BYT5_TOKENS, batch)
        out = self.transformer(
            hidden_states=torch.cat([latents, zeros], 1).to(self.dtype),
            timestep=timesteps.to(self.dtype).repeat_interleave(batch // len(timesteps)),
            encoder_hidden_states=texts,
            encoder_attention_mask=text_masks,
            encoder_hidden_states_2=byt5s,
            encoder_attention_mask_2=byt5_masks,
            image_embeds=texts.new_zeros(batch, IMAGE_TOKENS, config.image_embed_dim),
            return_dict=False,
        )[0]
        return out.float()


def velocity_kind(settings: ModelConfig) -> Callable[..., PackedVelocity]:
    """What makes the velocity of a transformer and a compute dtype, as rollout and learner both must run it."""
    if settings.stock_forward:
        return StockVelocity
    return functools.partial(PackedVelocity, compiled=settings.compile, keep_attention=settings.keep_attention)


def _padded(
    tokens: torch.Tensor, mask: torch.Tensor | None, slots: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [batch, slots, D], mask [batch, slots] of their dtype) of rows [R, L, D], each for batch / R videos."""
    rows, length = tokens.shape[:2]
    if length > slots:
        raise ValueError(f"a prompt of {length} tokens does not fit the {slots} that diffusers' forward takes")
    valid = tokens.new_ones(rows, length) if mask is None else mask.to(tokens.dtype)
    padded = functional.pad(tokens, (0, 0, 0, slots - length)), functional.pad(valid, (0, slots - length))
    first, second = (part.repeat_interleave(batch // rows, 0) for part in padded)
    return first, second
