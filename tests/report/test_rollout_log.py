"""RolloutLog: what is read back is what was written, and a crash costs the unfinished iteration only."""

import dataclasses

import pyarrow.parquet
import pytest

from sage_ray.rollout_log import RolloutLog, RolloutRow, read_rollouts

ROW = RolloutRow(
    iteration=0,
    prompt="a cat, 猫",
    prompt_index=7,
    seed=None,
    group=1,
    sample=2,
    policy_version=5,
    VQ=0.5,
    MQ=None,
    TA=1.5,
    reward=None,
    advantage=None,
    generate_s=2.5,
    score_s=0.25,
)


def rows(iteration: int, count: int = 3) -> list[RolloutRow]:
    return [dataclasses.replace(ROW, iteration=iteration, sample=place, truth=place / 2) for place in range(count)]


def test_read_back_equal_and_in_order(tmp_path):
    log = RolloutLog(tmp_path / "rollouts")
    for iteration in (2, 0, 11):
        log.write(iteration, rows(iteration))
    assert read_rollouts(tmp_path / "rollouts") == rows(0) + rows(2) + rows(11)


def test_one_complete_file_per_iteration_with_all_columns(tmp_path):
    file = RolloutLog(tmp_path).write(123, rows(123))
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000123.parquet"] == [file.name]
    table = pyarrow.parquet.read_table(file)
    assert table.column_names == [field.name for field in dataclasses.fields(RolloutRow)]
    assert table["MQ"].null_count == 3 and str(table.schema.field("MQ").type) == "double"


def test_a_half_written_iteration_is_not_read(tmp_path):
    log = RolloutLog(tmp_path)
    log.write(0, rows(0))
    (tmp_path / "iteration_000001.partial").write_bytes(b"PAR1")
    assert read_rollouts(tmp_path) == rows(0)


def test_a_repeated_iteration_replaces_its_rows(tmp_path):
    log = RolloutLog(tmp_path)
    log.write(0, rows(0, 4))
    log.write(0, rows(0, 2))
    assert read_rollouts(tmp_path) == rows(0, 2)


def test_an_iteration_without_rows_is_a_file_too(tmp_path):
    RolloutLog(tmp_path).write(0, [])
    assert read_rollouts(tmp_path) == []


def test_refusals(tmp_path):
    log = RolloutLog(tmp_path / "rollouts")
    with pytest.raises(ValueError, match="iteration=4: every row must be of iteration 3"):
        log.write(3, rows(4))
    with pytest.raises(ValueError, match="iteration_000000.parquet: "):
        log.write(0, [dataclasses.replace(ROW, reward="high")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"holds no iteration_\*\.parquet"):
        read_rollouts(tmp_path / "rollouts")
