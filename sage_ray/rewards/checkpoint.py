"""A VideoAlign folder on disk: what it must hold, checked before anything is allocated.

    VideoReward/
        model_config.json  prompt_template.txt  [base_config.json]
        checkpoint-N/  model.safetensors | model.pth | adapter_model.safetensors + non_lora_state_dict.pth
        checkpoint-N/tokenizer/tokenizer.json
    <model_name_or_path>/config.json        beside VideoReward, unless base_config.json is there

The highest N is used. Only JSON, file headers and zip directories are read; no tensor is.
"""

from __future__ import annotations

import hashlib
import math
import re
import string
from dataclasses import dataclass
from pathlib import Path

from sage_ray.json_object import read_object
from sage_ray.rewards.weight_files import FILES, check_weight_file
from sage_ray.tensor_files import refuse_partial
from sage_ray.types import AXES

REWARD_TOKENS = tuple(f"<|{axis}_reward|>" for axis in AXES)
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|endoftext|>")
LORA_EXCLUDED = ["lm_head", "rm_head", "embed_tokens", "visual"]
OFFICIAL_WEIGHTS_BYTES = 5_031_072_529
OFFICIAL_TEMPLATE_SHA256 = "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"

NEEDED = {
    "data_config": ("max_frame_pixels", "fps"),
    "model_config": ("model_name_or_path", "output_dim", "reward_token", "torch_dtype"),
    "peft_lora_config": ("lora_enable", "lora_r", "lora_alpha"),
}
SUPPORTED = {
    "data_config": {"prompt_template_type": ["detailed_special"], "sample_type": ["uniform"], "eval_dim": [list(AXES)]},
    "model_config": {
        "output_dim": [1, 3],
        "use_special_tokens": [True],
        "reward_token": ["special"],
        "torch_dtype": ["bfloat16", "float32"],
    },
    "peft_lora_config": {
        "lora_enable": [True, False],
        "vision_lora": [False],
        "use_rslora": [False],
        "num_lora_modules": [-1],
        "lora_namespan_exclude": [LORA_EXCLUDED],
    },
}
"""section -> key -> accepted values; a key that is absent counts as accepted unless NEEDED lists it."""

POSITIVE = {"data_config": ("max_frame_pixels", "fps", "num_frames"), "peft_lora_config": ("lora_r", "lora_alpha")}
BASE_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
BASE_VISION_SIZES = ("depth", "embed_dim", "hidden_size", "num_heads")
BASE_VISION_FIXED = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True)
class RewardFolder:
    """Files of a checked folder and its parsed configuration. weights: one file, or (adapter, rest)."""

    path: Path
    config: dict
    base_file: Path
    base_config: dict
    template: str
    weights: tuple[Path, ...]
    tokenizer: Path


