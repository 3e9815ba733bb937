"""Where a trained policy lies on disk, and how to load it.

A policy is a transformer in diffusers' layout (one safetensors file or shards with an index) or a LoRA adapter, which
means something on its base only. Whoever evaluates, samples or exports one asks here. Only headers are read to check.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sage_ray.json_object import read_object
from sage_ray.models.adapter_file import FILE, PREFIX, check_adapter
from sage_ray.models.components import blank, check_component
from sage_ray.models.lora import add_lora, load_adapter, merged_state
from sage_ray.models.streamed import STEM, load_transformer
from sage_ray.tensor_files import TensorFiles, refuse_partial

WEIGHTS = f"{STEM}.safetensors"
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
    refuse_partial(folder)
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
        check_component(found.path, "transformer")
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
    return load_transformer(folder.path, dtype, "cpu")


def check_fits(adapter: Path, base: Path) -> tuple[dict[str, Any], list[str]]:
    """(header, adapted layers) of an adapter whose A and B have the shapes that the base's layers ask for.

    Args: adapter, base: the folders of the weights themselves. Raises: ValueError naming file, key and rule.
    """
    path = adapter / FILE
    header, found = check_adapter(adapter), TensorFiles(adapter, FILE.removesuffix(".safetensors")).shapes
    for key in UNKNOWN_TO_MERGE:
        if header.get(PREFIX + key):
            raise ValueError(f"{path}: header says {PREFIX + key}={header[PREFIX + key]!r}, which cannot be merged")
    rank, shapes = header[f"{PREFIX}r"], TensorFiles(base, STEM).shapes
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


def _settings(folder: Path) -> dict[str, Any]:
    """Constructor arguments that a config.json comes to, defaults filled in; versions and paths are left out."""
    parameters = inspect.signature(HunyuanVideo15Transformer3DModel.__init__).parameters
    written = read_object(folder / "config.json")
    values = {key: written.get(key, value.default) for key, value in parameters.items() if key != "self"}
    return json.loads(json.dumps(values))


def _filled(folder: Path, state: dict[str, torch.Tensor]) -> HunyuanVideo15Transformer3DModel:
    """The model of config.json around these tensors."""
    model = blank("transformer", str(folder / "config.json"), _settings(folder))
    assert isinstance(model, HunyuanVideo15Transformer3DModel)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _merged(adapter: Path, base: Path, dtype: torch.dtype) -> HunyuanVideo15Transformer3DModel:
    """The base's transformer with the adapter in it. Raises: ValueError naming the adapter's file and key."""
    header, layers = check_fits(adapter, base)
    as_stored = TensorFiles(base, STEM).only_dtype() == DTYPE_NAMES[dtype]
    model = load_transformer(base, dtype if as_stored else torch.float32, "cpu")
    rank, alpha = header[f"{PREFIX}r"], header[f"{PREFIX}lora_alpha"]
    try:
        add_lora(model, rank=rank, alpha=alpha, targets=layers, seed=0, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"{adapter / FILE}: does not fit {base}: {error}") from error
    load_adapter(model, adapter)
    state = merged_state(model)
    del model
    return _filled(base, {name: state.pop(name).to(dtype) for name in list(state)})
