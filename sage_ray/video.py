"""Writes (and reads) videos as H.264 in MP4, which every player and browser shows."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

CRF = 18
"""x264's quality: 18 is visually lossless."""


def write_video(path: str | Path, frames: np.ndarray, fps: float, scale: int = 1) -> None:
    """Encodes frames to H.264, yuv420p. The file appears complete: it is written beside its place and renamed.

    Args:
        path: target, ends in .mp4; its folder is made when missing.
        frames: uint8 [T, H, W, 3], RGB. An odd height or width gains one row or column that repeats the edge.
        fps: frames per second, in [0.1, 1000].
        scale: whole factor by which pixels are repeated, so that a small frame is not blurred by a player.

    Raises:
        ValueError: names argument, value and rule.
    """
    path = Path(path)
    check_frames("frames", frames)
    if path.suffix.lower() != ".mp4":
        raise ValueError(f"path={str(path)!r}: must end in .mp4")
    if not 0.1 <= fps <= 1000:
        raise ValueError(f"fps={fps}: must be in [0.1, 1000]")
    if scale < 1:
        raise ValueError(f"scale={scale}: must be at least 1")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial.mp4")
    try:
        _encode(partial, even_size(enlarge(frames, scale)), Fraction(fps).limit_denominator(1001))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_video(path: str | Path) -> np.ndarray:
    """Frames of a file that `write_video` wrote: uint8 [T, H, W, 3], as large as they are in it. Raises: OSError."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def enlarge(frames: np.ndarray, scale: int) -> np.ndarray:
    """[..., H, W, 3] -> [..., scale * H, scale * W, 3], nearest neighbour."""
    return frames.repeat(scale, axis=-3).repeat(scale, axis=-2)


def even_size(frames: np.ndarray) -> np.ndarray:
    """[T, H, W, 3] with odd H or W padded by one repeated row or column: yuv420p halves both."""
    height, width = frames.shape[1:3]
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def check_frames(name: str, frames: np.ndarray) -> None:
    """Raises ValueError unless frames are uint8 [T, H, W, 3] with T, H, W >= 1."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"{name}: must be uint8 [T, H, W, 3] and not empty, is {frames.dtype} {list(frames.shape)}")


def _encode(path: Path, frames: np.ndarray, rate: Fraction) -> None:
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(CRF), "preset": "fast"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for frame in frames:
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
