"""Weight files of a VideoAlign checkpoint: whether they are complete, and their tensors under official names."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file

from sage_ray.tensor_files import Shape, only_dtype, read_header

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""model_config.torch_dtype -> dtype."""
FILES = (("model.safetensors",), ("model.pth",), ("adapter_model.safetensors", "non_lora_state_dict.pth"))
"""Names of the weight files of a checkpoint; the first set that is there is loaded."""
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""dtype -> safetensors' name."""
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError)
"""What torch raises for a .pth that holds something else or is damaged inside."""
Value = TypeVar("Value")


def check_weight_file(file: Path) -> None:
    """Whether a .safetensors or .pth file is whole, from its header or zip directory only.

    Raises: ValueError when it is missing, empty, cut off or of another format.
    """
    if not file.is_file():
        raise ValueError(f"{file}: the weight file is missing")
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: the weight file is empty")
    if file.suffix == ".safetensors":
        read_header(file)
    else:
        _check_torch_zip(file)


def _check_torch_zip(file: Path) -> None:
    """A torch zip ends in its directory, which must list the pickle and lie behind all entries."""
    if not zipfile.is_zipfile(file):
        raise ValueError(f"{file}: cut off or not a torch zip file, its zip directory is missing")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file}: cut off, its zip directory is not readable ({error})") from None
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        raise ValueError(f"{file}: not a torch file, it holds no data.pkl")
    end_bytes = max(entry.header_offset + entry.compress_size for entry in entries)
    if end_bytes > file.stat().st_size:
        raise ValueError(f"{file}: cut off, {file.stat().st_size} bytes, its entries need {end_bytes}")


def read_shapes(files: tuple[Path, ...]) -> dict[str, Shape]:
    """Shapes of all tensors under the names that `read_tensors` gives them; a .pth is mapped, its numbers are not read.

    Raises: ValueError as `read_tensors`, also for a file whose tensors are of several dtypes.
    """
    parts = []
    for file in files:
        if file.suffix == ".safetensors":
            entries = read_header(file).tensors
            only_dtype(file, {key: entry.dtype for key, entry in entries.items()})
            parts.append({key: entry.shape for key, entry in entries.items()})
        else:
            tensors = _read(file)
            only_dtype(file, {key: STORED.get(tensor.dtype, str(tensor.dtype)) for key, tensor in tensors.items()})
            parts.append({key: tuple(tensor.shape) for key, tensor in tensors.items()})
    return _joined(files, parts)


def read_tensors(files: tuple[Path, ...]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint under the names of a full PEFT state dict, mapped from disk where possible.

    Args: files: (model.safetensors,), (model.pth,) or (adapter_model.safetensors, non_lora_state_dict.pth).
    Raises: ValueError for a file that is not a plain dictionary of tensors, or a name in both files.
    """
    return _joined(files, [_read(file) for file in files])


def _joined(files: tuple[Path, ...], parts: list[dict[str, Value]]) -> dict[str, Value]:
    if len(parts) == 1:
        return parts[0]
    adapter, rest = {_with_adapter_name(key): value for key, value in parts[0].items()}, parts[1]
    if both := sorted(adapter.keys() & rest.keys()):
        raise ValueError(f"{files[1]}: key {both[0]} is also in {files[0].name}")
    return adapter | rest


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        tensors = torch.load(file, "cpu", weights_only=True, mmap=True)
    except UNREADABLE as error:
        raise ValueError(f"{file}: must hold tensors only, loading it as weights failed") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file}: must hold a dictionary of tensors")
    return tensors


def _with_adapter_name(key: str) -> str:
    """`x.lora_A.weight`, as PEFT saves an adapter, to `x.lora_A.default.weight`, as it holds it."""
    for part in ("lora_A", "lora_B"):
        key = key.replace(f".{part}.weight", f".{part}.default.weight")
    return key
