"""The small VideoAlign of the shapes world: its template, tokenizer and sizes."""

from __future__ import annotations

from pathlib import Path

import torch

from sage_ray.rewards.initial_state import Sizes, base_config, random_state
from sage_ray.rewards.reward_tokenizer import train_tokenizer
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.rewards.videoalign_write import CheckpointSettings, write_checkpoint
from sage_ray.shapes.world import SPECS, caption

TEMPLATE = (
    "\nJudge this video.\nVisual quality: <|VQ_reward|>\nMotion quality: <|MQ_reward|>\n"
    "Textual prompt - {text_prompt}\nText alignment: <|TA_reward|>\n"
)
SIZES = Sizes(hidden=80, layers=3, heads=5, kv_heads=5, intermediate=160, vision_dim=32, vision_depth=1, vision_heads=2)
LORA_R, LORA_ALPHA = 8, 16


def write_reward(folder: Path, state: dict[str, torch.Tensor] | None, constants: dict[str, float] | None, seed: int):
    """Write `folder` as a VideoAlign directory in bfloat16; state None draws random weights.

    Args: constants: inference_config (VQ_mean, VQ_std, ...) or None.
    """
    corpus = [caption(spec) for spec in SPECS] + [TEMPLATE, "system You are a helpful assistant. user assistant"] * 50
    tokenizer = train_tokenizer(corpus, 512)
    base = base_config(SIZES, tokenizer)
    if state is None:
        state = random_state(base, tokenizer.get_vocab_size(with_added_tokens=True), LORA_R, 1, seed)
    settings = CheckpointSettings(
        lora_r=LORA_R, lora_alpha=LORA_ALPHA, torch_dtype="bfloat16", inference_config=constants
    )
    write_checkpoint(folder, state, settings=settings, base_config=base, tokenizer=tokenizer, prompt_template=TEMPLATE)


def new_model(folder: Path, device: str, seed: int) -> VideoAlign:
    """A random model in float32 on `device`, ready to train; `folder` holds its first checkpoint."""
    write_reward(folder, None, None, seed)
    return VideoAlign.load(folder, device, torch.float32)
