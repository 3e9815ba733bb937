"""Write a VideoAlign folder in the official layout, for the reward models that this project trains itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from sage_ray.rewards.checkpoint import LORA_EXCLUDED, open_folder
from sage_ray.rewards.reward_tokenizer import save_tokenizer
from sage_ray.rewards.weight_files import DTYPES
from sage_ray.types import AXES


@dataclass(frozen=True)
class CheckpointSettings:
    """What model_config.json says; the defaults are the official folder's where there is an official value."""

    lora_r: int
    lora_alpha: int
    torch_dtype: str = "float32"
    """Of the stored weights; also the precision of the rotary tables, so it must be the one of training."""
    inference_config: dict[str, float] | None = None
    """VQ_mean, VQ_std, MQ_mean ... of raw scores; None leaves scores raw."""
    fps: float = 2.0
    num_frames: int | None = None
    max_frame_pixels: int = 200704
    output_dim: int = 1
    model_name_or_path: str = "Qwen/Qwen2-VL-2B-Instruct"
    step: int = 1
    """N of checkpoint-N."""
    weights_file: str = "model.safetensors"
    """Or model.pth, as upstream writes it."""

    def model_config(self) -> dict:
        """The content of model_config.json. meta_data and data_dir must exist: upstream deletes them."""
        config = {
            "data_config": {
                "meta_data": "",
                "data_dir": "",
                "max_frame_pixels": self.max_frame_pixels,
                "num_frames": self.num_frames,
                "fps": self.fps,
                "eval_dim": list(AXES),
                "prompt_template_type": "detailed_special",
                "sample_type": "uniform",
            },
            "training_args": {"bf16": self.torch_dtype == "bfloat16"},
            "model_config": {
                "model_name_or_path": self.model_name_or_path,
                "output_dim": self.output_dim,
                "use_special_tokens": True,
                "reward_token": "special",
                "torch_dtype": self.torch_dtype,
                "loss_type": "btt",
            },
            "peft_lora_config": {
                "lora_enable": True,
                "vision_lora": False,
                "lora_r": self.lora_r,
                "lora_alpha": self.lora_alpha,
                "lora_dropout": 0.05,
                "lora_namespan_exclude": LORA_EXCLUDED,
                "lora_task_type": "CAUSAL_LM",
                "use_rslora": False,
                "num_lora_modules": -1,
            },
        }
        return config if self.inference_config is None else config | {"inference_config": self.inference_config}


def write_checkpoint(
    folder: str | Path,
    state: dict[str, torch.Tensor],
    *,
    settings: CheckpointSettings,
    base_config: dict,
    tokenizer: Tokenizer,
    prompt_template: str,
) -> None:
    """Write a folder that `VideoAlign.load` reads; files of the same name are replaced.

    Args: state: all parameters under official keys, lm_head included (`random_state`, `VideoAlign.official_state`).
        base_config: the base model's config.json. prompt_template: with {text_prompt} and the three reward tokens.
    Raises: ValueError when the written folder does not pass `VideoAlign.check`, or holds weights that go before these.
    """
    folder = Path(folder)
    checkpoint = folder / f"checkpoint-{settings.step}"
    save_tokenizer(checkpoint / "tokenizer", tokenizer)
    (folder / "prompt_template.txt").write_bytes(prompt_template.encode("utf-8"))
    for name, value in (("model_config.json", settings.model_config()), ("base_config.json", base_config)):
        (folder / name).write_text(json.dumps(value, indent=4) + "\n", "utf-8")
    dtype = DTYPES[settings.torch_dtype]
    tensors = {key: tensor.detach().to("cpu", dtype).contiguous().clone() for key, tensor in state.items()}
    if settings.weights_file == "model.pth":
        torch.save(tensors, checkpoint / settings.weights_file)
    else:
        save_file(tensors, checkpoint / settings.weights_file, metadata={"format": "pt"})
    found = open_folder(folder).weights
    if found != (checkpoint / settings.weights_file,):
        raise ValueError(
            f"{folder}: {found[0]} was there before and would be loaded instead of {settings.weights_file}"
        )
