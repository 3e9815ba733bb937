"""write_video: what PyAV reads back has the right count, size, rate and colours."""

from fractions import Fraction

import av
import numpy as np
import pytest

from sage_ray import video
from sage_ray.video import enlarge, even_size, write_video


def moving_square(frames: int, height: int, width: int) -> np.ndarray:
    """uint8 [frames, height, width, 3]: a red square that moves right on blue."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video[..., 2] = 200
    for place in range(frames):
        video[place, 4:12, place : place + 8] = (220, 30, 30)
    return video


def read(path) -> tuple[np.ndarray, Fraction, str, str]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        return frames, stream.average_rate, stream.codec_context.name, stream.codec_context.pix_fmt


@pytest.mark.parametrize("fps", [8.0, 24, 23.976, 30000 / 1001])
def test_round_trip(tmp_path, fps):
    clip = moving_square(9, 32, 48)
    write_video(tmp_path / "new" / "a.mp4", clip, fps)
    frames, rate, codec, pixels = read(tmp_path / "new" / "a.mp4")
    assert (codec, pixels) == ("h264", "yuv420p") and float(rate) == pytest.approx(fps, rel=1e-5)
    assert frames.shape == clip.shape
    assert np.abs(frames.astype(int) - clip).mean() < 6


@pytest.mark.parametrize(("height", "width", "scale"), [(33, 47, 1), (15, 15, 3), (1, 1, 1), (16, 16, 4)])
def test_odd_sizes_gain_one_edge_and_small_frames_are_enlarged(tmp_path, height, width, scale):
    clip = np.full((2, height, width, 3), 90, np.uint8)
    write_video(tmp_path / "a.mp4", clip, 8, scale)
    frames = read(tmp_path / "a.mp4")[0]
    assert frames.shape == (2, scale * height + scale * height % 2, scale * width + scale * width % 2, 3)
    assert np.abs(frames.astype(int) - 90).max() <= 3


def test_padding_repeats_the_edge_and_enlarging_repeats_pixels():
    frame = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1).repeat(3, axis=3)
    padded = even_size(frame)[0, ..., 0]
    assert padded.tolist() == [[0, 1, 2, 2], [3, 4, 5, 5], [6, 7, 8, 8], [6, 7, 8, 8]]
    assert enlarge(frame[:, :1, :2], 2)[0, ..., 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


GOOD = moving_square(2, 16, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.avi", GOOD, 8), "must end in .mp4"),
        (("a.mp4", GOOD, 0), r"fps=0: must be in \[0.1, 1000\]"),
        (("a.mp4", GOOD, float("nan")), r"fps=nan: must be in \[0.1, 1000\]"),
        (("a.mp4", GOOD, 8, 0), "scale=0: must be at least 1"),
        (("a.mp4", GOOD / 255, 8), r"frames: must be uint8 \[T, H, W, 3\] and not empty, is float64 \[2, 16, 16, 3\]"),
        (("a.mp4", GOOD[:0], 8), r"is uint8 \[0, 16, 16, 3\]"),
        (("a.mp4", GOOD[0], 8), r"is uint8 \[16, 16, 3\]"),
    ],
)
def test_refusals_leave_no_file(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / arguments[0], *arguments[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_encoding_leaves_no_file(tmp_path, monkeypatch):
    def breaks(path, frames, rate):
        path.write_bytes(b"half")
        raise OSError("disk is full")

    monkeypatch.setattr(video, "_encode", breaks)
    with pytest.raises(OSError, match="disk is full"):
        write_video(tmp_path / "a.mp4", GOOD, 8)
    assert list(tmp_path.iterdir()) == []
