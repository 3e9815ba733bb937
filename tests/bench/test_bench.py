"""The benches of the real size run at a tiny one on a CPU and give every number; times mean nothing here."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench import agreement, one_gpu, speed
from bench.velocity import COMPILED, EAGER, KEPT, NOT_KEPT, SHIPPED
from sage_ray.config_check import validate
from sage_ray.config_load import load_config


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


@pytest.mark.cluster
def test_the_whole_ring_runs_on_random_folders(tmp_path: Path) -> None:
    result = one_gpu.main(["--size", "small", "--folder", str(tmp_path / "ring"), "--iterations", "1"])
    assert result["status"] == 0
    (row,) = result["iterations"]
    assert row["learner/stepped"] == 1 and row["agreement/max_abs"] == 0
    assert all(row[f"phase/{name}_s"] > 0 for name in ("rollout", "update", "publish", "turn"))


def test_the_one_gpu_recipe_cut_for_the_bench_keeps_every_rule() -> None:
    validate(load_config([one_gpu.RECIPE], one_gpu.CUT.split()))


def test_peaks_belong_to_the_phase_that_runs() -> None:
    timeline = one_gpu.Timeline()
    for line, used in (("starting", 1), ("iteration 1/2: rollout ...", 5), ("", 3), ("iteration 1/2: update ...\n", 4)):
        timeline.read(line)
        timeline.sample(used)
    assert timeline.peaks == {"start": 1, "rollout": 5, "update": 4}
