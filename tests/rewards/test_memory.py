"""A thousand scores of video files leave the process as large as it was."""

import gc
import resource
from pathlib import Path

import numpy as np

from sage_ray.rewards.video_input import read_video
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.video import write_video
from tests.conftest import REWARD

STATM = Path("/proc/self/statm")


def test_resident_memory_is_flat_over_a_thousand_scores(tmp_path: Path) -> None:
    """The slope of RSS over the last 1,000 of 1,200 scores: upper 95 % bound below 0.1 MB per 100 scores."""
    files = []
    for number in range(4):
        files.append(tmp_path / f"{number}.mp4")
        frames = np.random.default_rng(number).integers(0, 255, (8, 32, 48, 3), np.uint8)
        write_video(files[-1], frames, 8.0)
    model, page_bytes, used_mb = VideoAlign.load(REWARD), resource.getpagesize(), []
    for number in range(1200):
        frames, fps = read_video(files[number % len(files)])
        scores = model.score([frames], [f"a boat {number % 50}"], fps)
        assert np.isfinite(scores.numpy()).all()
        if number >= 200 and number % 20 == 0:
            gc.collect()
            used_mb.append(int(STATM.read_text().split()[1]) * page_bytes / 2**20)
    hundreds = np.arange(len(used_mb)) * 0.2
    centred = hundreds - hundreds.mean()
    slope = float(centred @ used_mb / (centred @ centred))
    residual = np.asarray(used_mb) - np.mean(used_mb) - slope * centred
    error = float(np.sqrt(residual @ residual / (len(used_mb) - 2) / (centred @ centred)))
    assert slope + 1.96 * error < 0.1, f"{slope:.4f} +- {error:.4f} MB per 100 scores"
