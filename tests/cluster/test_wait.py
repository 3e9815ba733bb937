"""Waits are bounded and say what they wait for."""

import time
from concurrent.futures import Future

import pytest
import ray

from actors.wait import WaitTimeoutError, wait_all, wait_future

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=0)
def sleeper(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_values_come_in_order() -> None:
    assert wait_all([sleeper.remote(0.2), sleeper.remote(0.0)], "two sleepers", 60) == [0.2, 0.0]


@ray.remote(num_cpus=0)
def broken() -> None:
    raise ValueError("broken at once")


def test_the_first_failure_ends_the_wait() -> None:
    start, stuck = time.monotonic(), sleeper.remote(60.0)
    with pytest.raises(ValueError, match="broken at once"):
        wait_all([stuck, broken.remote()], "two tasks", 50)
    assert time.monotonic() - start < 30
    ray.cancel(stuck, force=True)


def test_a_wait_ends_and_names_need_and_have() -> None:
    refs = [sleeper.remote(0.0), sleeper.remote(30.0)]
    ray.get(refs[0])
    with pytest.raises(WaitTimeoutError, match="waited 1 s for two sleepers: 1 of 2 done"):
        wait_all(refs, "two sleepers", 1.0)
    ray.cancel(refs[1], force=True)


def test_work_of_another_thread_is_waited_for_in_the_same_way() -> None:
    done, never = Future(), Future()
    done.set_result(3)
    assert wait_future(done, "a number", 1.0) == 3
    with pytest.raises(WaitTimeoutError, match="waited 0 s for another number"):
        wait_future(never, "another number", 0.2)
    assert never.cancelled()
