"""A rollout pool that grows, shrinks and loses workers while a run goes on: the run is that of a fixed pool."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest
import ray

from actors import scale
from actors.controller import Controller
from tests.cluster.troubles import DriftedWorker, odd_actors, process_of, run, told, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.timeout(600),
    pytest.mark.skipif("SAGE_HOSTS" not in os.environ, reason="takes minutes: make test-cluster runs it"),
]
WORDS = ("num_iterations=6", "save_interval=6")


class Noted:
    """First states of all videos that the learner takes, as hashes, and the versions that made them."""

    def __init__(self) -> None:
        self.noise, self.versions = list[str](), list[set[int]]()

    def attach(self, controller: Controller) -> None:
        update = controller.learner.update

        def noted(trajectories, *others):
            found = ray.get(list(trajectories))
            self.versions.append({one.policy_version for one in found})
            self.noise += [hashlib.sha256(row.tobytes()).hexdigest() for one in found for row in one.latents[:, 0]]
            return update(trajectories, *others)

        controller.learner.update = noted


def test_grow_shrink_and_preempt(tmp_path: Path) -> None:
    """1 worker, then 4 (asked for as `launch.py scale` does), 2, one of them killed, and 2 at the end."""
    noted, serving = Noted(), dict[int, int]()

    def act(controller: Controller, finished: int) -> None:
        staff = controller.rollouts.rollouts.staff
        serving[finished] = len(staff.serving)
        if finished == 1:
            scale.ask(4, controller.output.name)
            wait_until(lambda: len(staff.seats) == 4, "three newcomers to come up", 120)
        if finished == 4:
            scale.ask(2, controller.output.name)
            wait_until(lambda: len(staff.seats) == 2, "two to leave")
            os.kill(process_of(staff.seats[1].group.members[0]), signal.SIGKILL)

    fixed = run(tmp_path / "fixed", *WORDS)
    ended = run(tmp_path / "elastic", *WORDS, "rollout.num_workers=1", before=noted.attach, after=act)
    assert serving[1] == 1 and 2 <= serving[3] <= 4 and serving[4] == 4
    assert told(ended, "has joined, 4 of 4 serve") and told(ended, "rollout groups: 2 from now on, 4 before")
    assert told(ended, "is replaced (deaths)")
    assert noted.versions == [{version} for version in range(6)]
    assert len(noted.noise) == len(set(noted.noise)) == 6 * 8
    assert ended.is_as(fixed)


def test_a_newcomer_with_other_weights_is_not_let_in(tmp_path: Path) -> None:
    """The log-probs that it gives to another's trajectory tell, whatever it says of its weights."""

    def act(controller: Controller, finished: int) -> None:
        staff = controller.rollouts.rollouts.staff
        if finished == 1:
            controller.rollouts.rollouts.resize(2)
            wait_until(lambda: len(staff.seats) == 2, "a newcomer to come up", 120)
        if finished == 2:
            assert len(staff.serving) == 1

    words = "num_iterations=3", "rollout.num_workers=1", "reward.num_workers=1"
    with odd_actors({"rollout-1": DriftedWorker}):
        ended = run(tmp_path, *words, after=act)
    assert told(ended, "rollout-1 is replaced (faulty): replays another's log-probs with a difference of")
