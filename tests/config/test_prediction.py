"""Seconds and bytes of whole configurations, and what `launch.py plan` says of them."""

import json
from pathlib import Path

import pytest

from bench.ring import RINGS
from launch import main
from sage_ray.config import Config
from sage_ray.config_load import load_config
from sage_ray.cost import H100, Dims, Way, forward_s, update_s
from sage_ray.prediction import predict, read_dims
from tests.small import ROOT

REAL = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
TOKENS = 32_760 + 200
RATES = H100()
SETTINGS = {
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "patch_size": 1,
    "patch_size_t": 1,
}


def configured(*overrides: str) -> Config:
    return load_config([ROOT / "configs" / "lora_one_gpu.yaml"], list(overrides))


def test_seconds_of_the_one_gpu_recipe() -> None:
    """4 videos of 20 steps under guidance; 19 trained steps, two references, the KL's share once in 10 steps."""
    found = predict(configured(), REAL, 19, RATES)
    forward = forward_s(REAL, TOKENS, True, RATES)
    training = 4 * 19 * 2 * update_s(REAL, TOKENS, Way(True, True, True, False), RATES)
    assert found.rollout_s["denoise"] == pytest.approx(4 * 20 * 2 * forward)
    assert found.rollout_s["decode"] == pytest.approx(4 * 3.211, rel=0.01)
    assert found.rollout_s["reward"] == pytest.approx(4 / 26.0)
    assert found.update_s["forward and backward"] == pytest.approx(training)
    assert found.update_s["references"] == pytest.approx(4 * 19 * 2 * 2 * forward)
    assert found.update_s["KL share"] == pytest.approx(training / 10)
    assert "old log-probs" not in found.update_s
    assert found.iteration_s > sum(found.rollout_s.values()) + sum(found.update_s.values())


def test_the_measured_ring_is_predicted() -> None:
    """docs/real_size.md, one H100: seconds of the second iteration within 15 %, peaks of memory within 10 %."""
    ring = RINGS[1, 1]
    found = predict(load_config([ring.file], ring.words.split()), REAL, 3, RATES)
    assert sum(found.rollout_s.values()) == pytest.approx(17.19, rel=0.15)
    assert sum(found.update_s.values()) == pytest.approx(43.76, rel=0.15)
    assert sum(found.rollout_bytes.values()) == pytest.approx(2.979e10, rel=0.1)
    assert sum(found.learner_bytes.values()) == pytest.approx(3.992e10, rel=0.1)


@pytest.mark.parametrize(
    ("mode", "previous", "held"),
    [("none", "last_step", 0), ("fixed", "last_step", 1), ("dual_moving", "rollout", 1), ("stepwise", "last_step", 1)],
)
def test_every_held_reference_is_one_forward(mode: str, previous: str, held: int) -> None:
    found = predict(configured(f"kl.mode={mode}", f"kl.previous={previous}"), REAL, 1, RATES).update_s
    assert found.get("references", 0.0) == pytest.approx(held * 4 * 2 * forward_s(REAL, TOKENS, True, RATES))


def test_sequence_parallel_ranks_share_forwards_and_activations() -> None:
    """The busiest rank of dp 2 x sp 2 has one of two groups, and half of its tokens; one actor of a group decodes."""
    words = "data.num_prompts=2", "learner.num_ranks=4", "cluster.take_turns=false"
    alone, shared = (predict(configured(*words, *sp), REAL, 19, RATES) for sp in ((), ("sp_size=2",)))
    assert shared.update_s == pytest.approx({name: seconds / 2 for name, seconds in alone.update_s.items()})
    assert shared.rollout_s["denoise"] == pytest.approx(alone.rollout_s["denoise"] / 2)
    assert shared.rollout_s["decode"] == alone.rollout_s["decode"]
    assert shared.learner_bytes["activations"] == alone.learner_bytes["activations"] / 2
    assert shared.learner_bytes["masters"] == alone.learner_bytes["masters"]


