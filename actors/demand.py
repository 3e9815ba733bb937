"""What a run asks of an autoscaler (cluster.grows): nodes for all its actors, whether they wait for a place or idle."""

from __future__ import annotations

from ray.autoscaler.sdk import request_resources

from actors.layout import LABEL, Layout
from sage_ray.config import Config


def ask(config: Config, layout: Layout, num_groups: int) -> None:
    """The cluster should be able to hold the run with so many rollout groups. Nothing where no autoscaler is."""
    if config.cluster.grows:
        bundles, selectors = bundles_of(config, layout, num_groups)
        request_resources(bundles=bundles, bundle_label_selectors=selectors)


def withdraw(config: Config) -> None:
    """The run needs nothing more: what was asked for would be kept for ever."""
    if config.cluster.grows:
        request_resources(bundles=[])


def bundles_of(config: Config, layout: Layout, num_groups: int) -> tuple[list[dict], list[dict]]:
    """(resources, label selectors) of every node-sized part. On the CPU an actor counts as one core."""
    roles, found = config.cluster.node_roles, []
    for pool, count, gpus in (
        ("learner", config.learner.num_ranks, layout.gpus_learner),
        ("rollout", num_groups, layout.gpus_rollout * config.rollout.sp_size),
        ("reward", config.reward.num_workers, layout.gpus_reward),
    ):
        need = {"GPU": gpus} if gpus else {"CPU": 1}
        found += [(need, {LABEL: roles[pool]} if pool in roles else {})] * count
    return [dict(need) for need, _ in found], [dict(selector) for _, selector in found]
