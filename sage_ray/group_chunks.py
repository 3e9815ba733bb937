"""In which bits a learner takes the groups of an iteration, so that it can begin before the last one is scored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sage_ray.config import Config
from sage_ray.config_check import dp_degree, num_prompts
from sage_ray.group_batch import count_all_pairs, split_groups


@dataclass(frozen=True)
class Chunk:
    """Groups that the learner takes together.

    groups: their numbers, in order; shares: of every data-parallel rank, as `split_groups` gives them; members: all
    groups of the optimizer step; all_pairs: of these, weighted or not; last: the optimizer step is complete with it.
    """

    groups: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    all_pairs: float
    num_trained: int
    last: bool

    @property
    def needed(self) -> tuple[int, ...]:
        """Numbers of all groups that a rank reads, those that it repeats with weight 0 too."""
        return tuple(sorted({group if group >= 0 else -group - 1 for share in self.shares for group in share}))

    def weighted_pairs(self, weights_PG: np.ndarray) -> float:
        """(sample, trained step) pairs of the optimizer step that count; weights_PG: of the whole iteration."""
        return float(weights_PG[list(self.members)].sum() * self.num_trained)


def chunks_of(config: Config, num_trained: int) -> list[Chunk] | None:
    """The chunks of an iteration, in order: the fewest groups that fill whole passes on every rank. None where the
    learner needs all rewards before the first group: advantage.global_std, several optimizer steps.

    Gradients are summed as in one update of all groups, pass by pass in the same order.

    Args: num_trained: steps of a group that are trained.
    """
    if config.advantage.global_std or config.loss.num_epochs * config.loss.num_updates > 1:
        return None
    size, dp = config.data.group_size, dp_degree(config)
    rows_per_pass = max(1, (config.learner.videos_per_pass or size) // size)
    places = rows_per_pass // math.gcd(rows_per_pass, num_trained)
    count = num_prompts(config)
    (shares,) = split_groups(count, 1, dp)
    (pairs,) = count_all_pairs(count, size, 1, num_trained)
    return [_chunk(shares, start, places, pairs, num_trained) for start in range(0, len(shares[0]), places)]


def _chunk(shares: list[list[int]], start: int, places: int, all_pairs: float, num_trained: int) -> Chunk:
    """The groups at some places of every rank."""
    mine = tuple(tuple(share[start : start + places]) for share in shares)
    groups = sorted({group for share in mine for group in share if group >= 0})
    members = sorted({group for share in shares for group in share if group >= 0})
    last = start + places >= len(shares[0])
    return Chunk(tuple(groups), mine, tuple(members), all_pairs, num_trained, last)
