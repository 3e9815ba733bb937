"""An untrained VideoAlign of any size: the base model's config.json and random weights under official keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from sage_ray.rewards.network import RewardNetwork

EMBEDDING_STD = 0.5
"""About the size of a fresh vision token, so that neither drowns the other."""

HEAD_GAIN = 0.1
RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "attn.proj", "fc2")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a small Qwen2-VL. hidden / heads must be a multiple of 8, vision_dim / vision_heads of 4."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    vision_dim: int = 32
    vision_depth: int = 2
    vision_heads: int = 2
    vision_mlp_ratio: int = 4


def base_config(sizes: Sizes, tokenizer: Tokenizer) -> dict:
    """The base model's config.json (`Qwen2VLConfig`, flat layout).

    Raises: ValueError when the head sizes leave no whole rotary sections.
    """
    for name, width, heads, step in (
        ("hidden / heads", sizes.hidden, sizes.heads, 8),
        ("vision_dim / vision_heads", sizes.vision_dim, sizes.vision_heads, 4),
    ):
        if width % (heads * step):
            raise ValueError(f"{name}={width}/{heads}: must be a multiple of {step}")
    token = {f"{name}_token_id": tokenizer.token_to_id(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    token |= {f"{name}_token_id": tokenizer.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        **token,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": _rotary_sections(sizes)},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vision_config": _vision_config(sizes),
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
    }


def _rotary_sections(sizes: Sizes) -> list[int]:
    """Whole sections are asked for by the format; VideoAlign's 1-D positions make them equal."""
    rotary = sizes.hidden // sizes.heads // 2
    rest = rotary - rotary // 4
    return [rotary // 4, (rest + 1) // 2, rest // 2]


def _vision_config(sizes: Sizes) -> dict:
    return {
        "depth": sizes.vision_depth,
        "embed_dim": sizes.vision_dim,
        "hidden_size": sizes.hidden,
        "in_chans": 3,
        "mlp_ratio": sizes.vision_mlp_ratio,
        "num_heads": sizes.vision_heads,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def random_state(config: dict, rows: int, lora_r: int, output_dim: int, seed: int) -> dict[str, torch.Tensor]:
    """float32 tensors under official keys, ready to be trained: LoRA starts as the identity, scores near 0.

    Args: config: the base model's config.json. rows: of the embedding, the tokenizer's size. output_dim: 1 or 3.
    """
    network = RewardNetwork(config, rows, {"lora_enable": True, "lora_r": lora_r, "lora_alpha": lora_r}, output_dim)
    names = network.official_names()
    shapes = {names[name]: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    num_blocks = max(len(network.backbone.language_model.layers), len(network.backbone.visual.blocks))
    generator = torch.Generator().manual_seed(seed)
    state = {key: _draw(key, shapes[key], num_blocks, generator) for key in sorted(shapes)}
    embedding = state[f"{network.prefix}model.embed_tokens.weight"]
    return state | {f"{network.prefix}lm_head.weight": embedding.clone()}


def _draw(key: str, shape: tuple[int, ...], num_blocks: int, generator: torch.Generator) -> torch.Tensor:
    """Norms 1, biases and LoRA B 0, matrices normal with std 1 / sqrt(inputs), smaller where a block ends."""
    if key.endswith("bias") or "lora_B" in key:
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = math.prod(shape[1:]) ** -0.5
    if "embed_tokens" in key:
        std = EMBEDDING_STD
    elif "rm_head" in key:
        std *= HEAD_GAIN
    elif any(name in key for name in RESIDUAL_OUTPUTS) and "lora" not in key:
        std /= math.sqrt(2 * num_blocks)
    return torch.randn(shape, generator=generator) * std
