"""Who runs where: a pure function of a configuration and of the nodes of a cluster.

`plan` divides GPUs among the pools and groups places that must be reserved together; `actors.places` reserves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sage_ray.config import Config, ConfigError

LABEL = "role"
"""Label of a node that says what it is for; `ray start --labels=role=rollout`, or `labels` of a node type."""
POOLS = ("learner", "rollout", "reward")
"""In the order in which they are reserved: whole nodes before single GPUs."""
ROUNDING = 1e-6
"""GPUs: shares are decimal fractions."""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster. role: value of its label, empty where it has none."""

    gpus: float
    role: str = ""


@dataclass(frozen=True)
class Group:
    """Places that are reserved together.

    name: of the group; its actors are called by `names`, in order, the same number in every bundle. gpus: of one actor.
    bundles: number of them; each lies on one node, all on as few nodes as possible. selector: of the node's role, empty
    is any node.
    """

    name: str
    names: tuple[str, ...]
    gpus: float
    bundles: int = 1
    selector: str = ""

    @property
    def per_bundle(self) -> int:
        return len(self.names) // self.bundles

    @property
    def bundle_gpus(self) -> float:
        return self.gpus * self.per_bundle

    @property
    def strategy(self) -> str:
        """Ray's name for it."""
        return "STRICT_PACK" if self.bundles == 1 else "PACK"


@dataclass(frozen=True)
class Layout:
    """Who runs where. device: cpu or cuda; gpus_*: GPU share of one actor of each pool."""

    device: str
    gpus_rollout: float
    gpus_reward: float
    gpus_learner: float


@dataclass(frozen=True)
class Plan:
    """A layout, the groups to reserve in this order, and the node (by number) that every bundle fits on; none where
    nodes are still to come."""

    layout: Layout
    groups: tuple[Group, ...]
    nodes: tuple[tuple[int, ...], ...]


def plan(config: Config, nodes: Sequence[Node], num_ranks: int | None = None) -> Plan:
    """Where everything goes on these nodes.

    Args: num_ranks: of the learner, 0 where nothing is trained; None takes learner.num_ranks.

    Raises: ConfigError with need and have, when it does not fit and cluster.grows is false.
    """
    cluster, ranks = config.cluster, config.learner.num_ranks if num_ranks is None else num_ranks
    total = sum(node.gpus for node in nodes)
    if not cluster.grows:
        layout = plan_layout(config, total, ranks)
        groups = _groups(config, layout, ranks)
        return Plan(layout, groups, _assign(groups, nodes))
    if cluster.device == "auto":
        raise ConfigError(
            "cluster.device='auto': must be cpu or cuda with cluster.grows=true: what may come is unknown"
        )
    layout = plan_layout(config, max(total, _need(config, ranks)), ranks)
    return Plan(layout, _groups(config, layout, ranks), ())


