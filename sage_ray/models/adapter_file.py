"""The file of a LoRA adapter, in diffusers' layout: its keys, what its header says, and whether it is whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sage_ray.tensor_files import Header, only_dtype, read_header

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
PREFIX = "transformer."
"""diffusers': where a file's header keeps the LoraConfig as JSON, and what goes before its keys and the tensors'."""


def check_adapter(folder: Path, rank: int | None = None, alpha: float | None = None) -> dict[str, Any]:
    """The LoraConfig in the header of a folder's adapter, of this rank and alpha where given; reads no tensor.

    Raises: ValueError naming file, key and rule: what is missing or half-written, an A without its B, a shape that is
        not of the rank, several dtypes.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder}: must hold {FILE}")
    stored = read_header(path)
    header = read_settings(path, stored)
    for key, wanted, name in (("r", rank, "rank"), ("lora_alpha", alpha, "alpha")):
        found = header.get(PREFIX + key)
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < math.inf:
            raise ValueError(f"{path}: its header does not say {PREFIX + key}, a positive number")
        if wanted is not None and found != wanted:
            raise ValueError(f"{path}: its {name} is {found}, lora.{name}={wanted} must be the same")
    _check_pairs(path, stored, header[f"{PREFIX}r"])
    only_dtype(path, {key: entry.dtype for key, entry in stored.tensors.items()})
    return header


def read_settings(path: Path, stored: Header) -> dict[str, Any]:
    """The LoraConfig in a header. Raises: ValueError naming the file."""
    try:
        header = json.loads(stored.metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header's {METADATA} must be JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header's {METADATA} must be a JSON object")
    return header


def _check_pairs(path: Path, stored: Header, rank: int) -> None:
    for key, entry in stored.tensors.items():
        half = next((k for k in "AB" if key.startswith(PREFIX) and key.endswith(f".lora_{k}.weight")), None)
        if half is None:
            raise ValueError(f"{path}: {key} must be {PREFIX}LAYER.lora_A.weight or {PREFIX}LAYER.lora_B.weight")
        other = f"{key.removesuffix(f'{half}.weight')}{'B' if half == 'A' else 'A'}.weight"
        if other not in stored.tensors:
            raise ValueError(f"{path}: {other} is missing, {key} is there")
        if len(entry.shape) != 2 or entry.shape[0 if half == "A" else 1] != rank:
            raise ValueError(f"{path}: {key} is {entry.shape}, rank {rank} of the header does not fit")
