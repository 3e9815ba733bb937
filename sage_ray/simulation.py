"""One run as a small simulation of events, to tell how long an iteration takes with pools of given sizes.

Three ways: `synchronous` (separate pools, one after the other), `asynchronous` (separate pools at once, policy age A:
iteration k is made by the weights that were published after iteration max(0, k - A)) and `colocated` (all GPUs do each
phase in turn). A piece of work takes the same seconds in all of them: they depend on the seed and its place alone.

Left out: failures, the second task that waits in a worker, batches of several videos in a reward worker (which takes
iterations in order), the bound overlap.max_groups (its default never binds), runs whose learner needs all rewards first
(see `group_chunks.chunks_of`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Seconds:
    """A time: lognormal of this mean; spread: standard deviation of its logarithm, 0 is always the mean."""

    mean: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mean", "spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: must be finite and at least 0")

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """float64 of a shape."""
        return self.mean * np.exp(self.spread * random.standard_normal(shape) - self.spread**2 / 2)


@dataclass(frozen=True)
class Work:
    """Of one iteration. groups: P; videos: G of each. rollout: one group on a worker; reward: one video; learn: one
    group on a data-parallel rank; publish: the learner gives its weights away; load: a worker takes them."""

    groups: int
    videos: int
    rollout: Seconds
    reward: Seconds
    learn: Seconds
    publish: Seconds = Seconds(0.0)
    load: Seconds = Seconds(0.0)

    def __post_init__(self) -> None:
        _at_least_one(groups=self.groups, videos=self.videos)


@dataclass(frozen=True)
class Pools:
    """rollouts: groups of GPUs that generate; ranks: data-parallel ranks of the learner; rewards: reward workers;
    gpus: of all of them together."""

    rollouts: int
    ranks: int
    rewards: int
    gpus: float

    def __post_init__(self) -> None:
        _at_least_one(rollouts=self.rollouts, ranks=self.ranks, rewards=self.rewards)


@dataclass(frozen=True)
class Simulated:
    """ends_s: when every iteration's weights were out. iteration_s: of one in the steady state, the first ones left
    out. Busy shares in [0, 1] of the steady state, as a run measures them: the learner's is the share of the time in
    which it updates. gpu_s_per_video: GPU-seconds."""

    ends_s: tuple[float, ...]
    iteration_s: float
    rollout_busy: float
    reward_busy: float
    learner_busy: float
    gpu_s_per_video: float

    @property
    def total_s(self) -> float:
        return self.ends_s[-1]


@dataclass(frozen=True)
class _Drawn:
    """Seconds of every piece of work: rollout, learn [I, P], reward [I, P, G], publish, load [I]."""

    rollout: np.ndarray
    reward: np.ndarray
    learn: np.ndarray
    publish: np.ndarray
    load: np.ndarray

    @staticmethod
    def of(work: Work, iterations: int, seed: int) -> _Drawn:
        _at_least_one(iterations=iterations)
        shape = iterations, work.groups
        streams = [np.random.Generator(np.random.Philox(key=(seed, kind))) for kind in range(5)]
        return _Drawn(
            work.rollout.draw(streams[0], shape),
            work.reward.draw(streams[1], (*shape, work.videos)),
            work.learn.draw(streams[2], shape),
            work.publish.draw(streams[3], (iterations,)),
            work.load.draw(streams[4], (iterations,)),
        )


def synchronous(work: Work, pools: Pools, iterations: int = 8, seed: int = 0) -> Simulated:
    """Rollouts and their rewards, then the update of all groups, then the weights to all workers."""
    drawn, now, ends = _Drawn.of(work, iterations, seed), 0.0, []
    for k in range(iterations):
        _, made = _generate([now] * pools.rollouts, now, 0.0, drawn.rollout[k])
        scored, _ = _score(made, drawn.reward[k], [now] * pools.rewards)
        now = max(scored) + _chunk_s(drawn.learn[k], pools.ranks).sum() + drawn.publish[k] + drawn.load[k]
        ends.append(now)
    return _summary(work, pools, drawn, ends, skip=0)


def asynchronous(work: Work, pools: Pools, age: int, iterations: int = 24, seed: int = 0) -> Simulated:
    """Workers make the groups of iteration k as soon as they are free and its weights are out; the learner takes groups
    in order, as many at once as it has ranks, each such chunk once its last reward is there.

    Args: age: A >= 0, publishes between the weights an iteration is made by and those it trains.
    """
    if age < 0:
        raise ValueError(f"age={age!r}: must be at least 0")
    drawn, published, ends = _Drawn.of(work, iterations, seed), [0.0], []
    free, scorers, held = [0.0] * pools.rollouts, [0.0] * pools.rewards, 0
    scored: list[list[float]] = []
    for k in range(iterations):
        while len(scored) < iterations and (version := max(0, len(scored) - age)) <= k:
            coming, load_s = len(scored), drawn.load[version - 1] if version > held else 0.0
            free, made = _generate(free, published[version], load_s, drawn.rollout[coming])
            done, scorers = _score(made, drawn.reward[coming], scorers)
            scored.append(done)
            held = version
        now = published[k]
        for chunk, seconds in enumerate(_chunk_s(drawn.learn[k], pools.ranks)):
            now = max(now, *scored[k][chunk * pools.ranks : (chunk + 1) * pools.ranks]) + float(seconds)
        published.append(now + float(drawn.publish[k]))
        ends.append(published[-1])
    return _summary(work, pools, drawn, ends, skip=min(2 * (age + 1), iterations - 1))


def colocated(work: Work, pools: Pools, switch_s: float = 0.0, iterations: int = 8, seed: int = 0) -> Simulated:
    """All GPUs are rollout workers, then reward workers, then learner ranks.

    Args: pools: each of them on all GPUs. switch_s: an iteration's changes of models on the GPUs.
    """
    drawn, now, ends = _Drawn.of(work, iterations, seed), 0.0, []
    for k in range(iterations):
        _, made = _generate([now] * pools.rollouts, now, 0.0, drawn.rollout[k])
        scored, _ = _score([max(made)] * work.groups, drawn.reward[k], [now] * pools.rewards)
        now = max(scored) + _chunk_s(drawn.learn[k], pools.ranks).sum()
        now += drawn.publish[k] + drawn.load[k] + switch_s
        ends.append(now)
    return _summary(work, pools, drawn, ends, skip=0)


def _generate(
    free: Sequence[float], released: float, load_s: float, seconds: np.ndarray
) -> tuple[list[float], list[float]]:
    """Groups in order, each by the worker that can begin first: (when every worker is free, when every group is made).
    A worker that makes none of them takes no weights."""
    workers = [(max(one, released) + load_s, one, False) for one in free]
    heapq.heapify(workers)
    made = []
    for each in seconds:
        start, _, _ = heapq.heappop(workers)
        made.append(float(start + each))
        heapq.heappush(workers, (made[-1], made[-1], True))
    return [end if used else before for end, before, used in workers], made


def _score(made: Sequence[float], seconds: np.ndarray, scorers: Sequence[float]) -> tuple[list[float], list[float]]:
    """Videos in the order in which their groups are made: (when every group is scored, when every scorer is free)."""
    free, done = list(scorers), [0.0] * len(made)
    heapq.heapify(free)
    for end, group in sorted(zip(made, range(len(made)), strict=True)):
        for each in seconds[group]:
            scored = max(heapq.heappop(free), end) + float(each)
            heapq.heappush(free, scored)
            done[group] = max(done[group], scored)
    return done, free


def _chunk_s(learn: np.ndarray, ranks: int) -> np.ndarray:
    """Of every chunk of an iteration: as long as its slowest rank."""
    return np.array([learn[start : start + ranks].max() for start in range(0, len(learn), ranks)])


def _summary(work: Work, pools: Pools, drawn: _Drawn, ends: list[float], skip: int) -> Simulated:
    """skip: first iterations that are left out of the steady state."""
    begin, count = (ends[skip - 1] if skip else 0.0), len(ends) - skip
    each_s = (ends[-1] - begin) / count
    learn_s = sum(_chunk_s(one, pools.ranks).sum() for one in drawn.learn[skip:]) / count

    def busy(seconds: float, size: int) -> float:
        return min(1.0, seconds / (size * each_s)) if each_s > 0 else 0.0

    return Simulated(
        ends_s=tuple(map(float, ends)),
        iteration_s=float(each_s),
        rollout_busy=busy(float(drawn.rollout[skip:].sum() / count), pools.rollouts),
        reward_busy=busy(float(drawn.reward[skip:].sum() / count), pools.rewards),
        learner_busy=busy(float(learn_s), 1),
        gpu_s_per_video=float(each_s * pools.gpus / (work.groups * work.videos)),
    )


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value!r}: must be at least 1")
