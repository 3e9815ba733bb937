"""Encoded prompts as the tensors that a packed forward takes, one row or several of unequal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from sage_ray.types import Condition


class ConditionTensors(NamedTuple):
    """text: float32 [R, L, text_dim]; byt5: float32 [R, L2, byt5_dim]; text_mask, byt5_mask: bool [R, L], [R, L2], True
    at valid tokens, None where all are."""

    text: torch.Tensor
    byt5: torch.Tensor
    text_mask: torch.Tensor | None
    byt5_mask: torch.Tensor | None


def condition_tensors(conditions: Sequence[Condition], device: torch.device | str) -> ConditionTensors:
    """R conditions as rows; shorter ones are padded behind, and only then is there a mask."""
    text, text_mask = _rows([condition.text for condition in conditions], device)
    byt5, byt5_mask = _rows([condition.byt5 for condition in conditions], device)
    return ConditionTensors(text, byt5, text_mask, byt5_mask)


def _rows(parts: Sequence[np.ndarray], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tokens [R, longest, D], mask [R, longest] or None)."""
    tokens = pad_sequence([torch.from_numpy(np.array(part)) for part in parts], batch_first=True)
    lengths = torch.tensor([len(part) for part in parts])
    mask = None if (lengths == tokens.shape[1]).all() else torch.arange(tokens.shape[1]) < lengths[:, None]
    return tokens.to(device), None if mask is None else mask.to(device)
