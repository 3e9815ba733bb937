"""HunyuanVideo-1.5 as its publication describes it, over official key names alone: what a key map is judged by.

Written from the description (technical report arXiv 2511.18870, module names and order of operations of the official
program), in functions over a dictionary, without diffusers. A wrong split, swap or name changes the result; a round
trip would not notice.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

State = dict[str, torch.Tensor]


def linear(w: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(x: torch.Tensor, w: State | None = None, name: str = "", eps: float = 1e-6) -> torch.Tensor:
    """LayerNorm, with weight and bias where a name is given."""
    affine = (w[f"{name}.weight"], w[f"{name}.bias"]) if w is not None else (None, None)
    return F.layer_norm(x, x.shape[-1:], *affine, eps=eps)


def time_embedding(w: State, name: str, t: torch.Tensor) -> torch.Tensor:
    """Cosines first, then sines, of t / 10000^(i / 128); two layers."""
    angles = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    return linear(w, f"{name}.mlp.2", F.silu(linear(w, f"{name}.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, S, heads, D] each -> [B, S, heads * D]."""
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def refine(w: State, text: torch.Tensor, t: torch.Tensor, heads: int, depth: int) -> torch.Tensor:
    """The token refiner; its modulation gates attention and MLP and has no shift or scale."""
    pooled = linear(w, "txt_in.c_embedder.linear_2", F.silu(linear(w, "txt_in.c_embedder.linear_1", text.mean(1))))
    condition = F.silu(time_embedding(w, "txt_in.t_embedder", t) + pooled)
    x = linear(w, "txt_in.input_embedder", text)
    for i in range(depth):
        name = f"txt_in.individual_token_refiner.blocks.{i}"
        gate_attention, gate_mlp = linear(w, f"{name}.adaLN_modulation.1", condition)[:, None].chunk(2, -1)
        fused = linear(w, f"{name}.self_attn_qkv", norm(x, w, f"{name}.norm1"))
        q, k, v = fused.unflatten(2, (3, heads, -1)).unbind(2)
        x = x + gate_attention * linear(w, f"{name}.self_attn_proj", attention(q, k, v))
        inner = F.silu(linear(w, f"{name}.mlp.fc1", norm(x, w, f"{name}.norm2")))
        x = x + gate_mlp * linear(w, f"{name}.mlp.fc2", inner)
    return x


