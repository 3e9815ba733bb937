"""Where a trained policy lies on disk, and how to load it.

A policy is a transformer in diffusers' layout (one safetensors file or shards with an index) or a LoRA adapter, which
means something on its base only. Whoever evaluates, samples or exports one asks here. Only headers are read to check.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors import SafetensorError, safe_open

from sage_ray.json_object import read_object
from sage_ray.models.hunyuan_video import align
from sage_ray.models.lora import FILE, METADATA, PREFIX, add_lora, check_adapter, load_adapter, merged_state

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CLASS = HunyuanVideo15Transformer3DModel.__name__
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""safetensors' names."""
UNKNOWN_TO_MERGE = ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora")
"""Keys of PEFT's LoraConfig that change what an adapter adds; ours never set them."""


@dataclass(frozen=True)
class PolicyFolder:
    """path: the folder that holds the weights themselves. kind: "transformer" (diffusers' layout) or "adapter"."""

    path: Path
    kind: str


def find_policy(folder: Path) -> PolicyFolder:
    """The weights in or under `folder`; their files are there and their headers whole.

    Args:
        folder: a checkpoint of ours (holds transformer/ or adapter/), a HunyuanVideo15Pipeline directory, or the
            folder of the weights itself (transformer, transformer_average, adapter, adapter_average).
    Raises: ValueError naming file and rule, also for what is half written.
    """
    folder = Path(folder)
    if folder.name.endswith(".partial") or folder.parent.name.endswith(".partial"):
        raise ValueError(f"{folder}: is half written; a finished checkpoint's name does not end in .partial")
    inside = [kind for kind in ("transformer", "adapter") if (folder / kind).is_dir()]
    if len(inside) > 1:
        raise ValueError(f"{folder}: holds transformer/ and adapter/; name one of the two")
    if inside:
        found = PolicyFolder(folder / inside[0], inside[0])
    elif (folder / FILE).is_file():
        found = PolicyFolder(folder, "adapter")
    elif (folder / "config.json").is_file():
        found = PolicyFolder(folder, "transformer")
    else:
        raise ValueError(
            f"{folder}: must be a checkpoint or a pipeline directory (holds transformer/ or adapter/), or such a "
            f"folder itself (holds config.json or {FILE})"
        )
    if found.kind == "adapter":
        check_adapter(found.path)
    else:
        _check_transformer(found.path)
    return found


def load_policy(folder: PolicyFolder, base: Path, dtype: torch.dtype) -> HunyuanVideo15Transformer3DModel:
    """The policy as a plain transformer on the CPU, every parameter in fresh storage.

    An adapter is merged: W + (alpha / rank) B A is summed in float32 and rounded once to `dtype`. The base is only
    read. Merging holds the weights twice for a while: 67 GB for the 8.3 B model, 33 GB when both are bfloat16.

    Args:
        folder: from `find_policy`. base: the HunyuanVideo15Pipeline directory that was trained, or its transformer
            folder. dtype: float32 or bfloat16.
    Raises: ValueError naming file, key and rule when configuration, keys or shapes do not fit.
    """
    source = find_policy(base)
    if source.kind != "transformer":
        raise ValueError(f"{base}: the base must be a {CLASS}, not an adapter")
    if folder.kind == "adapter":
        return _merged(folder.path, source.path, dtype)
    ours, theirs = _settings(folder.path), _settings(source.path)
    for key in ours:
        if ours[key] != theirs[key]:
            raise ValueError(f"{folder.path / 'config.json'}: {key}={ours[key]!r}, the base {base} has {theirs[key]!r}")
    return _load(folder.path, dtype)


