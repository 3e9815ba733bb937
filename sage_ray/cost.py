"""What HunyuanVideo-1.5's transformer costs: floating-point work, seconds on an H100, bytes.

Counted as useful work: the GEMMs of the blocks and attention, over video and valid text tokens. Not counted: adaLN,
which runs once per sample, embedders and text refiner, recomputation in a backward pass, padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def linear_flops(dim: int, layers: int, tokens: int) -> float:
    """GEMMs of the blocks: 24 dim^2 a token and layer (four dim x dim, two dim x 4 dim, 2 FLOP a weight)."""
    return 24.0 * dim**2 * layers * tokens


def attention_flops(dim: int, layers: int, tokens: int) -> float:
    """Joint attention: 4 dim tokens^2 a layer (query times key, weights times value)."""
    return 4.0 * dim * layers * tokens**2


def forward_flops(dim: int, layers: int, tokens: int) -> float:
    """Of one forward of one video, tokens = video tokens + text tokens; a backward takes twice as many."""
    return linear_flops(dim, layers, tokens) + attention_flops(dim, layers, tokens)


@dataclass(frozen=True)
class H100:
    """Rates of one H100 80GB (torch 2.11, bfloat16), each with where it was measured. "table" is that of
    docs/real_size.md: one video of 81 frames, 480 x 832, 32,760 video and 200 text tokens."""

    linear_flops_s: float = 692e12
    """GEMMs of the blocks: 179 TFLOP in 0.259 s (table)."""
    attention_flops_s: float = 568e12
    """cuDNN attention, forward: 481 TFLOP in 0.847 s (table)."""
    attention_backward_flops_s: float = 429e12
    """961 TFLOP in 2.243 s (table)."""
    compiled_forward: float = 1.09
    """Forward over GEMMs and attention at the rates above: 1.207 s over 1.106 (table)."""
    eager_forward: float = 1.436
    """1.589 s over 1.106 (table)."""
    compiled_update: float = 1.09
    """Forward and backward over the same: 5.378 s over 4.971 with everything recomputed, 4.532 s over 4.125 with
    attention kept (table)."""
    eager_update: float = 1.34
    """6.66 s, everything recomputed, over 4.971 (an earlier run; bench.py has no such row)."""
    decode_pixels_s: float = 10.07e6
    """Decoded pixels a second: 81 x 480 x 832 in 3.211 s by chunks of 2 latent frames (table); at once 9.4e6."""
    decode_pixel_bytes: float = 1810.0
    """GPU memory of decoding at once beside the weights: (57 - 2.3) GiB over 81 x 480 x 832 pixels (table)."""
    chunk_bytes: tuple[float, float] = (3.6 * 2**30, 3.05 * 2**30)
    """Of decoding 480 x 832 in chunks beside the weights: frames that are kept, and every latent frame
    (table: 9.0, 12.1 and 18.1 GiB by chunks of 1, 2 and 4)."""
    reward_videos_s: tuple[tuple[int, float], ...] = ((1, 9.6), (4, 26.0), (8, 26.3))
    """VideoAlign: (videos in a batch, videos a second) at 81 frames of 480 x 832 (docs/rewards.md)."""
    pack_bytes_s: float = 0.9e9
    """GPU to host memory to object store, one rank (two H100s, Ray 2.60, once)."""
    unpack_bytes_s: float = 4.0e9
    """Object store to GPU, one worker: the lower of 4.0-6.7 (the same)."""
    work_tokens: float = 24.0
    """Values of dim that a block holds for every token while it is recomputed: about 3.3 GB at 32,960 tokens
    (hunyuanvideo.md, 7, on paper); a forward without gradient is taken to hold half."""
    vae_bytes: float = 2.52e9
    """The real VAE in bfloat16: 1.261 B parameters (hunyuanvideo.md, 7)."""

    card_bytes: float = 79.1 * 2**30
    """GPU memory of the card that a process can have."""
    peak_flops_s: float = 989e12
    """Dense bfloat16 by the vendor's datasheet: what model FLOPs utilisation (MFU) is a share of."""

    def reward_rate(self, batch: int) -> float:
        """Videos a second of the largest measured batch that is not above `batch`."""
        return max((rate for size, rate in self.reward_videos_s if size <= max(1, batch)), default=0.0)


@dataclass(frozen=True)
class Dims:
    """Of a transformer's config.json. dim: heads x head_dim; patch: (time, space)."""

    dim: int
    layers: int
    refiner_layers: int
    patch: tuple[int, int]

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Dims:
        """Of a config.json; KeyError where it lacks one."""
        dim = settings["num_attention_heads"] * settings["attention_head_dim"]
        patch = settings["patch_size_t"], settings["patch_size"]
        return Dims(dim, settings["num_layers"], settings["num_refiner_layers"], patch)

    @property
    def block_parameters(self) -> int:
        """Matrices of one block: 12 dim^2 for video, 12 for text, 12 of adaLN."""
        return 36 * self.dim**2

    @property
    def parameters(self) -> int:
        """Matrices of blocks and text refiner; the embedders are left out (0.6 % of the real model)."""
        return self.layers * self.block_parameters + self.refiner_layers * 14 * self.dim**2

    def lora_parameters(self, rank: int) -> int:
        """Adapters on every linear layer of the blocks: rank x (in + out), 50 dim a block."""
        return self.layers * rank * 50 * self.dim

    def tokens(self, latent: tuple[int, int, int]) -> int:
        """Video tokens of latents (F, H, W)."""
        frames, height, width = latent
        time, space = self.patch
        return (frames // time) * (height // space) * (width // space)


@dataclass(frozen=True)
class Way:
    """How the transformer is run. weight_gradients: False where only adapters are trained."""

    compiled: bool
    checkpointing: bool
    keep_attention: bool
    weight_gradients: bool


def forward_s(dims: Dims, tokens: int, compiled: bool, rates: H100) -> float:
    """Seconds of one forward of one video without gradient."""
    floor = linear_flops(dims.dim, dims.layers, tokens) / rates.linear_flops_s
    floor += attention_flops(dims.dim, dims.layers, tokens) / rates.attention_flops_s
    return floor * (rates.compiled_forward if compiled else rates.eager_forward)


def update_s(dims: Dims, tokens: int, way: Way, rates: H100) -> float:
    """Seconds of one forward and backward of one video: products forward, again, and backward for input and weight;
    attention forward, again unless kept, and backward. Adapters' own products are left out."""
    linear = linear_flops(dims.dim, dims.layers, tokens) / rates.linear_flops_s
    attention = attention_flops(dims.dim, dims.layers, tokens)
    again = way.checkpointing
    floor = linear * (1 + again + 1 + way.weight_gradients)
    floor += attention / rates.attention_flops_s * (1 + (again and not way.keep_attention))
    floor += 2 * attention / rates.attention_backward_flops_s
    return floor * (rates.compiled_update if way.compiled else rates.eager_update)
