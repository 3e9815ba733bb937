"""Which steps of a rollout are stochastic, and which of those are trained, in which order.

All members of a group share one plan; it is a pure function of (seed, iteration, group), so that a redone or
re-assigned group takes the same steps. MixGRPO's sliding window, Flow-GRPO-Fast's random one, a random fraction, and
the plain case of every step are one rule with different numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOVES = ("none", "slide", "random")
_PLAN = 7_001
"""Domain of the random numbers below; noise.py uses 0 and 1."""


@dataclass(frozen=True)
class StepPlan:
    """sde_steps: stochastic steps, ascending; trained_steps: some of them, in the order in which they are trained."""

    sde_steps: tuple[int, ...]
    trained_steps: tuple[int, ...]


@dataclass(frozen=True)
class StepRule:
    """The numbers that decide a StepPlan.

    candidates: steps that may be stochastic at some time, ascending. window_size: consecutive candidates that are
    stochastic at a time, None for all. move: "none", "slide" (by `stride` candidates every `interval` iterations,
    starting again when the end is passed) or "random" (a new place for every group). sde_fraction: share of the
    candidates that is stochastic, drawn per group; not with a window. trained_fraction: share of the stochastic steps
    that is trained. permute: train them in random order, so that a fraction is a random one; else the first ones.
    Shares are rounded down, to at least one step, as in the official code.
    """

    candidates: tuple[int, ...]
    window_size: int | None = None
    move: str = "none"
    stride: int = 1
    interval: int = 1
    sde_fraction: float = 1.0
    trained_fraction: float = 1.0
    permute: bool = True

    def __post_init__(self) -> None:
        _require(bool(self.candidates), "candidates", self.candidates, "must hold at least one step")
        ascending = all(a < b for a, b in zip(self.candidates, self.candidates[1:], strict=False))
        _require(ascending, "candidates", self.candidates, "must be strictly ascending")
        _require(self.move in MOVES, "move", self.move, f"must be one of {', '.join(MOVES)}")
        _require(self.stride >= 1, "stride", self.stride, "must be at least 1")
        _require(self.interval >= 1, "interval", self.interval, "must be at least 1")
        for name in ("sde_fraction", "trained_fraction"):
            value = getattr(self, name)
            _require(0 < value <= 1, name, value, "must be in (0, 1]")
        if self.window_size is not None:
            fits = 1 <= self.window_size <= len(self.candidates)
            _require(fits, "window_size", self.window_size, f"must be in [1, {len(self.candidates)}]")
            _require(self.sde_fraction == 1, "sde_fraction", self.sde_fraction, "must be 1 with a window")
        else:
            _require(self.move == "none", "move", self.move, "needs window_size")

    @property
    def num_trained(self) -> int:
        """Trained steps of every group, the same number for all."""
        return _share(self._num_stochastic, self.trained_fraction)

    @property
    def _num_stochastic(self) -> int:
        if self.window_size is not None:
            return self.window_size
        return _share(len(self.candidates), self.sde_fraction)

    def at(self, seed: int, iteration: int, group: int) -> StepPlan:
        """The plan of one group. Args: all >= 0."""
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((_PLAN, seed, iteration, group))))
        stochastic = self._stochastic(random, iteration)
        order = random.permutation(len(stochastic)) if self.permute else np.arange(len(stochastic))
        trained = tuple(stochastic[i] for i in order[: self.num_trained])
        return StepPlan(stochastic, trained)

    def _stochastic(self, random: np.random.Generator, iteration: int) -> tuple[int, ...]:
        if self.window_size is None:
            chosen = random.permutation(len(self.candidates))[: self._num_stochastic]
            return tuple(self.candidates[i] for i in sorted(chosen))
        places = len(self.candidates) - self.window_size + 1
        start = {
            "none": 0,
            "slide": (iteration // self.interval * self.stride) % places,
            "random": int(random.integers(places)),
        }[self.move]
        return self.candidates[start : start + self.window_size]


def _share(count: int, fraction: float) -> int:
    """`fraction` of `count`, rounded down to a whole number of at least 1; float noise does not take a step away."""
    return max(1, math.floor(count * fraction + 1e-9))


def _require(holds: bool, name: str, value: float | str | Sequence[int] | None, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {value!r} {rule}")