def rotate(x: torch.Tensor, grid: tuple[int, ...], axes: tuple[int, ...], theta: float = 256.0) -> torch.Tensor:
    """Rotary embedding of neighbouring pairs; the head's channels are shared out to time, height and width."""
    positions = torch.cartesian_prod(*(torch.arange(n).float() for n in grid))
    angles = [positions[:, i, None] * theta ** -(torch.arange(0, d, 2) / d) for i, d in enumerate(axes)]
    turn = torch.polar(torch.ones(len(positions), sum(axes) // 2), torch.cat(angles, 1))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def double_block(w: State, i: int, streams: list[torch.Tensor], vec: torch.Tensor, heads: int, turn) -> list:
    """[video, text] -> [video, text]: own weights, one attention over both; video tokens are rotated."""
    names, modulations, parts = ("img", "txt"), [], []
    for name, x in zip(names, streams):
        name = f"double_blocks.{i}.{name}"
        m = linear(w, f"{name}_mod.linear", F.silu(vec))[:, None].chunk(6, -1)
        modulations.append(m)
        shifted = norm(x) * (1 + m[1]) + m[0]
        q, k, v = (linear(w, f"{name}_attn_{part}", shifted).unflatten(2, (heads, -1)) for part in "qkv")
        q, k = (
            y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}_attn_{part}_norm.weight"]
            for part, y in (("q", q), ("k", k))
        )
        parts.append((turn(q), turn(k), v) if name.endswith("img") else (q, k, v))
    joint = attention(*(torch.cat(pair, 1) for pair in zip(*parts)))
    out = []
    for name, x, m, a in zip(names, streams, modulations, joint.split([x.shape[1] for x in streams], 1)):
        name = f"double_blocks.{i}.{name}"
        x = x + m[2] * linear(w, f"{name}_attn_proj", a)
        inner = F.gelu(linear(w, f"{name}_mlp.fc1", norm(x) * (1 + m[4]) + m[3]), approximate="tanh")
        out.append(x + m[5] * linear(w, f"{name}_mlp.fc2", inner))
    return out


def transformer(w: State, config: dict, x, t, text, byt5, vision, t_r=None) -> torch.Tensor:
    """Velocity [B, C, F, H, W] of the official transformer where every text, glyph and vision token is valid.

    Args:
        w: official key -> float32. config: the official config.json. vision: not all zero. t_r: the second
            time of a mean-flow model.
    """
    heads, patch = config["heads_num"], config["patch_size"]
    video = F.conv3d(x, w["img_in.proj.weight"], w["img_in.proj.bias"], stride=patch)
    grid = tuple(video.shape[2:])
    vec = time_embedding(w, "time_in", t)
    if t_r is not None:
        vec = vec + time_embedding(w, "time_r_in", t_r)
    depth = len({key.split(".")[3] for key in w if key.startswith("txt_in.individual_token_refiner")})
    kinds = w["cond_type_embedding.weight"]
    context = refine(w, text, t, heads, depth) + kinds[0]
    glyph = F.gelu(linear(w, "byt5_in.fc1", norm(byt5, w, "byt5_in.layernorm", 1e-5)))
    glyph = linear(w, "byt5_in.fc3", F.gelu(linear(w, "byt5_in.fc2", glyph))) + kinds[1]
    image = linear(w, "vision_in.proj.1", norm(vision, w, "vision_in.proj.0", 1e-5))
    image = norm(linear(w, "vision_in.proj.3", F.gelu(image)), w, "vision_in.proj.4", 1e-5) + kinds[2]
    streams = [video.flatten(2).transpose(1, 2), torch.cat([image, glyph, context], 1)]
    for i in range(config["mm_double_blocks_depth"]):
        streams = double_block(w, i, streams, vec, heads, lambda y: rotate(y, grid, tuple(config["rope_dim_list"])))
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", F.silu(vec))[:, None].chunk(2, -1)
    out = linear(w, "final_layer.linear", norm(streams[0]) * (1 + scale) + shift)
    out = out.reshape(len(x), *grid, config["out_channels"], *patch)
    return torch.einsum("nthwcopq->nctohpwq", out).reshape(len(x), config["out_channels"], *x.shape[2:])


def conv(w: State, name: str, x: torch.Tensor) -> torch.Tensor:
    """Causal in time: all of its time padding lies before the clip. Edges are repeated."""
    return F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"), w[f"{name}.conv.weight"], w[f"{name}.conv.bias"])


def rms(w: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=1) * math.sqrt(x.shape[1]) * w[f"{name}.gamma"]


def resnet(w: State, name: str, x: torch.Tensor) -> torch.Tensor:
    h = conv(w, f"{name}.conv1", F.silu(rms(w, f"{name}.norm1", x)))
    h = conv(w, f"{name}.conv2", F.silu(rms(w, f"{name}.norm2", h)))
    if f"{name}.nin_shortcut.weight" in w:
        x = F.conv3d(x, w[f"{name}.nin_shortcut.weight"], w[f"{name}.nin_shortcut.bias"])
    return x + h


def middle(w: State, name: str, x: torch.Tensor) -> torch.Tensor:
    """Two resnets around an attention that sees its own frame and earlier ones."""
    x = resnet(w, f"{name}.block_1", x)
    normed, frames = rms(w, f"{name}.attn_1.norm", x), x.shape[2]

    def point(part: str, y: torch.Tensor) -> torch.Tensor:
        return F.conv3d(y, w[f"{name}.attn_1.{part}.weight"], w[f"{name}.attn_1.{part}.bias"])

    q, k, v = (point(part, normed).flatten(2).transpose(1, 2) for part in "qkv")
    frame = torch.arange(frames).repeat_interleave(x.shape[3] * x.shape[4])
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(frame > frame[:, None], -math.inf)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
    return resnet(w, f"{name}.block_2", x + point("proj_out", attended))


def fold(x: torch.Tensor, time: int) -> torch.Tensor:
    """[B, C, F r, 2 H, 2 W] -> [B, (r 2 2 C), F, H, W]."""
    x = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, time))
    return torch.einsum("bcfrhpwq->brpqcfhw", x).flatten(1, 4)


