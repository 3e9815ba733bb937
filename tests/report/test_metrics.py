"""MetricsWriter: one readable line per write whatever the numbers, and TensorBoard beside it."""

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_ray.metrics import MetricsWriter, read_metrics


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_on_disk_before_close(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    writer.write(3, {"reward/total": 0.5})
    (line,) = lines(tmp_path / "run")
    assert line.pop("time_s") > 1.7e9 and line == {"step": 3, "reward/total": 0.5}
    writer.close()
    writer.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": None, "e": 2})
    assert lines(tmp_path)[0].items() >= {"a": None, "b": None, "c": None, "d": None, "e": 2.0}.items()


def test_tensorboard_has_the_finite_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, {"reward/total": step / 2, "gap": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/total"]
    assert [(event.step, event.value) for event in events.Scalars("reward/total")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_reserved_names_and_words_are_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="metric 'step': the name is taken by the writer"):
            writer.write(0, {"step": 1})
        with pytest.raises(TypeError):
            writer.write(0, {"a": []})
    assert lines(tmp_path) == []


def test_a_resumed_run_cuts_the_half_line_of_a_crash_and_goes_on(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a"')
    assert [row["a"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 2})
    assert [line["a"] for line in lines(tmp_path)] == [1.0, 2.0]


def test_reading_merges_a_step_and_takes_the_later_value(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 5}\n{"step": 2, "b": 3, "a": 4}\n')
    assert read_metrics(file) == [{"step": 1, "a": 5}, {"step": 2, "a": 4, "b": 3}]


@pytest.mark.parametrize("bad", ["{", "[]", '{"a": 1}', ""])
def test_a_broken_line_is_named(tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 0}}\n{bad}\n')
    with pytest.raises(ValueError) as caught:
        read_metrics(file)
    assert str(caught.value) == f"{file}, line 2: must be a JSON object with the key step"
