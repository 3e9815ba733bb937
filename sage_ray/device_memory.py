"""The most memory that this process's tensors have taken on its GPU."""

from __future__ import annotations

import torch


def peak_bytes() -> int:
    """Most bytes allocated at once since `forget_peak`, 0 without a GPU. The allocator's reserve and the context are
    not counted."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def forget_peak() -> None:
    """Begin to look for the peak anew."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
