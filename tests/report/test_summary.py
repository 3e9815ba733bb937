"""The summary: failed pairs, prompts with several videos, the gap, several seeds; and its tables."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from sage_ray.evaluation_report import MAX_COLUMNS, columns, comparison_report, training_report
from sage_ray.intervals import bootstrap_interval
from sage_ray.summary import GAP, compare, gap, over_runs, over_runs_table, summary, summary_table
from tests.report.evaluated import policy


def printed(table) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]


def test_summary_leaves_failed_pairs_out_and_counts_them():
    scores = {
        "training": {"reward": ([0, 0, math.nan, 9], [1, 3, 5, math.inf])},
        "held out": {"truth": ([math.nan], [1])},
    }
    training, held_out = summary(scores)
    assert training[:7] == ("training", "reward", 2, 2, 0.0, 2.0, 2.0)
    assert (training.low, training.high) == bootstrap_interval([1, 3])[1:] == (1, 3)
    assert held_out[:4] == ("held out", "truth", 0, 1) and math.isnan(held_out.difference)
    with pytest.raises(ValueError, match="held out truth: 2 values before and 1 after must be pairs"):
        summary({"held out": {"truth": ([1, 2], [1])}})


def test_videos_of_one_prompt_count_as_one_by_hand():
    """Two prompts of two videos: their mean differences are 2 and 6, so the interval is 2 to 6."""
    (line,) = summary({"held_out": {"truth": ([0, 0, 0, 0], [1, 3, 5, 7])}}, videos_per_prompt=2)
    assert line[2:] == (4, 0, 0.0, 4.0, 4.0, 2.0, 6.0)
    (line,) = summary({"held_out": {"truth": ([0, 0, 0, np.nan], [1, 3, 5, 7])}}, videos_per_prompt=2)
    assert (line.num_pairs, line.num_failed, line.end, line.difference) == (3, 1, 3.5, 3.5)
    with pytest.raises(ValueError, match="3 for every prompt"):
        summary({"held_out": {"truth": ([0, 0], [1, 3])}}, videos_per_prompt=3)


def test_summary_table_shows_every_number_in_80_columns():
    scores = {
        "training": {"reward": ([0, 0, math.nan], [1, 3, 5]), "reward VQ": ([0.5, 0.5], [0.5, 0.5])},
        "held_out": {"reward": ([1], [2]), "truth": ([math.nan], [1])},
    }
    rows = printed(summary_table(summary(scores), "title"))
    assert "training reward 2 (1 failed) 0.000 2.000 +2.000 +1.000 to +3.000" in rows
    assert "reward VQ 2 0.500 0.500 +0.000 +0.000 to +0.000" in rows
    assert "held_out reward 1 1.000 2.000 +1.000 unknown" in rows
    assert "truth 0 (1 failed) - - - -" in rows


def test_gap_by_hand():
    """Reward gains 4 in units of 2, truth 0.3 in units of 0.3: the gap is 2 - 1."""
    before, after = gap(([0, 2, 4], [4, 6, 8]), ([0.0, 0.3, 0.6], [0.3, 0.6, 0.9]))
    assert before.mean() == pytest.approx(0)
    assert after - before == pytest.approx([1, 1, 1])


def test_gap_of_a_score_that_does_not_vary_is_unknown():
    before, after = gap(([0, 2], [4, 6]), ([1, 1], [2, 2]))
    assert np.isnan(before).all() and np.isnan(after).all()


def test_compare_has_every_score_and_the_gap():
    """Gains 2 of reward (weights 0.5, 0.5, 1) and 1 of truth, both of the same shape: no gap."""
    lines = {line.score: line for line in compare(policy("base", 0), policy("new", 1))}
    truths = ["truth", *(f"truth {axis}" for axis in ("VQ", "MQ", "TA"))]
    rewards = ["reward", "reward VQ", "reward MQ", "reward TA", "reward clip", "overall"]
    assert list(lines) == [*rewards, *truths, "match", GAP]
    gains = {score: line.difference for score, line in lines.items()}
    assert (gains["reward"], gains["overall"], gains["truth"], gains["reward clip"]) == (2, 3, 1, 0)
    assert gains[GAP] == pytest.approx(0, abs=1e-12) and lines["reward"].num_pairs == 6


def test_compare_refuses_other_prompts():
    with pytest.raises(ValueError, match="base and new were evaluated on other prompts"):
        compare(policy("base", 0), policy("new", 0, ["a cat", "a dog", "a cow that is brown"]))


def test_over_runs_by_hand():
    """Gains 2, 4 and 6: mean 4, standard deviation 2, t(2) = 4.302653."""
    runs = [summary({"held_out": {"reward": ([0, 0], [gain, gain])}}) for gain in (2, 4, 6)]
    (line,) = over_runs(runs)
    half = 4.302653 * 2 / math.sqrt(3)
    assert line[:4] == ("held_out", "reward", 3, 4.0)
    assert (line.low, line.high) == pytest.approx((4 - half, 4 + half), abs=1e-5)
    assert f"held_out reward 3 +4.000 {4 - half:+.3f} to {4 + half:+.3f}" in printed(over_runs_table([line], "seeds"))
    runs[0] = summary({"held_out": {"reward": ([0, 0], [math.nan, math.nan])}})
    assert over_runs(runs)[0].num_runs == 2


def test_a_comparison_leaves_every_file(tmp_path):
    policies = [policy("base", 0), policy("sage 1", 1), policy("sage 2", 2), policy("dance", 0)]
    tables = comparison_report(tmp_path, policies, {"sage": ["sage 1", "sage 2"], "dance": ["dance"]})
    assert len(tables) == 4 and "held_out reward 2 +3.000" in " ".join(printed(tables[3]))
    content = json.loads((tmp_path / "summary.json").read_text())
    assert list(content["changes"]) == ["sage 1", "sage 2", "dance"] and list(content["over_runs"]) == ["sage"]
    assert content["changes"]["sage 2"][0]["difference"] == 4
    assert (tmp_path / "contact_sheet.png").stat().st_size > 0
    assert (tmp_path / "gallery.html").read_text().count("<video") == 12


def test_numbers_that_are_not_finite_are_null(tmp_path):
    """One prompt: every interval is unbounded."""
    training_report(tmp_path, [policy("iteration 0", 0, ["a cat"]), policy("iteration 9", 1, ["a cat"])])
    (line, *_) = json.loads((tmp_path / "summary.json").read_text())["changes"]["iteration 9"]
    assert line["difference"] == 2 and line["low"] is None and line["high"] is None


def test_a_long_run_shows_first_last_and_some_between():
    policies = [dataclasses.replace(policy("x", 0), name=str(i)) for i in range(21)]
    assert [shown.name for shown in columns(policies)] == ["0", "5", "10", "15", "20"]
    assert [shown.name for shown in columns(policies[:2])] == ["0", "1"] and len(columns(policies[:7])) == MAX_COLUMNS
