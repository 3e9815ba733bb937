"""What a video looks like in six numbers: guards against a policy that pleases the reward with degenerate frames."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

NUM_FRAMES = 16
"""Frames, and pairs of neighbours, that are looked at in each video; a shorter one is looked at in full."""
LUMA = (299, 587, 114)
"""BT.601's weights of red, green and blue, in thousandths: whole numbers keep a flat frame exactly flat."""


@dataclass(frozen=True)
class FrameStatistics:
    """float64 [G], one value a video, each in [0, 1]. x is a subpixel / 255, y = 0.299 R + 0.587 G + 0.114 B of x."""

    brightness: np.ndarray
    """Mean of y over pixels and frames."""
    contrast: np.ndarray
    """Standard deviation of y over pixels and frames together, at most 0.5."""
    high_frequency: np.ndarray
    """Share of spatial energy above half the Nyquist frequency: sum of |F|^2 where max(|f_y|, |f_x|) > 1/4 cycle per
    pixel over the sum where (f_y, f_x) != 0, with F each frame's 2-D DFT of y and both sums over all frames. 0 where
    every frame is flat. The DFT sees a frame as periodic, so a jump between opposite edges counts as an edge."""
    saturation: np.ndarray
    """Mean over pixels and frames of HSV's S = (max - min) / max over R, G, B; 0 for black."""
    clipped: np.ndarray
    """Share of subpixels that are 0 or 255."""
    inter_frame_change: np.ndarray
    """Mean |x[t + 1] - x[t]| over subpixels and t; 0 for one frame."""

    def metrics(self) -> dict[str, float]:
        """Mean over the videos as frames/brightness, frames/contrast ..."""
        return {f"frames/{field.name}": float(getattr(self, field.name).mean()) for field in dataclasses.fields(self)}


def frame_statistics(frames: np.ndarray) -> FrameStatistics:
    """Statistics of each video, of 16 frames and 16 pairs (t, t + 1) spread evenly from the first to the last.

    Args: frames: uint8 [G, T, H, W, 3], RGB. Returns: float64 [G] each, of a video independent of the others.
    Raises: ValueError unless frames are such an array and not empty.
    """
    if frames.dtype != np.uint8 or frames.ndim != 5 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames: must be uint8 [G, T, H, W, 3] and not empty, is {frames.dtype} {list(frames.shape)}")
    columns = np.array([_of_video(video) for video in frames], np.float64).T
    return FrameStatistics(*columns)


def _of_video(video: np.ndarray) -> tuple[float, ...]:
    """uint8 [T, H, W, 3] to the six numbers, in the order of FrameStatistics."""
    chosen = np.ascontiguousarray(np.moveaxis(video[_spread(len(video))], -1, 0))
    luma = sum(weight * channel.astype(np.int32) for weight, channel in zip(LUMA, chosen)) / 255_000
    return (
        luma.mean(),
        luma.std(),
        _high_frequency(luma),
        _saturation(chosen),
        ((chosen == 0) | (chosen == 255)).mean(),
        _change(video),
    )


def _spread(count: int) -> np.ndarray:
    """At most NUM_FRAMES different places in [0, count), the first and the last included."""
    return np.linspace(0, count - 1, min(count, NUM_FRAMES)).round().astype(int)


def _high_frequency(luma: np.ndarray) -> float:
    """luma: float64 [n, H, W]. The half spectrum of a real frame stands for both halves, hence the weights."""
    luma = luma[luma.min((1, 2)) < luma.max((1, 2))]
    if not len(luma):
        return 0.0
    height, width = luma.shape[1:]
    rows, columns = np.abs(np.fft.fftfreq(height))[:, None], np.fft.rfftfreq(width)
    weight = np.where((columns == 0) | (columns == 0.5), 1.0, 2.0)
    energy = (np.abs(np.fft.rfft2(luma)) ** 2).sum(0) * weight
    energy[0, 0] = 0.0
    return float(energy[np.maximum(rows, columns) > 0.25].sum() / energy.sum())


def _saturation(channels: np.ndarray) -> float:
    """channels: uint8 [3, n, H, W]."""
    largest, smallest = channels.max(0), channels.min(0)
    return float(((largest - smallest) / np.maximum(largest, 1).astype(np.float32)).mean(dtype=np.float64))


def _change(video: np.ndarray) -> float:
    """video: uint8 [T, H, W, 3]."""
    if len(video) == 1:
        return 0.0
    first = _spread(len(video) - 1)
    before, after = video[first], video[first + 1]
    return float((np.maximum(before, after) - np.minimum(before, after)).mean(dtype=np.float64) / 255)
