"""The simulation of a run: by hand where a hand can, and what must hold whatever the times are."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray.simulation import Pools, Seconds, Simulated, Work, asynchronous, colocated, synchronous


def work(rollout: float, learn: float, groups: int = 4, videos: int = 1, **others: float) -> Work:
    named = {"reward": Seconds(0.0)} | {name: Seconds(mean) for name, mean in others.items()}
    return Work(groups=groups, videos=videos, rollout=Seconds(rollout), learn=Seconds(learn), **named)


def pools(rollouts: int, ranks: int, rewards: int = 1) -> Pools:
    return Pools(rollouts, ranks, rewards, gpus=rollouts + ranks)


def test_synchronous_by_hand() -> None:
    """4 groups on 2 workers: 20 s; the last reward 3 s; 4 groups on 3 ranks: two chunks of 7 s; 1 + 2 s of weights."""
    found = synchronous(work(10, 7, reward=3, publish=1, load=2), pools(2, 3, rewards=4), iterations=3)
    assert found.ends_s == pytest.approx((40, 80, 120))
    assert found.iteration_s == pytest.approx(40)
    assert found.rollout_busy == pytest.approx(4 * 10 / (2 * 40))
    assert found.learner_busy == pytest.approx(14 / 40)
    assert found.reward_busy == pytest.approx(4 * 3 / (4 * 40))
    assert found.gpu_s_per_video == pytest.approx(5 * 40 / 4)


def test_age_0_streams_into_the_learner_by_hand() -> None:
    """1 worker, 1 rank: groups at 10, 20, 30, 40; each takes 7: the learner ends at 47, synchronous at 68."""
    mine, two = work(10, 7), pools(1, 1)
    assert asynchronous(mine, two, age=0, iterations=2).ends_s == pytest.approx((47, 94))
    assert synchronous(mine, two, iterations=2).ends_s == pytest.approx((68, 136))


def test_age_1_by_hand() -> None:
    """Rollout-bound: groups every 10 s without a gap, the first iteration ends at 47, the others 40 s later each.
    Learner-bound at 12 s: the first group at 10, then 48 s an iteration; the second one's groups are there."""
    assert asynchronous(work(10, 7), pools(1, 1), age=1, iterations=4).ends_s == pytest.approx((47, 87, 127, 167))
    found = asynchronous(work(10, 12), pools(1, 1), age=1, iterations=4)
    assert found.ends_s == pytest.approx((58, 106, 154, 202))
    assert found.learner_busy == pytest.approx(1) and found.rollout_busy == pytest.approx(40 / 48)


def test_weights_reach_a_worker_between_its_groups() -> None:
    """2 groups of 10 s, learned in 1: 10..11, 20..21; out at 21.5. The second iteration is of the first weights too,
    at 30 and 40: learned at 41, out at 41.5. The third takes 2 s of loading from 40 on: made at 52, 62."""
    mine = work(10, 1, groups=2, publish=0.5, load=2)
    assert asynchronous(mine, pools(1, 1), age=1, iterations=3).ends_s == pytest.approx((21.5, 41.5, 63.5))


def test_a_chunk_waits_for_all_its_groups() -> None:
    """Groups at 1, 2, 3, 4 and ranks 3: the chunks begin at 3 and 4.5; two ranks begin at 2 and 4: sooner done."""
    assert asynchronous(work(1, 1.5), pools(1, 3), age=0, iterations=1).total_s == pytest.approx(6)
    assert asynchronous(work(1, 1.5), pools(1, 2), age=0, iterations=1).total_s == pytest.approx(5.5)


def test_videos_queue_for_the_reward_workers() -> None:
    """2 groups of 3 videos are there at 10; six scores of 4 s on two workers: 12 s."""
    mine = work(10, 1, groups=2, videos=3, reward=4)
    assert synchronous(mine, pools(2, 2, rewards=2), iterations=1).total_s == pytest.approx(10 + 12 + 1)


def test_colocated_by_hand() -> None:
    """On 4 GPUs each: 10 + 2 + 7 + 1 + .5 and 3 s of switching; nobody works while others do."""
    mine = work(10, 7, reward=2, publish=1, load=0.5)
    found = colocated(mine, Pools(4, 4, 4, gpus=4), switch_s=3, iterations=2)
    assert found.ends_s == pytest.approx((23.5, 47))
    assert found.rollout_busy + found.learner_busy + found.reward_busy == pytest.approx(19 / 23.5)
    assert found.gpu_s_per_video == pytest.approx(23.5)


def test_a_lognormal_keeps_its_mean_and_spread() -> None:
    """Rollouts of 10 s, a worker for each of 64 groups, nothing else: the slowest sets the pace of an iteration."""
    mine = dataclasses.replace(work(0, 0, groups=64), rollout=Seconds(10, spread=0.3))
    found = synchronous(mine, pools(64, 1), iterations=500, seed=1)
    assert found.rollout_busy * found.iteration_s == pytest.approx(10, rel=0.01)
    slowest = 10 * math.exp(0.3 * 2.37 - 0.3**2 / 2)  # the largest of 64 normal numbers is 2.37 on average
    assert found.iteration_s == pytest.approx(slowest, rel=0.03)


