"""HunyuanVideo-1.5 through diffusers, as a rollout worker needs it: load a pipeline directory, encode prompts once,
give velocities, decode frames, leave the device and come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from sage_ray.host_copy import HostCopy
from sage_ray.json_object import read_object
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.prompt_encoder import PromptEncoder, place
from sage_ray.models.streamed import load_transformer
from sage_ray.models.vae_decode import decoded_chunks
from sage_ray.parked import Parked
from sage_ray.types import Condition


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
    """A whole pipeline directory: prompt encoders, transformer and VAE, as a rollout worker needs them.

    Args:
        dtype: of the transformer. kind: makes the velocity of it (`velocity_kind`).
        decode_frames: latent frames that are decoded at once, one video after the other; None decodes everything at
            once.
        prompts: the pipeline's encoders, where they are placed already.
    """

    def __init__(
        self,
        pipeline: HunyuanVideo15Pipeline,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        kind: Callable[..., PackedVelocity] = PackedVelocity,
        decode_frames: int | None = None,
        prompts: PromptEncoder | None = None,
    ):
        self.device, self.decode_frames = torch.device(device), decode_frames
        self.prompts = prompts or PromptEncoder(pipeline, self.device)
        place(pipeline.vae, self.device)
        self.pipeline = pipeline
        self.vae: AutoencoderKLHunyuanVideo15 = batched_vae(pipeline.vae)
        transformer = pipeline.transformer.to(self.device, dtype).eval()
        self.velocity = kind(transformer, dtype).requires_grad_(False)
        self._parked = Parked()

    @staticmethod
    def load(
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        kind: Callable[..., PackedVelocity] = PackedVelocity,
        decode_frames: int | None = None,
        parks_encoders: bool = False,
    ) -> HunyuanVideo:
        """Load a HunyuanVideo15Pipeline directory in `dtype`, tensor by tensor onto the device.

        Args: parks_encoders: they wait on the host while no prompt is encoded, the transformer's loading included.
        """
        device = torch.device(device)
        pipeline = HunyuanVideo15Pipeline.from_pretrained(
            folder,
            transformer=None,
            torch_dtype=dtype,
            use_safetensors=True,
            device_map="cuda" if device.type == "cuda" else None,
        )
        prompts = PromptEncoder(pipeline, device, parks_encoders)
        pipeline.register_modules(transformer=load_transformer(Path(folder) / "transformer", dtype, device))
        return HunyuanVideo(pipeline, dtype, device, kind=kind, decode_frames=decode_frames, prompts=prompts)

    @property
    def is_away(self) -> bool:
        """Whether its weights wait on the host."""
        return self._parked.is_parked

    def leave(self) -> int:
        """Take all weights off the device; bytes freed. Does nothing when they are away."""
        if self.is_away:
            return 0
        published = self.velocity.trainable_names
        named = dict(self.velocity.named_parameters())
        others = [*self.velocity.buffers(), *self.vae.parameters(), *self.vae.buffers(), *self.prompts.tensors()]
        return self._parked.park(
            [parameter for name, parameter in named.items() if name in published],
            [*(parameter for name, parameter in named.items() if name not in published), *others],
        )

    def enter(self) -> None:
        """Bring all weights back to where they were; does nothing when they are there."""
        self._parked.unpark()

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

    def encode_prompt(self, text: str) -> Condition:
        """Encode one prompt, once."""
        return self.encode_prompts([text])[0]

    def encode_prompts(self, texts: Sequence[str]) -> list[Condition]:
        """Encode prompts, each once; padding is dropped."""
        return self.prompts.encode(texts)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents float32 [B, C, F, h, w] to frames uint8 [B, T, H, W, 3] on the CPU, rounded to nearest.

        The VAE's scaling factor is divided out exactly once, here.
        """
        (num_videos, _, frames, *size), vae = latents.shape, self.vae
        num_frames = (frames - 1) * vae.temporal_compression_ratio + 1
        height, width = (vae.spatial_compression_ratio * side for side in size)
        copy = HostCopy((num_videos, num_frames, height, width, 3), torch.uint8, self.device)
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor
        if self.decode_frames is None:
            copy.write(slice(None), _pixels(vae.decode(scaled).sample))
            return torch.from_numpy(copy.numpy())
        for video in range(num_videos):
            start = 0
            for chunk in decoded_chunks(vae.decoder, scaled[video : video + 1], self.decode_frames):
                pixels = _pixels(chunk)[0]
                copy.write((video, slice(start, start + len(pixels))), pixels)
                start += len(pixels)
        return torch.from_numpy(copy.numpy())


def _pixels(video: torch.Tensor) -> torch.Tensor:
    """float [B, 3, T, H, W] in [-1, 1] to uint8 [B, T, H, W, 3], where it lies."""
    frames = ((video.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return frames.permute(0, 2, 3, 4, 1).contiguous()
