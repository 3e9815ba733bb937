"""A small, random HunyuanVideo15Pipeline with its own tokenizers and text encoders; nothing is fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from sage_ray.rewards.reward_tokenizer import WORD_PATTERN
from sage_ray.shapes.world import SPECS, caption

SYSTEM_TOKENS = 105
"""Fillers of the system turn: with <|im_start|>, "user" and the line break they make the 108 tokens that the pipeline
cuts off before the prompt (a constant in diffusers that is not saved with a checkpoint)."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|filler|>' * " + str(SYSTEM_TOKENS) + " }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the small policy; the defaults make the checkpoint under assets/."""

    heads: int = 4
    head_dim: int = 16
    layers: int = 4
    rope: tuple[int, int, int] = (4, 6, 6)
    latent_channels: int = 8
    vae_channels: tuple[int, ...] = (8, 16, 32, 64)
    vae_layers: int = 0
    text_dim: int = 64
    shift: float = 3.0


def build_pipeline(sizes: Sizes, seed: int = 0) -> HunyuanVideo15Pipeline:
    """A pipeline with random weights; guidance is off in its guider (scale 1)."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer()
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=2 * sizes.latent_channels + 1,
        out_channels=sizes.latent_channels,
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_dim,
        num_layers=sizes.layers,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=sizes.text_dim,
        text_embed_2_dim=16,
        image_embed_dim=8,
        rope_axes_dim=sizes.rope,
        task_type="t2v",
    )
    for parameter in transformer.context_embedder_2.parameters():
        torch.nn.init.zeros_(parameter)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=sizes.latent_channels,
        block_out_channels=sizes.vae_channels,
        layers_per_block=sizes.vae_layers,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        scaling_factor=1.0,
    )
    with torch.no_grad():  # a narrow posterior: wide ones make the decoder ignore the latents
        vae.encoder.conv_out.conv.get_parameter("bias")[sizes.latent_channels :] = -5.0
    return HunyuanVideo15Pipeline(
        text_encoder=_text_encoder(tokenizer, sizes.text_dim),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=sizes.shift),
        text_encoder_2=_byt5_encoder(),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )


def word_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE in which every word of the captions is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
    )
    tokenizer.train_from_iterator([caption(spec) for spec in SPECS] + ["user", "assistant", "system"] * 50, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    result = Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, extra_special_tokens=["<|im_start|>", "<|im_end|>", "<|filler|>"]
    )
    result.chat_template = CHAT_TEMPLATE
    result.padding_side = "right"
    return result


def _text_encoder(tokenizer: Qwen2Tokenizer, text_dim: int) -> Qwen2_5_VLTextModel:
    """Random and frozen; a wide initialisation keeps words apart (the third hidden state from the end is used)."""
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=text_dim,
        intermediate_size=2 * text_dim,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2_5_VLTextModel(config).eval()


def _byt5_encoder() -> T5EncoderModel:
    config = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, tie_word_embeddings=False)
    return T5EncoderModel(config).eval()
