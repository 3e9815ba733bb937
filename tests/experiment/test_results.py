"""Numbers, verdicts and pages of stored runs whose answers are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sage_ray.experiment.claims import EQUAL, OPEN, REPRODUCED, REVERSE, decide, judge
from sage_ray.experiment.report import write
from sage_ray.experiment.results import Results, read_results
from sage_ray.experiment.spec import BASE, Cell, Claim, Experiment
from sage_ray.experiment.stored import read_run, store
from sage_ray.intervals import Interval
from tests.experiment.stored_runs import BUDGET, evaluation, fill, half_width, write_run

GOOD, BAD = Cell("good", "Good", ("kl.mode=none",), note="best"), Cell("bad", "Bad", ("kl.mode=fixed",))
CLAIMS = (
    Claim("good is better", "Table 0", "overall", "good", "bad"),
    Claim("bad is better", "Table 0", "overall", "bad", "good"),
    Claim("good trains", "Table 0", "overall", "good", "base"),
    Claim("good spreads", "Table 0", "spread", "good", "bad"),
    Claim("good hacks", "Table 0", "hacking", "good", "bad"),
)
MADE = Experiment("made", "Made up", (Cell(BASE, "before training"), GOOD, BAD), CLAIMS)
GAINS = {"good": (1.0, 1.1, 1.3), "bad": (0.2, 0.5, 0.4)}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    fill(tmp_path, MADE, lambda cell, seed: GAINS[cell][seed])
    return read_results(MADE, BUDGET, tmp_path)


def test_a_gain_is_taken_over_the_base(results: Results) -> None:
    """Every axis rises by g and truth by g / 2; setting B weighs the axes .5, .5, 1, so reward rises by 2 g."""
    run = results.runs["good"][1]
    assert results.outcome(run, "overall") == pytest.approx(3.3)
    assert results.outcome(run, "VQ") == pytest.approx(1.1)
    assert results.outcome(run, "reward") == pytest.approx(2.2)
    assert results.outcome(run, "truth") == pytest.approx(1.1)
    assert results.outcome(run, "clip") == 0.0
    assert results.judges() == ["clip"]


def test_the_hacking_gap_is_in_standard_deviations_of_the_base(results: Results) -> None:
    """Reward's deviation is twice that of p + v, truth's the same as that of p + v: both rise by g over it."""
    deviation = np.std([0, 1, 1, 2, 2, 3], ddof=1)
    run = results.runs["good"][0]
    assert results.unit("reward", run.config) == pytest.approx(2 * deviation)
    assert results.unit("truth", run.config) == pytest.approx(deviation)
    assert results.outcome(run, "hacking") == pytest.approx(0.0, abs=1e-12)
    hacked = dataclasses.replace(run, rows=read_rows_of(results, reward=2.0, truth=0.0), path=Path("other"))
    assert results.outcome(hacked, "hacking") == pytest.approx(2.0 / deviation)


def read_rows_of(results: Results, reward: float, truth: float):
    from sage_ray.evaluation_rows import evaluation_rows

    return evaluation_rows([evaluation("x", reward, truth)])


def test_spread_is_that_of_the_last_third(results: Results) -> None:
    assert results.outcome(results.runs["bad"][2], "spread") == pytest.approx(1.4)


def test_a_claim_compares_runs_of_the_same_seed(results: Results) -> None:
    differences = [3 * (g - b) for g, b in zip(GAINS["good"], GAINS["bad"], strict=True)]
    found = judge(results, CLAIMS[0])
    assert found.seeds == (0, 1, 2) and found.verdict == REPRODUCED
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(np.mean(differences))
    assert found.difference.high - found.difference.mean == pytest.approx(half_width(differences), rel=1e-5)
    assert judge(results, CLAIMS[1]).verdict == REVERSE
    assert judge(results, CLAIMS[2]).verdict == REPRODUCED
    assert judge(results, CLAIMS[3]).verdict == REPRODUCED
    assert judge(results, CLAIMS[4]).verdict == EQUAL


def test_only_seeds_of_both_cells_count(tmp_path: Path) -> None:
    write_run(tmp_path, MADE.cells[0], 0, evaluation("base"))
    for cell, seeds in ((GOOD, (0, 1, 2)), (BAD, (1, 2, 7))):
        for seed in seeds:
            write_run(tmp_path, cell, seed, evaluation(cell.name, 1.0))
    found = judge(read_results(MADE, BUDGET, tmp_path), CLAIMS[0])
    assert found.seeds == (1, 2) and found.verdict == f"{OPEN} (n = 2)"


@pytest.mark.parametrize(
    ("interval", "seeds", "verdict"),
    [
        ((1.0, 0.1, 1.9), 3, REPRODUCED),
        ((-1.0, -1.9, -0.1), 3, REVERSE),
        ((0.01, -0.04, 0.06), 3, EQUAL),
        ((0.01, -0.04, 0.2), 3, OPEN),
        ((0.01, -0.2, 0.04), 5, OPEN),
        ((1.0, 0.1, 1.9), 2, f"{OPEN} (n = 2)"),
    ],
)
def test_the_rule(interval: tuple[float, float, float], seeds: int, verdict: str) -> None:
    assert decide(Interval(*interval), seeds, 0.1) == verdict


def test_the_page_prints_n_gains_and_verdicts(results: Results, tmp_path: Path) -> None:
    page = write(MADE, results, tmp_path / "out", "gpu") if (tmp_path / "out").mkdir() is None else None
    assert page is not None
    text = page.read_text()
    good = [3 * g for g in GAINS["good"]]
    low, high = np.mean(good) - half_width(good), np.mean(good) + half_width(good)
    assert f"| Good | best | 3 | +{np.mean(good):.3f} (+{low:.3f} to +{high:.3f}) |" in text
    assert "**reproduced**" in text and "6 runs, seeds 0, 1, 2, on test; 3.0 minutes" in text
    assert (tmp_path / "out" / "made.png").stat().st_size > 5000


def test_a_cell_that_was_not_run_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, MADE.cells[0], 0, evaluation("base"))
    write_run(tmp_path, GOOD, 0, evaluation("good", 1.0))
    found = read_results(MADE, BUDGET, tmp_path)
    text = write(MADE, found, tmp_path, "gpu").read_text()
    assert "Not run yet: bad" in text and "| Bad |  | 0 | - |" in text


def test_without_a_base_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not stored; launch.py experiment made"):
        read_results(MADE, BUDGET, tmp_path)


def test_a_stored_run_reads_back_and_is_small(tmp_path: Path) -> None:
    place = write_run(tmp_path / "runs", GOOD, 0, evaluation("good", 1.0))
    output = tmp_path / "output"
    place.rename(output)
    store(output, tmp_path / "again" / "seed_0", {"seconds": 1.0}, keep_videos=False)
    run = read_run(tmp_path / "again" / "seed_0")
    assert run.config.kl.mode == "none" and len(run.metrics) == 9 and len(run.rows) == 6
    assert run.metrics[0]["reward/total"] == pytest.approx(1 / 9, rel=1e-5)
    assert sum(file.stat().st_size for file in run.path.iterdir()) < 40_000
