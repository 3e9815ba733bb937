"""Every file in configs/ is a run that starts: one iteration on the small world's checkpoints, sizes overridden."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch import main
from sage_ray.config_check import num_prompts, validate
from sage_ray.config_load import load_config
from sage_ray.metrics import read_metrics
from tests.cluster.test_launch import launch
from tests.small import ROOT

ADDITIONS = ("judge_clip.yaml",)
"""Files that come after a recipe; tests/cluster/test_evaluate.py runs it."""
OFFICIAL = ("official_8gpu.yaml", "official_64gpu.yaml", "paper_setting_a.yaml", "paper_setting_b.yaml")
"""One run when their sizes are overridden, so one of them is enough to start."""
ELSEWHERE = ("lora_one_gpu.yaml",)
"""Started by tests/bench/test_bench.py, from folders of random weights."""
EXPERIMENTS = ROOT / "configs" / "experiment"
"""No recipes: tests/experiment/test_spec.py reads them."""
RECIPES = sorted(
    file
    for file in (ROOT / "configs").rglob("*.yaml")
    if file.name not in ADDITIONS and EXPERIMENTS not in file.parents
)
SHAPES = ROOT / "assets" / "shapes"
SIZES = f"""model.path={SHAPES}/policy reward.path={SHAPES}/reward/VideoReward
data.prompts=[{SHAPES}/prompts_train.txt] data.held_out_prompts=[{SHAPES}/prompts_held_out.txt]
sampling.height=32 sampling.width=32 sampling.num_frames=9 sampling.fps=8 sampling.num_steps=6 data.group_size=4
data.batch_size=null data.gradient_accumulation_steps=1 data.num_prompts=2 num_iterations=1 reward.dtype=float32
reward.truth=shapes reward.num_workers=1 rollout.num_workers=1 learner.num_ranks=1 evaluation.num_prompts=0
cluster.device=cpu rollout.cuda_graphs=false model.compile=false learner.videos_per_pass=null
rollout.groups_per_task=1""".split()


def name(recipe: Path) -> str:
    return recipe.relative_to(ROOT / "configs").as_posix()


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_recipe_keeps_every_rule(recipe: Path) -> None:
    validate(load_config([recipe], []))


def test_the_official_recipes_differ_in_sizes_and_reward_weights_only() -> None:
    files = [ROOT / "configs" / file for file in OFFICIAL]
    first, *others = (load_config([file], ["output_dir=run", "reward.setting=A", *SIZES]) for file in files)
    assert all(other == first for other in others)


@pytest.mark.cluster
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name not in (*OFFICIAL[1:], *ELSEWHERE)], ids=name)
def test_recipe_runs_one_iteration(recipe: Path, tmp_path: Path) -> None:
    done = launch("train", "--config", str(recipe), f"output_dir={tmp_path / 'run'}", *SIZES)
    assert done.returncode == 0, done.stderr
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["policy_version"] == 1 and last["learner/grad_norm"] > 0
    assert last["agreement/max_abs"] == 0.0


@pytest.mark.parametrize(
    ("recipe", "prompts", "videos"),
    [("official_8gpu", 2, 8), ("official_64gpu", 16, 64), ("paper_setting_a", 8, 32), ("paper_setting_b", 8, 32)],
)
def test_official_numbers(recipe: str, prompts: int, videos: int) -> None:
    """8 GPUs, sp 2: batch 2 x dp 4 / 4 generations = 2 prompts; 64 GPUs: 16; the paper accumulates over 4 rollouts."""
    config = load_config([ROOT / "configs" / f"{recipe}.yaml"], [])
    assert (num_prompts(config), num_prompts(config) * config.data.group_size) == (prompts, videos)
    gpus = config.rollout.num_workers + config.reward.num_workers + config.learner.num_ranks
    assert gpus == (64 if recipe == "official_64gpu" else 8)


def test_plan_prints_the_derived_numbers(capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", "output_dir=outputs/never"]) == 0
    out = capsys.readouterr().out
    assert "288 = 24 groups of 12" in out and "1152 when no score fails" in out and "30 in all" in out
    assert not os.path.exists("outputs/never")


def test_plan_names_every_fault(capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", "--config", "configs/official_8gpu.yaml", "output_dir=outputs/never"]) == 2
    captured = capsys.readouterr()
    assert "2 = batch_size 2 x dp 4 / num_generations 4" in captured.out
    for word in ("model.path", "reward.path", "prompts/train.csv"):
        assert word in captured.err


def test_plan_refuses_a_broken_rule(capsys) -> None:
    assert main(["plan", "num_generations=5", "data.num_prompts=null", "batch_size=2"]) == 2
    assert "num_generations" in capsys.readouterr().err


@pytest.mark.cluster
def test_the_lora_recipe_raises_the_reward(tmp_path: Path) -> None:
    """An alpha that is too small would leave the reward flat. Same prompts and noise before and after 5 iterations."""
    words = """num_iterations=5 evaluation.num_prompts=12 evaluation.videos_per_prompt=2 evaluation.num_steps=8
    rollout.num_workers=1""".split()
    output = tmp_path / "run"
    done = launch("train", "--config", "configs/shapes_lora.yaml", f"output_dir={output}", *words)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(output / "metrics.jsonl")
    name = "evaluation/training/reward/total"
    assert rows[5][name] - rows[0][name] > 0.3, (rows[0][name], rows[5][name])
    assert (output / "checkpoints" / "version_000005" / "adapter").is_dir()