def open_folder(folder: Path) -> RewardFolder:
    """Check a VideoAlign folder and parse its small files.

    Raises: ValueError naming file, key and rule.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: must be a VideoAlign directory, is {'a file' if folder.exists() else 'missing'}")
    refuse_partial(folder)
    file = folder / "model_config.json"
    config = read_object(file)
    _check_config(file, config)
    base_file, base = _base_config(folder, config["model_config"]["model_name_or_path"])
    checkpoint = newest_checkpoint(folder)
    weights = _weights(checkpoint)
    tokenizer = checkpoint / "tokenizer" / "tokenizer.json"
    _check_tokenizer(tokenizer)
    template = _template(folder / "prompt_template.txt", weights)
    return RewardFolder(folder, config, base_file, base, template, weights, tokenizer)


def _check_config(file: Path, config: dict) -> None:
    """Every needed key is there and every value is one that this implementation reproduces."""
    for section, keys in NEEDED.items():
        if type(config.get(section)) is not dict:
            raise ValueError(f"{file}: section {section} is missing")
        for key in keys:
            if key not in config[section]:
                raise ValueError(f"{file}: key {section}.{key} is missing")
    for section, rules in SUPPORTED.items():
        for key, accepted in rules.items():
            value = config[section].get(key, accepted[0])
            if value not in accepted:
                words = " or ".join(map(repr, accepted))
                raise ValueError(f"{file}: {section}.{key}={value!r} is not supported, must be {words}")
    for section, keys in POSITIVE.items():
        for key in keys:
            value = config[section].get(key)
            if value is not None or key in NEEDED[section]:
                _check_positive(file, f"{section}.{key}", value)
    if not isinstance(name := config["model_config"]["model_name_or_path"], str) or not name:
        raise ValueError(f"{file}: model_config.model_name_or_path={name!r} must be a name")
    if config.get("inference_config") is not None:
        _check_constants(file, config["inference_config"])


def _check_positive(file: Path, key: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{file}: {key}={value!r} must be a finite number above 0")


def _check_constants(file: Path, constants: object) -> None:
    """inference_config: a finite mean and a positive std for every axis."""
    if not isinstance(constants, dict):
        raise ValueError(f"{file}: inference_config must be an object, is {constants!r}")
    for axis in AXES:
        for key in (f"{axis}_mean", f"{axis}_std"):
            if key not in constants:
                raise ValueError(f"{file}: key inference_config.{key} is missing")
            if type(constants[key]) not in (int, float) or not math.isfinite(constants[key]):
                raise ValueError(f"{file}: inference_config.{key}={constants[key]!r} must be a finite number")
        _check_positive(file, f"inference_config.{axis}_std", constants[f"{axis}_std"])


def _base_config(folder: Path, name: str) -> tuple[Path, dict]:
    """The base model's config.json and what it holds, from the first of three places that has it."""
    beside = folder.absolute().parent
    places = [folder / "base_config.json", beside / name / "config.json", beside / Path(name).name / "config.json"]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ValueError(f"{folder}: the config.json of {name} is at none of {', '.join(map(str, places))}")
    base = read_object(file)
    if base.get("model_type") != "qwen2_vl":
        raise ValueError(f"{file}: model_type={base.get('model_type')!r} must be 'qwen2_vl'")
    vision, text = base.get("vision_config"), base.get("text_config", base)
    if type(vision) is not dict:
        raise ValueError(f"{file}: section vision_config is missing")
    missing = [key for key in BASE_SIZES if key not in text]
    missing += [f"vision_config.{key}" for key in BASE_VISION_SIZES if key not in vision]
    if missing:
        raise ValueError(f"{file}: key {missing[0]} is missing")
    for key, fixed in BASE_VISION_FIXED.items():
        if vision.get(key, fixed) != fixed:
            raise ValueError(f"{file}: vision_config.{key}={vision[key]!r} is not supported, must be {fixed}")
    return file, base


def newest_checkpoint(folder: Path) -> Path:
    """The checkpoint-N of the highest N. Raises: ValueError when there is none."""
    found = {int(m.group(1)): p for p in folder.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))}
    if not found:
        raise ValueError(f"{folder}: holds no checkpoint-N directory")
    return found[max(found)]


def _weights(checkpoint: Path) -> tuple[Path, ...]:
    """The weight files, each complete as far as its container tells."""
    for names in FILES:
        files = tuple(checkpoint / name for name in names)
        if files[0].exists():
            for file in files:
                check_weight_file(file)
            return files
    looked_for = ", ".join(" with ".join(names) for names in FILES)
    raise ValueError(f"{checkpoint}: holds no weights, looked for {looked_for}")


def _check_tokenizer(file: Path) -> None:
    added = read_object(file).get("added_tokens", [])
    if not isinstance(added, list):
        raise ValueError(f"{file}: added_tokens must be a list")
    known = {entry.get("content") for entry in added if isinstance(entry, dict)}
    for token in (*CHAT_TOKENS, *REWARD_TOKENS):
        if token not in known:
            raise ValueError(f"{file}: added_tokens must hold {token}")


def _template(file: Path, weights: tuple[Path, ...]) -> str:
    """The prompt template, byte for byte: blanks at line ends are tokens."""
    if not file.is_file():
        raise ValueError(f"{file}: the prompt template is missing; it is model input and not part of the weights")
    content = file.read_bytes()
    official = weights[0].name == "model.pth" and weights[0].stat().st_size == OFFICIAL_WEIGHTS_BYTES
    if official and (digest := hashlib.sha256(content).hexdigest()) != OFFICIAL_TEMPLATE_SHA256:
        raise ValueError(f"{file}: sha256 {digest} must be {OFFICIAL_TEMPLATE_SHA256} for the official checkpoint")
    try:
        text = content.decode("utf-8")
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"{file}: not a format string in UTF-8 ({error})") from None
    if fields != ["text_prompt"]:
        raise ValueError(f"{file}: must hold the field {{text_prompt}} once and no other, holds {fields}")
    places = [text.find(token) for token in REWARD_TOKENS]
    if [text.count(token) for token in REWARD_TOKENS] != [1, 1, 1] or places != sorted(places):
        raise ValueError(f"{file}: must hold {', '.join(REWARD_TOKENS)} once each, in this order")
    return text
