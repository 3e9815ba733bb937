"""What every reward and every measure is: a scorer of clips that names its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import nn


@runtime_checkable
class Scorer(Protocol):
    """Scores clips. VideoAlign, CLIPScore, PickScore, truth, a user's class and a remote service all are one.

    parts: names of the numbers that a clip gets, such as ("VQ", "MQ", "TA").
    """

    parts: tuple[str, ...]

    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        """float64 [B, len(parts)], one row a clip.

        Args: videos: B clips uint8 [T, H, W, 3] (RGB), shapes may differ. prompts: B texts. fps: that they play at.
        Raises: ValueError naming the clip or prompt that is wrong. A number that could not be had is nan, or an
            exception; it is never another number.
        """
        ...


def modules_of(scorer: Scorer) -> list[nn.Module]:
    """The torch modules that a scorer is or has as attributes: what it keeps on a device, as far as it shows."""
    return [value for value in (scorer, *getattr(scorer, "__dict__", {}).values()) if isinstance(value, nn.Module)]
