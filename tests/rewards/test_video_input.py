"""Sampling and sizes equal upstream's tables; pixel arithmetic by hand; videos read from files."""

import json

import numpy as np
import pytest
import torch

from sage_ray.rewards.video_input import (
    ClipRules,
    clip_patches,
    frame_indices,
    patches,
    read_video,
    resize,
    smart_resize,
)
from tests.rewards.golden import DATA

TABLES = json.loads((DATA / "videoalign_sampling_and_sizes.json").read_text())


def test_sampling_table():
    assert len(TABLES["sampling"]) == 1308
    for row in TABLES["sampling"]:
        rules = ClipRules(row.get("fps"), row.get("nframes"), 200704)
        if isinstance(row["idx"], str):
            with pytest.raises(ValueError, match="at least 2 are needed"):
                frame_indices(row["total_frames"], row["video_fps"], rules)
        else:
            assert frame_indices(row["total_frames"], row["video_fps"], rules).tolist() == row["idx"], row


def test_size_table():
    assert len(TABLES["resize"]) == 168
    for row in TABLES["resize"]:
        if isinstance(row["out"], str):
            with pytest.raises(ValueError, match="aspect ratio above 200"):
                smart_resize(row["h"], row["w"], row["max_pixels"])
        else:
            assert list(smart_resize(row["h"], row["w"], row["max_pixels"])) == row["out"], row


@pytest.mark.parametrize("fps", [0, -1.0, float("nan"), float("inf")])
def test_fps_must_be_positive(fps):
    with pytest.raises(ValueError, match=r"^fps="):
        frame_indices(16, fps, ClipRules(2.0, None, 200704))


def test_all_256_levels_are_normalised_as_upstream_does():
    levels = torch.arange(256, dtype=torch.float32)
    frames = levels.view(1, 256, 1, 1, 1).repeat(1, 1, 3, 28, 28)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    expected = ((levels.double() * (1 / 255)).float()[:, None] - mean) / std
    flat, grid = patches(frames)
    assert grid == (128, 2, 2)
    found = flat.view(128, 4, 3, 2, 196)[:, 0, :, :, 0].permute(0, 2, 1).reshape(256, 3)
    assert torch.equal(found, expected)


def test_patches_are_in_merge_order_and_odd_clips_repeat_the_last_frame():
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    numbers = (rows * 6 + columns).repeat_interleave(14, 0).repeat_interleave(14, 1)
    frames = torch.stack([numbers, numbers + 100, numbers + 200])[None, :, None].repeat(1, 1, 3, 1, 1).float()
    flat, grid = patches(frames)
    assert grid == (2, 4, 6)
    blue = flat.view(48, 3, 2, 196)[:, 2, :, 5] * 0.27577711 + 0.40821073
    found = (blue * 255).round().long()
    assert found[:8, 0].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]
    assert found[:2, 1].tolist() == [100, 101]
    assert found[24:26].tolist() == [[200, 200], [201, 201]]


def test_resize_rounds_to_levels_and_skips_equal_sizes():
    frames = torch.randint(0, 256, (2, 3, 30, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(resize(frames, (30, 40)), frames.float())
    larger = resize(frames, (56, 84))
    assert larger.shape == (2, 3, 56, 84)
    assert torch.equal(larger, larger.clamp(0, 255).round())


def test_one_batch_equals_clips_alone_and_inputs_are_not_written():
    random = np.random.RandomState(0)
    clips = [random.randint(0, 256, (9, 32, 32, 3)).astype(np.uint8) for _ in range(3)]
    for clip in clips:
        clip.setflags(write=False)
    rules, cpu = ClipRules(2.0, None, 200704), torch.device("cpu")
    flat, grid = clip_patches(clips, 8.0, rules, cpu)
    assert grid == (2, 24, 24)
    single = [clip_patches([torch.tensor(clip)], 8.0, rules, cpu)[0] for clip in clips]
    assert torch.equal(flat, torch.cat(single))


@pytest.mark.parametrize("content", [None, b"", b"not a video"])
def test_unreadable_video_is_named(tmp_path, content):
    file = tmp_path / "clip.mp4"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"clip\.mp4"):
        read_video(file)
