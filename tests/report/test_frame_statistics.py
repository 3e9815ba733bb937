"""Frame statistics against numbers found by hand."""

import time

import numpy as np
import pytest

from sage_ray.frame_statistics import FrameStatistics, frame_statistics

NAMES = ("brightness", "contrast", "high_frequency", "saturation", "clipped", "inter_frame_change")


def constant(colour: tuple[int, int, int], frames: int = 4, height: int = 8, width: int = 12) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (1, frames, height, width, 3)).copy()


def grey(luma: np.ndarray) -> np.ndarray:
    """Values [T, H, W] as one grey video."""
    return np.repeat(luma.astype(np.uint8)[None, ..., None], 3, axis=-1)


def wave(cycles: int, size: int = 64, horizontal: bool = True) -> np.ndarray:
    """[1, size, size]: a cosine with `cycles` over the frame's width or height."""
    line = np.round(128 + 100 * np.cos(2 * np.pi * cycles * np.arange(size) / size))
    frame = np.broadcast_to(line if horizontal else line[:, None], (size, size))
    return frame[None]


def numbers(frames: np.ndarray) -> list[float]:
    found = frame_statistics(frames)
    assert all(getattr(found, name).dtype == np.float64 and getattr(found, name).shape == (1,) for name in NAMES)
    return [float(getattr(found, name)[0]) for name in NAMES]


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ((51, 51, 51), [0.2, 0, 0, 0, 0, 0]),
        ((255, 0, 0), [0.299, 0, 0, 1, 1, 0]),
        ((0, 255, 0), [0.587, 0, 0, 1, 1, 0]),
        ((0, 0, 255), [0.114, 0, 0, 1, 1, 0]),
        ((200, 100, 150), [(200 * 0.299 + 100 * 0.587 + 150 * 0.114) / 255, 0, 0, 0.5, 0, 0]),
        ((0, 0, 0), [0, 0, 0, 0, 1, 0]),
        ((255, 255, 255), [1, 0, 0, 0, 1, 0]),
        ((0, 10, 255), [(10 * 0.587 + 255 * 0.114) / 255, 0, 0, 1, 2 / 3, 0]),
    ],
)
def test_constant_clips(colour, expected):
    assert numbers(constant(colour)) == pytest.approx(expected, abs=1e-7)
    assert numbers(constant(colour))[2] == 0.0


@pytest.mark.parametrize(("height", "width"), [(8, 8), (6, 10)])
def test_checkerboard_has_all_energy_at_nyquist(height, width):
    board = 255 * (np.indices((height, width)).sum(0) % 2)
    assert numbers(grey(np.stack([board, board]))) == pytest.approx([0.5, 0.5, 1, 0, 1, 0], abs=1e-12)


@pytest.mark.parametrize("horizontal", [True, False])
@pytest.mark.parametrize(("cycles", "share"), [(1, 0), (8, 0), (15, 0), (16, 0), (17, 1), (24, 1), (31, 1), (32, 1)])
def test_the_border_is_half_of_nyquist(cycles, share, horizontal):
    """64 pixels: Nyquist is 32 cycles, 16 belong to the lower half; rounding to levels adds a little noise."""
    assert numbers(grey(wave(cycles, horizontal=horizontal)))[2] == pytest.approx(share, abs=2e-4)


def test_two_waves_share_by_the_square_of_their_heights():
    place = 2 * np.pi * np.arange(64) / 64
    line = 128 + 60 * np.cos(4 * place) + 30 * np.cos(28 * place)
    assert numbers(grey(np.broadcast_to(np.round(line), (1, 64, 64))))[2] == pytest.approx(0.2, abs=1e-3)


def test_a_flat_frame_among_others_adds_no_energy():
    flat, board = np.full((8, 8), 77), 255 * (np.indices((8, 8)).sum(0) % 2)
    assert numbers(grey(np.stack([flat, board])))[2] == pytest.approx(1.0)


def test_two_alternating_frames():
    """Black and 51: mean 0.1, standard deviation 0.1, each step 0.2; half of the subpixels are black."""
    clip = grey(np.stack([np.full((6, 6), 51 * (place % 2)) for place in range(6)]))
    assert numbers(clip) == pytest.approx([0.1, 0.1, 0, 0, 0.5, 0.2], abs=1e-12)


def test_flicker_of_a_long_clip_is_seen():
    """The pairs are neighbours also where frames are left out."""
    clip = grey(np.stack([np.full((2, 2), 255 * (place % 2)) for place in range(81)]))
    assert numbers(clip)[5] == 1.0


def test_black_and_white_noise():
    """White noise: of the spectrum's square, 1 - 1/4 lies above half of Nyquist; neighbours differ half of the time."""
    clip = grey(255 * np.random.default_rng(0).integers(0, 2, (16, 128, 128)))
    assert numbers(clip) == pytest.approx([0.5, 0.5, 0.75, 0, 1, 0.5], abs=0.02)


def test_energy_of_odd_sizes_is_that_of_the_full_spectrum():
    clip = np.random.default_rng(1).integers(0, 256, (1, 3, 7, 9, 3)).astype(np.uint8)
    luma = (clip[0] @ np.array([299, 587, 114])) / 255_000
    energy = np.abs(np.fft.fft2(luma)) ** 2
    energy[:, 0, 0] = 0
    far = np.maximum(np.abs(np.fft.fftfreq(7))[:, None], np.abs(np.fft.fftfreq(9))) > 0.25
    assert numbers(clip)[2] == pytest.approx(energy[:, far].sum() / energy.sum(), rel=1e-12)


def test_order_of_videos_does_not_matter():
    clips = np.random.default_rng(2).integers(0, 256, (5, 4, 10, 12, 3)).astype(np.uint8)
    order = np.array([3, 0, 4, 1, 2])
    found, turned = frame_statistics(clips), frame_statistics(clips[order])
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name)[order], getattr(turned, name))


def test_one_frame_and_one_pixel():
    assert numbers(constant((255, 0, 0), frames=1, height=1, width=1)) == pytest.approx([0.299, 0, 0, 1, 1, 0])


def test_metrics_are_means_over_videos():
    both = np.concatenate([constant((0, 0, 0)), constant((255, 255, 255))])
    found = frame_statistics(both).metrics()
    assert list(found) == [f"frames/{name}" for name in NAMES]
    assert found["frames/brightness"] == 0.5 and found["frames/clipped"] == 1.0


def test_input_is_not_written_and_may_be_strided():
    clip = constant((9, 8, 7), width=24)[:, :, :, ::2]
    clip.setflags(write=False)
    assert numbers(clip)[3] == pytest.approx(2 / 9)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((1, 2, 4, 4, 3), np.float32),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros((1, 2, 4, 4, 4), np.uint8),
        np.zeros((0, 2, 4, 4, 3), np.uint8),
        np.zeros((1, 0, 4, 4, 3), np.uint8),
    ],
)
def test_wrong_input_is_named(frames):
    with pytest.raises(ValueError, match=r"frames: must be uint8 \[G, T, H, W, 3\] and not empty, is "):
        frame_statistics(frames)


def test_a_full_clip_takes_less_than_3_s_of_processor():
    frame = np.random.default_rng(0).integers(0, 256, (1, 1, 480, 832, 3), dtype=np.uint8)
    clip = np.repeat(frame, 81, axis=1)
    start_s = time.process_time()
    assert isinstance(frame_statistics(clip), FrameStatistics)
    assert time.process_time() - start_s < 3
