"""Inputs of the golden scores: a tiny random checkpoint and synthetic clips, both functions of a seed alone.

tests/data/videoalign/videoalign_golden.json holds what upstream's own code scores on them, and digests of both, so a
drift here is found before it is taken for a wrong score.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch

from sage_ray.rewards.initial_state import Sizes, base_config
from sage_ray.rewards.reward_tokenizer import train_tokenizer
from sage_ray.rewards.videoalign_write import CheckpointSettings, write_checkpoint

DATA = Path(__file__).parents[1] / "data" / "videoalign"
GOLDEN = json.loads((DATA / "videoalign_golden.json").read_text("utf-8"))
TEMPLATE = (DATA / "prompt_template.txt").read_bytes().decode("utf-8")
SIZES = Sizes()
LORA_R, LORA_ALPHA = 4, 8
NORM = {"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121}
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CELL = 12

CORPUS = (
    "The camera slowly follows a small red boat across a calm lake at sunrise.",
    "Please evaluate the quality of the generated video and provide a rating for each category.",
    "Visual quality covers clarity, detail, color, composition, brightness and the overall aesthetic.",
    "Motion quality covers stability, naturalness, smoothness, fusion and amplitude of the movement.",
    "Text alignment considers whether the subject, motion, environment, style and camera match the prompt.",
    "A person walks through a crowded street while the background lights blur in the rain.",
    "There should be no sudden jumps, unnatural artifacts, missing body parts or logical errors in the scene.",
    "The following dimensions should be independent of the others, with 0 being the worst and 10 the best.",
    "Assess the dynamic aspects of the video; consider texture, lighting, hair, clothing and shadows.",
    "If the content is static or harmful, the score should be as low as possible.",
    "Two dogs and three children play with a blue ball on the green grass, cinematic wide shot.",
    "Ensure that elements in motion blend with the background and that transitions are seamless.",
)
"""What the golden tokenizer was trained on; its merges depend on every letter."""


class Draw:
    """Seeded normal tensors, rounded through bfloat16 so that both dtypes hold the same numbers."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * std + mean).bfloat16().float()

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(rows, columns, std=gain / math.sqrt(columns))

    def norm(self, width: int) -> torch.Tensor:
        return self.normal(width, std=0.1, mean=1.0)


