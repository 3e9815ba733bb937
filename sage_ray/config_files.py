"""Existence checks of what a configuration points at: the output folder and the policy's checkpoint.

Reads JSON and safetensors headers only, so it costs milliseconds even for a large checkpoint and finds a half-written
one before anything is allocated. Prompt files and the reward folder are checked by their own modules.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from sage_ray.config import Config, ConfigError
from sage_ray.json_object import read_object

PIPELINE = "HunyuanVideo15Pipeline"
CONFIG_FILES = {
    "transformer": "config.json",
    "vae": "config.json",
    "text_encoder": "config.json",
    "text_encoder_2": "config.json",
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
    "scheduler": "scheduler_config.json",
    "guider": "guider_config.json",
}
"""Component folder -> the file that describes it, in diffusers' layout."""

WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
}
"""Component folder -> its weights; beside it `<name>.index.json` when they are sharded."""


def check_files(config: Config) -> None:
    """Checks output_dir, model.path and that the video's size suits the checkpoint's VAE.

    Raises:
        ConfigError: names the key, the file and the rule.
    """
    check_output_dir(Path(config.output_dir))
    check_pipeline(Path(config.model.path))
    _check_video_size(config)


def check_output_dir(folder: Path) -> None:
    """Raises ConfigError unless the folder is new or empty."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r}: must be a new or empty folder, is a file")
    if (folder / "config.yaml").exists():
        raise ConfigError(f"output_dir={str(folder)!r}: must be new or empty, holds another run (config.yaml)")
    first = next(iter(sorted(folder.iterdir())), None)
    if first is not None:
        raise ConfigError(f"output_dir={str(folder)!r}: must be new or empty, holds {first.name}")


def check_pipeline(folder: Path) -> None:
    """Raises ConfigError unless the folder is a complete HunyuanVideo15Pipeline in diffusers' layout."""
    if not folder.is_dir():
        raise ConfigError(f"model.path={str(folder)!r}: must be a directory that holds a {PIPELINE}")
    index = _read_json(folder / "model_index.json")
    if index.get("_class_name") != PIPELINE:
        raise _broken(folder / "model_index.json", f"_class_name must be {PIPELINE}, is {index.get('_class_name')!r}")
    for component, file in CONFIG_FILES.items():
        if component not in index:
            raise _broken(folder / "model_index.json", f"must list the component {component}")
        _read_json(folder / component / file)
    for component, file in WEIGHTS.items():
        _check_weights(folder / component / file)


def _check_weights(file: Path) -> None:
    """One safetensors file, or the shards its index lists, each complete and holding its tensors."""
    index_file = file.with_name(file.name + ".index.json")
    if not index_file.exists():
        safetensors_names(file)
        return
    weight_map = _read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _broken(index_file, "must hold a weight_map of tensors and shards")
    for shard in sorted(set(weight_map.values())):
        names = safetensors_names(file.with_name(shard))
        missing = [name for name, where in weight_map.items() if where == shard and name not in names]
        if missing:
            raise _broken(file.with_name(shard), f"must hold {missing[0]}, as {index_file.name} says")


def safetensors_names(file: Path) -> set[str]:
    """Names of the tensors of a safetensors file, after checking that its length is what its header says.

    Raises:
        ConfigError: missing, unreadable or shorter or longer than its header says (a half-written file).
    """
    if not file.is_file():
        raise _broken(file, "the file does not exist")
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size_bytes
        if 8 + header_bytes > size_bytes:
            raise _broken(file, f"half-written: {size_bytes} bytes end inside the safetensors header")
        text = stream.read(header_bytes)
    try:
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        data_bytes = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise _broken(file, f"the safetensors header is not readable: {error!r}") from error
    expected_bytes = 8 + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise _broken(file, f"half-written: {size_bytes} bytes, its header says {expected_bytes}")
    return set(tensors)


def _check_video_size(config: Config) -> None:
    """The video must fill whole latent frames and pixels of the checkpoint's VAE."""
    file = Path(config.model.path) / "vae" / "config.json"
    vae, sampling = _read_json(file), config.sampling
    for ratio in ("temporal_compression_ratio", "spatial_compression_ratio"):
        if not isinstance(vae.get(ratio), int) or vae[ratio] < 1:
            raise _broken(file, f"must hold {ratio}, a positive int")
    temporal, spatial = vae["temporal_compression_ratio"], vae["spatial_compression_ratio"]
    if (sampling.num_frames - 1) % temporal:
        raise ConfigError(
            f"sampling.num_frames={sampling.num_frames}: num_frames - 1 must be a multiple of {temporal}, "
            f"the temporal ratio in {file}"
        )
    for key in ("height", "width"):
        if getattr(sampling, key) % spatial:
            raise ConfigError(
                f"sampling.{key}={getattr(sampling, key)}: must be a multiple of {spatial}, the spatial ratio in {file}"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from error


def _broken(file: Path, rule: str) -> ConfigError:
    return ConfigError(f"model.path: {file}: {rule}")
