"""Runs of the small world in which something goes wrong, and what they come to.

A run of three iterations with two rollout and two reward workers; bounds are short, so that who hangs is found within
seconds. Whatever is done to its rollout and reward workers, its numbers and weights must be the undisturbed run's.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from actors import cluster
from actors.controller import Controller
from actors.learner import LearnerRank
from actors.places import place_everything
from actors.reward_worker import RewardWorker
from actors.rollout_worker import RolloutWorker
from actors.stop import StopRequest
from sage_ray.checks import CheckedRun
from sage_ray.config_load import open_output
from sage_ray.data.prompts import read_prompts
from sage_ray.metrics import read_metrics
from sage_ray.progress import Progress
from sage_ray.resume import cut_files, find_resume
from tests.cluster.made import end_controller
from tests.small import small_config, without_times

WORDS = """data.num_prompts=4 data.group_size=2 num_iterations=3 sampling.num_steps=4 kl.mode=dual_moving
kl.anchor_interval=2 learner.videos_per_pass=2 save_interval=1 reward.max_batch_tokens=1 rollout.num_workers=2
reward.num_workers=2 faults.hung_min_s=6 faults.hung_factor=3 faults.slow_factor=1.5
cluster.start_timeout_s=120 cluster.device=cpu""".split()
PATIENCE_S = 60


@dataclass
class Ended:
    """What a run came to. digest: of its last weights; lines: of its metrics, without times; said: what it told;
    took_s: the iteration in which the trouble came, from its first beginning to its end."""

    digest: str
    lines: list[dict[str, Any]]
    said: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def is_as(self, other: Ended) -> bool:
        """Whether weights and numbers are the same, bit for bit."""
        return (self.digest, self.lines) == (other.digest, other.lines)


class HeardProgress(Progress):
    """Remembers its lines."""

    def __init__(self, num_iterations: int):
        super().__init__(num_iterations)
        self.lines = list[str]()
        self.listeners.append(self.lines.append)

    def heard(self, *words: str) -> bool:
        """Whether a line holds all of these words."""
        return any(all(word in line for word in words) for line in list(self.lines))


Trouble = Callable[[Controller], None]


def run(
    folder: Path,
    *overrides: str,
    trouble: Trouble | None = None,
    iteration: int = 2,
    before: Trouble | None = None,
    after: Callable[[Controller, int], None] | None = None,
) -> Ended:
    """A whole run on the present Ray.

    Args: trouble: is made, in a thread of its own, once this iteration has begun. before: sees the controller first;
        after: is called between iterations, with the number of finished ones.
    """
    config = small_config(folder, [*WORDS, *overrides])
    prompts = read_prompts([Path(file) for file in config.data.prompts])
    checked = CheckedRun(config, prompts, [], find_resume(config, prompts))
    progress, times = HeardProgress(config.num_iterations), dict[str, float]()
    output = open_output(config)
    if checked.resume:
        cut_files(output, checked.resume.iteration)
    controller = Controller(checked, place_everything(config), progress, StopRequest())
    if before is not None:
        before(controller)

    def make_trouble() -> None:
        wait_until(lambda: progress.heard(f"iteration {iteration}/"), "the iteration to begin")
        if trouble is not None:
            trouble(controller)

    def between(finished: int) -> None:
        times.setdefault(f"after {finished}", time.monotonic())
        if after is not None:
            after(controller, finished)

    threads = ThreadPoolExecutor(1)
    try:
        controller.start()
        times["start"] = time.monotonic()
        made = threads.submit(make_trouble)
        if config.overlap.enabled:
            controller.run_async(between, lambda finished: after is not None)
        else:
            controller.run_sync(between)
        digest = controller.published.digest
        made.result(timeout=PATIENCE_S)  # else nothing was tried
    finally:
        threads.shutdown(wait=False)
        end_controller(controller)
    lines = [without_times(line) for line in read_metrics(controller.output / "metrics.jsonl")]
    took_s = times.get(f"after {iteration}", math.nan) - times.get(f"after {iteration - 1}", times["start"])
    return Ended(digest, lines, progress.lines, took_s)


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Look every few milliseconds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.005)


def process_of(actor: ray.actor.ActorHandle) -> int:
    """Id of an actor's process, which may be stopped."""
    from ray._private.state import state

    return int(state.actor_table(actor._actor_id.hex())["Pid"])