def text_tensors(draw: Draw, rows: int) -> dict[str, torch.Tensor]:
    hidden, intermediate = SIZES.hidden, SIZES.intermediate
    kv = SIZES.kv_heads * hidden // SIZES.heads
    tensors = {"model.embed_tokens.weight": draw.normal(rows, hidden, std=1.0)}
    for layer in range(SIZES.layers):
        at = f"model.layers.{layer}."
        for name, width, gain in (("q", hidden, 2.0), ("k", kv, 2.0), ("v", kv, 1.5)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw.matrix(width, hidden, gain)
            tensors[f"{at}self_attn.{name}_proj.bias"] = draw.normal(width, std=0.3)
        tensors[f"{at}self_attn.o_proj.weight"] = draw.matrix(hidden, hidden, 1.5)
        tensors[f"{at}mlp.gate_proj.weight"] = draw.matrix(intermediate, hidden)
        tensors[f"{at}mlp.up_proj.weight"] = draw.matrix(intermediate, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = draw.matrix(hidden, intermediate)
        tensors[f"{at}input_layernorm.weight"] = draw.norm(hidden)
        tensors[f"{at}post_attention_layernorm.weight"] = draw.norm(hidden)
    return tensors | {"model.norm.weight": draw.norm(hidden)}


def vision_tensors(draw: Draw) -> dict[str, torch.Tensor]:
    width, wide, merged = SIZES.vision_dim, SIZES.vision_dim * SIZES.vision_mlp_ratio, SIZES.vision_dim * 4
    patch = (3, 2, 14, 14)
    tensors = {"visual.patch_embed.proj.weight": draw.normal(width, *patch, std=1.0 / math.sqrt(math.prod(patch)) * 4)}
    for layer in range(SIZES.vision_depth):
        at = f"visual.blocks.{layer}."
        for name in ("norm1", "norm2"):
            tensors[f"{at}{name}.weight"] = draw.norm(width)
            tensors[f"{at}{name}.bias"] = draw.normal(width, std=0.1)
        for name, out, into, gain, bias_std in (
            ("attn.qkv", 3 * width, width, 1.5, 0.2),
            ("attn.proj", width, width, 1.0, 0.1),
            ("mlp.fc1", wide, width, 1.0, 0.1),
            ("mlp.fc2", width, wide, 1.0, 0.1),
        ):
            tensors[f"{at}{name}.weight"] = draw.matrix(out, into, gain)
            tensors[f"{at}{name}.bias"] = draw.normal(out, std=bias_std)
    tensors["visual.merger.ln_q.weight"] = draw.norm(width)
    tensors["visual.merger.ln_q.bias"] = draw.normal(width, std=0.1)
    for name, out in (("0", merged), ("2", SIZES.hidden)):
        tensors[f"visual.merger.mlp.{name}.weight"] = draw.matrix(out, merged, 1.5)
        tensors[f"visual.merger.mlp.{name}.bias"] = draw.normal(out, std=0.1)
    return tensors


def golden_state(rows: int, output_dim: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 tensors of the golden checkpoint under official keys; LoRA B is not zero."""
    draw = Draw(seed)
    state = {}
    for key, tensor in (text_tensors(draw, rows) | vision_tensors(draw)).items():
        stem, leaf = key.rsplit(".", 1)
        if not (stem.startswith("model.layers.") and stem.endswith(LORA_TARGETS)):
            state[f"base_model.model.{key}"] = tensor
            continue
        state[f"base_model.model.{stem}.base_layer.{leaf}"] = tensor
        if leaf == "weight":
            state[f"base_model.model.{stem}.lora_A.default.weight"] = draw.matrix(LORA_R, tensor.shape[1], 0.7)
            lora_b = draw.normal(tensor.shape[0], LORA_R, std=0.35 / math.sqrt(LORA_R))
            state[f"base_model.model.{stem}.lora_B.default.weight"] = lora_b
    state["base_model.model.lm_head.weight"] = state["base_model.model.model.embed_tokens.weight"].clone()
    state["base_model.model.rm_head.weight"] = draw.normal(output_dim, SIZES.hidden, std=0.35)
    return state


def write_golden(folder: Path, dtype: str = "float32", **settings: object) -> Path:
    """Write the golden checkpoint; `settings` override CheckpointSettings. Returns `folder`."""
    tokenizer = train_tokenizer(CORPUS, 640)
    defaults = {"inference_config": NORM, "step": 11352, "weights_file": "model.pth", "torch_dtype": dtype}
    chosen = CheckpointSettings(LORA_R, LORA_ALPHA, **(defaults | settings))
    write_checkpoint(
        folder,
        golden_state(tokenizer.get_vocab_size(with_added_tokens=True), chosen.output_dim),
        settings=chosen,
        base_config=base_config(SIZES, tokenizer),
        tokenizer=tokenizer,
        prompt_template=TEMPLATE,
    )
    return folder


def clip(seed: int | str, frames: int, height: int, width: int) -> np.ndarray:
    """uint8 [T, H, W, 3]: a blocky texture that scrolls under a moving square; seed "zeros" is black."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    if seed == "zeros":
        return video
    random = np.random.RandomState(seed)
    blocks = random.randint(0, 160, size=(height // CELL + 3, width // CELL + 3, 3)).astype(np.int64)
    texture = np.kron(blocks, np.ones((CELL, CELL, 1), np.int64))
    step_y, step_x = int(random.randint(1, 3)), int(random.randint(1, 4))
    side = height // 4
    color = random.randint(80, 256, size=3).astype(np.int64)
    square_y, square_x = int(random.randint(1, 6)), int(random.randint(2, 9))
    rows, columns = np.mgrid[0:height, 0:width]
    ramp = ((rows * 40) // height + (columns * 50) // width)[..., None]
    for t in range(frames):
        y, x = step_y * t % CELL, step_x * t % CELL
        frame = texture[y : y + height, x : x + width] + ramp
        y, x = square_y * t * 3 % (height - side), square_x * t * 3 % (width - side)
        frame[y : y + side, x : x + side] = (frame[y : y + side, x : x + side] + 3 * color) // 4
        video[t] = np.clip(frame, 0, 255)
    return video


def golden_clip(name: str) -> tuple[np.ndarray, float]:
    """A clip of the golden file, and its frames per second."""
    made = GOLDEN["videos"][name]
    return clip(made["seed"], made["frames"], made["height"], made["width"]), made["fps"]


def sha256(array: np.ndarray | torch.Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def state_sha256(state: dict[str, torch.Tensor]) -> str:
    """Over keys in order: the key, then the tensor's bytes."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
