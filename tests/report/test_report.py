"""Intervals against hand-computed numbers, the summary, and pictures that open and show something."""

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from sage_ray.contact_sheet import SheetRow, contact_sheet
from sage_ray.metrics import MetricsWriter
from sage_ray.report import paired_interval, reward_curve, summary, summary_table, t_quantile

RNG = np.random.default_rng(0)


def colours(path) -> int:
    """Number of distinct colours of a picture, at most 10,000."""
    return len(Image.open(path).convert("RGB").getcolors(maxcolors=1 << 24))


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_t_quantile_is_the_printed_table(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_t_quantile_refuses_no_freedom():
    with pytest.raises(ValueError, match="degrees=0: must be at least 1"):
        t_quantile(0)


def test_paired_interval_by_hand():
    """Differences 1, 2, 3, 4, 5: mean 3, standard deviation sqrt(2.5), t(4) = 2.776445."""
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert paired_interval([0, 0, 0, 0, 0], [1, 2, 3, 4, 5]) == pytest.approx((3, 3 - half, 3 + half), abs=1e-5)


def test_paired_interval_of_two_pairs_by_hand():
    """Differences 0 and 2: mean 1, standard error 1, t(1) = tan(0.475 pi)."""
    quantile = math.tan(0.475 * math.pi)
    assert paired_interval([1, 1], [1, 3]) == pytest.approx((1, 1 - quantile, 1 + quantile))


def test_one_pair_says_nothing_about_its_error():
    assert paired_interval([1], [3]) == (2, -math.inf, math.inf)


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=20), st.floats(-5, 5))
def test_what_pairs_share_cancels(pairs, shift):
    before, after = np.array(pairs).T
    shared = paired_interval(before + shift, after + shift)
    assert shared == pytest.approx(paired_interval(before, after), abs=1e-6)
    assert shared[1] <= shared[0] <= shared[2]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([], [], r"before \[0\], after \[0\]: must be \[n\] and \[n\] with n >= 1"),
        ([1], [1, 2], r"before \[1\], after \[2\]"),
        ([[1]], [[1]], r"before \[1, 1\]"),
        ([1, 2], [1, math.nan], "must be finite; leave out pairs with a failed score"),
    ],
)
def test_paired_interval_refuses(before, after, message):
    with pytest.raises(ValueError, match=message):
        paired_interval(before, after)


def test_summary_leaves_failed_pairs_out_and_counts_them():
    scores = {
        "training": {"reward": ([0, 0, math.nan, 9], [1, 3, 5, math.inf])},
        "held out": {"truth": ([math.nan], [1])},
    }
    training, held_out = summary(scores)
    assert training[:7] == ("training", "reward", 2, 2, 0.0, 2.0, 2.0)
    assert (training.low, training.high) == pytest.approx(paired_interval([0, 0], [1, 3])[1:])
    assert held_out[:4] == ("held out", "truth", 0, 1) and math.isnan(held_out.difference)
    with pytest.raises(ValueError, match="held out truth: 2 values before and 1 after must be pairs"):
        summary({"held out": {"truth": ([1, 2], [1])}})


def test_videos_of_one_prompt_count_as_one_by_hand():
    """Two prompts of two videos: their mean differences are 2 and 6, so 4 +- 12.706 * 2.828 / sqrt(2)."""
    (line,) = summary({"held_out": {"truth": ([0, 0, 0, 0], [1, 3, 5, 7])}}, videos_per_prompt=2)
    assert (line.num_pairs, line.start, line.end, line.difference) == (4, 0.0, 4.0, 4.0)
    assert line.high - line.difference == pytest.approx(2 * 12.706, abs=1e-3)
    (line,) = summary({"held_out": {"truth": ([0, 0, 0, np.nan], [1, 3, 5, 7])}}, videos_per_prompt=2)
    assert (line.num_pairs, line.num_failed, line.end, line.difference) == (3, 1, 3.5, 3.5)
    with pytest.raises(ValueError, match="3 for every prompt"):
        summary({"held_out": {"truth": ([0, 0], [1, 3])}}, videos_per_prompt=3)


def test_summary_table_shows_every_number_in_80_columns():
    scores = {
        "training": {"reward": ([0, 0, math.nan], [1, 3, 5]), "reward VQ": ([0.5, 0.5], [0.5, 0.5])},
        "held_out": {"reward": ([1], [2]), "truth": ([math.nan], [1])},
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table(scores))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]
    assert "training reward 2 (1 failed) 0.000 2.000 +2.000 -10.706 to +14.706" in rows
    assert "reward VQ 2 0.500 0.500 +0.000 +0.000 to +0.000" in rows
    assert "held_out reward 1 1.000 2.000 +1.000 unknown" in rows
    assert "truth 0 (1 failed) - - - -" in rows


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
