"""The board of rollout tasks: whatever its makers do, every task is made, in order, and by few."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from actors.publisher import Publication
from actors.task_board import Task, TaskBoard
from actors.uptime import Uptime
from sage_ray.config import FaultsConfig
from tests.rollout.small_rollout import requests

FAULTS = FaultsConfig(slow_factor=2.0, hung_factor=8.0, hung_min_s=30.0)
PUBLICATION = Publication(0, "digest")


def board_of(count: int) -> tuple[TaskBoard, list[Task]]:
    board, loop = TaskBoard(FAULTS, 600.0), asyncio.new_event_loop()
    request = requests(1)[0]
    return board, [board.put([replace(request, group=n)], PUBLICATION, loop.create_future()) for n in range(count)]


@given(count=st.integers(1, 12), makers=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_every_task_is_made_once_whoever_is_lost(count: int, makers: int, seed: int) -> None:
    """Makers take, finish, are lost and are late at random; a lost one's place is taken by a new one."""
    board, tasks = board_of(count)
    luck, busy, fresh = random.Random(seed), dict[object, Task](), makers
    idle = [f"maker {n}" for n in range(makers)]
    for _ in range(10_000):
        waiting = board.waiting()
        assert waiting == sorted(waiting, key=lambda task: task.order)
        assert all(len(task.makers) <= 2 for task in tasks)
        if not board.open():
            break
        for maker in list(idle):
            found = next((task for task in (*waiting, *board.late()) if task.suits(maker)), None)
            if found is not None:
                board.give(found, maker)
                busy[maker] = found
                idle.remove(maker)
                waiting = board.waiting()
        maker = luck.choice(list(busy))
        fate = luck.choice(["makes", "makes", "is lost", "is late"])
        if fate == "is late":
            busy[maker].is_late = True
            continue
        task = busy.pop(maker)
        if fate == "makes" and not task.made.done():
            task.made.set_result([])
        board.leave(task, maker)
        fresh += fate == "is lost"
        idle.append(maker if fate == "makes" else f"maker {fresh}")
    assert all(task.made.done() for task in tasks) and not board.open() and not board.waiting()


def test_bounds_follow_what_is_usual() -> None:
    """Tasks of 1 x 4 steps x group size; the second takes twice as long as the first."""
    board, (first, second) = board_of(2)
    assert board.bound_s(first) == 600.0 and not board.is_slow(first, 599.0)
    board.took(first, 10.0)
    assert board.is_slow(second, 20.1) and not board.is_slow(second, 19.9)
    assert board.bound_s(second) == 80.0
    longer = replace(second, requests=second.requests * 2)
    assert board.bound_s(longer) == 160.0 and not board.is_slow(longer, 39.9)
    for _ in range(64):
        board.took(first, 0.1)
    assert board.bound_s(second) == 30.0 and board.is_slow(second, 2.1) and not board.is_slow(second, 1.9)


def test_tasks_whose_asker_is_gone_are_forgotten() -> None:
    board, (first, second) = board_of(2)
    first.made.cancel()
    assert board.waiting() == [second] == board.open()


def test_nobody_makes_again_what_it_failed_at() -> None:
    board, (task,) = board_of(1)
    board.give(task, "a")
    assert not task.suits("a") and task.suits("b")
    task.errors["a"] = "out of memory"
    board.leave(task, "a")
    assert board.waiting() == [task] and not task.suits("a")
    task.doubted = "b", []
    assert not task.suits("b") and task.suits("c")


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    wall = [0.0]
    clock = Uptime(5.0, lambda: wall[0])
    wall[0] = 3.0
    assert clock() == 3.0
    clock.tick()
    wall[0] = 1003.0
    assert clock() == 8.0
    clock.tick()
    wall[0] = 1004.0
    assert clock() == 9.0
