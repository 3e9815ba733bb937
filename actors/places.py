"""Places in the cluster: what `actors.layout` plans is reserved here, before any actor starts."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.layout import LABEL, Group, Layout, Node, plan
from actors.wait import REPORT_S, WaitTimeoutError
from sage_ray.config import Config, ConfigError

logger = logging.getLogger("sage_ray")
SOME_CPU = 0.001
"""CPUs of a place on a CPU node: a placement group has no empty places."""

_places: dict[str, dict[str, Any]] = {}
"""Ray's options for an actor's place, by the actor's name."""


def cluster_nodes() -> list[Node]:
    """The nodes that live."""
    living = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["Resources"].get("GPU", 0), node["Labels"].get(LABEL, "")) for node in living]


def present_nodes(words: str | None) -> tuple[str, list[Node]]:
    """What the nodes are of, and the nodes: of "8:learner,8,8", else of the cluster that RAY_ADDRESS names, else of
    this machine.

    Raises: ConfigError, also when no cluster answers.
    """
    if words is not None:
        return f"nodes as given, {words}", [_node(word) for word in words.split(",")]
    if not (address := os.environ.get("RAY_ADDRESS")):
        import torch

        return "this machine", [Node(torch.cuda.device_count())]
    with joined(address):
        return f"the cluster at {address}", cluster_nodes()


def _node(word: str) -> Node:
    gpus, _, role = word.partition(":")
    if not gpus.strip().isdecimal():
        raise ConfigError(f"--nodes: {word!r} must be a number of GPUs, or GPUS:ROLE")
    return Node(float(gpus), role.strip())


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Inside, this process is one of the cluster's drivers. Raises: ConfigError when no cluster answers."""
    try:
        ray.init(address, namespace="sage_ray", logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines()
        raise ConfigError(f"RAY_ADDRESS={address!r}: {lines[0] if lines else type(error).__name__}") from error
    try:
        yield
    finally:
        ray.shutdown()


def place_everything(config: Config, num_ranks: int | None = None) -> Layout:
    """Plan a run on the present cluster and reserve its places; `place_of` knows them then.

    Args: num_ranks: of the learner, 0 where nothing is trained; None takes learner.num_ranks.

    Raises: ConfigError when it does not fit; WaitTimeoutError with need and have when places do not become free.
    """
    planned = plan(config, cluster_nodes(), num_ranks)
    _places.clear()
    _places.update(reserve(planned.groups, config.cluster.start_timeout_s))
    return planned.layout


def place_of(name: str | None) -> dict[str, Any]:
    """Ray's options for the place of the actor with this name; empty is anywhere."""
    return _places.get(name or "", {})


def forget_places() -> None:
    """Another Ray begins."""
    _places.clear()


def reserve(groups: Sequence[Group], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Ray's options for every actor's place. All groups are asked for at once, so that an autoscaler sees them all.

    A single actor on the CPU needs no place of its own, only a node of its role.

    Raises: WaitTimeoutError with need and have after `timeout_s`; then nothing stays reserved.
    """
    found: dict[str, dict[str, Any]] = {}
    asked: list[tuple[Group, PlacementGroup]] = []
    for group in groups:
        if group.gpus or (group.bundles == 1 and len(group.names) > 1):
            asked.append((group, _ask(group)))
        elif group.selector:
            found |= dict.fromkeys(group.names, anywhere(group.selector))
    deadline = time.monotonic() + timeout_s
    with ExitStack() as undo:
        for _, placement in asked:
            undo.callback(ray.util.remove_placement_group, placement)
        for group, placement in asked:
            _wait_for_places(placement, _words(group), deadline - time.monotonic(), timeout_s)
            for number, name in enumerate(group.names):
                place = PlacementGroupSchedulingStrategy(placement, number // group.per_bundle)
                found[name] = {"scheduling_strategy": place}
        undo.pop_all()
    return found


def _ask(group: Group) -> PlacementGroup:
    need = {"GPU": group.bundle_gpus} if group.gpus else {"CPU": SOME_CPU}
    selectors = [{LABEL: group.selector}] * group.bundles if group.selector else None
    return ray.util.placement_group([need] * group.bundles, group.strategy, bundle_label_selector=selectors)


def _words(group: Group) -> str:
    where = f" with {LABEL}={group.selector}" if group.selector else ""
    each = f"{group.bundle_gpus:g} GPUs" if group.gpus else "some CPU"
    return f"{group.name}: {group.bundles} times {each} on one node{where}"


def places_together(
    names: Sequence[str], num_gpus: float, what: str, timeout_s: float, selector: str = ""
) -> list[dict[str, Any]]:
    """Ray's options for places of `num_gpus` GPUs each on one node, reserved: for who was not planned. `place_of` knows
    them then.

    Raises: WaitTimeoutError with need and have after `timeout_s`.
    """
    need: dict[str, float] = {"GPU": num_gpus} if num_gpus else {"CPU": SOME_CPU}
    selectors = [{LABEL: selector}] * len(names) if selector else None
    group = ray.util.placement_group([need] * len(names), strategy="STRICT_PACK", bundle_label_selector=selectors)
    _wait_for_places(group, f"{what}: {len(names)} places of {need} on one node", timeout_s, timeout_s)
    for index, name in enumerate(names):
        _places[name] = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}
    return [_places[name] for name in names]


def anywhere(selector: str) -> dict[str, Any]:
    """Ray's options for a single actor on any node of a role; empty is any node."""
    return {"label_selector": {LABEL: selector}} if selector else {}


def release(names: Sequence[str]) -> None:
    """Give back what was reserved for these actors, who have ended, and for nobody else."""
    for name in names:
        strategy = _places.pop(name, {}).get("scheduling_strategy")
        if strategy is not None and not any(
            other.get("scheduling_strategy", None) is not None
            and other["scheduling_strategy"].placement_group == strategy.placement_group
            for other in _places.values()
        ):
            ray.util.remove_placement_group(strategy.placement_group)


def _wait_for_places(group: PlacementGroup, what: str, left_s: float, timeout_s: float) -> None:
    """Every 30 s it says that it waits and for what. Args: left_s: of the `timeout_s` that the caller has."""
    deadline = time.monotonic() + left_s
    while not group.wait(math.ceil(max(0.0, min(REPORT_S, deadline - time.monotonic())))):
        nodes = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
        if time.monotonic() >= deadline:
            ray.util.remove_placement_group(group)
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}; GPUs of the nodes are {nodes}, {have()}")
        logger.warning("still waiting for %s; GPUs of the nodes are %s, %s", what, nodes, have())


def have() -> str:
    """What the cluster has, and what of it is free."""
    return f"the cluster has {ray.cluster_resources()}, free are {ray.available_resources()}"
