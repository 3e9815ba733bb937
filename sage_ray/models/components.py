"""What a component of a pipeline must hold for its class: every tensor in its shape, no other, all of one dtype.

The class is built from config.json without storage and compared with the headers of the weights, so nothing is taken
from memory or GPU. Only text_encoder_2's embedding is ever read: a file may hold it twice, then both must be equal.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from transformers import Qwen2_5_VLTextModel, T5EncoderModel

from sage_ray.from_settings import made_from
from sage_ray.json_object import read_object
from sage_ray.tensor_files import Shape, TensorFiles


class Component(NamedTuple):
    """model: the class. stem: of its weights' files. key, names: what config.json must say, and under which key.

    tied: names of one tensor, of which a file may hold either or both.
    """

    model: type
    stem: str
    key: str
    names: tuple[str, ...]
    tied: tuple[str, ...] = ()


def _diffusers(model: type) -> Component:
    return Component(model, "diffusion_pytorch_model", "_class_name", (model.__name__,))


COMPONENTS = {
    "transformer": _diffusers(HunyuanVideo15Transformer3DModel),
    "vae": _diffusers(AutoencoderKLHunyuanVideo15),
    "text_encoder": Component(Qwen2_5_VLTextModel, "model", "model_type", ("qwen2_5_vl_text", "qwen2_5_vl")),
    "text_encoder_2": Component(
        T5EncoderModel, "model", "model_type", ("t5",), ("shared.weight", "encoder.embed_tokens.weight")
    ),
}
COUNTS = ("num_layers", "num_refiner_layers", "num_hidden_layers", "layers_per_block")
"""Keys that say how many modules there are, at most as many as tensors: a class with 10**9 layers is never built."""
LATER = ("use_meanflow",)
"""Arguments of diffusers' classes that folders of its first versions do not state; the default is what they were."""
OTHER_LOADING = ("quantization_config", "auto_map")
"""Keys of config.json with which the libraries would load something else."""


def check_component(folder: Path, name: str) -> TensorFiles:
    """The weights of the component `name` (of COMPONENTS) in `folder`, checked against its class.

    Raises: ValueError naming file, key and rule.
    """
    component, file = COMPONENTS[name], folder / "config.json"
    config = read_object(file)
    if config.get(component.key) not in component.names:
        words = " or ".join(component.names)
        raise ValueError(f"{file}: {component.key} is {config.get(component.key)!r}, must be {words}")
    for key in OTHER_LOADING:
        if config.get(key) is not None:
            raise ValueError(f"{file}: {key} is not supported; weights must be stored as they are")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder / 'adapter_config.json'}: must not be there, an adapter would be loaded with it")
    if component.key == "_class_name":
        _check_arguments(file, config, component.model)
    files = TensorFiles(folder, component.stem)
    check_counts(file, config, len(files.shapes))
    expected = dict(_expected(name, str(file), json.dumps(config)))
    _match(files, expected, component.tied)
    files.only_dtype()
    return files


def _check_arguments(file: Path, config: dict[str, Any], model: type) -> None:
    """A missing or odd argument of a diffusers class would silently become another model, or fail when it is used."""
    for key, argument in inspect.signature(model.__init__).parameters.items():
        if key == "self" or (key in LATER and key not in config):
            continue
        if key not in config:
            raise ValueError(f"{file}: key {key} is missing")
        value, default = config[key], argument.default
        kinds = {float: (int, float), tuple: (list,)}.get(type(default), (type(default),))
        parts = value if isinstance(value, list) else [value]
        if type(value) not in kinds or any(type(x) in (int, float) and not 0 <= x < math.inf for x in parts):
            raise ValueError(f"{file}: {key}={value!r} must be like {default!r}")


def check_counts(file: Path, config: dict[str, Any], most: int) -> None:
    """Raises ValueError for a number of modules that is none, or more than there are tensors."""
    for key in COUNTS:
        if (count := config.get(key, 0)) is not None and (type(count) is not int or not 0 <= count <= most):
            raise ValueError(f"{file}: {key}={count!r} must be an int, at most the {most} tensors that are there")


def blank(name: str, file: str, config: dict[str, Any]) -> torch.nn.Module:
    """The component's class without storage. Raises: ValueError naming `file` for settings that make none."""
    model = COMPONENTS[name].model

    def make() -> torch.nn.Module:
        with torch.device("meta"):
            if COMPONENTS[name].key == "_class_name":
                return model.from_config(config)
            settings = model.config_class
            return model(settings.from_dict(config.get(settings.base_config_key or "", config)))

    return made_from(file, model.__name__, make)


@functools.lru_cache(maxsize=16)
def _expected(name: str, file: str, config: str) -> tuple[tuple[str, Shape], ...]:
    return tuple((key, tuple(value.shape)) for key, value in blank(name, file, json.loads(config)).state_dict().items())


def _match(files: TensorFiles, expected: dict[str, Shape], tied: tuple[str, ...]) -> None:
    """Raises ValueError for the first tensor that is missing, unknown or of another shape."""
    held = [key for key in tied if key in files.shapes]
    if len(held) > 1 and len({files.shapes[key] for key in held}) == 1:
        if not all(torch.equal(files.read(held[0]), files.read(key)) for key in held[1:]):
            raise ValueError(f"{files.files[held[1]]}: {' and '.join(held)} must be equal")
    for key in tied:
        if key not in (held or tied[:1]):
            del expected[key]
    for key in sorted(expected.keys() | files.shapes.keys()):
        if files.shapes.get(key) != expected.get(key):
            file = files.files.get(key, files.main)
            is_now, rule = files.shapes.get(key, "missing"), expected.get(key, "no such tensor")
            raise ValueError(f"{file}: {key} is {is_now}, config.json makes it {rule}")