def test_a_seed_repeats_a_run() -> None:
    mine = dataclasses.replace(work(0, 1), rollout=Seconds(10, spread=0.5))
    first, again, other = (asynchronous(mine, pools(2, 2), age=1, seed=seed) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Seconds(-1.0), "mean=-1.0"),
        (lambda: Seconds(1.0, math.nan), "spread=nan"),
        (lambda: work(1, 1, groups=0), "groups=0"),
        (lambda: pools(0, 1), "rollouts=0"),
        (lambda: asynchronous(work(1, 1), pools(1, 1), age=-1), "age=-1"),
        (lambda: synchronous(work(1, 1), pools(1, 1), iterations=0), "iterations=0"),
    ],
)
def test_bad_numbers_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


times = st.floats(0.01, 20.0)
spreads = st.floats(0.0, 1.0)
COUNT = 6


@st.composite
def works(draw: st.DrawFn, random: bool = True) -> Work:
    """No score waits for another (see `many`): who comes first in a queue is no matter of more or fewer workers."""
    spread = draw(spreads) if random else 0.0
    named = {name: Seconds(draw(times), spread) for name in ("rollout", "reward", "learn", "publish", "load")}
    return Work(groups=draw(st.integers(1, 7)), videos=draw(st.integers(1, 3)), **named)


def many(rollouts: int, ranks: int) -> Pools:
    """With a reward worker for every video that there can be."""
    return pools(rollouts, ranks, rewards=200)


def not_later(first: Simulated, second: Simulated) -> None:
    for mine, other in zip(first.ends_s, second.ends_s, strict=True):
        assert mine <= other * (1 + 1e-9)


sizes = st.integers(1, 6)
ages = st.integers(0, 3)
seeds = st.integers(0, 1000)


@settings(max_examples=60)
@given(works(random=False), sizes, sizes, ages, seeds)
def test_overlap_never_ends_an_iteration_later(mine: Work, rollouts: int, ranks: int, age: int, seed: int) -> None:
    """Than the synchronous ring; nor does an older policy than a younger one. With times that differ from group to
    group another order of the groups may be the luckier one."""
    two = many(rollouts, ranks)
    found = asynchronous(mine, two, age, COUNT, seed)
    not_later(found, synchronous(mine, two, COUNT, seed))
    not_later(asynchronous(mine, two, age + 1, COUNT, seed), found)


@settings(max_examples=60)
@given(works(), sizes, sizes, seeds)
def test_age_0_gains_at_most_what_can_stream(mine: Work, rollouts: int, ranks: int, seed: int) -> None:
    """Rollouts and updates of all iterations can lie beside each other, what is published and loaded can not."""
    two = many(rollouts, ranks)
    straight, streamed = synchronous(mine, two, COUNT, seed), asynchronous(mine, two, 0, COUNT, seed)
    weights = {name: Seconds(0) for name in ("publish", "load")}
    update = dataclasses.replace(mine, **weights, rollout=Seconds(0), reward=Seconds(0))
    load_s = straight.total_s - synchronous(dataclasses.replace(mine, load=Seconds(0)), two, COUNT, seed).total_s
    gained_s = straight.total_s - streamed.total_s
    assert -1e-9 <= gained_s <= synchronous(update, two, COUNT, seed).total_s + load_s + 1e-9


@settings(max_examples=60)
@given(works(random=False), sizes, sizes, ages)
def test_nothing_is_faster_than_its_work(mine: Work, rollouts: int, ranks: int, age: int) -> None:
    """Of either pool, if it never waited: all rollouts on all workers, all groups on all ranks."""
    two = many(rollouts, ranks)
    least = COUNT * mine.groups * max(mine.rollout.mean / rollouts, mine.learn.mean / ranks)
    for found in (synchronous(mine, two, COUNT), asynchronous(mine, two, age, COUNT)):
        assert found.total_s * (1 + 1e-9) >= least
        assert 0 < found.rollout_busy <= 1 and 0 < found.learner_busy <= 1


@settings(max_examples=60)
@given(works(), sizes, sizes, ages, seeds)
def test_more_workers_or_twice_the_ranks_are_never_slower(
    mine: Work, rollouts: int, ranks: int, age: int, seed: int
) -> None:
    """One more rank can be, where the learner streams: its chunks wait for one more group (see by hand)."""
    mine = dataclasses.replace(mine, learn=Seconds(mine.learn.mean))  # else a chunk waits for its slowest rank
    found = asynchronous(mine, many(rollouts, ranks), age, COUNT, seed)
    not_later(asynchronous(mine, many(rollouts + 1, ranks), age, COUNT, seed), found)
    not_later(asynchronous(mine, many(rollouts, 2 * ranks), age, COUNT, seed), found)


@settings(max_examples=60)
@given(works(random=False), sizes, sizes)
def test_more_of_anything_is_never_slower_in_turn(mine: Work, rollouts: int, ranks: int) -> None:
    found = synchronous(mine, pools(rollouts, ranks), COUNT)
    for more in (pools(rollouts + 1, ranks), pools(rollouts, ranks + 1), pools(rollouts, ranks, rewards=2)):
        not_later(synchronous(mine, more, COUNT), found)
