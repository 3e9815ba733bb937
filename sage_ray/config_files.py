"""Checks of what a configuration points at: the output folder and the policy's checkpoint.

Reads JSON and safetensors headers only, so it costs little even for a large checkpoint and finds a half-written one
before anything is allocated. Prompt files and the reward folder are checked by their own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sage_ray.config import Config, ConfigError
from sage_ray.json_object import read_object
from sage_ray.tensor_files import TensorFiles, refuse_partial

Result = TypeVar("Result")

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


def check_model(config: Config) -> None:
    """Checks that model.path will load as what it says it is, and that the video's size suits its VAE.

    Raises: ConfigError naming the key, the file and the rule.
    """
    from sage_ray.models.pipeline_check import check_components  # its libraries take seconds; `fetch` needs none

    folder = Path(config.model.path)
    check_pipeline(folder)
    _named(lambda: check_components(folder))
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
    _named(lambda: refuse_partial(folder))
    index = _read_json(folder / "model_index.json")
    if index.get("_class_name") != PIPELINE:
        raise _broken(folder / "model_index.json", f"_class_name must be {PIPELINE}, is {index.get('_class_name')!r}")
    for component, file in CONFIG_FILES.items():
        if component not in index:
            raise _broken(folder / "model_index.json", f"must list the component {component}")
        _read_json(folder / component / file)
    for component, file in WEIGHTS.items():
        _named(partial(TensorFiles, folder / component, file.removesuffix(".safetensors")))


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
    return _named(lambda: read_object(file))


def _named(check: Callable[[], Result]) -> Result:
    """What `check` returns; its ValueError as a ConfigError that names the key."""
    try:
        return check()
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from error


def _broken(file: Path, rule: str) -> ConfigError:
    return ConfigError(f"model.path: {file}: {rule}")
