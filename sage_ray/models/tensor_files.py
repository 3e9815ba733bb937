"""Writes the safetensors weights of a folder one shard at a time; `sage_ray.tensor_files` reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file, as diffusers writes them; also the memory that writing needs."""


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
