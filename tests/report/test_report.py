"""The curve and the contact sheet: pictures that open and show something."""

import math

import numpy as np
import pytest
from PIL import Image

from sage_ray.contact_sheet import SheetRow, contact_sheet
from sage_ray.metrics import MetricsWriter
from sage_ray.report import reward_curve

RNG = np.random.default_rng(0)


def colours(path) -> int:
    """Number of distinct colours of a picture, at most 10,000."""
    return len(Image.open(path).convert("RGB").getcolors(maxcolors=1 << 24))


def write_run(folder, names, steps=6) -> None:
    with MetricsWriter(folder) as writer:
        for step in range(steps):
            writer.write(step, {name: 0.1 * step + 0.01 * place for place, name in enumerate(names)})


def test_reward_curve_draws_training_and_evaluation(tmp_path):
    kinds = [f"{measure}/{axis}" for measure in ("reward", "truth") for axis in ("total", "VQ", "MQ", "TA")]
    evaluated = [f"evaluation/{which}/{kind}" for which in ("training", "held_out") for kind in kinds]
    write_run(tmp_path, kinds + evaluated + [f"{name}_error" for name in evaluated])
    reward_curve(tmp_path / "plots" / "curve.png", tmp_path / "metrics.jsonl")
    image = np.asarray(Image.open(tmp_path / "plots" / "curve.png").convert("RGB"))
    assert image.shape[0] > 500 and image.shape[1] > 1500
    for colour in ((31, 119, 180), (255, 127, 14), (115, 115, 115)):
        assert (np.abs(image.astype(int) - colour).max(axis=-1) < 8).sum() > 100


def test_reward_curve_draws_a_measure_beside_the_axes(tmp_path):
    write_run(tmp_path, ["reward/total", "reward/clip", "evaluation/held_out/reward/clip", "reward/failed"])
    widths = []
    for parts in ((), ("clip",), ("clip", "missing")):
        reward_curve(tmp_path / "curve.png", tmp_path / "metrics.jsonl", parts)
        widths.append(Image.open(tmp_path / "curve.png").width)
    assert widths[0] < widths[1] == widths[2]


def test_reward_curve_with_one_panel_and_gaps(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward/total": math.nan})
        writer.write(1, {"reward/total": 1.0, "evaluation/training/reward/total": 1.5})
    reward_curve(tmp_path / "curve.png", tmp_path / "metrics.jsonl")
    assert colours(tmp_path / "curve.png") > 20


def test_reward_curve_without_reward_says_so(tmp_path):
    write_run(tmp_path, ["loss"])
    with pytest.raises(ValueError, match="holds no reward/<axis> and no truth/<axis>"):
        reward_curve(tmp_path / "curve.png", tmp_path / "metrics.jsonl")


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 255, (*shape, 3), dtype=np.uint8)


def test_contact_sheet_shows_frames_of_every_size(tmp_path):
    scores = {"reward": 0.1234, "VQ": -1.5, "truth": None, "truth VQ": math.nan}
    rows = [
        SheetRow("a red circle moves left", noise(9, 48, 64), noise(9, 48, 64), scores, scores),
        SheetRow("a long prompt " * 30, noise(1, 300, 400), noise(2, 300, 400)),
    ]
    contact_sheet(tmp_path / "new" / "sheet.png", rows)
    image = Image.open(tmp_path / "new" / "sheet.png")
    assert image.format == "PNG" and image.width > 2 * 5 * 224 and image.height > 96 + 168
    assert colours(tmp_path / "new" / "sheet.png") > 1000


def test_contact_sheet_places_before_left_and_after_right(tmp_path):
    dark, bright = np.full((5, 32, 32, 3), 60, np.uint8), np.full((5, 32, 32, 3), 180, np.uint8)
    contact_sheet(tmp_path / "sheet.png", [SheetRow("x", dark, bright)])
    image = np.asarray(Image.open(tmp_path / "sheet.png"))
    row = image[image.shape[0] - 30, :, 0]
    half = len(row) // 2
    assert (row[:half] == 60).sum() == (row[half:] == 180).sum() == 5 * 128


def test_contact_sheet_takes_first_and_last_frame(tmp_path):
    video = np.arange(0, 90, 10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 32, 32, 3), np.uint8)
    contact_sheet(tmp_path / "sheet.png", [SheetRow("x", video, video)])
    image = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert {0, 20, 40, 60, 80} <= set(image[image.shape[0] - 30, :, 0].tolist())


def test_contact_sheet_refuses(tmp_path):
    with pytest.raises(ValueError, match="rows: a contact sheet needs at least one prompt"):
        contact_sheet(tmp_path / "sheet.png", [])
    with pytest.raises(ValueError, match=r"after: must be uint8 \[T, H, W, 3\]"):
        contact_sheet(tmp_path / "sheet.png", [SheetRow("x", noise(1, 8, 8), noise(8, 8))])
