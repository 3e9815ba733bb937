"""How much a run computes: videos, tokens and floating-point work of an iteration, and the share of the devices' peak.

Counted as `cost` counts: the products of the blocks and attention, over video and text tokens; a backward is twice a
forward, recomputation is not useful work. Text tokens are taken to be 200 a prompt at the real size and none where the
model is small, as prompts there are short.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sage_ray.config import Config
from sage_ray.config_check import num_prompts
from sage_ray.cost import forward_flops
from sage_ray.json_object import read_object
from sage_ray.models.packed_velocity import TORCH_DTYPES
from sage_ray.prediction import SMALLEST, TEXT_TOKENS, read_dims
from sage_ray.trust_region import KL_TERMS

PEAKS = {
    "H100": 989e12, "H200": 989e12, "H800": 989e12, "GH200": 989e12,
    "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
}  # fmt: skip
"""Part of a GPU's name -> dense bfloat16 FLOP/s of its data sheet."""
SIZE, REPEATS = 1024, 3
"""Matrices of the measurement where no data sheet is known."""


@dataclass(frozen=True)
class Work:
    """Of one iteration. videos: made in the rollout; tokens: through the transformer, once a forward and once a
    backward; flops: useful ones."""

    videos: int
    tokens: float
    flops: float


@dataclass(frozen=True)
class Device:
    """peak_flops: of one GPU, or of one CPU thread, FLOP/s; measured: by a matrix product, not from a data sheet."""

    name: str
    peak_flops: float
    measured: bool


def iteration_work(config: Config, num_trained: int) -> Work:
    """Args: num_trained: trained steps of a group. Without the transformer's sizes tokens and flops are nan."""
    sampling, loss, terms = config.sampling, config.loss, KL_TERMS[config.kl.mode]
    videos = num_prompts(config) * config.data.group_size
    tokens, flops = _one_forward(config)
    branches = 1 if sampling.guidance_scale == 1.0 else 2
    references = int(terms.anchor) + int(terms.previous and config.kl.previous != "rollout")
    steps = loss.num_updates * loss.num_epochs
    pairs = videos * num_trained * loss.num_epochs
    denoising = videos * sampling.num_steps * branches
    learning = pairs * branches * (references + (steps - 1) / steps)
    trained = pairs * branches
    forwards = denoising + learning
    return Work(videos, tokens * (forwards + 2 * trained), flops * (forwards + 3 * trained))


def _one_forward(config: Config) -> tuple[float, float]:
    """(tokens, FLOP) of one forward of one video."""
    folder, sampling = Path(config.model.path), config.sampling
    dims = read_dims(folder)
    if dims is None:
        return float("nan"), float("nan")
    vae = read_object(folder / "vae" / "config.json")
    space, time_ratio = vae["spatial_compression_ratio"], vae["temporal_compression_ratio"]
    latent = (sampling.num_frames - 1) // time_ratio + 1, sampling.height // space, sampling.width // space
    tokens = dims.tokens(latent) + (TEXT_TOKENS if dims.parameters >= SMALLEST else 0)
    return float(tokens), forward_flops(dims.dim, dims.layers, tokens)


def measure_device(device: str, dtype: str) -> Device:
    """The rate of the data sheet for bfloat16 on a known GPU, else the fastest of some matrix products in `dtype`."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU thread"
    known = next((rate for part, rate in PEAKS.items() if part in name), None)
    if dtype == "bfloat16" and known is not None:
        return Device(name, known, measured=False)
    a = torch.ones(SIZE, SIZE, dtype=TORCH_DTYPES[dtype], device=device)
    fastest = min(_seconds(a) for _ in range(REPEATS))
    return Device(name, 2 * SIZE**3 / fastest, measured=True)


def _seconds(a: torch.Tensor) -> float:
    start = time.perf_counter()
    product = a @ a
    if product.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
