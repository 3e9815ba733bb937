"""What an iteration computes, counted by hand for the small world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sage_ray.throughput import SIZE, iteration_work, measure_device
from tests.small import small_config

TOKENS = 3 * 4 * 4
"""9 frames of 32 x 32 behind a VAE of 4 x 8 x 8, patches of 1."""
FORWARD = 24 * 64**2 * 4 * TOKENS + 4 * 64 * 4 * TOKENS**2
"""64 wide, 4 blocks."""


@pytest.mark.parametrize(
    ("words", "forwards", "trained"),
    [
        ([], 16 * 8 + 2 * 64, 64),  # 8 steps of 16 videos; anchor and previous step on 16 x 4 pairs
        (["kl.mode=none"], 16 * 8, 64),
        (["kl.previous=rollout"], 16 * 8 + 64, 64),
        (["sampling.guidance_scale=3"], 2 * (16 * 8 + 2 * 64), 128),
        (["kl.mode=none", "loss.num_epochs=2", "loss.num_updates=2"], 16 * 8 + 128 * 3 / 4, 128),
    ],
)
def test_work_of_an_iteration(tmp_path: Path, words: list[str], forwards: float, trained: int) -> None:
    work = iteration_work(small_config(tmp_path, words), num_trained=4)
    assert work.videos == 16
    assert work.tokens == pytest.approx(TOKENS * (forwards + 2 * trained))
    assert work.flops == pytest.approx(FORWARD * (forwards + 3 * trained))


def test_without_a_transformer_nothing_is_made_up(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.path = str(tmp_path)
    work = iteration_work(config, 4)
    assert work.videos == 16 and work.tokens != work.tokens and work.flops != work.flops


def test_a_device_s_rate(monkeypatch) -> None:
    found = measure_device("cpu", "float32")
    assert found.measured and found.name == "CPU thread" and found.peak_flops > 2 * SIZE**3 / 60
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert vars(measure_device("cuda", "bfloat16")) == {
        "name": "NVIDIA H100 80GB HBM3",
        "peak_flops": 989e12,
        "measured": False,
    }
