"""Phases and idle time add up to the wall's time, whatever is nested, at once, or asked in between."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.actor_clock import IDLE, ActorClock


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def by_hand() -> tuple[ActorClock, Hand]:
    hand = Hand()
    return ActorClock(hand, lambda: 5000.0), hand


def test_an_inner_phase_counts_and_the_rest_is_idle() -> None:
    clock, hand = by_hand()
    hand.now += 1
    with clock.phase("update"):
        hand.now += 2
        with clock.phase("fetch"):
            hand.now += 4
        hand.now += 8
    hand.now += 16
    assert clock.totals() == (31.0, {IDLE: 17.0, "update": 10.0, "fetch": 4.0})
    report = clock.report()
    assert report.start_s == 5000.0 and report.wall_s == 31.0
    assert [(one.phase, one.start_s, one.seconds) for one in report.intervals] == [
        ("fetch", 5003.0, 4.0),
        ("update", 5001.0, 14.0),
    ]


def test_reports_share_time_out_without_gap_or_overlap() -> None:
    clock, hand = by_hand()
    with clock.phase("load"):
        hand.now += 3
        first = clock.report()
        hand.now += 5
    second = clock.report()
    assert first.phases == {"load": 3.0} and first.intervals == ()
    assert second.phases == {"load": 5.0} and second.start_s == first.start_s + first.wall_s
    assert second.intervals[0].seconds == 8.0


def test_two_threads_at_once_are_counted_once() -> None:
    clock, hand = by_hand()
    inside, go_on = threading.Event(), threading.Event()

    def decode() -> None:
        with clock.phase("decode"):
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=decode)
    with clock.phase("denoise"):
        hand.now += 1
        thread.start()
        assert inside.wait(60)
        hand.now += 2
    hand.now += 4
    go_on.set()
    thread.join()
    assert clock.totals() == (7.0, {"denoise": 1.0, "decode+denoise": 2.0, "decode": 4.0})
    assert {one.lane for one in clock.report().intervals} == {0, 1}


def test_coroutines_of_a_thread_may_end_in_any_order() -> None:
    clock, hand = by_hand()

    async def work(name: str, begin: asyncio.Event, end: asyncio.Event) -> None:
        with clock.phase(name):
            begin.set()
            await end.wait()

    async def both() -> None:
        begun, ends = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
        tasks = []
        for name, begin, end in zip(("a", "b"), begun, ends, strict=True):
            tasks.append(asyncio.ensure_future(work(name, begin, end)))
            await begin.wait()
            hand.now += 1
        ends[0].set()
        await tasks[0]
        hand.now += 2
        ends[1].set()
        await tasks[1]

    asyncio.run(both())
    assert clock.totals() == (4.0, {"a": 1.0, "b": 3.0})


@given(st.lists(st.tuples(st.sampled_from(["in", "out", "wait", "report"]), st.sampled_from("abc")), max_size=60))
def test_seconds_are_conserved(steps: list[tuple[str, str]]) -> None:
    clock, hand = by_hand()
    opened, reported = [], 0.0
    for number, (what, name) in enumerate(steps):
        if what == "in":
            opened.append(clock.phase(name))
            opened[-1].__enter__()
        elif what == "out" and opened:
            opened.pop().__exit__(None, None, None)
        elif what == "report":
            report = clock.report()
            assert sum(report.phases.values()) == pytest.approx(report.wall_s)
            reported += report.wall_s
        hand.now += 2.0 ** -(number % 8)
    wall, phases = clock.totals()
    assert wall == pytest.approx(hand.now - 100.0) and sum(phases.values()) == pytest.approx(wall)
    assert reported + clock.report().wall_s == pytest.approx(wall)


def test_a_phase_needs_a_name() -> None:
    for name in ("", IDLE):
        with pytest.raises(ValueError, match="phase"), ActorClock().phase(name):
            pass


def test_a_phase_that_fails_ends() -> None:
    clock, hand = by_hand()
    with pytest.raises(KeyError), clock.phase("score"):
        hand.now += 1
        raise KeyError
    hand.now += 1
    assert clock.totals()[1] == {IDLE: 1.0, "score": 1.0}
