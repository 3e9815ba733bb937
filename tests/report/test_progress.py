"""Progress: plain lines in a file, a live line on a terminal, and failures that say where."""

import io

import pytest
from rich.console import Console

from sage_ray import progress
from sage_ray.progress import Progress, duration


class Clock:
    """time.monotonic, one second per look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(progress, "time", Clock())


def make(num_iterations: int, finished: int = 0, terminal: bool = False) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, soft_wrap=True, highlight=False, width=40)
    return Progress(num_iterations, finished, console), file


def test_plain_lines():
    shown, file = make(2)
    for i in (1, 2):
        with shown.phase("rollout"):
            pass
        shown.iteration(i, {"reward/total": i / 2, "truth/total": None, "loss": 3.0})
    shown.message("saved [run]")
    assert file.getvalue().splitlines() == [
        "iteration 1/2: rollout ...",
        "iteration 1/2  reward +0.5000 (start +0.5000)  rollout 1.0 s  30.0 iterations/min  ETA 2 s",
        "iteration 2/2: rollout ...",
        "iteration 2/2  reward +1.0000 (start +0.5000)  rollout 1.0 s  20.0 iterations/min  ETA 0 s",
        "saved [run]",
    ]


def test_resumed_run_counts_on_and_eta_covers_what_is_left():
    shown, file = make(100, finished=90)
    shown.started_with({"reward/total": 0.25, "loss": 1.0})
    with shown.phase("update"):
        pass
    shown.iteration(91, {"reward/total": 0.5})
    assert file.getvalue().splitlines() == [
        "iteration 91/100: update ...",
        "iteration 91/100  reward +0.5000 (start +0.2500)  update 1.0 s  30.0 iterations/min  ETA 18 s",
    ]


def test_phases_after_the_last_iteration_have_no_number():
    shown, file = make(1, finished=1)
    with shown.phase("evaluate"):
        pass
    assert file.getvalue() == "evaluate ...\n"


def test_failure_names_phase_and_time_and_passes_on():
    shown, file = make(3)
    with pytest.raises(KeyError), shown.phase("reward"):
        raise KeyError
    assert file.getvalue().splitlines()[-1] == "iteration 1/3: reward failed after 1.0 s"


def test_terminal_shows_phases_live_and_nested():
    shown, file = make(3, terminal=True)
    with shown.phase("rollout"), shown.phase("update"):
        pass
    shown.iteration(1, {"reward/total": 1.0})
    text = file.getvalue()
    assert "\x1b[" in text and "..." not in text
    assert "iteration 1/3  reward +1.0000 (start +1.0000)  update 1.0 s  rollout 3.0 s" in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (7623, "2 h 07 min"), (-1, "0 s")],
)
def test_duration(seconds, words):
    assert duration(seconds) == words
