"""Latents to pixels: diffusers' VAE as shipped, tiled, and in chunks of latent frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench.real_size import Size, random_latents, random_vae
from bench.timing import Report, Row, free, measure
from sage_ray.models.vae_decode import decoded_chunks

UNTILED = "as diffusers ships it, untiled"
CHUNKS = "chunks"


@torch.no_grad()
def decode(size: Size, frames: int, chunks: Sequence[int], device: torch.device, report: Report) -> None:
    """A random VAE in bfloat16, each way called once after its warm-up; its difference from the untiled pixels."""
    latents = random_latents(size, frames, device).to(torch.bfloat16)
    vae = random_vae(size, device, torch.bfloat16)
    whole = _row(report, UNTILED, frames, device, lambda: vae.decode(latents).sample, None)
    for chunk in chunks:
        run = _chunked(vae.decoder, latents, chunk)
        _row(report, f"{CHUNKS} of {chunk} latent frames", frames, device, run, whole)
    vae.enable_tiling()
    _row(report, "as diffusers ships it, tiled", frames, device, lambda: vae.decode(latents).sample, whole)


def _chunked(decoder: nn.Module, latents: torch.Tensor, chunk: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.cat(list(decoded_chunks(decoder, latents, chunk)), 2)


def _row(
    report: Report,
    name: str,
    frames: int,
    device: torch.device,
    run: Callable[[], torch.Tensor],
    whole: torch.Tensor | None,
) -> torch.Tensor | None:
    """Measure one way; its pixels on the CPU, None where it failed."""
    last: dict[str, torch.Tensor] = {}

    def call() -> None:
        last.clear()
        last["pixels"] = run()

    row = measure(Row("decode", name, frames, shipped_s=report.seconds("decode", UNTILED, frames)), call, device, 1)
    pixels = last["pixels"].float().cpu() if row.error is None else None
    if pixels is not None and whole is not None:
        row.values = {"relative_l2": float((pixels - whole).norm() / whole.norm())}
    report.add(row)
    last.clear()
    free()
    return pixels
