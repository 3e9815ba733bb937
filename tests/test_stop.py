"""Signals: what they interrupt, what they wait for, and what a checkpoint that fails does to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest

from actors.controller import Controller
from actors.stop import StopRequest
from sage_ray.checkpoint import CheckpointError
from tests.small import ROOT


def test_a_signal_interrupts_what_can_be_repeated() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == signal.SIGTERM and stop.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    with stop.held(), stop.held():  # what saves afterwards is not interrupted again
        pass


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_is_held_is_finished_first(number: signal.Signals, code: int) -> None:
    stop, done = StopRequest(), []
    with pytest.raises(KeyboardInterrupt), stop.listening():
        with stop.held():
            with stop.held():
                os.kill(os.getpid(), number)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"] and stop.code == code


def test_the_second_signal_ends_at_once() -> None:
    words = """
import os, signal
from actors.stop import StopRequest
stop = StopRequest()
with stop.listening(), stop.held():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    print("never")
"""
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stdout == ""


def test_a_checkpoint_that_fails_is_told_and_the_last_one_ends_the_run() -> None:
    def saved(wait_s: float) -> str:
        raise CheckpointError("version_000002: learner rank 0: OSError: No space left on device")

    told = []
    controller = types.SimpleNamespace(
        staged="version_000002",
        checkpoint="version_000001",
        learner=types.SimpleNamespace(saved=saved),
        progress=types.SimpleNamespace(message=told.append),
    )
    Controller.look_at_save(controller)
    assert len(told) == 1 and "the run goes on" in told[0] and "No space left on device" in told[0]
    assert controller.checkpoint == controller.staged == "version_000001"
    controller.staged = "version_000003"
    with pytest.raises(CheckpointError):
        Controller.look_at_save(controller, wait_s=1, must=True)
