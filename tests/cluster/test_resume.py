"""A run that is killed, told to stop and resumed is the same run; two runs on one machine do not meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch import main
from sage_ray.evaluation_rows import EvaluationRow
from sage_ray.metrics import read_lines
from sage_ray.rollout_log import read_rollouts
from sage_ray.row_file import read_rows
from tests.learner.checkpointed import largest_difference, read_state
from tests.small import ROOT, without_times

pytestmark = pytest.mark.cluster
WORDS = """data.num_prompts=3 data.group_size=4 num_iterations=4 save_interval=2 rollout.num_workers=1
sampling.num_steps=5 evaluation.num_prompts=2 evaluation.videos_per_prompt=1 evaluation.num_steps=2
evaluation.interval=2 optimizer.ema_decay=0.5 kl.anchor_interval=3 checkpoint.keep_last=2""".split()
SECONDS = ("generate_s", "score_s")


class Run:
    """launch.py train in a process of its own, whose output is read line by line."""

    def __init__(self, output: Path, *words: str):
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "launch.py", "train", f"output_dir={output}", *WORDS, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )

    def until(self, words: str) -> None:
        """Read until a line holds these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        """Read to the end; the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait(timeout=60)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def numbers(output: Path) -> list[dict]:
    """Every line of the metrics but for times."""
    return [without_times(line) for line in read_lines(output / "metrics.jsonl")]


def rollouts(output: Path) -> list[dict]:
    return [{k: v for k, v in vars(row).items() if k not in SECONDS} for row in read_rollouts(output / "rollouts")]


@pytest.mark.timeout(600)
def test_a_run_that_was_killed_and_stopped_is_the_run_that_was_not(tmp_path: Path, monkeypatch, capsys) -> None:
    """Two runs at once; one is killed with -9 in its third iteration, resumed, told to stop in its fourth, resumed."""
    straight, broken = Run(tmp_path / "straight"), Run(tmp_path / "broken")
    broken.until("iteration 3/4: update")
    children = psutil.Process(broken.process.pid).children(recursive=True)
    others = psutil.Process(straight.process.pid).children(recursive=True)
    assert len(children) >= 6 and len(others) >= 4
    broken.process.kill()
    broken.end()
    start = time.monotonic()
    while left := alive(children):
        assert time.monotonic() - start < 30, left
        time.sleep(0.2)
    assert straight.end() == 0, straight.lines  # the watcher of one run leaves the other alone
    resumed = Run(tmp_path / "broken", "resume=auto")
    resumed.until("iteration 4/4: rollout")
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.end() == 128 + signal.SIGTERM, resumed.lines
    stopped = next(line for line in resumed.lines if line.startswith("stopped: by SIGTERM after iteration 3"))
    assert "checkpoints/version_000003" in stopped and "Traceback" not in "".join(resumed.lines)
    assert any("resuming after iteration 2 from" in line for line in resumed.lines)
    last = Run(tmp_path / "broken", "resume=auto", "learner.timeout_s=600")
    assert last.end() == 0, last.lines
    assert any("resuming after iteration 3 from" in line for line in last.lines)
    equal(tmp_path / "straight", tmp_path / "broken")
    monkeypatch.chdir(ROOT)
    other = ["optimizer.learning_rate=1", "resume=auto"]
    assert main(["train", f"output_dir={tmp_path / 'broken'}", *WORDS, *other]) == 2
    assert "optimizer.learning_rate=1.0 (was 0.0002)" in capsys.readouterr().err


def equal(straight: Path, broken: Path) -> None:
    """Policy, optimizer, references, average, lambda, metrics, rollouts and evaluations, to the bit."""
    ends = [folder / "checkpoints" / "version_000004" for folder in (straight, broken)]
    states = [read_state(end) for end in ends]
    assert {key.partition("/")[0] for key in states[0]} == {"policy", "optimizer", "anchor", "previous", "average"}
    assert largest_difference(*states) == 0.0
    trainers = [json.loads((end / "trainer.json").read_text()) for end in ends]
    for key in ("kl_controller", "iteration", "policy_version", "counters", "identity"):
        assert trainers[0][key] == trainers[1][key]
    assert [path.name for path in sorted((broken / "checkpoints").iterdir())] == ["version_000003", "version_000004"]
    assert numbers(straight) == numbers(broken) and len(numbers(broken)) == 7
    assert rollouts(straight) == rollouts(broken) and len(rollouts(broken)) == 48
    for number in (0, 2, 4):
        file = f"evaluations/iteration_{number:06d}.parquet"
        assert read_rows(straight / file, EvaluationRow) == read_rows(broken / file, EvaluationRow)
    assert (straight / "summary.json").read_text() == (broken / "summary.json").read_text()
    for name in ("gallery.html", "contact_sheet.png", "reward_curve.png"):
        assert (broken / name).stat().st_size > 0
