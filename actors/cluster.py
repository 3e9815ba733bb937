"""Ray itself, devices, and the one place where plain actor classes become Ray actors."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.orphans import watch
from actors.wait import REPORT_S, WaitTimeoutError, wait_all
from sage_ray.config import Config, ConfigError
from sage_ray.parallel import free_port

logger = logging.getLogger("sage_ray")
THREAD_VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SOME_CPU = 0.001
"""CPUs of a place on a CPU node: a placement group has no empty places."""


@dataclass(frozen=True)
class Layout:
    """Who runs where. device: cpu or cuda; gpus_*: GPU share of one actor of each pool."""

    device: str
    gpus_rollout: float
    gpus_reward: float
    gpus_learner: float


def start_ray(config: Config) -> None:
    """Join the cluster that RAY_ADDRESS names, else start an embedded Ray for this process, which ends with it."""
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace="sage_ray", logging_level=logging.WARNING)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    session = ray.init(
        address="local",  # of its own, whatever other Ray runs on this machine
        num_cpus=config.cluster.num_cpus,
        include_dashboard=False,
        object_store_memory=config.cluster.object_store_bytes,
        namespace="sage_ray",
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    watch(session.address_info["session_dir"])


def plan_layout(config: Config, num_gpus: float, num_ranks: int | None = None) -> Layout:
    """Devices of every pool for a cluster with `num_gpus` GPUs. Raises ConfigError when they do not fit.

    Every actor takes whole GPUs where there are enough; else, with cluster.share_gpu, at most one learner rank and
    rollout groups of one actor, all actors share what is there.

    Args: num_ranks: of the learner, 0 where nothing is trained; None takes learner.num_ranks.
    """
    wanted = config.cluster.device
    device = ("cuda" if num_gpus >= 1 else "cpu") if wanted == "auto" else wanted
    if device == "cpu":
        if config.rollout.cuda_graphs:
            raise ConfigError("rollout.cuda_graphs=True: needs GPUs, the run would be on the CPU")
        return Layout("cpu", 0, 0, 0)
    ranks = config.learner.num_ranks if num_ranks is None else num_ranks
    counts = config.rollout.num_workers, config.reward.num_workers, ranks
    reward_share = 1 if config.reward.gpus_per_worker is None else config.reward.gpus_per_worker
    need = counts[0] * config.rollout.gpus_per_group + counts[1] * reward_share + counts[2]
    if need > num_gpus >= 1 and config.cluster.share_gpu and ranks <= 1 and config.rollout.sp_size == 1:
        if config.reward.gpus_per_worker is None:
            share = 1 / math.ceil(sum(counts) / num_gpus)
            return Layout("cuda", share, share, share)
        left = 1 - counts[1] * reward_share
        if num_gpus == 1 and left > 0:
            share = math.floor(100 * left / (counts[0] + counts[2])) / 100
            return Layout("cuda", share, reward_share, share)
    if need > num_gpus:
        raise ConfigError(
            f"cluster.device: {counts[0]} rollout groups of {config.rollout.gpus_per_group}, "
            f"{counts[1]} reward workers and {counts[2]} learner ranks need {need} GPUs, the cluster has {num_gpus:g}"
        )
    return Layout("cuda", config.rollout.gpus_per_group / config.rollout.sp_size, reward_share, 1)


def start_actor(
    cls: type,
    num_gpus: float,
    *arguments: Any,
    runtime_env: dict[str, Any] | None = None,
    max_concurrency: int = 1,
    place: PlacementGroupSchedulingStrategy | None = None,
) -> ray.actor.ActorHandle:
    """A Ray actor of a plain class. CPU actors take no CPU slot: the pools take turns on the same cores.

    Args: max_concurrency: methods that run at once, in threads. place: where, None is anywhere (`places_together`).
    """
    hidden = {} if num_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    given = runtime_env or {}
    variables = THREAD_VARIABLES | hidden | (given.get("env_vars") or {})
    environment = {**given, "env_vars": variables}
    options = {"num_cpus": 0, "num_gpus": num_gpus, "max_concurrency": max_concurrency, "runtime_env": environment}
    if place is not None:
        options["scheduling_strategy"] = place
    return ray.remote(cls).options(**options).remote(*arguments)


def places_together(count: int, num_gpus: float, what: str, timeout_s: float) -> list[PlacementGroupSchedulingStrategy]:
    """`count` places of `num_gpus` GPUs each on one node, reserved. Every 30 s it says that it waits and for what.

    Raises: WaitTimeoutError with need and have after `timeout_s`.
    """
    need: dict[str, float] = {"GPU": num_gpus} if num_gpus else {"CPU": SOME_CPU}
    group = ray.util.placement_group([need] * count, strategy="STRICT_PACK")
    _wait_for_places(group, f"{what}: {count} places of {need} on one node", timeout_s)
    return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(count)]


def _wait_for_places(group: PlacementGroup, what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not group.wait(math.ceil(max(0.0, min(REPORT_S, deadline - time.monotonic())))):
        nodes = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
        if time.monotonic() >= deadline:
            ray.util.remove_placement_group(group)
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}; GPUs of the nodes are {nodes}, {_have()}")
        logger.warning("still waiting for %s; GPUs of the nodes are %s, %s", what, nodes, _have())


def _have() -> str:
    return f"the cluster has {ray.cluster_resources()}, free are {ray.available_resources()}"


def free_address() -> tuple[str, int]:
    """Address of this process's host, and a port there that nobody listens on."""
    return ray.util.get_node_ip_address(), free_port()


def wait_until_ready(refs: list[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    """Wait for starting actors; what is needed and what is there is in the message when they do not come."""
    start = time.monotonic()
    try:
        return wait_all(refs, what, timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {_have()}") from None
    finally:
        logger.debug("%s took %.1f s", what, time.monotonic() - start)