def test_further_optimizer_steps_take_old_log_probs() -> None:
    """With two epochs the second one's pairs run once more without gradient."""
    found = predict(configured("loss.num_epochs=2", "kl.mode=none"), REAL, 1, RATES).update_s
    assert found["old log-probs"] == pytest.approx(4 * 2 * forward_s(REAL, TOKENS, True, RATES))


def test_bytes_of_a_learner_of_adapters() -> None:
    """Block inputs and attention's outputs of both guidance branches: 2 x 54 x 2 x 135 MB."""
    found = predict(configured(), REAL, 19, RATES).learner_bytes
    token_bytes = TOKENS * 2048 * 2
    assert found["frozen base"] == 2 * REAL.parameters
    assert found["masters"] == found["gradients"] == 4 * REAL.lora_parameters(32)
    assert found["activations"] == 2 * 54 * 2 * token_bytes + 24 * token_bytes
    alone = predict(configured("sampling.guidance_scale=1", "model.keep_attention=false"), REAL, 19, RATES)
    assert alone.learner_bytes["activations"] == 54 * token_bytes + 24 * token_bytes


def test_gradients_are_whole_between_passes_and_sharded_with_one() -> None:
    full = (
        "lora.rank=0",
        "learner.num_ranks=4",
        "cluster.take_turns=false",
        "data.num_prompts=4",
        "optimizer.name=muon",
    )
    many = predict(configured(*full), REAL, 19, RATES).learner_bytes
    one = predict(configured(*full, "learner.videos_per_pass=4"), REAL, 1, RATES).learner_bytes
    assert many["gradients"] == 4 * REAL.parameters and one["gradients"] == REAL.parameters
    small = "learner.shard_gradients=true", "learner.reference_offload=true"
    found = predict(configured(*full, *small), REAL, 19, RATES).learner_bytes
    assert found["gradients"] == REAL.parameters and "references" not in found and "references" in many
    assert many["optimizer"] == many["masters"] == REAL.parameters


def test_chunks_make_a_decode_small() -> None:
    """By two latent frames 3.6 + 2 x 3.05 GiB; at once 54.7 GiB a video."""
    chunks = predict(configured(), REAL, 19, RATES).rollout_bytes
    whole = predict(configured("rollout.decode_frames=null", "data.group_size=1"), REAL, 19, RATES).rollout_bytes
    assert chunks["decode"] / 2**30 == pytest.approx(9.7)
    assert whole["decode"] / 2**30 == pytest.approx(54.7, abs=0.2)


def test_plan_prints_the_prediction_of_a_real_model(tmp_path: Path, capsys) -> None:
    """The folder holds nothing but its sizes: the plan reads no weights (and says that they are missing)."""
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(SETTINGS), "utf-8")
    words = ["--config", str(ROOT / "configs" / "official_8gpu.yaml"), f"model.path={tmp_path}"]
    words.append(f"output_dir={tmp_path / 'run'}")
    assert main(["plan", *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    for name in ("time an iteration (H100)", "rollout, busiest worker", "update, busiest rank"):
        assert sum(line.startswith(name) for line in lines) == 1, name
    memory = [line for line in lines if line.startswith("GPU memory")]
    assert len(memory) == 2 and not any("more than" in line for line in memory)
    assert main(["plan", *words, "learner.videos_per_pass=null", "rollout.decode_frames=null"]) == 2
    memory = [line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU memory")]
    assert len(memory) == 2 and all(line.endswith("more than an 80 GB card has") for line in memory)


def test_plan_predicts_nothing_of_the_small_world(tmp_path: Path, capsys) -> None:
    assert main(["plan", f"output_dir={tmp_path / 'run'}"]) == 0
    words = capsys.readouterr().out
    assert "predicted for bfloat16 models of a billion parameters or more" in words and "H100" not in words


@pytest.mark.parametrize("text", ["", "[]", "{", '{"num_layers": "x"}'])
def test_dims_of_a_broken_file_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(text, "utf-8")
    assert read_dims(tmp_path) is None
