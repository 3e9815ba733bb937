"""Waits are bounded and say what they wait for."""

import signal
import subprocess
import sys
import time
from concurrent.futures import Future

import pytest
import ray

from actors.stacks import look
from actors.wait import Deadline, WaitTimeoutError, wait_all, wait_future
from tests.small import ROOT

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


def test_time_in_which_this_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped for 1,000 s in a wait of 30 s: 35 s are counted, as 5 s are how late a wait may come back."""
    wall = [0.0]
    monkeypatch.setattr("actors.wait.time.monotonic", lambda: wall[0])
    deadline = Deadline(60.0)
    assert deadline.step() == 30.0
    wall[0] = 1000.0
    deadline.passed()
    assert deadline.left == 25.0 == deadline.step()
    wall[0] = 1025.0
    deadline.passed()
    assert deadline.left == 0.0


def test_a_stuck_process_is_looked_at_from_outside() -> None:
    """One that blocks writes its stacks, one that is stopped cannot, and one that is gone is said to be."""
    code = "import time; from actors.stacks import answer_with_stacks as a; a(); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    assert "(sleeping)" in (words := look(process.pid)) and 'File "<string>", line 1 in <module>' in words
    process.send_signal(signal.SIGSTOP)
    assert "(stopped); it writes no stacks" in look(process.pid)
    process.kill()
    process.wait()
    assert "no stacks" in look(process.pid)
