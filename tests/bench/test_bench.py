"""The benches of the real size run at a tiny one on a CPU and give every number; times mean nothing here."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import agreement, ring, sequence_parallel, speed
from bench.timeline import Timeline
from bench.velocity import COMPILED, EAGER, KEPT, NOT_KEPT, SHIPPED
from sage_ray.config_check import validate
from sage_ray.config_load import load_config
from sage_ray.cost import Dims, forward_flops
from sage_ray.prediction import useful_flops
from tests.small import ROOT


@pytest.fixture(autouse=True)
def not_compiled():
    with torch._dynamo.config.patch(disable=True):
        yield


def test_every_part_of_bench_py_gives_its_rows(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    words = "--size small --frames 9 --repeats 1 --chunks 1 2 --shipped-update".split()
    report = speed.main([*words, "--json", str(file)])
    found = {(row.part, row.name) for row in report.rows}
    assert {("forward", name) for name in (SHIPPED, EAGER, COMPILED)} <= found
    assert {("update", name) for name in (SHIPPED, KEPT, NOT_KEPT)} <= found
    assert len([row for row in report.rows if row.part == "decode"]) == 4
    assert len([row for row in report.rows if row.part == "video"]) == 4
    for row in report.rows:
        assert row.error is None, row
        numbers = [x for x in (row.seconds, row.flops, row.floor_s, row.shipped_s) if x is not None]
        assert all(math.isfinite(x) and x > 0 for x in numbers), row
    errors = [row.values["relative_l2"] for row in report.rows if row.part in ("error", "decode") if row.values]
    assert len(errors) == 6 and all(0 <= error < 0.05 for error in errors)
    assert (
        len(json.loads(file.read_text())["rows"]) == len(report.rows) == len(capsys.readouterr().out.splitlines()) - 1
    )


def test_a_part_that_fails_is_a_row_and_the_others_run(monkeypatch) -> None:
    def fail(*_) -> None:
        raise torch.OutOfMemoryError("no room\nmore words")

    monkeypatch.setattr("bench.decode.decoded_chunks", fail)
    report = speed.main(["decode", "--size", "small", "--frames", "9", "--chunks", "1"])
    failed = [row.error for row in report.rows if row.error]
    assert failed == ["OutOfMemoryError: no room"] and report.rows[-1].error is None


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(SystemExit):
        speed.main(["backward", "--size", "small"])


@pytest.mark.parametrize("words", [[], ["--lora", "0", "--dtype", "float32", "--layers", "1", "--videos", "2"]])
def test_rollout_and_learner_agree(words: list[str]) -> None:
    results = agreement.main(["--size", "small", "--frames", "9", "--no-compile", *words])
    assert [result["guidance"] for result in results] == [1.0, 6.0]
    for result in results:
        assert result["bitwise"] and result["max_abs"] == 0 and result["grad_norm"] > 0
        assert {pair["step"] for pair in result["pairs"]} == {0, 1, 2}


def test_a_policy_that_differs_is_seen(monkeypatch) -> None:
    """Otherwise the comparison could not fail."""
    publish = agreement.publish

    def damaged(trained, receiver, version, dtype) -> None:
        publish(trained, receiver, version, dtype)
        with torch.no_grad():
            receiver.velocity.transformer.proj_out.weight.add_(0.1)

    monkeypatch.setattr(agreement, "publish", damaged)
    (result,) = agreement.main(["--size", "small", "--frames", "9", "--no-compile", "--guidance", "1"])
    assert not result["bitwise"] and result["max_abs"] > 1e-5


RANKS = ["-m", "bench.sequence_parallel", "--size", "small", "--frames", "9", "--no-compile", "--repeats", "1"]


def over_two_ranks(tmp_path: Path, *words: str) -> list[dict]:
    """Rows of bench.sequence_parallel, in processes of its own."""
    file = tmp_path / "rows.json"
    command = [sys.executable, *RANKS, "--json", str(file), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["rows"]


def test_two_ranks_that_share_tokens_agree_with_themselves_and_with_one(tmp_path: Path) -> None:
    rows = over_two_ranks(tmp_path, "--dtype", "float32", "--guidance", "1", "6")
    timed = {(row["part"], row["name"]) for row in rows if row["seconds"]}
    assert timed == {(f"sp {sp}", name) for sp in (1, 2) for name in ("forward", "update of adapters")}
    agreed = {row["name"]: row["values"] for row in rows if row["part"] == "agree"}
    assert len(agreed) == 6
    for guidance in (1, 6):
        for by, of in ((2, 2), (1, 1), (2, 1)):
            values = agreed[f"guidance {guidance}, sampled by sp {by}, replayed by sp {of}"]
            assert values["pairs"] == 2
            assert values["max_abs"] <= (0 if by == of else 1e-5), (guidance, by, of)
            assert values["states_relative_l2"] <= (0 if by == of else 1e-5)


def test_a_trajectory_that_differs_is_seen() -> None:
    ones = np.ones((1, 3, 2))
    assert sequence_parallel.relative(ones * 1.5, ones) == 0.5 and sequence_parallel.relative(ones, ones) == 0


def test_all_parameters_over_two_ranks(tmp_path: Path) -> None:
    rows = over_two_ranks(tmp_path, "--full")
    names = ["forward, sharded weights", "update of all parameters"]
    timed = [(row["part"], row["name"]) for row in rows if row["seconds"]]
    assert timed == [(f"sp {sp}", name) for sp in (2, 1) for name in names] + [("sp 1", "Muon step")]


@pytest.mark.cluster
def test_the_whole_ring_by_turns_runs_on_random_folders(tmp_path: Path) -> None:
    result = ring.main(["--size", "small", "--folder", str(tmp_path / "ring"), "--iterations", "1", "--save"])
    assert result["status"] == 0
    (found,) = result["iterations"]
    assert found["learner/stepped"] == 1 and found["agreement/max_abs"] == 0
    assert all(found[f"{name}_s"] > 0 for name in ("rollout", "update", "publish", "turns"))
    assert next(tmp_path.glob("ring/run_*/checkpoints/*"))


@pytest.mark.cluster
def test_a_ring_of_two_and_two_ends_before_it_saves(tmp_path: Path) -> None:
    words = ["--gpus", "4", "--rollouts", "2", "--size", "small", "--iterations", "1"]
    result = ring.main([*words, "--folder", str(tmp_path / "ring")])
    assert result["status"] == 0
    (found,) = result["iterations"]
    assert found["learner/stepped"] == 1 and found["turns_s"] == 0
    assert found["gpu_s_per_video"] == pytest.approx(4 * found["iteration_s"] / 8)
    assert result["exit_code"] == 130  # by the second signal


@pytest.mark.parametrize("sizes", ring.RINGS)
def test_rings_keep_every_rule(sizes: tuple[int, int]) -> None:
    """Every GPU has its role, and VideoAlign fits on a rollout worker's."""
    one = ring.RINGS[sizes]
    config = load_config([one.file], one.words.split())
    validate(config)
    assert config.rollout.num_workers == sizes[1]
    if sizes[0] > 1:
        assert config.rollout.num_workers + config.learner.num_ranks == sizes[0]
        assert config.reward.gpus_per_worker == 0.1 and config.lora.rank == 0 and config.kl.mode == "dual_moving"


