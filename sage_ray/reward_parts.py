"""The parts of the run's reward, their weighted sum, and a group's scores from those of its videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sage_ray.advantage import combine
from sage_ray.types import AXES, Scores, VideoScore


class RewardParts(NamedTuple):
    """The parts of the run's reward. A part of weight 0 is a measure: it is logged, and its failure fails nothing;
    VideoAlign's axes come from one forward and always count."""

    names: tuple[str, ...]
    weights: tuple[float, ...]

    @property
    def trained(self) -> list[int]:
        """Columns that the reward needs."""
        return [k for k, name in enumerate(self.names) if self.weights[k] != 0 or name in AXES]

    def total(self, axes: np.ndarray) -> np.ndarray:
        """Weighted sum of [..., K] (eq. 33), nan where a needed part is not finite; returns [...]."""
        return combine(axes[..., self.trained], [self.weights[k] for k in self.trained])

    def truth_total(self, truth: np.ndarray) -> np.ndarray:
        """Truth's VQ, MQ and TA [..., 3] weighted as the reward weighs its own, or equally where it has none."""
        found = dict(zip(self.names, self.weights, strict=True))
        return combine(truth, [found[axis] for axis in AXES] if set(AXES) <= found.keys() else (1.0, 1.0, 1.0))


def failed(reason: str, num_parts: int) -> VideoScore:
    """A video without a score."""
    return VideoScore(np.full(num_parts, np.nan), reason, "", None, None, {}, 0.0)


def as_scores(videos: Sequence[VideoScore]) -> Scores:
    """Scores of a group from those of its videos; truth of a failed video is nan where others are judged."""
    judged = any(video.truth is not None for video in videos)
    names = next((tuple(video.frames) for video in videos if video.frames), ())
    unknown = np.full(3, np.nan)
    return Scores(
        axes=np.stack([video.parts for video in videos]),
        truth=np.stack([unknown if v.truth is None else v.truth for v in videos]) if judged else None,
        matches=np.array([np.nan if v.match is None else v.match for v in videos]) if judged else None,
        seconds=sum(video.seconds for video in videos),
        reasons=tuple(video.reason for video in videos),
        frames={name: np.array([video.frames.get(name, np.nan) for video in videos]) for name in names},
    )
