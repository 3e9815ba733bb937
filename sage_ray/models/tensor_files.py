"""Safetensors weights of a folder, read one tensor and written one shard at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sage_ray.json_object import read_object

Shape = tuple[int, ...]
SHARD_BYTES = 5 * 10**9
"""Most bytes of one file, as diffusers writes them; also the memory that writing needs."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1}


class TensorFiles:
    """The tensors of `folder/stem.safetensors`, or of the shards that `stem.safetensors.index.json` lists.

    shapes: key -> shape. bytes: key -> size. Only headers are read until `read`.
    """

    def __init__(self, folder: Path, stem: str):
        """Raises: ValueError naming file and key: missing, unreadable, in two files, not where the index says."""
        index = folder / f"{stem}.safetensors.index.json"
        listed: Mapping[str, str] | None = None
        if index.is_file():
            listed = read_object(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{index}: weight_map must name the file of every tensor")
        self.shapes: dict[str, Shape] = {}
        self.bytes: dict[str, int] = {}
        self._files: dict[str, Path] = {}
        for name in sorted(set(listed.values())) if listed else [f"{stem}.safetensors"]:
            self._read_header(folder / name)
        for key in sorted(self.shapes.keys() ^ (listed or self.shapes).keys()):
            raise ValueError(f"{index}: key {key} is {'not listed' if key in self.shapes else 'in none of the shards'}")

    def _read_header(self, file: Path) -> None:
        if not file.is_file():
            raise ValueError(f"{file}: the file does not exist")
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():
                    if key in self.shapes:
                        raise ValueError(f"{file}: key {key} is also in {self._files[key].name}")
                    part = opened.get_slice(key)
                    self._files[key], self.shapes[key] = file, tuple(part.get_shape())
                    if part.get_dtype() not in ITEM_BYTES:
                        raise ValueError(f"{file}: key {key} has dtype {part.get_dtype()}, must be of {[*ITEM_BYTES]}")
                    self.bytes[key] = ITEM_BYTES[part.get_dtype()] * math.prod(self.shapes[key])
        except SafetensorError as error:
            raise ValueError(f"{file}: cannot be read: {error}") from error

    def read(self, key: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        with safe_open(self._files[key], framework="pt") as opened:
            return opened.get_tensor(key)


Piece = tuple[int, Callable[[], Mapping[str, torch.Tensor]]]
"""(bytes, what makes the tensors): tensors that are made together and go into one file."""


def write_tensors(folder: Path, stem: str, pieces: Sequence[Piece], shard_bytes: int = SHARD_BYTES) -> None:
    """Write pieces in their order into files of at most `shard_bytes` (or of one piece), with an index if several.

    Args: folder: is made. pieces: each is made when its file is written and then forgotten.
    """
    shards: list[list[Piece]] = [[]]
    size_bytes = 0
    for piece in pieces:
        if shards[-1] and size_bytes + piece[0] > shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(piece)
        size_bytes += piece[0]
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{part}.safetensors"
        tensors = {key: tensor.contiguous() for _, make in shard for key, tensor in make().items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(piece[0] for piece in pieces)}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
