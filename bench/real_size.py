"""Random HunyuanVideo-1.5 parts of the real size (or a tiny one), made where they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from sage_ray.models.condition import ConditionTensors

Weights = dict[str, torch.Tensor]
GATES_STD = 0.3
"""Of the biases of modulations: with small ones a block would hardly change what goes through it, errors included."""


@dataclass(frozen=True)
class Size:
    """transformer, vae: what differs from diffusers' defaults, which are the real model's; height, width: pixels;
    text: valid tokens of a prompt."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    height: int
    width: int
    text: int

    def latent_shape(self, frames: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of a video of so many frames."""
        spatial = self.vae.get("spatial_compression_ratio", 16)
        return self.vae.get("latent_channels", 32), (frames - 1) // 4 + 1, self.height // spatial, self.width // spatial


SMALL_TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "rope_axes_dim": (4, 6, 6),
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "image_embed_dim": 8,
}
SMALL_VAE = {"block_out_channels": (8, 16, 32, 64), "layers_per_block": 0, "spatial_compression_ratio": 8}
SIZES = {
    "official": Size({"task_type": "t2v"}, {}, 480, 832, 200),
    "small": Size({**SMALL_TRANSFORMER, "task_type": "t2v"}, SMALL_VAE, 32, 32, 10),
}


def blank(size: Size, layers: int | None = None) -> HunyuanVideo15Transformer3DModel:
    """The transformer without storage; layers: fewer than the size has."""
    settings = size.transformer | ({} if layers is None else {"num_layers": layers})
    with torch.device("meta"):
        return HunyuanVideo15Transformer3DModel(**settings).eval()


def spread(name: str, tensor: torch.Tensor) -> float | None:
    """Standard deviation of a random parameter, None for the scale of a norm, which is 1."""
    if name.endswith("gamma") or (tensor.dim() == 1 and "norm" in name and name.endswith("weight")):
        return None
    modulates = "transformer_blocks." in name and "norm1" in name and name.endswith("bias")
    return GATES_STD if modulates else 0.02


@torch.no_grad()
def fill_random(named: Iterable[tuple[str, torch.Tensor]], seed: int = 0) -> None:
    """Zero-mean Gaussian weights and biases (`spread`), scales of norms 1."""
    generator = None
    for name, tensor in named:
        generator = generator or torch.Generator(tensor.device).manual_seed(seed)
        std = spread(name, tensor)
        if std is None:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, std, generator=generator)


def random_weights(size: Size, device: torch.device, dtype=torch.bfloat16, layers: int | None = None) -> Weights:
    """State of a random transformer, made on the device."""
    model = blank(size, layers).to(dtype).to_empty(device=device)
    fill_random(model.named_parameters())
    return model.state_dict()


def transformer(size: Size, weights: Weights, layers: int | None = None) -> HunyuanVideo15Transformer3DModel:
    """A fresh model over the given tensors, none of which is copied."""
    model = blank(size, layers)
    model.load_state_dict(weights, assign=True)
    return model


def random_vae(size: Size, device: torch.device, dtype: torch.dtype) -> AutoencoderKLHunyuanVideo15:
    """A random VAE, made on the device."""
    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo15(**size.vae)
    vae = vae.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    fill_random(vae.named_parameters())
    return vae


def random_latents(size: Size, frames: int, device: torch.device) -> torch.Tensor:
    """Float32 [1, C, F, H, W]."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(1, *size.latent_shape(frames), generator=generator, device=device)


def random_condition(size: Size, device: torch.device, seed: int = 2) -> ConditionTensors:
    """One prompt of `size.text` valid tokens and no quoted text."""
    generator = torch.Generator(device).manual_seed(seed)
    text_dim, glyph_dim = size.transformer.get("text_embed_dim", 3584), size.transformer.get("text_embed_2_dim", 1472)
    text = torch.randn(1, size.text, text_dim, generator=generator, device=device)
    return ConditionTensors(text, text.new_zeros(1, 0, glyph_dim), None, None)
