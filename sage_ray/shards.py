"""What a rank holds of a parameter that FSDP2 shards; a plain parameter is whole."""

from __future__ import annotations

import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_extent(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of the local shard inside the full parameter."""
    if not hasattr(parameter, "to_local"):
        return tuple(parameter.shape), (0,) * parameter.ndim
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape,
        parameter.device_mesh,  # pyright: ignore[reportAttributeAccessIssue]
        parameter.placements,  # pyright: ignore[reportAttributeAccessIssue]
    )
    return tuple(shape), tuple(offset)


def local_share(parameter: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """(the local shard, its rows in the full parameter): FSDP2 shards along rows."""
    shape, offset = local_extent(parameter)
    held = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data  # pyright: ignore[reportAttributeAccessIssue]
    return held, slice(offset[0], offset[0] + shape[0]) if shape else slice(None)
