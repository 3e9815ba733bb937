"""Actors of a recipe placed on GPUs that do not exist: real Ray, real placement, actors that load nothing.

`python -m tests.cluster.fake_gpus FILE NODES GPUS_PER_NODE EVERY RECIPE [key=value ...]` writes of every actor name ->
[node of its reserved place, node and GPU ids that it found itself on]; tests/cluster/test_official_dry_run.py says
where they must be. Only every EVERY-th actor is started, as a process takes a second.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import actors.cluster
from actors.learner_group import LearnerGroup
from actors.places import place_everything, place_of
from actors.scored_rollouts import ScoredRollouts
from actors.wait import wait_all
from sage_ray.config_load import load_config


class StandIn:
    """In an actor's place."""

    def where(self) -> tuple[str, list[str]]:
        """Node and GPUs that Ray gave it."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


def node_of(name: str) -> str:
    """Where an actor's place is reserved."""
    place = place_of(name)["scheduling_strategy"]
    table = ray.util.placement_group_table(place.placement_group)
    return table["bundles_to_node_id"][place.placement_group_bundle_index]


def place(recipe: str, words: list[str], every: int) -> dict[str, list[Any]]:
    """Place a recipe's actors as a run does; what is written."""
    count, config = itertools.count(), load_config([Path(recipe)], words)

    def make(cls: type, options: dict[str, Any], arguments: tuple[Any, ...]) -> ray.actor.ActorHandle | None:
        """As actors.cluster.make_actor, of another class."""
        return None if next(count) % every else ray.remote(StandIn).options(**options).remote()

    actors.cluster.make_actor = make  # type: ignore[assignment]
    layout = place_everything(config)
    ScoredRollouts(config, layout)
    LearnerGroup(config, layout)
    started = {name: actor for name, actor in actors.cluster.started.items() if actor is not None}
    places = wait_all([actor.where.remote() for actor in started.values()], f"{len(started)} stand-ins", 200)
    found = dict(zip(started, places, strict=True))
    return {name: [node_of(name), *found.get(name, (None, None))] for name in actors.cluster.started}


def main(file: str, nodes: int, gpus: int, every: int, recipe: str, words: list[str]) -> None:
    head = {"num_cpus": 2, "num_gpus": gpus, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(wait=False, num_cpus=1, num_gpus=gpus, object_store_memory=80_000_000)
        cluster.wait_for_nodes(timeout=120)
        ray.init(address=cluster.address, namespace="sage_ray", log_to_driver=False, logging_level="warning")
        Path(file).write_text(json.dumps(place(recipe, words, every), indent=1), "utf-8")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], sys.argv[6:])
