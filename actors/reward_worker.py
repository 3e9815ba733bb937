"""A reward worker: VideoAlign, and the small world's truth where the config names it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from sage_ray.config import Config
from sage_ray.models.hunyuan_video import TORCH_DTYPES
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.shapes.truth import judge
from sage_ray.types import Scores


class RewardWorker:
    """Scores groups of clips. A non-finite score stays non-finite: it is counted and leaves its group later."""

    def __init__(self, config: Config, device: str):
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        self.config = config
        self.scorer = VideoAlign.load(Path(config.reward.path), device, TORCH_DTYPES[config.reward.dtype])

    def score(self, frames: np.ndarray, prompt: str) -> Scores:
        """Scores of one group. frames: uint8 [G, T, H, W, 3], all of one prompt."""
        start = time.monotonic()
        axes = self.scorer.score(list(frames), [prompt] * len(frames), self.config.sampling.fps)
        truth = matches = None
        if self.config.reward.truth == "shapes":
            seen = judge(torch.from_numpy(np.array(frames)), [prompt] * len(frames))
            truth = torch.stack([seen.vq, seen.mq, seen.ta], 1).double().numpy()
            matches = seen.matches.double().numpy()
        return Scores(axes.cpu().double().numpy(), truth, matches, time.monotonic() - start)

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True
