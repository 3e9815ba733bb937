"""Ray itself, devices, and the one place where plain actor classes become Ray actors."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray.job_config import JobConfig

from actors.layout import Layout as Layout
from actors.orphans import watch
from actors.places import forget_places, have, place_of
from actors.wait import wait_all
from sage_ray.config import Config
from sage_ray.parallel import free_port

logger = logging.getLogger("sage_ray")
THREAD_VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def start_ray(config: Config) -> None:
    """Join the cluster that RAY_ADDRESS names, else start an embedded Ray for this process, which ends with it."""
    job = JobConfig(metadata={"job_name": Path(config.output_dir).name, "project": "sage-ray"})  # shown on Ray's pages
    _names.clear()
    forget_places()
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace="sage_ray", logging_level=logging.WARNING, job_config=job)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    session = ray.init(
        address="local",  # of its own, whatever other Ray runs on this machine
        num_cpus=config.cluster.num_cpus,
        include_dashboard=config.cluster.dashboard,
        job_config=job,
        object_store_memory=config.cluster.object_store_bytes,
        namespace="sage_ray",
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    watch(session.address_info["session_dir"])
    if config.cluster.dashboard:
        print(f"Ray's dashboard: http://{session.address_info['webui_url']}", flush=True)


def start_actor(
    cls: type,
    num_gpus: float,
    *arguments: Any,
    runtime_env: dict[str, Any] | None = None,
    max_concurrency: int = 1,
    place: dict[str, Any] | None = None,
    name: str | None = None,
) -> ray.actor.ActorHandle:
    """A Ray actor of a plain class. CPU actors take no CPU slot: the pools take turns on the same cores.

    Args: max_concurrency: methods that run at once, in threads. place: Ray's options for it, None is what was reserved
        for the name.
        name: "role-number", None is the class's. Ray shows it with the job's number, and a restart's behind a dot.
    """
    hidden = {} if num_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    given = runtime_env or {}
    variables = THREAD_VARIABLES | hidden | (given.get("env_vars") or {})
    environment = {**given, "env_vars": variables}
    options = {"num_cpus": 0, "num_gpus": num_gpus, "max_concurrency": max_concurrency, "runtime_env": environment}
    options |= place_of(name) if place is None else place
    label = _label(name or cls.__name__.lower())
    options["name"] = f"{label}@{ray.get_runtime_context().get_job_id()}"
    started[label] = make_actor(cls, options, arguments)
    return started[label]


def make_actor(cls: type, options: dict[str, Any], arguments: tuple[Any, ...]) -> ray.actor.ActorHandle:
    """A new actor. A process that makes several runs puts another function in its place (actors/warm.py)."""
    return ray.remote(cls).options(**options).remote(*arguments)


def end_actor(actor: ray.actor.ActorHandle) -> None:
    """End an actor, whatever it does; one that is gone already too. Who replaces `make_actor` replaces it with it."""
    ray.kill(actor)


def _label(name: str) -> str:
    """The name, with a number where this process has used it before."""
    _names[name] += 1
    return name if _names[name] == 1 else f"{name}.{_names[name] - 1}"


started: dict[str, ray.actor.ActorHandle] = {}
"""Actors that this process has started, by name; who watches them forgets the dead ones."""
_names: Counter[str] = Counter()


def node_of(actor: ray.actor.ActorHandle) -> str:
    """Id of the node that an actor is on; empty where it is on none."""
    return cluster_state.actor_table(actor._actor_id.hex()).get("Address", {}).get("NodeID", "")


def is_dead(actor: ray.actor.ActorHandle) -> bool:
    """Whether Ray knows that it has ended for good."""
    return cluster_state.actor_table(actor._actor_id.hex()).get("State") == "DEAD"


def free_address() -> tuple[str, int]:
    """Address of this process's host, and a port there that nobody listens on."""
    return ray.util.get_node_ip_address(), free_port()


def wait_until_ready(refs: list[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    """Wait for starting actors; what is needed and what is there is in the message when they do not come."""
    start = time.monotonic()
    try:
        return wait_all(refs, what, timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {have()}") from None
    finally:
        logger.debug("%s took %.1f s", what, time.monotonic() - start)
