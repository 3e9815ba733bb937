"""What a checkpoint holds, read without a process group and whole."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader


def read_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's training state by its key."""
    reader = FileSystemReader(checkpoint / "state")
    stored = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored.items()}
    with warnings.catch_warnings(action="ignore"):  # it says that it reads in one process
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Over all tensors, whose keys must be the same."""
    assert one.keys() == other.keys() and one
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)
