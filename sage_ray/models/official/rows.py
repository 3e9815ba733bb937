"""Every layer of HunyuanVideo-1.5's transformer and VAE under both of its names: the data of the official key map.

Names and shapes are those of the modules of the official program (Tencent-Hunyuan/HunyuanVideo-1.5, commit 60783e7:
hyvideo/models/transformers, hyvideo/models/autoencoders) and of diffusers 0.42.1. Sizes come from diffusers'
config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FREQUENCIES = 256
"""Width of the sinusoidal time embedding, a constant of both programs."""
BYT5_HIDDEN = 2048
"""Inner width of the byT5 projection, a constant of both programs."""
REFINER_RATIO = 4.0
"""Width ratio of the token refiner's MLP; mlp_ratio is of the double blocks only, on both sides."""
CUBE, POINT = (3, 3, 3), (1, 1, 1)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One layer of the map. shape: of its official weight, except for "norm" and "gamma", which take a width."""

    official: str
    diffusers: tuple[str, ...]
    kind: str
    shape: Shape
    operation: str = "rename"


def transformer_rows(config: Mapping[str, Any]) -> list[Row]:
    """Every layer of a transformer. Args: config: diffusers' config.json."""
    if config["qk_norm"] != "rms_norm":
        raise ValueError(f"transformer: qk_norm={config['qk_norm']!r}: the key map covers 'rms_norm' only")
    heads, head = config["num_attention_heads"], config["attention_head_dim"]
    h, text, byt5, image = heads * head, config["text_embed_dim"], config["text_embed_2_dim"], config["image_embed_dim"]
    patch = (config["patch_size_t"], config["patch_size"], config["patch_size"])
    rows = [
        Row("img_in.proj", ("x_embedder.proj",), "conv", (h, config["in_channels"], *patch)),
        *_time_rows("time_in", "time_embed.timestep_embedder", h),
        Row("txt_in.input_embedder", ("context_embedder.proj_in",), "linear", (h, text)),
        *_time_rows("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder", h),
    ]
    if config.get("use_meanflow", False):
        rows += _time_rows("time_r_in", "time_embed.timestep_embedder_r", h)
    for layer, width in (("linear_1", text), ("linear_2", h)):
        target = f"context_embedder.time_text_embed.text_embedder.{layer}"
        rows.append(Row(f"txt_in.c_embedder.{layer}", (target,), "linear", (h, width)))
    for i in range(config["num_refiner_layers"]):
        rows += _refiner_rows(i, h)
    rows.append(Row("byt5_in.layernorm", ("context_embedder_2.norm",), "norm", (byt5,)))
    for i, shape in enumerate(((BYT5_HIDDEN, byt5), (BYT5_HIDDEN, BYT5_HIDDEN), (h, BYT5_HIDDEN)), 1):
        rows.append(Row(f"byt5_in.fc{i}", (f"context_embedder_2.linear_{i}",), "linear", shape))
    rows += [
        Row("vision_in.proj.0", ("image_embedder.norm_in",), "norm", (image,)),
        Row("vision_in.proj.1", ("image_embedder.linear_1",), "linear", (image, image)),
        Row("vision_in.proj.3", ("image_embedder.linear_2",), "linear", (h, image)),
        Row("vision_in.proj.4", ("image_embedder.norm_out",), "norm", (h,)),
        Row("cond_type_embedding", ("cond_type_embed",), "table", (3, h)),
    ]
    for i in range(config["num_layers"]):
        rows += _block_rows(i, h, head, int(h * config["mlp_ratio"]))
    return [
        *rows,
        Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), "linear", (2 * h, h), "swap halves"),
        Row("final_layer.linear", ("proj_out",), "linear", (math.prod(patch) * config["out_channels"], h)),
    ]


def _time_rows(official: str, diffusers: str, h: int) -> list[Row]:
    return [
        Row(f"{official}.mlp.0", (f"{diffusers}.linear_1",), "linear", (h, FREQUENCIES)),
        Row(f"{official}.mlp.2", (f"{diffusers}.linear_2",), "linear", (h, h)),
    ]


def _refiner_rows(i: int, h: int) -> list[Row]:
    source, target = f"txt_in.individual_token_refiner.blocks.{i}", f"context_embedder.token_refiner.refiner_blocks.{i}"
    inner = int(h * REFINER_RATIO)
    qkv = tuple(f"{target}.attn.to_{name}" for name in "qkv")
    return [
        Row(f"{source}.norm1", (f"{target}.norm1",), "norm", (h,)),
        Row(f"{source}.self_attn_qkv", qkv, "linear", (3 * h, h), "split in 3"),
        Row(f"{source}.self_attn_proj", (f"{target}.attn.to_out.0",), "linear", (h, h)),
        Row(f"{source}.norm2", (f"{target}.norm2",), "norm", (h,)),
        Row(f"{source}.mlp.fc1", (f"{target}.ff.net.0.proj",), "linear", (inner, h)),
        Row(f"{source}.mlp.fc2", (f"{target}.ff.net.2",), "linear", (h, inner)),
        Row(f"{source}.adaLN_modulation.1", (f"{target}.norm_out.linear",), "linear", (2 * h, h)),
    ]