def check_fits(adapter: Path, base: Path) -> tuple[dict[str, Any], list[str]]:
    """(header, adapted layers) of an adapter whose A and B have the shapes that the base's layers ask for.

    Args: adapter, base: the folders of the weights themselves. Raises: ValueError naming file, key and rule.
    """
    path = adapter / FILE
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[METADATA])
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    for key in UNKNOWN_TO_MERGE:
        if header.get(PREFIX + key):
            raise ValueError(f"{path}: header says {PREFIX + key}={header[PREFIX + key]!r}, which cannot be merged")
    rank, shapes = header[f"{PREFIX}r"], {name: shape for name, shape, _ in _headers(base)}
    layers = sorted({key.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for key in found})
    expected: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shape = shapes.get(f"{layer}.weight", ())
        if len(shape) == 2:
            expected[f"{PREFIX}{layer}.lora_A.weight"] = (rank, shape[1])
            expected[f"{PREFIX}{layer}.lora_B.weight"] = (shape[0], rank)
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            is_now, rule = found.get(key, "missing"), expected.get(key, "no such layer")
            raise ValueError(f"{path}: {key} is {is_now}, rank {rank} on the base {base} makes it {rule}")
    return header, layers


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a transformer folder. Raises: ValueError when one is missing."""
    if (folder / INDEX).is_file():
        shards = read_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{folder / INDEX}: weight_map must name the file of every tensor")
        files = [folder / name for name in sorted(set(shards.values()))]
    else:
        files = [folder / WEIGHTS]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file}: the file does not exist; the folder must hold {WEIGHTS} or {INDEX} and shards")
    return files


def _headers(folder: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, safetensors' dtype) of every tensor; reads no tensor."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    yield name, tuple(part.get_shape()), part.get_dtype()
        except SafetensorError as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error


def _check_transformer(folder: Path) -> None:
    """Raises ValueError unless the folder holds our class with every tensor in the shape of its configuration."""
    name = read_object(folder / "config.json").get("_class_name")
    if name != CLASS:
        raise ValueError(f"{folder / 'config.json'}: _class_name is {name!r}, must be {CLASS}")
    expected = {name: tuple(tensor.shape) for name, tensor in _blank(folder).state_dict().items()}
    shapes = {name: shape for name, shape, _ in _headers(folder)}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            found, rule = shapes.get(name, "missing"), expected.get(name, "no such tensor")
            raise ValueError(f"{folder}: {name} is {found}, config.json makes it {rule}")


def _blank(folder: Path) -> HunyuanVideo15Transformer3DModel:
    """The model of a folder's config.json without storage."""
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel.from_config(_settings(folder))
    assert isinstance(model, HunyuanVideo15Transformer3DModel)
    return model


def _settings(folder: Path) -> dict[str, Any]:
    """Constructor arguments that a config.json comes to, defaults filled in; versions and paths are left out."""
    parameters = inspect.signature(HunyuanVideo15Transformer3DModel.__init__).parameters
    written = read_object(folder / "config.json")
    values = {key: written.get(key, value.default) for key, value in parameters.items() if key != "self"}
    return json.loads(json.dumps(values))


def _load(folder: Path, dtype: torch.dtype) -> HunyuanVideo15Transformer3DModel:
    loaded = HunyuanVideo15Transformer3DModel.from_pretrained(folder, torch_dtype=dtype)
    align(loaded)
    return _filled(folder, loaded.state_dict())


def _filled(folder: Path, state: dict[str, torch.Tensor]) -> HunyuanVideo15Transformer3DModel:
    """The model of config.json around these tensors; from_pretrained would keep this machine's paths in it."""
    model = _blank(folder)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _merged(adapter: Path, base: Path, dtype: torch.dtype) -> HunyuanVideo15Transformer3DModel:
    """The base's transformer with the adapter in it. Raises: ValueError naming the adapter's file and key."""
    header, layers = check_fits(adapter, base)
    as_stored = {stored for _, _, stored in _headers(base)} == {DTYPE_NAMES[dtype]}
    model = _load(base, dtype if as_stored else torch.float32)
    rank, alpha = header[f"{PREFIX}r"], header[f"{PREFIX}lora_alpha"]
    try:
        add_lora(model, rank=rank, alpha=alpha, targets=layers, seed=0, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"{adapter / FILE}: does not fit {base}: {error}") from error
    load_adapter(model, adapter)
    state = merged_state(model)
    del model
    return _filled(base, {name: state.pop(name).to(dtype) for name in list(state)})
