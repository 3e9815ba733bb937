"""Weight files of a VideoAlign checkpoint: whether they are complete, and their tensors under official names."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""model_config.torch_dtype -> dtype."""


def check_weight_file(file: Path) -> None:
    """Whether a .safetensors or .pth file is whole, from its header or zip directory only.

    Raises: ValueError when it is missing, empty, cut off or of another format.
    """
    if not file.is_file():
        raise ValueError(f"{file}: the weight file is missing")
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: the weight file is empty")
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    else:
        _check_torch_zip(file)


def _check_safetensors(file: Path) -> None:
    """The length must be what the header says."""
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size_bytes
        if 8 + header_bytes > size_bytes:
            raise ValueError(f"{file}: cut off, {size_bytes} bytes end inside the safetensors header")
        text = stream.read(header_bytes)
    try:
        entries = {key: entry for key, entry in json.loads(text).items() if key != "__metadata__"}
        data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file}: not a readable safetensors header ({error!r})") from None
    if size_bytes != 8 + header_bytes + data_bytes:
        raise ValueError(f"{file}: cut off, {size_bytes} bytes, its header says {8 + header_bytes + data_bytes}")


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


def read_tensors(files: tuple[Path, ...]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint under the names of a full PEFT state dict, mapped from disk where possible.

    Args: files: (model.safetensors,), (model.pth,) or (adapter_model.safetensors, non_lora_state_dict.pth).
    Raises: ValueError for a file that is not a plain dictionary of tensors, or a name in both files.
    """
    if len(files) == 1:
        return _read(files[0])
    adapter = {_with_adapter_name(key): tensor for key, tensor in _read(files[0]).items()}
    rest = _read(files[1])
    if both := sorted(adapter.keys() & rest.keys()):
        raise ValueError(f"{files[1]}: key {both[0]} is also in {files[0].name}")
    return adapter | rest


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        tensors = torch.load(file, "cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file}: must hold tensors only, loading it as weights failed") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file}: must hold a dictionary of tensors")
    return tensors


def _with_adapter_name(key: str) -> str:
    """`x.lora_A.weight`, as PEFT saves an adapter, to `x.lora_A.default.weight`, as it holds it."""
    for part in ("lora_A", "lora_B"):
        key = key.replace(f".{part}.weight", f".{part}.default.weight")
    return key
