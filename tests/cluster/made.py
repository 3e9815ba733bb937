"""Pools and controllers in tests: what they make, and their end."""

from __future__ import annotations

from collections.abc import Iterable

import ray

from actors.controller import Controller
from actors.rollout_pool import RolloutPool
from actors.task_board import Made
from sage_ray.types import GroupRequest


def generate(pool: RolloutPool, requests: list[GroupRequest]) -> list[Made]:
    """Groups in order, by the weights last loaded."""
    return [one.result(timeout=120) for one in pool.generate(requests)]


def end_pool(pool: RolloutPool) -> None:
    """Its thread and its actors."""
    pool.close()
    end_actors(pool.members)


def end_controller(controller: Controller) -> None:
    """Its threads and files, and the actors of all pools."""
    controller.close()
    rewards = [worker.actor for worker in controller.rollouts.rewards.workers]
    end_actors((*controller.rollouts.rollouts.members, *rewards, *controller.learner.ranks))


def end_actors(actors: Iterable[ray.actor.ActorHandle]) -> None:
    for actor in actors:
        ray.kill(actor)
