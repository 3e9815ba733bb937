"""launch.py as a user runs it: the whole ring on real Ray, and every kind of bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launch import main
from sage_ray.metrics import read_metrics
from sage_ray.rollout_log import read_rollouts
from tests.small import ROOT

pytestmark = pytest.mark.cluster
SMALL = ("data.num_prompts=3", "data.group_size=4", "num_iterations=1", "rollout.num_workers=1", "sampling.num_steps=5")


def launch(*arguments: str, timeout_s: float = 550.0) -> subprocess.CompletedProcess:
    """Run launch.py in the repository's root."""
    return subprocess.run(
        [sys.executable, "launch.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("sde_type", "kl_mode"),
    [("dance_grpo", "none"), ("flow_grpo", "fixed"), ("cps", "stepwise"), ("sage_cp", "moving")],
)
def test_the_ring_finishes_with_each_method_and_kl_mode(tmp_path: Path, sde_type: str, kl_mode: str) -> None:
    """sage_grpo with dual_moving is the whole ring below."""
    output = tmp_path / "run"
    overrides = [f"sde_type={sde_type}", f"kl.mode={kl_mode}", "kl.share_interval=1", "kl.anchor_interval=1"]
    overrides += ["evaluation.num_prompts=0", *SMALL, "num_iterations=2"]
    done = launch("train", f"output_dir={output}", *overrides)
    assert done.returncode == 0, done.stderr
    assert len(read_rollouts(output / "rollouts")) == 24
    first, last = read_metrics(output / "metrics.jsonl")
    assert first["agreement/max_abs"] == last["agreement/max_abs"] == 0.0
    assert first["kl/anchor"] == first["kl/previous"] == 0.0
    assert (last["kl/anchor"] > 0) == (kl_mode == "fixed")  # "moving" has just been copied from the policy
    assert (last["kl/previous"] > 0) == (kl_mode == "stepwise")
    assert ("kl/gradient_share" in last) == (kl_mode != "none")
    if kl_mode in ("fixed", "stepwise"):
        assert 0 < last["kl/gradient_share"] < 1 and first["kl/gradient_share"] == 0


def test_a_reward_that_fails_for_some_videos_reaches_nobody_as_a_number(tmp_path: Path) -> None:
    """A scorer of the test's own beside VideoAlign gives nan for about half of the videos, and one group gets none."""
    output = tmp_path / "run"
    extra = "{mine: {kind: 'tests.cluster.scorers:HalfBroken', weights: {half: 0.5}}}"
    overrides = [f"reward.extra={extra}", "reward.max_failed_share=1", "evaluation.num_prompts=0"]
    done = launch("train", f"output_dir={output}", *overrides, *SMALL, "num_iterations=2")
    assert done.returncode == 0, done.stderr
    rows = read_rollouts(output / "rollouts")
    broken = [row for row in rows if row.failure is not None]
    assert 0 < len(broken) < len(rows)
    for row in rows:
        assert (row.reward is None) == (row.failure is not None) == (row.parts["mine"] is None)
        assert row.VQ is not None and row.frames["brightness"] is not None
        if row.reward is None:
            assert row.advantage is None
        else:
            expected = 0.5 * row.VQ + 0.5 * row.MQ + row.TA + 0.5 * row.parts["mine"]
            assert row.reward == pytest.approx(expected, rel=1e-9)
    metrics = read_metrics(output / "metrics.jsonl")
    assert sum(row["reward/failed"] for row in metrics) == len(broken)
    stopped = launch("train", f"output_dir={tmp_path / 'again'}", overrides[0], "evaluation.num_prompts=0", *SMALL)
    assert stopped.returncode == 1 and "reward.max_failed_share=0.25" in stopped.stderr


def test_every_other_knob_turned_at_once(tmp_path: Path) -> None:
    """LoRA on two ranks, Muon, moving average, cosine, two epochs of two updates, sliding window, axes."""
    output = tmp_path / "run"
    overrides = """lora.rank=4 lora.alpha=8 optimizer.name=muon optimizer.muon_dtype=float32 optimizer.ema_decay=0.5
    optimizer.schedule=cosine optimizer.warmup_steps=2 loss.num_updates=2 loss.num_epochs=2 learner.num_ranks=2
    sampling.sde_window_size=2 sampling.sde_window_move=slide loss.timestep_fraction=0.5 advantage.combine=axis
    kl.schedule=two_stage kl.previous=rollout reward.setting=A evaluation.num_prompts=2 evaluation.num_steps=4
    num_iterations=2 data.num_prompts=4"""
    done = launch("train", f"output_dir={output}", *SMALL, *overrides.split())
    assert done.returncode == 0, done.stderr
    rows = read_metrics(output / "metrics.jsonl")
    assert rows[2]["policy_version"] == 8 and rows[1]["agreement/max_abs"] == 0.0
    assert rows[1]["loss/ratio_mean"] != 1.0  # later updates are measured against the sampling policy
    adapter = output / "checkpoints" / "version_000008" / "adapter"
    assert [file.name for file in adapter.iterdir()] == ["pytorch_lora_weights.safetensors"]
    again = tmp_path / "again"
    words = ["lora.rank=4", "lora.alpha=8", f"lora.path={adapter}", "evaluation.num_prompts=0"]
    assert launch("train", f"output_dir={again}", *SMALL, *words).returncode == 0
    refused = launch("plan", f"output_dir={tmp_path / 'third'}", "lora.rank=8", f"lora.path={adapter}")
    assert refused.returncode == 2 and "lora.rank=8" in refused.stderr


def test_the_whole_ring_writes_everything(tmp_path: Path) -> None:
    """sage, two learner ranks, two iterations, evaluation before and after."""
    output = tmp_path / "run"
    done = launch(
        "train",
        f"output_dir={output}",
        *SMALL,
        "num_iterations=2",
        "learner.num_ranks=2",
        "evaluation.num_prompts=2",
        "evaluation.videos_per_prompt=2",
        "evaluation.num_steps=4",
    )
    assert done.returncode == 0, done.stderr
    assert "held_out" in done.stdout and "interval" in done.stdout
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["policy_version"] == 2
    for name in ("reward/total", "truth/total", "phase/rollout_s", "evaluation/held_out/truth/total"):
        assert rows[2][name] is not None
    rollouts = read_rollouts(output / "rollouts")
    assert len(rollouts) == 24 and {row.policy_version for row in rollouts} == {0, 1}
    assert len({(row.iteration, row.prompt) for row in rollouts}) == 6
    checkpoint = output / "checkpoints" / "version_000002"
    assert json.loads((checkpoint / "trainer.json").read_text())["policy_version"] == 2
    assert (checkpoint / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size > 10_000_000
    written = ["config.yaml", "reward_curve.png", "contact_sheet.png", "gallery.html", "summary.json"]
    written += [f"videos/iteration_00000{i}/{which}_01.mp4" for i in (0, 2) for which in ("training", "held_out")]
    written += [f"evaluations/iteration_00000{i}.parquet" for i in (0, 2)]
    for name in written:
        assert (output / name).stat().st_size > 0, name
    again = launch("train", f"output_dir={output}", *SMALL)
    assert again.returncode == 2 and "holds another run" in again.stderr


def test_a_run_that_breaks_names_version_and_checkpoint(tmp_path: Path) -> None:
    """A learning rate that ruins the policy at its first step: the run stops, nothing is invented."""
    output = tmp_path / "run"
    done = launch(
        "train",
        f"output_dir={output}",
        "evaluation.num_prompts=0",
        *SMALL,
        "num_iterations=4",
        "save_interval=1",
        "optimizer.learning_rate=1e35",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    stopped = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert len(stopped) == 1 and "after policy version" in stopped[0] and "last good checkpoint is" in stopped[0]
    assert "Traceback" not in done.stderr


def test_a_run_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    """A reward checkpoint whose lm_head differs from its embedding: only loading can see it, headers are alike."""
    folder = copied(tmp_path, "reward/VideoReward")
    file = folder / "checkpoint-1" / "model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.lm_head.weight"
    save_file(tensors | {name: tensors[name] + 1}, file)
    output = tmp_path / "run"
    done = launch("train", f"output_dir={output}", f"reward.path={folder}", "evaluation.num_prompts=0", *SMALL)
    assert done.returncode == 1, done.stdout + done.stderr
    stopped = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert len(stopped) == 1 and name in stopped[0] and "Traceback" not in done.stderr


def test_official_flags_with_values_are_taken(tmp_path: Path) -> None:
    done = launch("train", f"output_dir={tmp_path}/run", "--sde_type", "ode", "--use_grad_balancing", "false")
    assert done.returncode == 2 and "sde_type" in done.stderr


def copied(tmp_path: Path, name: str) -> Path:
    """A copy of one of the shipped folders that a test may break."""
    target = tmp_path / Path(name).name
    shutil.copytree(ROOT / "assets" / "shapes" / name, target)
    return target


def no_template(tmp_path: Path) -> list[str]:
    folder = copied(tmp_path, "reward/VideoReward")
    (folder / "prompt_template.txt").unlink()
    return [f"reward.path={folder}"]


def half_written_weights(tmp_path: Path) -> list[str]:
    folder = copied(tmp_path, "policy")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return [f"model.path={folder}"]


def half_written_reward(tmp_path: Path) -> list[str]:
    folder = copied(tmp_path, "reward/VideoReward")
    file = folder / "checkpoint-1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return [f"reward.path={folder}"]


def empty_prompts(tmp_path: Path) -> list[str]:
    (tmp_path / "none.txt").write_text("\n\n")
    return [f"data.prompts=[{tmp_path / 'none.txt'}]"]


def latin_prompts(tmp_path: Path) -> list[str]:
    (tmp_path / "latin.txt").write_bytes("a caf\xe9".encode("latin-1"))
    return [f"data.prompts=[{tmp_path / 'latin.txt'}]"]


def foreign_prompts(tmp_path: Path) -> list[str]:
    (tmp_path / "foreign.txt").write_text("\n".join(f"a dog number {i}" for i in range(40)))
    return [f"data.prompts=[{tmp_path / 'foreign.txt'}]"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.num_step=8"], ["sampling.num_step", "sampling.num_steps"]),
        (["learning_rat=1"], ["learning_rat", "learning_rate"]),
        (["num_iterations=many"], ["num_iterations", "many"]),
        (["data.num_prompts=null", "batch_size=3", "num_generations=4"], ["num_generations", "batch_size", "3", "4"]),
        (["rollout.sp_size=3", "rollout.gpus_per_group=4"], ["rollout.sp_size", "3", "4"]),
        (["sde_type=ode"], ["sde_type", "ode"]),
        (["model.path=/nowhere/at/all"], ["model.path", "/nowhere/at/all"]),
        (no_template, ["prompt_template.txt", "missing"]),
        (half_written_weights, ["diffusion_pytorch_model.safetensors"]),
        (half_written_reward, ["model.safetensors"]),
        (empty_prompts, ["none.txt"]),
        (latin_prompts, ["latin.txt", "UTF-8"]),
        (foreign_prompts, ["a dog number"]),
        (["data.num_prompts=5000"], ["data.num_prompts", "5000"]),
    ],
)
def test_bad_input_is_one_error_with_exit_code_two(tmp_path: Path, monkeypatch, capsys, overrides, words) -> None:
    """main() is what the command runs; its value is the exit code."""
    monkeypatch.chdir(ROOT)
    output = tmp_path / "run"
    arguments = overrides(tmp_path) if callable(overrides) else overrides
    assert main(["train", f"output_dir={output}", *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ")
    for word in words:
        assert word in errors[0], errors[0]
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["export", "--checkpoint", "nowhere", "--output", "out"], "nowhere: must be a checkpoint or a pipeline"),
        (["evaluate"], "--checkpoint: must be given at least once"),
        (["evaluate", "--checkpoint", "nowhere"], "nowhere: must be a checkpoint or a pipeline"),
        (["evaluate", "--checkpoint", "x", "evaluation.num_prompts=0"], "evaluation.num_prompts=0: must be at least 1"),
    ],
)
def test_export_and_evaluate_refuse_bad_input(arguments, rule, capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    words = [f"output_dir={tmp_path / 'run'}"] if arguments[0] == "evaluate" else []
    assert main([*arguments, *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {rule}") and not (tmp_path / "run").exists()
