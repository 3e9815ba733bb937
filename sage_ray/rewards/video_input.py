"""Clips to VideoAlign's pixels: frame sampling, smart resize, bicubic resize on uint8, normalisation, patches."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

PATCH, MERGE, TEMPORAL = 14, 2, 2
FACTOR = PATCH * MERGE
MIN_PIXELS = 128 * FACTOR * FACTOR
MAX_ASPECT = 200
MIN_FRAMES, MAX_FRAMES = 4, 768
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
CONTAINERS = (
    *("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg"),
    *("ivf", "nut", "yuv4mpegpipe"),
)
"""FFmpeg's names of the formats that `read_video` opens: no pictures, no text, no playlists that name other files."""

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


def read_video(path: str | Path, timeout_s: float = 60.0, max_frames: int = 4096) -> tuple[np.ndarray, float]:
    """A video file: all frames uint8 [T, H, W, 3] (RGB), and its average frames per second.

    Frames are those of the first video stream in the order of display, each once whatever its duration, turned
    upright as players (and upstream's decord) do when the file says so. Deeper colours become 8 bits. The rate is the
    container's average. Refused rather than shortened: a file whose frames the decoder calls damaged, or that has
    fewer than its container states (MP4, AVI) or than its duration needs (others). Damage that decodes to other pixels
    without an error, as most in H.265 does, cannot be seen here.

    Args:
        path: a local file in one of CONTAINERS.
        timeout_s: seconds between two frames, above 0. Reading is interrupted then; a decoder that is busy is not, so
            the error comes as soon as it returns.
        max_frames: more are refused, before they are decoded where the container states their number.

    Raises: ValueError naming the file and its fault.
    """
    import av

    _check_arguments(path, timeout_s)
    options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "file"}
    try:
        with av.open(f"file:{path}", options=options, timeout=timeout_s, metadata_errors="replace") as container:
            stream = _video_stream(container, path)
            stated = _stated_frames(container, stream)
            if stated > max_frames:
                raise ValueError(f"{path}: states {stated} frames, max_frames={max_frames}")
            frames = [*_decoded(container, stream, path, timeout_s, max_frames)]
            rate = float(stream.average_rate or 0)
            needed = stated or round(_duration_s(container, stream) * rate - 0.25)
    except av.error.ExitError:
        raise ValueError(f"{path}: nothing could be read within timeout_s={timeout_s}") from None
    except av.FFmpegError as error:
        raise ValueError(f"{path}: not a readable video ({error.strerror})") from None
    if not frames or not rate:
        raise ValueError(f"{path}: holds {len(frames)} frames at {rate} frames per second")
    if len(frames) < needed:
        raise ValueError(f"{path}: truncated or damaged: {len(frames)} frames can be decoded of {needed}")
    return np.stack(frames), rate


def _check_arguments(path: str | Path, timeout_s: float) -> None:
    if not Path(path).is_file():
        raise ValueError(f"{path}: not a file")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: must be above 0")


def _video_stream(container: InputContainer, path: str | Path) -> VideoStream:
    """The first video stream that is no cover picture and has a decoder."""
    from av.stream import Disposition

    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        raise ValueError(f"{path}: holds no video stream")
    if streams[0].codec_context is None:
        raise ValueError(f"{path}: its video codec is unknown")
    return streams[0]


def _stated_frames(container: InputContainer, stream: VideoStream) -> int:
    """Frames that the container says it shows, 0 where it does not. MP4's edit list may hide some of those it holds."""
    if "mp4" in container.format.name:
        return sum(not entry.is_discard for entry in stream.index_entries)
    return stream.frames


def _duration_s(container: InputContainer, stream: VideoStream) -> float:
    """Stated duration of the stream, 0 where it is unknown: the container's may be that of a longer sound."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if (tag := re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))) is not None:
        hours, minutes, seconds = (float(part) for part in tag.groups())
        return hours * 3600 + minutes * 60 + seconds
    return (container.duration or 0) / 1e6 if len(container.streams) == 1 else 0.0


def _decoded(
    container: InputContainer, stream: VideoStream, path: str | Path, timeout_s: float, max_frames: int
) -> Iterator[np.ndarray]:
    """Upright frames uint8 [H, W, 3] of one size. Raises ValueError naming path, frame and fault."""
    shape, start_s = None, time.monotonic()
    for place, frame in enumerate(container.decode(stream)):
        if (seconds := time.monotonic() - start_s) > timeout_s:
            raise ValueError(f"{path}: frame {place} took {seconds:.1f} s, timeout_s={timeout_s}")
        if place == max_frames:
            raise ValueError(f"{path}: has more than max_frames={max_frames} frames")
        if frame.is_corrupt:
            raise ValueError(f"{path}: truncated or damaged: frame {place} has errors")
        if frame.rotation % 90:
            raise ValueError(f"{path}: frame {place} is turned by {frame.rotation} degrees, must be a multiple of 90")
        image = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
        shape = shape or image.shape
        if image.shape != shape:
            raise ValueError(f"{path}: frame {place} is {list(image.shape)}, the first is {list(shape)}")
        yield image
        start_s = time.monotonic()
