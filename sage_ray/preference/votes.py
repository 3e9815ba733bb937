"""Votes on a kit: read, unblind, win rates with intervals; and a voter that is simulated, to test all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sage_ray.experiment.tables import table
from sage_ray.intervals import Interval, bootstrap_interval
from sage_ray.preference.page import Pair
from sage_ray.types import AXES

ANSWERS = ("A", "B", "tie")


@dataclass(frozen=True)
class WinRate:
    """Share of votes for a policy, a tie counted as half; 95 % bootstrap interval over prompts. votes: their number."""

    axis: str
    policy: str
    votes: int
    rate: Interval


def read_key(path: Path) -> tuple[tuple[str, str], list[Pair]]:
    """(the two policies, the pairs) of a kit's key. Raises: ValueError, OSError."""
    content = json.loads(path.read_text("utf-8"))
    return tuple(content["policies"]), [Pair(**pair) for pair in content["pairs"]]


def read_votes(path: Path, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Votes of one file, each {pair, axis, vote}. Raises: ValueError naming file, vote and rule."""
    try:
        votes = json.loads(path.read_text("utf-8"))["votes"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: must be a JSON object with votes: {error}") from error
    numbers, seen = {pair.number for pair in pairs}, set()
    for vote in votes:
        if not isinstance(vote, dict) or vote.get("vote") not in ANSWERS or vote.get("axis") not in AXES:
            raise ValueError(
                f"{path}: {vote!r}: axis must be one of {', '.join(AXES)} and vote of {', '.join(ANSWERS)}"
            )
        if vote.get("pair") not in numbers:
            raise ValueError(f"{path}: {vote!r}: pair must be one of the kit's 0 to {max(numbers)}")
        if (vote["pair"], vote["axis"]) in seen:
            raise ValueError(f"{path}: {vote!r}: is voted on twice in one file")
        seen.add((vote["pair"], vote["axis"]))
    return votes


def win_rates(policy: str, pairs: Sequence[Pair], files: Sequence[Sequence[Mapping[str, Any]]]) -> list[WinRate]:
    """Of `policy` against the other, per axis, over all voters' files. Raises: ValueError when there is no vote.

    A prompt's votes are averaged first, and prompts are resampled: several votes on one pair are no further videos.
    """
    shown = {pair.number: pair for pair in pairs}
    rates = []
    for axis in AXES:
        points: dict[int, list[float]] = {}
        for vote in (vote for file in files for vote in file if vote["axis"] == axis):
            points.setdefault(vote["pair"], []).append(_point(policy, shown[vote["pair"]], vote["vote"]))
        if not points:
            raise ValueError(f"{axis}: nobody has voted")
        number = sum(len(one) for one in points.values())
        rates.append(WinRate(axis, policy, number, bootstrap_interval([float(np.mean(p)) for p in points.values()])))
    return rates


def _point(policy: str, pair: Pair, answer: str) -> float:
    """1 for the policy, 0 for the other, a half for a tie."""
    if answer == "tie":
        return 0.5
    return float((pair.first if answer == "A" else pair.second) == policy)


def simulated_votes(
    pairs: Sequence[Pair], truth: Mapping[str, Mapping[str, Sequence[float]]], noise: float, seed: int
) -> list[dict[str, Any]]:
    """What a voter would say who sees truth with noise: prefers the higher of truth + noise, ties within a tenth of it.

    Args: truth: prompt -> policy -> truth of VQ, MQ, TA of its video. noise: standard deviation of what is seen.
    """
    random = np.random.Generator(np.random.Philox(seed))
    votes = []
    for pair in pairs:
        for column, axis in enumerate(AXES):
            first, second = (truth[pair.prompt][policy][column] for policy in (pair.first, pair.second))
            seen = first - second + noise * random.standard_normal()
            answer = "tie" if abs(seen) < 0.1 * noise else "A" if seen > 0 else "B"
            votes.append({"pair": pair.number, "axis": axis, "vote": answer})
    return votes


def rates_table(rates: Sequence[WinRate], other: str) -> str:
    """Markdown."""
    rows = [
        [r.axis, str(r.votes), f"{100 * r.rate.mean:.1f} % ({100 * r.rate.low:.1f} to {100 * r.rate.high:.1f})"]
        for r in rates
    ]
    return table(["axis", "votes", f"{rates[0].policy} preferred to {other}, 95 % over prompts"], rows)
