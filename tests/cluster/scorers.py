"""Scorers of the tests' own, for workers in other processes: they misbehave on command, once or always."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class Brightness:
    """Mean pixel of a clip, and commands in its prompt: hang and die act once, error and nan always.

    folder: where the processes leave a mark that a command has acted.
    """

    parts = ("brightness", "frames")

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        for prompt in prompts:
            if prompt == "hang" and self._first(prompt):
                time.sleep(1000)
            if prompt == "die" and self._first(prompt):
                os._exit(1)
            if prompt == "error":
                raise ValueError("this prompt cannot be scored")
        values = np.array([[video.mean(), len(video)] for video in videos], np.float64)
        values[[prompt == "nan" for prompt in prompts], 0] = np.nan
        return values

    def _first(self, command: str) -> bool:
        try:
            (self.folder / command).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class HalfBroken:
    """A number for a video whose middle pixel is even, nan for the others."""

    parts = ("half",)

    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        middle = np.array([int(v[len(v) // 2, v.shape[1] // 2, v.shape[2] // 2].sum()) for v in videos])
        return np.where(middle % 2 == 0, middle / 765, np.nan)[:, None]