def send(number: int, name: str) -> Callable[[Controller], None]:
    """A signal to an actor that is at work: "rollout-0" while it has a task, "reward-0" while it scores, "learner-0"
    while it updates."""

    def act(controller: Controller) -> None:
        pool, rewards = controller.rollouts.rollouts, controller.rollouts.rewards
        role, _, which = name.partition("-")
        if role == "rollout":
            seat = next(seat for seat in pool.staff.seats if seat.number == int(which))
            wait_until(lambda: seat.tasks, f"{name} to work")
            actor = seat.group.members[0]
        elif role == "reward":
            worker = next(worker for worker in rewards.workers if worker.number == int(which))
            wait_until(worker.busy.locked, f"{name} to work")
            actor = worker.actor
        else:
            iteration = controller.finished + 1
            wait_until(lambda: controller.progress.heard(f"iteration {iteration}/", ": update"), "the update to begin")
            actor = controller.learner.ranks[int(which)]
        os.kill(process_of(actor), number)

    return act


class SlowWorker(RolloutWorker):
    """Ten times as slow as the others from the second iteration on."""

    def generate(self, *requests):
        start = time.monotonic()
        found = super().generate(*requests)
        if requests[0].step:
            time.sleep(9 * (time.monotonic() - start))
        return found


class BrokenWorker(RolloutWorker):
    """Makes nothing but nan from the second iteration on."""

    def generate(self, *requests):
        found = list(super().generate(*requests))
        for i in range(0, len(found) if requests[0].step else 0, 3):
            trajectory, _, info = found[i : i + 3]
            found[i] = replace(trajectory, latents=np.full_like(trajectory.latents, np.nan))
            found[i + 2] = replace(info, finite=(False,) * len(info.finite))
        return tuple(found)


class DriftedWorker(RolloutWorker):
    """Says that it has the weights that it was given, and has others."""

    def load_weights(self, version, digest, *parts):
        answer = super().load_weights(version, digest, *parts)
        with torch.no_grad():
            self.model.velocity.transformer.proj_out.weight[0, 0] += 0.05
        return answer


class SlowScorer(RewardWorker):
    """Ten times as slow as the others."""

    def score(self, indices, prompts, *groups):
        start = time.monotonic()
        found = super().score(indices, prompts, *groups)
        time.sleep(9 * (time.monotonic() - start))
        return found


class BrokenScorer(RewardWorker):
    """Gives nan to everything."""

    def score(self, indices, prompts, *groups):
        found = super().score(indices, prompts, *groups)
        return [replace(one, parts=one.parts * np.nan, reason="a score is not finite") for one in found]


class SlowRank(LearnerRank):
    """Ten times as slow as it was from the second update on."""

    updates = 0

    def update(self, *arguments):
        start = time.monotonic()
        found = super().update(*arguments)
        self.updates += 1
        time.sleep(9 * (time.monotonic() - start) if self.updates > 1 else 0)
        return found


@contextmanager
def odd_actors(classes: dict[str, type]) -> Iterator[None]:
    """Inside, actors of these names are of these classes; those that replace them are as usual."""
    usual = cluster.make_actor

    def make(cls: type, options: dict[str, Any], arguments: tuple[Any, ...]) -> ray.actor.ActorHandle:
        return usual(classes.get(options["name"].partition("@")[0], cls), options, arguments)

    cluster.make_actor = make
    cluster._names.clear()
    try:
        yield
    finally:
        cluster.make_actor = usual


def killed(name: str) -> Callable[[Controller], None]:
    return send(signal.SIGKILL, name)


def stopped(name: str) -> Callable[[Controller], None]:
    return send(signal.SIGSTOP, name)


def told(ended: Ended, *words: str) -> bool:
    """Whether one of the run's lines holds all of these words."""
    return any(all(word in line for word in words) for line in ended.said)
