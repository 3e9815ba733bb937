"""A random pipeline folder of the real size, written fast: few random numbers, repeated, and small text encoders.

The language model has the real width but three layers and a small vocabulary, and byT5 one layer: their outputs have
the real shapes, their own cost is not the real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from torch import nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from bench.real_size import SMALL_TRANSFORMER, Size, blank, spread
from sage_ray.models.streamed import STEM
from sage_ray.models.tensor_files import write_tensors
from sage_ray.shapes.pipeline import word_tokenizer

HEAD_DIMS = {3584: 128, 32: 16}
"""Width of the language model -> width of its heads."""
SECTIONS = {128: [16, 24, 24], 16: [2, 3, 3]}
FILE_BYTES = 5 * 10**9


def write_policy(folder: Path, size: Size, shift: float = 5.0) -> None:
    """A HunyuanVideo15Pipeline folder in bfloat16."""
    source, tokenizer = random_numbers(), word_tokenizer()
    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo15(**size.vae)
    vae = vae.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            parameter.copy_(_random(name, parameter, source))
    transformer = blank(size)
    pipeline = HunyuanVideo15Pipeline(
        text_encoder=_language_model(tokenizer, transformer.config.text_embed_dim),
        tokenizer=tokenizer,
        transformer=HunyuanVideo15Transformer3DModel(**SMALL_TRANSFORMER),  # its place is taken below
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder_2=_byt5(transformer.config.text_embed_2_dim),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )
    pipeline.save_pretrained(folder)
    shutil.rmtree(folder / "transformer")
    write_transformer(folder / "transformer", transformer, source)


def write_transformer(folder: Path, model: nn.Module, source: torch.Tensor, file_bytes: int = FILE_BYTES) -> None:
    """A random transformer folder in bfloat16, in files of at most `file_bytes`, each made when it is written."""

    def make(name: str, parameter: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: {name: _random(name, parameter, source)}

    pieces = [(2 * p.numel(), make(name, p)) for name, p in model.state_dict().items()]
    write_tensors(folder, STEM, pieces, file_bytes)
    model.save_config(folder)


def random_numbers() -> torch.Tensor:
    """What random parameters repeat: float32 [2 ** 22], standard normal."""
    return torch.randn(2**22, generator=torch.Generator().manual_seed(0))


def _random(name: str, like: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """bfloat16 of the shape of `like`: the source's numbers over and over."""
    std = spread(name, like)
    if std is None:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    count = like.numel()
    numbers = (source[:count] * std).bfloat16()
    return numbers.repeat(-(-count // len(numbers)))[:count].reshape(like.shape).contiguous()


def _language_model(tokenizer: Qwen2Tokenizer, width: int) -> Qwen2_5_VLTextModel:
    """Three layers, as the third hidden state from the end is used."""
    head_dim = HEAD_DIMS[width]
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=width // head_dim,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS[head_dim]},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2_5_VLTextModel(config).eval().bfloat16()


def _byt5(width: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=384, d_model=width, d_kv=8, d_ff=width, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    return T5EncoderModel(config).eval().bfloat16()