def test_numbers_of_an_iteration_by_hand() -> None:
    """2 rollout and 2 learner GPUs, 8 videos: 100 s; 4e17 useful FLOPs a phase."""
    config = load_config([ring.RINGS[4, 2].file], ring.RINGS[4, 2].words.split())
    row = {"phase/rollout_s": 20.0, "phase/update_s": 70.0, "phase/publish_s": 10.0}
    row |= {"memory/learner_peak_bytes": 2.0**36, "agreement/max_abs": 0.0}
    plan = {"rollout_flops": 8e15, "update_flops": 7e16, "rollout_s": 25.0, "learner_bytes": 2.0**35}
    found = ring.numbers(row, config, plan, 4)
    assert found["iteration_s"] == 100 and found["gpu_s_per_video"] == 50
    assert (found["rollout_tflops"], found["update_tflops"]) == (200, 500)
    assert found["iteration_tflops"] == pytest.approx(7.8e16 / 100 / 4 / 1e12)
    assert found["update_mfu"] == pytest.approx(500 / 989)
    lines = ring.text(found, plan).splitlines()
    assert sum("plan 25, -20 %" in line for line in lines) == 1
    assert sum("64 GiB  plan 32 GiB, +100 %" in line for line in lines) == 1


def test_useful_work_of_a_ring() -> None:
    """8 videos of 4 steps; 3 are trained, each a forward, a backward and two references."""
    config = load_config([ring.RINGS[4, 2].file], ring.RINGS[4, 2].words.split())
    real = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
    forward = forward_flops(2048, 54, 32_760 + 200)
    assert useful_flops(config, real, 3) == {"rollout": 8 * 4 * forward, "update": 8 * 3 * (3 + 2) * forward}
    config.sampling.guidance_scale, config.loss.num_epochs = 6.0, 2
    update = 2 * 2 * 8 * 3 * (3 + 2 + 0.5) * forward
    assert useful_flops(config, real, 3) == {"rollout": 2 * 8 * 4 * forward, "update": update}


def test_peaks_belong_to_the_phase_that_runs() -> None:
    seen = Timeline()
    lines = ("starting", 1), ("iteration 1/2: rollout ...", 5), ("", 3), ("iteration 1/2: update ...\n", 4)
    for line, used in lines:
        seen.read(line)
        seen.sample(0, used)
        seen.sample(1, 2 * used)
    assert seen.peaks == {"start": {0: 1, 1: 2}, "rollout": {0: 5, 1: 10}, "update": {0: 4, 1: 8}}
    assert seen.finished == 0
    seen.read("iteration 1/2  reward +0.1 (start +0.1)  rollout 38.9 s\n")
    assert seen.finished == 1
