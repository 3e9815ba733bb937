"""What a run's actors say of their memory when they have started, beside the plan."""

from __future__ import annotations

import ray

from actors.wait import wait_all
from sage_ray.config import Config
from sage_ray.memory_report import expected_memory, memory_lines


def startup_memory(config: Config, rank: ray.actor.ActorHandle, worker: ray.actor.ActorHandle) -> list[str]:
    """Lines about a learner rank and a rollout worker that hold their models; a warning for what the plan misses."""
    plan = expected_memory(config)
    refs = [rank.memory.remote(), worker.memory.remote()]
    learner, rollout = wait_all(refs, "the actors' memory", config.cluster.start_timeout_s)
    return [
        *memory_lines("learner rank", learner, plan and plan.learner_bytes),
        *memory_lines("rollout worker", rollout, plan and plan.rollout_bytes),
    ]