def unfold(x: torch.Tensor, time: int) -> torch.Tensor:
    x = torch.einsum("brpqcfhw->bcfrhpwq", x.unflatten(1, (time, 2, 2, -1)))
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def down(w: State, name: str, x: torch.Tensor, time: int) -> torch.Tensor:
    """Positions become channels; the first frame stands alone in time. The shortcut averages channel groups."""
    h = conv(w, f"{name}.conv", x)
    if time == 1:
        h, short = fold(h, 1), fold(x, 1)
        return h + short.unflatten(1, (h.shape[1], -1)).mean(2)
    first = fold(h[:, :, :1], 1).repeat(1, 2, 1, 1, 1)
    h = torch.cat([first, fold(h[:, :, 1:], 2)], 2)
    shorts = [fold(x[:, :, :1], 1), fold(x[:, :, 1:], 2)]
    return h + torch.cat([s.unflatten(1, (h.shape[1], -1)).mean(2) for s in shorts], 2)


def up(w: State, name: str, x: torch.Tensor, time: int) -> torch.Tensor:
    """The inverse: channels become positions; the shortcut repeats channels."""
    h = conv(w, f"{name}.conv", x)
    repeats = h.shape[1] // x.shape[1]
    if time == 1:
        return unfold(h, 1) + unfold(x.repeat_interleave(repeats, 1), 1)
    first = unfold(h[:, :, :1], 1).chunk(2, 1)[0] + unfold(x[:, :, :1], 1).repeat_interleave(repeats // 2, 1)
    return torch.cat([first, unfold(h[:, :, 1:], 2) + unfold(x[:, :, 1:], 2).repeat_interleave(repeats, 1)], 2)


def levels(w: State, side: str, part: str, x: torch.Tensor, times: list[int]) -> torch.Tensor:
    """The levels of encoder (`part` down) or decoder (up). times: of each level that resamples, 2 with time, else 1."""
    for i in range(1 + max(int(key.split(".")[2]) for key in w if key.startswith(f"{side}.{part}."))):
        j = 0
        while f"{side}.{part}.{i}.block.{j}.norm1.gamma" in w:
            x, j = resnet(w, f"{side}.{part}.{i}.block.{j}", x), j + 1
        if f"{side}.{part}.{i}.{part}sample.conv.conv.weight" in w:
            x = (down if part == "down" else up)(w, f"{side}.{part}.{i}.{part}sample", x, times[i])
    return x


def encode(w: State, x: torch.Tensor, times: list[int]) -> torch.Tensor:
    """Mean and log-variance [B, 2 Z, F', H', W']."""
    h = middle(w, "encoder.mid", levels(w, "encoder", "down", conv(w, "encoder.conv_in", x), times))
    out = conv(w, "encoder.conv_out", F.silu(rms(w, "encoder.norm_out", h)))
    return out + h.unflatten(1, (out.shape[1], -1)).mean(2)


def decode(w: State, z: torch.Tensor, times: list[int]) -> torch.Tensor:
    h = conv(w, "decoder.conv_in", z)
    h = middle(w, "decoder.mid", h + z.repeat_interleave(h.shape[1] // z.shape[1], 1))
    h = levels(w, "decoder", "up", h, times)
    return conv(w, "decoder.conv_out", F.silu(rms(w, "decoder.norm_out", h)))
