"""Claims of the paper against stored runs, by one stated rule.

A claim says that one cell is above another in a measure. Its difference is taken between runs of the same seed (same
order of prompts, same noise, same evaluation), and Student's t gives its 95 % interval over the seeds.

- fewer than MIN_SEEDS pairs of runs: not resolvable here
- the interval lies above 0: reproduced
- the interval lies below 0: not reproduced (the reverse)
- the interval lies within a tenth of a standard deviation over the base's videos, on both sides of 0: not reproduced
  (no difference that would matter)
- otherwise: not resolvable here

No correction is made for the number of claims: of twenty that are false, one interval is expected to miss 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sage_ray.experiment.results import SPREAD, Results
from sage_ray.experiment.spec import BASE, Claim
from sage_ray.intervals import Interval, bootstrap_interval, interval_over_runs

MIN_SEEDS = 3
MATTERS = 0.1
REPRODUCED, REVERSE, EQUAL = "reproduced", "not reproduced (the reverse)", "not reproduced (no difference that matters)"
OPEN = "not resolvable here"


@dataclass(frozen=True)
class Verdict:
    """seeds: of the pairs; difference: over seeds; over_prompts: of the seeds' mean, bootstrapped over prompts; it
    speaks of other prompts for these very runs, and decides nothing."""

    claim: Claim
    seeds: tuple[int, ...]
    difference: Interval | None
    over_prompts: Interval | None
    unit: float
    verdict: str


def judge(results: Results, claim: Claim) -> Verdict:
    """The verdict on a claim, from the seeds that both of its cells have."""
    better, worse = (_outcomes(results, cell, claim.measure) for cell in (claim.better, claim.worse))
    anchor = BASE in (claim.better, claim.worse)
    seeds = tuple(sorted(better.keys() | worse.keys() if anchor else better.keys() & worse.keys()))
    if not seeds:
        return Verdict(claim, (), None, None, math.nan, OPEN)
    pairs = [better.get(seed, 0.0) - worse.get(seed, 0.0) for seed in seeds]
    difference = interval_over_runs(pairs)
    some = next(iter((results.runs.get(claim.better) or results.runs[claim.worse]).values()))
    unit = math.inf if claim.measure == SPREAD else results.unit(claim.measure, some.config)
    margin = 0.0 if math.isinf(unit) else MATTERS * unit
    prompts = None if claim.measure == SPREAD else _over_prompts(results, claim, seeds)
    return Verdict(claim, seeds, difference, prompts, unit, decide(difference, len(seeds), margin))


def decide(difference: Interval, num_seeds: int, margin: float) -> str:
    """The rule above. margin: half width of what does not matter; 0 leaves that branch out."""
    if num_seeds < MIN_SEEDS:
        return f"{OPEN} (n = {num_seeds})"
    if difference.low > 0:
        return REPRODUCED
    if difference.high < 0:
        return REVERSE
    if -margin < difference.low and difference.high < margin:
        return EQUAL
    return OPEN


def _outcomes(results: Results, cell: str, measure: str) -> dict[int, float]:
    return {} if cell == BASE else results.outcomes(cell, measure)


def _over_prompts(results: Results, claim: Claim, seeds: tuple[int, ...]) -> Interval:
    def mean(cell: str) -> np.ndarray | float:
        if cell == BASE:
            return 0.0
        return np.mean([results.differences(results.runs[cell][seed], claim.measure) for seed in seeds], axis=0)

    return bootstrap_interval(mean(claim.better) - mean(claim.worse))  # type: ignore[arg-type]