STREAMS = {
    "img": ("norm1", "to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0", "ff"),
    "txt": ("norm1_context", "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
    + ("to_add_out", "ff_context"),
}
"""stream of a double block -> diffusers' names of modulation, q, k, v, norms of q and k, projection and MLP."""


def _block_rows(i: int, h: int, head: int, inner: int) -> list[Row]:
    rows, target = [], f"transformer_blocks.{i}"
    for stream, (modulation, *attention, mlp) in STREAMS.items():
        source = f"double_blocks.{i}.{stream}"
        rows.append(Row(f"{source}_mod.linear", (f"{target}.{modulation}.linear",), "linear", (6 * h, h)))
        for name, layer in zip(("q", "k", "v", "q_norm", "k_norm", "proj"), attention, strict=True):
            kind, shape = ("scale", (head,)) if name.endswith("norm") else ("linear", (h, h))
            rows.append(Row(f"{source}_attn_{name}", (f"{target}.attn.{layer}",), kind, shape))
        rows.append(Row(f"{source}_mlp.fc1", (f"{target}.{mlp}.net.0.proj",), "linear", (inner, h)))
        rows.append(Row(f"{source}_mlp.fc2", (f"{target}.{mlp}.net.2",), "linear", (h, inner)))
    return rows


def coder_rows(config: Mapping[str, Any], coder: str) -> list[Row]:
    """One half of the VAE. The decoder counts its levels from the smallest picture, in both programs."""
    down, latents = coder == "encoder", config["latent_channels"]
    widths = list(config["block_out_channels"]) if down else list(reversed(config["block_out_channels"]))
    first, last = (config["in_channels"], 2 * latents) if down else (latents, config["out_channels"])
    middle = _middle_rows(coder, widths[-1] if down else widths[0])
    levels, width = [], widths[0]
    for i, out in enumerate(widths):
        source = f"{coder}.{'down' if down else 'up'}.{i}"
        target = f"{coder}.{'down_blocks' if down else 'up_blocks'}.{i}"
        for j in range(config["layers_per_block"] + (0 if down else 1)):
            levels += _resnet_rows(f"{source}.block.{j}", f"{target}.resnets.{j}", width, out)
            width = out
        factor = _resampling(config, i, down)
        if factor == 1:
            width = out
            continue
        match = config["downsample_match_channel" if down else "upsample_match_channel"]
        width = widths[i + 1] if match else out
        shape = (width // factor if down else width * factor, out, *CUBE)
        names = ("downsample", "downsamplers") if down else ("upsample", "upsamplers")
        levels.append(Row(f"{source}.{names[0]}.conv.conv", (f"{target}.{names[1]}.0.conv.conv",), "conv", shape))
    return [
        Row(f"{coder}.conv_in.conv", (f"{coder}.conv_in.conv",), "conv", (widths[0], first, *CUBE)),
        *(levels + middle if down else middle + levels),
        Row(f"{coder}.norm_out", (f"{coder}.norm_out",), "gamma", (widths[-1],)),
        Row(f"{coder}.conv_out.conv", (f"{coder}.conv_out.conv",), "conv", (last, widths[-1], *CUBE)),
    ]


def _resampling(config: Mapping[str, Any], level: int, down: bool) -> int:
    """Positions that a level merges into one or makes of one: 1 (none), 4 (space) or 8 (space and time)."""
    space, time = config["spatial_compression_ratio"], config["temporal_compression_ratio"]
    if down:
        return 1 if level >= math.log2(space) else 8 if level >= math.log2(space // time) else 4
    return 8 if level < math.log2(time) else 4 if level < math.log2(space) else 1


def _resnet_rows(source: str, target: str, width: int, out: int) -> list[Row]:
    rows = [
        Row(f"{source}.norm1", (f"{target}.norm1",), "gamma", (width,)),
        Row(f"{source}.conv1.conv", (f"{target}.conv1.conv",), "conv", (out, width, *CUBE)),
        Row(f"{source}.norm2", (f"{target}.norm2",), "gamma", (out,)),
        Row(f"{source}.conv2.conv", (f"{target}.conv2.conv",), "conv", (out, out, *CUBE)),
    ]
    if width != out:
        rows.append(Row(f"{source}.nin_shortcut", (f"{target}.conv_shortcut",), "conv", (out, width, *POINT)))
    return rows


def _middle_rows(coder: str, width: int) -> list[Row]:
    source, target = f"{coder}.mid", f"{coder}.mid_block"
    rows = _resnet_rows(f"{source}.block_1", f"{target}.resnets.0", width, width)
    rows.append(Row(f"{source}.attn_1.norm", (f"{target}.attentions.0.norm",), "gamma", (width,)))
    for name, layer in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "proj_out")):
        names = (f"{target}.attentions.0.{layer}",)
        rows.append(Row(f"{source}.attn_1.{name}", names, "conv", (width, width, *POINT)))
    return rows + _resnet_rows(f"{source}.block_2", f"{target}.resnets.1", width, width)
