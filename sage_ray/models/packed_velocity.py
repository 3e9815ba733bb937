"""The velocity of HunyuanVideo-1.5 from packed text: the one forward that pretraining, rollout, reference and learner
share.

It calls the modules of diffusers' HunyuanVideo15Transformer3DModel with valid text tokens only: the padded slots, the
S x S mask and the per-sample reordering loop of the stock forward are left out, which changes fp32 results by about
1e-6. Text-to-video only: the image slots are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from sage_ray.models.attention import PackedAttention
from sage_ray.models.condition import ConditionTensors
from sage_ray.models.packed_block import BlockPieces, compiled_pieces, use_pieces
from sage_ray.schedule import timestep
from sage_ray.sequence_parallel import TokenShards, gather_video

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedVelocity(nn.Module):
    """Velocity of a HunyuanVideo15Transformer3DModel from packed text. Weights live in `self.transformer`.

    Args:
        dtype: compute dtype. compiled: compile the blocks (`compiled_pieces`).
        keep_attention: where transformer.gradient_checkpointing is true, keep what attention gave for the backward.
    """

    def __init__(
        self,
        transformer: HunyuanVideo15Transformer3DModel,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        keep_attention: bool = True,
    ):
        super().__init__()
        if transformer.config.use_meanflow:
            raise ValueError("transformer/config.json: use_meanflow is true; only text-to-video models are supported")
        self.transformer = transformer
        self.dtype = dtype
        self.sequence_group: dist.ProcessGroup | None = None
        self._prepare_blocks(
            compiled_pieces(keep_attention) if compiled else BlockPieces(keep_attention=keep_attention)
        )
        freeze_unused(transformer)
        self.trainable_names = frozenset(name for name, p in self.named_parameters() if p.requires_grad)

    def share_tokens(self, group: dist.ProcessGroup | None) -> None:
        """Compute every forward together with the other ranks of a group, each on its share of the tokens; all of them
        must be given the same inputs, and get the same velocity. None computes alone."""
        heads = self.transformer.config.num_attention_heads
        if group is not None and heads % dist.get_world_size(group):
            raise ValueError(f"sp_size={dist.get_world_size(group)}: must divide the transformer's {heads} heads")
        self.sequence_group = group

    @property
    def sp_size(self) -> int:
        """Ranks that share the tokens of a forward."""
        return 1 if self.sequence_group is None else dist.get_world_size(self.sequence_group)

    def forward(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        text: torch.Tensor,
        byt5: torch.Tensor,
        text_mask: torch.Tensor | None = None,
        byt5_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One unguided velocity of R rows of videos, B = R * n: n videos in turn share a row's time and text.

        Args:
            latents: [B, C, F, H, W]. timesteps: float32 [1 or R], sigma * 1000, never rounded to bf16.
            text: [R, L, text_dim], valid tokens only unless `text_mask` bool [R, L] marks them.
            byt5: [R, L2, byt5_dim] with `byt5_mask`, L2 may be 0.
        Returns: float32 [B, C, F, H, W].
        """
        model, batch = self.transformer, latents.shape[0]
        hidden, shape = self._embed_video(latents)
        rotary = model.rope(latents)
        embedded_time = model.time_embed.time_proj(timesteps)
        time = _spread(model.time_embed.timestep_embedder(embedded_time.to(self.dtype)), batch)
        context = _spread(self._embed_text(timesteps, text, byt5, text_mask), batch).expand(batch, -1, -1).contiguous()
        text_mask = _joint_mask(text, byt5, text_mask, byt5_mask)
        text_mask = None if text_mask is None else _spread(text_mask, batch)
        shards = None
        if self.sequence_group is not None:
            shards = TokenShards(self.sequence_group, hidden.shape[1], context.shape[1])
            hidden, context = shards.cut(hidden), shards.cut(context)
            rotary = tuple(shards.cut(table, 0) for table in rotary)
        for block in model.transformer_blocks:
            hidden, context = block(hidden, context, time, text_mask, rotary, model.gradient_checkpointing, shards)
        out = model.proj_out(model.norm_out(hidden, time.expand(batch, -1)))
        if shards is not None:
            out = gather_video(shards, out)
        return self._unpatch(out, shape).float()

    def _prepare_blocks(self, pieces: BlockPieces) -> None:
        for block in self.transformer.transformer_blocks:
            block.attn.set_processor(PackedAttention())
            use_pieces(block, pieces)

    def _embed_video(self, latents: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """[B, C, F, H, W] to tokens [B, S, D]; the condition and mask channels of text-to-video are zero."""
        config = self.transformer.config
        batch, channels, *size = latents.shape
        zeros = latents.new_zeros(batch, config.in_channels - channels, *size)
        tokens = self.transformer.x_embedder(torch.cat([latents, zeros], 1).to(self.dtype))
        frames, rows, columns = size
        return tokens, (frames // config.patch_size_t, rows // config.patch_size, columns // config.patch_size)

    def _embed_text(self, timesteps, text, byt5, text_mask) -> torch.Tensor:
        """Context tokens [1 or B, L2 + L, D], byT5 before language model as the stock forward orders them."""
        model = self.transformer
        refiner = model.context_embedder
        context = refiner(text.to(self.dtype), timesteps, text_mask)
        context = context + model.cond_type_embed.weight[0]
        # Run on empty text too: a rank whose prompts hold no quoted text must reduce the same gradients as the others.
        glyphs = model.context_embedder_2(byt5.to(self.dtype)) + model.cond_type_embed.weight[1]
        rows = max(len(glyphs), len(context))
        return torch.cat([glyphs.expand(rows, -1, -1), context.expand(rows, -1, -1)], 1)

    def _unpatch(self, tokens: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """Tokens [B, S, patch * C] back to [B, C, F, H, W]."""
        config = self.transformer.config
        p_t, p = config.patch_size_t, config.patch_size
        x = tokens.reshape(tokens.shape[0], *shape, -1, p_t, p, p).permute(0, 4, 1, 5, 2, 6, 3, 7)
        size = [extent * patch for extent, patch in zip(shape, (p_t, p, p), strict=True)]
        return x.reshape(len(x), -1, *size).contiguous()  # no view: FSDP2 hooks what a forward returns


def _spread(rows: torch.Tensor, batch: int) -> torch.Tensor:
    """[R, ...] to [batch, ...], every row for its batch / R videos; a single row stays one and broadcasts."""
    return rows if len(rows) == 1 else rows.repeat_interleave(batch // len(rows), 0)


def _joint_mask(text, byt5, text_mask, byt5_mask) -> torch.Tensor | None:
    """bool [R, L2 + L] over byT5 and text tokens; None where all are valid."""
    if text_mask is None and byt5_mask is None:
        return None
    parts = ((byt5, byt5_mask), (text, text_mask))
    return torch.cat([x.new_ones(x.shape[:2], dtype=torch.bool) if m is None else m for x, m in parts], 1)


def freeze_unused(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Take parameters that text-to-video never reads (or whose output is dropped) out of training.

    With a zero or missing gradient, weight decay would still shrink them and a saved optimizer could not be resumed.
    The byT5 projection is frozen only where the checkpoint stores it as zeros, as the small world does.
    """
    last = transformer.transformer_blocks[-1]
    for module in (last.attn.to_add_out, last.ff_context, last.attn.norm_added_q, last.attn.add_q_proj):
        module.requires_grad_(False)
    transformer.image_embedder.requires_grad_(False)
    if not any(parameter.any() for parameter in transformer.context_embedder_2.parameters()):
        transformer.context_embedder_2.requires_grad_(False)


def guided_velocity(
    model: Callable[..., torch.Tensor],
    latents: torch.Tensor,
    sigmas: Sequence[float],
    condition: ConditionTensors,
    negative: ConditionTensors | None,
    guidance_scale: float,
) -> torch.Tensor:
    """Classifier-free guidance v = u + scale (c - u), conditional pass first; gradient flows through both.

    Args:
        model: a PackedVelocity (possibly sharded), or what calls one. latents: float32 [B, C, F, H, W].
        sigmas: [1 or R] in [0, 1]. condition, negative: R rows; negative may be None when scale is 1.
    Returns: float32 [B, C, F, H, W].
    """
    timesteps = torch.tensor([timestep(sigma) for sigma in sigmas], dtype=torch.float32, device=latents.device)
    conditional = model(latents, timesteps, *condition)
    if guidance_scale == 1.0:
        return conditional
    assert negative is not None
    unconditional = model(latents, timesteps, *negative)
    return unconditional + guidance_scale * (conditional - unconditional)
