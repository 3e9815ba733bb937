"""HunyuanVideo-1.5 through diffusers, as a rollout worker needs it: load a pipeline directory, encode prompts once,
give velocities, decode frames."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import nn

from sage_ray.json_object import read_object
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.streamed import load_transformer
from sage_ray.types import Condition

MAX_CONDITIONS = 1024
"""Encoded prompts that a worker keeps; about 3 MB each at the real size."""


def align(module: nn.Module) -> None:
    """Give every parameter and buffer fresh, aligned storage: safetensors gives views at odd addresses, for which CPU
    kernels differ."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def batched_vae(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Let diffusers' VAE take more than one video: its mid-block mask has no head axis and is built row by row."""

    def causal_mask(n_frame, n_hw, dtype, device, batch_size=None):
        frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
        mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
        return mask.masked_fill_(frame[:, None] < frame[None, :], float("-inf"))[None, None]

    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = causal_mask
    return vae


def scheduler_shift(folder: Path) -> float:
    """Shift of the sigma grid that the checkpoint was made for; raises ValueError when the file lacks it."""
    path = Path(folder) / "scheduler" / "scheduler_config.json"
    shift = read_object(path).get("shift")
    if shift is None:
        raise ValueError(f"{path}: key shift is missing, so sampling.shift must be given")
    if type(shift) not in (int, float) or not 0 < shift < math.inf:
        raise ValueError(f"{path}: shift={shift!r} must be a positive number")
    return float(shift)


class HunyuanVideo:
    """A whole pipeline directory: prompt encoders, transformer and VAE, as a rollout worker needs them."""

    def __init__(self, pipeline: HunyuanVideo15Pipeline, dtype: torch.dtype, device: torch.device | str):
        self.device = torch.device(device)
        for module in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
            align(module)
            module.to(self.device).eval().requires_grad_(False)
        self.pipeline = pipeline
        self.vae: AutoencoderKLHunyuanVideo15 = batched_vae(pipeline.vae)
        self.velocity = PackedVelocity(pipeline.transformer.to(self.device, dtype).eval(), dtype).requires_grad_(False)
        self._conditions: OrderedDict[str, Condition] = OrderedDict()

    @staticmethod
    def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> HunyuanVideo:
        """Load a HunyuanVideo15Pipeline directory; encoders and VAE stay float32."""
        transformer = load_transformer(Path(folder) / "transformer", dtype, device)
        pipeline = HunyuanVideo15Pipeline.from_pretrained(
            folder, transformer=transformer, torch_dtype=torch.float32, use_safetensors=True
        )
        return HunyuanVideo(pipeline, dtype, device)

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of one video's latents; raises ValueError when the size does not fit the VAE."""
        spatial, temporal = self.vae.spatial_compression_ratio, self.vae.temporal_compression_ratio
        for key, value in (("height", height), ("width", width)):
            if value % spatial:
                raise ValueError(f"sampling.{key}: {value} must be a multiple of {spatial}, the VAE's spatial ratio")
        if (num_frames - 1) % temporal:
            raise ValueError(f"sampling.num_frames: {num_frames} - 1 must be a multiple of {temporal} (VAE)")
        channels = self.vae.config.latent_channels
        return channels, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    @torch.no_grad()
    def encode_prompt(self, text: str) -> Condition:
        """Encode one prompt once; the last MAX_CONDITIONS are kept. Padding is dropped."""
        if text not in self._conditions:
            embeds, mask, byt5, byt5_mask = self.pipeline.encode_prompt(
                [text], device=self.device, dtype=torch.float32, batch_size=1
            )
            self._conditions[text] = Condition(
                text=embeds[0][mask[0].bool()].cpu().numpy(), byt5=byt5[0][byt5_mask[0].bool()].cpu().numpy()
            )
            if len(self._conditions) > MAX_CONDITIONS:
                self._conditions.popitem(last=False)
        return self._conditions[text]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents float32 [B, C, F, H, W] to frames uint8 [B, T, H, W, 3] on the CPU, rounded to nearest.

        The VAE's scaling factor is divided out exactly once, here.
        """
        video = self.vae.decode(latents.to(self.vae.dtype) / self.vae.config.scaling_factor).sample
        frames = ((video.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        return frames.permute(0, 2, 3, 4, 1).contiguous().cpu()
