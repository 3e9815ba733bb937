"""What a policy gained over another on the same prompts and noise, with paired intervals; and over several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from sage_ray.evaluation import EvaluatedPolicy, prompt_means
from sage_ray.intervals import Interval, Numbers, bootstrap_interval, interval_over_runs

GAP = "gap"
"""Score: the reward's gain minus truth's, each in standard deviations over the videos of the first policy."""


class Change(NamedTuple):
    """One line of the summary. start, end, difference: means over prompts; low, high: 95 % bootstrap interval."""

    prompts: str
    score: str
    num_pairs: int
    num_failed: int
    start: float
    end: float
    difference: float
    low: float
    high: float


class RunsGain(NamedTuple):
    """The gain of several runs that differ in their seed. low, high: 95 % t interval over the runs."""

    prompts: str
    score: str
    num_runs: int
    gain: float
    low: float
    high: float


def compare(first: EvaluatedPolicy, second: EvaluatedPolicy) -> list[Change]:
    """Every score of every set that both policies have, and the gap where there is truth.

    Raises: ValueError when they were not evaluated on the same videos.
    """
    changes = []
    for name, before in first.sets.items():
        after = second.sets[name]
        if before.prompts != after.prompts:
            raise ValueError(f"{name}: {first.name} and {second.name} were evaluated on other prompts")
        pairs = {s: (before.scores[s], after.scores[s]) for s in before.scores if s in after.scores}
        if "truth" in pairs:
            pairs[GAP] = gap(pairs["reward"], pairs["truth"])
        changes += summary({name: pairs}, before.videos_per_prompt)
    return changes


def gap(reward: tuple[Numbers, Numbers], truth: tuple[Numbers, Numbers]) -> tuple[np.ndarray, np.ndarray]:
    """(before [n], after [n]) whose difference is the gap; nan throughout where before does not vary.

    z(reward) - z(truth) with z(x) = (x - mean) / std (n - 1), mean and std of the finite `before`. They are the unit of
    the comparison and stay fixed when prompts are resampled.
    """
    scaled = []
    for before, after in (reward, truth):
        values = np.asarray(before, np.float64)
        finite = values[np.isfinite(values)]
        std = float(finite.std(ddof=1)) if len(finite) > 1 else 0.0
        mean, unit = (float(finite.mean()), std) if std > 0 else (math.nan, 1.0)
        scaled.append([(values - mean) / unit, (np.asarray(after, np.float64) - mean) / unit])
    (reward_before, reward_after), (truth_before, truth_after) = scaled
    return reward_before - truth_before, reward_after - truth_after


def summary(scores: Mapping[str, Mapping[str, tuple[Numbers, Numbers]]], videos_per_prompt: int = 1) -> list[Change]:
    """Start and end of every score; pairs with a failed (not finite) score are left out and counted.

    Args:
        scores: prompts ("training", "held_out") -> score ("reward", "reward VQ", "truth" ...) -> (before [n],
            after [n]), one value per evaluated video in the same order.
        videos_per_prompt: so many values in a row share a prompt; they are no independent evidence, so prompts are
            resampled and not videos.
    """
    return [
        _change(
            prompts,
            score,
            np.asarray(pair[0], dtype=np.float64),
            np.asarray(pair[1], dtype=np.float64),
            videos_per_prompt,
        )
        for prompts, measured in scores.items()
        for score, pair in measured.items()
    ]


def _change(prompts: str, score: str, before: np.ndarray, after: np.ndarray, per_prompt: int) -> Change:
    if before.shape != after.shape:
        raise ValueError(f"{prompts} {score}: {len(before)} values before and {len(after)} after must be pairs")
    if len(before) % per_prompt:
        raise ValueError(f"{prompts} {score}: {len(before)} values are not {per_prompt} for every prompt")
    finite = np.isfinite(before) & np.isfinite(after)
    num_pairs, num_failed = int(finite.sum()), int((~finite).sum())
    if not num_pairs:
        return Change(prompts, score, 0, num_failed, *[math.nan] * 5)
    start, end = (prompt_means(np.where(finite, values, np.nan), per_prompt) for values in (before, after))
    return Change(
        prompts, score, num_pairs, num_failed, float(start.mean()), float(end.mean()), *bootstrap_interval(end - start)
    )


def over_runs(runs: Sequence[Sequence[Change]]) -> list[RunsGain]:
    """Mean gain of every score over runs that were compared with the same policy; runs where it failed are left out."""
    gains = []
    for lines in zip(*runs, strict=True):
        values = [line.difference for line in lines if math.isfinite(line.difference)]
        interval = interval_over_runs(values) if values else Interval(*[math.nan] * 3)
        gains.append(RunsGain(lines[0].prompts, lines[0].score, len(values), *interval))
    return gains


def summary_table(changes: Sequence[Change], title: str, first: str = "start", second: str = "end") -> Table:
    """`changes` for the terminal; first and second are the headings of the two means."""
    rows = []
    for line in changes:
        failed = f" ({line.num_failed} failed)" if line.num_failed else ""
        start_end = (f"{round(mean, 3) + 0.0:.3f}" for mean in (line.start, line.end))  # no -0.000
        numbers = [*start_end, f"{line.difference:+.3f}", _interval(line.low, line.high)]
        cells = [line.score, f"{line.num_pairs}{failed}", *(numbers if line.num_pairs else ["-"] * 4)]
        rows.append((line.prompts, cells))
    return _table(title, ["videos", first, second, "difference", "95 % interval"], rows)


def over_runs_table(gains: Sequence[RunsGain], title: str) -> Table:
    """`gains` for the terminal."""
    rows = []
    for line in gains:
        numbers = [f"{line.gain:+.3f}", _interval(line.low, line.high)] if line.num_runs else ["-", "-"]
        rows.append((line.prompts, [line.score, str(line.num_runs), *numbers]))
    return _table(title, ["runs", "gain", "95 % interval"], rows)


def _interval(low: float, high: float) -> str:
    return f"{low:+.3f} to {high:+.3f}" if math.isfinite(low) else "unknown"


def _table(title: str, headings: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """Rows of (prompts, cells), a section for each prompt set."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading in ("prompts", "score"):
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for prompts, cells in rows:
        if previous not in (None, prompts):
            table.add_section()
        table.add_row(prompts if prompts != previous else "", *cells)
        previous = prompts
    return table
