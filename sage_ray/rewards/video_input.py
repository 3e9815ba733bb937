"""Clips to VideoAlign's pixels: frame sampling, smart resize, bicubic resize on uint8, normalisation, patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

PATCH, MERGE, TEMPORAL = 14, 2, 2
FACTOR = PATCH * MERGE
MIN_PIXELS = 128 * FACTOR * FACTOR
MAX_ASPECT = 200
MIN_FRAMES, MAX_FRAMES = 4, 768
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

Grid = tuple[int, int, int]
"""Patches of a clip: (frame pairs, rows, columns)."""


@dataclass(frozen=True)
class ClipRules:
    """data_config: sampled frames a second, or a fixed num_frames; max_frame_pixels after the resize."""

    fps: float
    num_frames: int | None
    max_frame_pixels: int


def check_clip(clip: np.ndarray | torch.Tensor, where: str) -> None:
    """Raises ValueError, beginning with `where`, unless the clip is uint8 [T, H, W, 3] and not empty."""
    shape = tuple(getattr(clip, "shape", ()))
    if not isinstance(clip, np.ndarray | torch.Tensor) or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
        raise ValueError(f"{where}: must be an array [T, H, W, 3], is {type(clip).__name__} {list(shape)}")
    if clip.dtype not in (torch.uint8, np.uint8):
        raise ValueError(f"{where}: must be uint8 with values 0..255, is {clip.dtype}")


def frame_indices(total: int, video_fps: float, rules: ClipRules) -> torch.Tensor:
    """Frames that are scored, evenly spread, the first and the last included.

    Their number is total / video_fps * fps kept in [4, min(768, total)], or num_frames; always even, unless the clip
    itself is shorter than that.
    Args: total: frames of the clip. video_fps: that it plays at.
    Returns: int64 [n]. Raises: ValueError when video_fps is not positive or fewer than 2 frames remain.
    """
    if not (math.isfinite(video_fps) and video_fps > 0):
        raise ValueError(f"fps={video_fps!r}: must be the frames per second that the clip plays at, above 0")
    wanted = rules.num_frames
    if wanted is None:
        most = min(MAX_FRAMES, total) // TEMPORAL * TEMPORAL
        wanted = min(max(total / video_fps * rules.fps, MIN_FRAMES), most)
    count = min(round(wanted / TEMPORAL) * TEMPORAL, total)
    if count < TEMPORAL:
        raise ValueError(f"clip: {total} frames, of which {count} would be scored; at least {TEMPORAL} are needed")
    return torch.linspace(0, total - 1, count).round().long()


def smart_resize(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Nearest (height, width) in multiples of 28, its area in [100352, max_pixels] as far as upstream's rule goes.

    Raises: ValueError when one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise ValueError(f"clip: {height}x{width} has an aspect ratio above {MAX_ASPECT}")
    rows, columns = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (math.floor(side / scale / FACTOR) * FACTOR for side in (height, width))
    elif rows * columns < MIN_PIXELS:
        scale = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = (math.ceil(side * scale / FACTOR) * FACTOR for side in (height, width))
    return rows, columns


def clip_patches(
    videos: Sequence[np.ndarray | torch.Tensor], fps: float, rules: ClipRules, device: torch.device
) -> tuple[torch.Tensor, Grid]:
    """Patches of clips of one shape, all frames resized in one call on `device`.

    Args: videos: B clips uint8 [T, H, W, 3] of one shape. fps: that they play at.
    Returns: float32 [B * t * h * w, 1176] in merge order, and the grid (t, h, w) of every clip.
    """
    total, height, width, _ = videos[0].shape
    chosen = frame_indices(total, fps, rules)
    frames = torch.stack([_pick(clip, chosen) for clip in videos]).to(device)
    resized = resize(frames.flatten(0, 1).permute(0, 3, 1, 2), smart_resize(height, width, rules.max_frame_pixels))
    return patches(resized.unflatten(0, frames.shape[:2]))


def _pick(clip: np.ndarray | torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The chosen frames; a copy, so a read-only array may be given."""
    if isinstance(clip, np.ndarray):
        return torch.from_numpy(clip[chosen.numpy()])
    return clip[chosen.to(clip.device)]


def resize(frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Bicubic, antialiased, rounded back to the 0..255 grid. frames: uint8 [N, 3, H, W]; returns float32."""
    frames = frames.to(torch.float32, memory_format=torch.contiguous_format)
    if tuple(frames.shape[-2:]) == size:
        return frames
    return functional.interpolate(frames, size, mode="bicubic", antialias=True).clamp_(0, 255).round_()


def patches(frames: torch.Tensor) -> tuple[torch.Tensor, Grid]:
    """Normalised patches of clips of one size.

    Args: frames: float32 [B, T, 3, H, W] with whole values 0..255, overwritten; an odd T repeats the last frame.
    Returns: float32 [B * T/2 * H/14 * W/14, 1176] in merge order, and the grid (T/2, H/14, W/14).
    """
    if frames.shape[1] % TEMPORAL:
        frames = torch.cat([frames, frames[:, -1:]], 1)
    batch, num_frames, _, height, width = frames.shape
    mean, std = (torch.tensor(values, device=frames.device).view(3, 1, 1) for values in (MEAN, STD))
    pixels = frames.div_(255).sub_(mean).div_(std)
    grid = (num_frames // TEMPORAL, height // PATCH, width // PATCH)
    split = (grid[0], TEMPORAL, 3, grid[1] // MERGE, MERGE, PATCH, grid[2] // MERGE, MERGE, PATCH)
    ordered = pixels.reshape(batch, *split).permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return ordered.reshape(batch * math.prod(grid), -1), grid


def read_video(path: str | Path) -> tuple[np.ndarray, float]:
    """A video file: all frames uint8 [T, H, W, 3] (RGB), and its average frames per second.

    Raises: ValueError naming the file when it is missing or cannot be decoded.
    """
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path}: holds no video stream")
            stream = container.streams.video[0]
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
            rate = stream.average_rate
    except av.FFmpegError as error:
        raise ValueError(f"{path}: not a readable video ({error})") from None
    if not frames or not rate:
        raise ValueError(f"{path}: holds {len(frames)} frames at {rate} frames per second")
    return np.stack(frames), float(rate)
