"""`launch.py evaluate` as a user runs it, and a training run's own evaluations: they are the same numbers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from launch import main
from sage_ray.evaluation_rows import EvaluationRow
from sage_ray.metrics import read_metrics
from sage_ray.row_file import read_rows
from tests.cluster.test_launch import launch
from tests.conftest import POLICY
from tests.small import ROOT

pytestmark = pytest.mark.cluster
RECIPE = ("--config", "configs/shapes_cpu.yaml", "--config", "configs/judge_clip.yaml", "rollout.num_workers=1")
EVALUATION = ("evaluation.num_prompts=3", "evaluation.videos_per_prompt=2", "evaluation.num_steps=4")
SINGLE = "reward.max_batch_tokens=1"
"""Videos are scored one by one: which ones meet in a batch depends on time, and may change the last digit."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two iterations, evaluated before, between and after."""
    output = tmp_path_factory.mktemp("run") / "run"
    words = ["data.num_prompts=3", "data.group_size=4", "num_iterations=2", "sampling.num_steps=5"]
    done = launch("train", *RECIPE, *EVALUATION, SINGLE, f"output_dir={output}", "evaluation.interval=1", *words)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def compared(run, tmp_path_factory) -> Path:
    """The run's last checkpoint and the base itself against the base, on held-out prompts."""
    output = tmp_path_factory.mktemp("compared") / "out"
    checkpoints = ["--checkpoint", str(run / "checkpoints" / "version_000002"), "--checkpoint", f"same={POLICY}"]
    words = [SINGLE, "evaluation.sets=[held_out]", f"output_dir={output}"]
    done = launch("evaluate", *RECIPE, *EVALUATION, *words, *checkpoints)
    assert done.returncode == 0, done.stderr
    assert "base and run/version_000002" in done.stdout and "95 % interval" in done.stdout and "gap" in done.stdout
    return output


def rows(file: Path, policy: str) -> list[EvaluationRow]:
    """A policy's held-out rows without what names it."""
    found = [row for row in read_rows(file, EvaluationRow) if (row.policy, row.prompts) == (policy, "held_out")]
    assert len(found) == 6
    return [dataclasses.replace(row, policy="", policy_version=0) for row in found]


def linked(folder: Path) -> int:
    """Number of videos in a gallery, all of which are there."""
    files = re.findall(r'src="([^"]+)"', (folder / "gallery.html").read_text("utf-8"))
    assert all((folder / file).stat().st_size > 0 for file in files)
    return len(files)


def test_every_evaluation_of_a_run_is_kept(run: Path) -> None:
    files = sorted(file.name for file in (run / "evaluations").iterdir())
    assert files == [f"iteration_{i:06d}.parquet" for i in range(3)]
    assert len(list((run / "videos").glob("iteration_00000?/*.mp4"))) == linked(run) == 3 * 2 * 3
    assert (run / "videos" / "iteration_000001" / "held_out_02.mp4").exists()
    assert {row.policy_version for row in read_rows(run / "evaluations" / files[1], EvaluationRow)} == {1}
    lines = read_metrics(run / "metrics.jsonl")
    assert all(line["evaluation/held_out/reward/clip"] > 0 for line in lines)
    assert lines[2]["reward/clip"] > 0 and lines[2]["reward/total"] is not None
    changes = json.loads((run / "summary.json").read_text())["changes"]["iteration 2"]
    assert {"reward clip", "overall", "gap", "match"} <= {line["score"] for line in changes}


def test_a_checkpoint_gives_the_numbers_of_its_run(run: Path, compared: Path) -> None:
    file = compared / "evaluation.parquet"
    before, after = (run / "evaluations" / f"iteration_{i:06d}.parquet" for i in (0, 2))
    assert rows(file, "base") == rows(before, "iteration 0")
    assert rows(file, "run/version_000002") == rows(after, "iteration 2") != rows(before, "iteration 0")


def test_the_base_as_a_checkpoint_differs_by_nothing(compared: Path) -> None:
    changes = json.loads((compared / "summary.json").read_text())["changes"]["same"]
    assert {line["prompts"] for line in changes} == {"held_out"} and changes[-1]["score"] == "gap"
    for line in changes:
        assert line["num_pairs"] == 6 and line["difference"] == line["low"] == line["high"] == 0, line


def test_a_comparison_leaves_videos_page_and_settings(compared: Path) -> None:
    assert linked(compared) == 3 * 3 and (compared / "videos" / "01_run_version_000002" / "held_out_00.mp4").exists()
    assert (compared / "contact_sheet.png").stat().st_size > 0 and (compared / "config.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--checkpoint", "at least once"]),
        (["--checkpoint", "/nowhere"], ["/nowhere"]),
        (["--checkpoint", "assets/shapes/reward/VideoReward"], ["VideoReward"]),
        (["--checkpoint", "assets/shapes/policy", "evaluation.num_prompts=0"], ["evaluation.num_prompts=0"]),
        (["--checkpoint", "assets/shapes/policy", "evaluation.sets=[test]"], ["evaluation.sets", "held_out"]),
        (["--checkpoint", "assets/shapes/policy", "output_dir=docs"], ["output_dir", "new or empty"]),
    ],
)
def test_bad_input_is_one_error_with_exit_code_two(tmp_path: Path, monkeypatch, capsys, arguments, words) -> None:
    monkeypatch.chdir(ROOT)
    output = tmp_path / "out"
    assert main(["evaluate", f"output_dir={output}", *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and not output.exists()
    for word in words:
        assert word in errors[0], errors[0]
