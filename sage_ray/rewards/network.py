"""VideoAlign's network: Qwen2-VL with LoRA on its text layers and a linear head, read at three special tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import Qwen2VLConfig, Qwen2VLModel

from sage_ray.rewards.video_input import Grid
from sage_ray.rewards.vision import vision_features

PEFT_PREFIX = "base_model.model."
LORA_TARGETS = r"language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


@dataclass(frozen=True)
class Inputs:
    """A prepared batch of B clips of one shape, on the model's device.

    patches: [B * t * h * w, 1176]; grid: (t, h, w) of every clip; token_ids: int64 [B, L], padded on the right;
    video_id: the id of a video token; reward_positions: int64 [B, 3], where VQ, MQ and TA are read.
    """

    patches: torch.Tensor
    grid: Grid
    token_ids: torch.Tensor
    video_id: int
    reward_positions: torch.Tensor


class RewardNetwork(nn.Module):
    """Built on the meta device; `official_names` are the keys it must be filled with (see `fill`)."""

    def __init__(self, base_config: dict, rows: int, lora: dict, output_dim: int):
        """Args: base_config: the base model's config.json. rows: of the embedding. lora: peft_lora_config."""
        super().__init__()
        config = Qwen2VLConfig.from_dict(base_config)
        config._attn_implementation = "sdpa"
        text = config.get_text_config()
        text.vocab_size = rows
        self.prefix = PEFT_PREFIX if lora["lora_enable"] else ""
        self.rotary_dtype = torch.float32
        with torch.device("meta"):
            self.backbone = Qwen2VLModel(config)
            self.rm_head = nn.Linear(text.hidden_size, output_dim, bias=False)
            if lora["lora_enable"]:
                adapter = LoraConfig(r=lora["lora_r"], lora_alpha=lora["lora_alpha"], target_modules=LORA_TARGETS)
                inject_adapter_in_model(adapter, self.backbone)
        self.backbone.visual.rotary_pos_emb = nn.Identity()  # replaced by vision.rotary_tables

    def official_names(self) -> dict[str, str]:
        """Parameter name -> key in an official checkpoint."""
        return {name: self._official_name(name) for name, _ in self.named_parameters()}

    def _official_name(self, name: str) -> str:
        for ours, official in (("backbone.language_model.", "model."), ("backbone.visual.", "visual.")):
            if name.startswith(ours):
                return self.prefix + official + name.removeprefix(ours)
        return self.prefix + name

    def fill(self, tensors: dict[str, torch.Tensor], rotary_dtype: torch.dtype) -> None:
        """Take `tensors` (parameter name -> tensor, all of one device and dtype) as the parameters.

        rotary_dtype: what the rotary tables are rounded to. It belongs to the weights, which were trained with it,
        and not to the precision that the model runs in.
        """
        self.load_state_dict(tensors, strict=True, assign=True)
        text, device = self.backbone.language_model, self.rm_head.weight.device
        text.rotary_emb = type(text.rotary_emb)(text.config).to(device=device, dtype=rotary_dtype)
        self.rotary_dtype = rotary_dtype

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Raw scores [B, 3] (VQ, MQ, TA) in the model's dtype, with gradient.

        Positions are plain 0..L-1 over video and text. Padding is on the right and attention is causal: no token that
        is read can see a pad, so there is no mask.
        """
        text = self.backbone.language_model
        vision = vision_features(self.backbone.visual, inputs.patches, inputs.grid, self.rotary_dtype)
        embeds = text.embed_tokens(inputs.token_ids)
        is_video = (inputs.token_ids == inputs.video_id)[..., None]
        assert is_video.sum() == len(vision), "as many video tokens as vision features"
        embeds = embeds.masked_scatter(is_video, vision.to(embeds.dtype))
        positions = torch.arange(embeds.shape[1], device=embeds.device).expand(embeds.shape[:2])
        hidden = text(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        logits = self.rm_head(hidden[rows, inputs.reward_positions])
        return logits.squeeze(-1) if logits.shape[-1] == 1 else logits.diagonal(dim1=1, dim2=2)