def describe(planned: Plan, nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """(name, words) of every node and of what is asked for, for people."""
    lines = [("devices", f"{planned.layout.device}, on {len(nodes)} nodes with {_numbers(nodes)} GPUs")]
    for group in planned.groups:
        where = f" with role {group.selector}" if group.selector else ""
        together = f"{group.bundles} x {group.per_bundle}" if group.bundles > 1 else f"{group.per_bundle}"
        lines.append((f"places of {group.name}", f"{together} actors of {group.gpus:.3g} GPUs on a node{where}"))
    for number, node in enumerate(nodes):
        mine = [_on(group, where.count(number)) for group, where in _pairs(planned) if number in where]
        role = f" ({node.role})" if node.role else ""
        lines.append((f"node {number}{role}", ", ".join(mine) or ("nothing yet" if planned.nodes else "unknown yet")))
    return lines


def _pairs(planned: Plan) -> list[tuple[Group, tuple[int, ...]]]:
    return list(zip(planned.groups, planned.nodes, strict=True)) if planned.nodes else []


def _on(group: Group, bundles: int) -> str:
    count = bundles * group.per_bundle
    return group.name if count == len(group.names) else f"{count} of {len(group.names)} of {group.name}"


def _groups(config: Config, layout: Layout, ranks: int) -> tuple[Group, ...]:
    """The learner's sequence parallel groups are one bundle each; a rollout group is one bundle."""
    sp_size, roles = config.learner.sp_size, config.cluster.node_roles
    found = []
    if ranks:
        names = tuple(f"learner-{rank}" for rank in range(ranks))
        found.append(Group("learner", names, layout.gpus_learner, ranks // sp_size, roles.get("learner", "")))
    for number in range(config.rollout.num_workers):
        names = group_names(config, number)
        found.append(Group(f"rollout-{number}", names, layout.gpus_rollout, selector=roles.get("rollout", "")))
    for number in range(config.reward.num_workers):
        name = f"reward-{number}"
        found.append(Group(name, (name,), layout.gpus_reward, selector=roles.get("reward", "")))
    return tuple(sorted(found, key=lambda group: (not group.selector, -group.bundle_gpus)))


def group_names(config: Config, number: int) -> tuple[str, ...]:
    """Names of a rollout group's actors, by which their places are known."""
    name, size = f"rollout-{number}", config.rollout.sp_size
    return (name,) if size == 1 else tuple(f"{name}r{rank}" for rank in range(size))


def _assign(groups: Sequence[Group], nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """The node of every bundle: one that the group is on already, else the fullest where a single bundle fits, or the
    emptiest for several, as Ray packs them too."""
    free = [node.gpus for node in nodes]
    found = []
    for group in groups:
        mine: list[int] = []
        for _ in range(group.bundles):
            fits = [
                number
                for number, node in enumerate(nodes)
                if matches(group.selector, node.role) and free[number] >= group.bundle_gpus - ROUNDING
            ]
            if not fits:
                raise ConfigError(_misfit(group, nodes, free))
            sign = 1 if group.bundles == 1 else -1
            best = min(fits, key=lambda number: (number not in mine, sign * free[number]))
            free[best] -= group.bundle_gpus
            mine.append(best)
        found.append(tuple(mine))
    return tuple(found)


def _misfit(group: Group, nodes: Sequence[Node], free: Sequence[float]) -> str:
    have = ", ".join(f"{left:.3g} of {node.gpus:g} ({node.role or 'no role'})" for left, node in zip(free, nodes))
    if not any(matches(group.selector, node.role) for node in nodes):
        key, need = f"cluster.node_roles: {group.name}", f"a node whose label {LABEL} is {group.selector}"
    else:
        where = f" whose label {LABEL} is {group.selector}" if group.selector else ""
        key = "cluster.device: " + group.name
        need = f"{group.bundles} times {group.bundle_gpus:.3g} GPUs, each on one node{where}"
    return f"{key} needs {need}; the nodes' free GPUs are [{have}]; cluster.grows=true waits for an autoscaler's nodes"


def matches(selector: str, role: str) -> bool:
    """Whether a node's role satisfies one of Ray's selectors: "a", "!a", "in(a,b)", "!in(a,b)"; empty is any."""
    if not selector:
        return True
    words = selector.removeprefix("!")
    values = words[3:-1].split(",") if words.startswith("in(") else [words]
    return (role in (value.strip() for value in values)) != selector.startswith("!")


def _need(config: Config, ranks: int) -> float:
    share = 1 if config.reward.gpus_per_worker is None else config.reward.gpus_per_worker
    return config.rollout.num_workers * config.rollout.gpus_per_group + config.reward.num_workers * share + ranks


def _numbers(nodes: Sequence[Node]) -> str:
    return "+".join(f"{node.gpus:g}" for node in nodes) or "no"


def plan_layout(config: Config, num_gpus: float, num_ranks: int | None = None) -> Layout:
    """Devices of every pool for a cluster with `num_gpus` GPUs. Raises ConfigError when they do not fit.

    Every actor takes whole GPUs where there are enough; else, with cluster.share_gpu, at most one learner rank and
    rollout groups of one actor, all actors share what is there; and reward workers that take part of a GPU
    (reward.gpus_per_worker) have it of the rollout workers' where none is left.

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
    beside = 1 - math.ceil(counts[1] / counts[0]) * reward_share  # of a rollout worker's GPU
    together = config.cluster.share_gpu and config.rollout.sp_size == 1 and counts[0] + counts[2] <= num_gpus
    if need > num_gpus and together and 0 < beside < 1:
        return Layout("cuda", round(beside, 2), reward_share, 1)
    if need > num_gpus:
        raise ConfigError(
            f"cluster.device: {counts[0]} rollout groups of {config.rollout.gpus_per_group}, "
            f"{counts[1]} reward workers and {counts[2]} learner ranks need {need} GPUs, the cluster has {num_gpus:g}"
        )
    return Layout("cuda", config.rollout.gpus_per_group / config.rollout.sp_size, reward_share, 1)
