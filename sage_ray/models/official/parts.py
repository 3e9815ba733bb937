"""The parts of a HunyuanVideo-1.5 folder, each checked first and then written in the other layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler

from sage_ray.config_files import CONFIG_FILES, PIPELINE
from sage_ray.json_object import read_object
from sage_ray.models.official import config as configs
from sage_ray.models.official.keys import check_keys, rules
from sage_ray.models.official.text import Write, byt5_to_diffusers, llm_to_diffusers, text_to_official
from sage_ray.models.tensor_files import write_tensors
from sage_ray.tensor_files import TensorFiles

STEM = "diffusion_pytorch_model"
MODEL_INDEX = {
    "guider": ["diffusers", "ClassifierFreeGuidance"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", configs.TRANSFORMER],
    "vae": ["diffusers", configs.VAE],
}


def to_diffusers_steps(source: Path, version: str) -> list[Write]:
    """The steps that write a pipeline; everything they need is checked."""
    shift, guidance = configs.VERSIONS[version]
    folder = source / "transformer" / version
    files, file = TensorFiles(folder, STEM), folder / "config.json"
    transformer = configs.transformer_from_official(read_object(file), files.shapes, str(file))
    if transformer["task_type"] != "t2v":
        raise ValueError(
            f"{file}: ideal_task={transformer['task_type']!r} must be 't2v', only text-to-video is supported"
        )
    vae_file = source / "vae" / "config.json"
    vae = configs.vae_from_official(read_object(vae_file), str(vae_file))

    def write_small(target: Path) -> None:
        FlowMatchEulerDiscreteScheduler(shift=shift).save_config(target / "scheduler")
        ClassifierFreeGuidance(guidance_scale=guidance).save_config(target / "guider")
        _write_json(target / "model_index.json", {"_class_name": PIPELINE, **_diffusers_version(vae), **MODEL_INDEX})

    return [
        _weights(files, transformer, transformer, "official", "transformer"),
        _weights(TensorFiles(source / "vae", STEM), vae, vae, "official", "vae"),
        llm_to_diffusers(source / "text_encoder" / "llm"),
        byt5_to_diffusers(source / "text_encoder"),
        write_small,
    ]


def to_official_steps(source: Path, version: str | None) -> list[Write]:
    """The steps that write an official folder; everything they need is checked."""
    read = {
        part: read_object(source / part / CONFIG_FILES[part]) for part in ("transformer", "vae", "scheduler", "guider")
    }
    transformer = configs.transformer_to_official(read["transformer"], f"{source}/transformer/config.json")
    vae = configs.vae_to_official(read["vae"], f"{source}/vae/config.json")
    if transformer["ideal_task"] != "t2v":
        raise ValueError(f"{source}/transformer/config.json: task_type={transformer['ideal_task']!r} must be 't2v'")
    if version is None:
        if read["scheduler"].get("use_dynamic_shifting"):
            raise ValueError(f"{source}/scheduler: use_dynamic_shifting has no counterpart in the official program")
        guidance = read["guider"].get("guidance_scale") if read["guider"].get("enabled", True) else 1.0
        version = configs.version_of(transformer, read["scheduler"].get("shift"), guidance, str(source))
    shift = configs.VERSIONS[version][0]
    files = TensorFiles(source / "transformer", STEM)

    def write_small(target: Path) -> None:
        (target / "scheduler").mkdir()
        _write_json(target / "scheduler/scheduler_config.json", configs.scheduler_to_official(shift))
        _write_json(target / "config.json", {"_class_name": "HunyuanVideo_1_5_Pipeline", **_diffusers_version(vae)})

    return [
        _weights(files, read["transformer"], transformer, "diffusers", f"transformer/{version}"),
        _weights(TensorFiles(source / "vae", STEM), read["vae"], vae, "diffusers", "vae"),
        text_to_official(source),
        write_small,
    ]


def _weights(files: TensorFiles, config: dict[str, Any], written: dict[str, Any], side: str, name: str) -> Write:
    """Transformer or VAE through the key map. config: diffusers'. written: the target's. side: the source's."""
    found = rules(config)
    check_keys(found, files.shapes, side, name)

    def write(target: Path) -> None:
        pieces = [
            (
                sum(files.bytes[key] for key in rule.keys(side)),
                lambda rule=rule: rule.apply([files.read(key) for key in rule.keys(side)], side),
            )
            for rule in found
        ]
        write_tensors(target / name, STEM, pieces)
        _write_json(target / name / "config.json", written)

    return write


def _diffusers_version(config: dict[str, Any]) -> dict[str, Any]:
    return {"_diffusers_version": config["_diffusers_version"]}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
