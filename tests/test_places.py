"""Which places are reserved together, and which node everything is on, as a table."""

from __future__ import annotations

import pytest

from actors.layout import Group, Node, Plan, describe, matches, plan
from sage_ray.config import Config, ConfigError

ROLES = {"learner": "learner", "rollout": "rollout", "reward": "in(rollout,reward)"}


def config(rollouts: str, rewards: str, learner: str, **cluster: object) -> Config:
    """Pools as "number x size": rollout groups of so many actors, reward workers of such a share, ranks of sp_size."""
    mine = Config()
    counts = [words.split("x") for words in (rollouts, rewards, learner)]
    mine.rollout.num_workers, mine.rollout.sp_size = map(int, counts[0])
    mine.rollout.gpus_per_group = mine.rollout.sp_size
    mine.reward.num_workers, share = int(counts[1][0]), float(counts[1][1])
    mine.reward.gpus_per_worker = None if share == 1 else share
    mine.learner.num_ranks, mine.learner.sp_size = map(int, counts[2])
    for key, value in cluster.items():
        setattr(mine.cluster, key, value)
    return mine


def nodes(words: str) -> list[Node]:
    """As in "8learner 8rollout 0"."""
    found = []
    for word in words.split():
        digits = "".join(letter for letter in word if letter.isdigit())
        found.append(Node(float(digits), word.removeprefix(digits)))
    return found


def where(planned: Plan) -> str:
    """Every group and the nodes of its bundles, in the order in which they are reserved."""
    return " ".join(
        f"{group.name}:{''.join(map(str, on))}" for group, on in zip(planned.groups, planned.nodes, strict=True)
    )


@pytest.mark.parametrize(
    ("rollouts", "rewards", "learner", "cluster", "expected"),
    [
        # separate pools on one node and on several
        ("4x1", "1x1", "3x1", "8", "learner:000 rollout-0:0 rollout-1:0 rollout-2:0 rollout-3:0 reward-0:0"),
        ("1x1", "1x1", "2x1", "2 2", "learner:00 rollout-0:1 reward-0:1"),
        ("2x1", "1x1", "4x1", "2 2 2 2", "learner:0011 rollout-0:2 rollout-1:2 reward-0:3"),
        # sequence parallel groups are never split, the learner's not either
        ("2x4", "0x1", "8x4", "8 8", "learner:00 rollout-0:1 rollout-1:1"),
        ("2x2", "1x1", "2x2", "3 3 3", "learner:0 rollout-0:1 rollout-1:2 reward-0:0"),
        # the wider groups first, so that single GPUs do not break up a node
        ("1x4", "2x1", "2x1", "4 4", "rollout-0:0 learner:11 reward-0:1 reward-1:1"),
        # colocated: shares of one and of two GPUs; a reward worker of its own share, on the CPU
        ("2x1", "1x1", "1x1", "1", "learner:0 rollout-0:0 rollout-1:0 reward-0:0"),
        ("2x1", "1x1", "1x1", "1 1", "learner:0 rollout-0:0 rollout-1:1 reward-0:1"),
        ("2x1", "1x0.1", "1x1", "1 1 1", "learner:0 rollout-0:1 rollout-1:2 reward-0:1"),
        ("1x1", "1x0", "1x1", "2", "learner:0 rollout-0:0 reward-0:0"),
        # CPU only
        ("2x1", "1x1", "2x1", "0 0", "learner:00 rollout-0:0 rollout-1:0 reward-0:0"),
    ],
)
def test_places(rollouts: str, rewards: str, learner: str, cluster: str, expected: str) -> None:
    assert where(plan(config(rollouts, rewards, learner), nodes(cluster))) == expected


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("8rollout 8learner 8rollout", "rollout-0:0 rollout-1:0 learner:1111 reward-0:0"),
        ("4learner 8rollout 2reward 1", "rollout-0:1 rollout-1:1 learner:0000 reward-0:2"),
        ("0learner 0rollout 0reward", "learner:0000 rollout-0:1 rollout-1:1 reward-0:1"),
    ],
)
def test_roles_go_to_the_nodes_of_their_label(cluster: str, expected: str) -> None:
    assert where(plan(config("2x2", "1x1", "4x1", node_roles=ROLES), nodes(cluster))) == expected


@pytest.mark.parametrize(
    ("mine", "cluster", "words"),
    [
        (
            config("1x1", "1x1", "2x1"),
            "3",
            "cluster.device: 1 rollout groups of 1, 1 reward workers and 2 learner ranks "
            "need 4 GPUs, the cluster has 3",
        ),
        (
            config("1x4", "1x1", "3x1"),
            "2 2 2 2",
            "cluster.device: rollout-0 needs 1 times 4 GPUs, each on one node; the "
            "nodes' free GPUs are [2 of 2 (no role), 2 of 2 (no role), 2 of 2 (no role), 2 of 2 (no role)]",
        ),
        (
            config("1x1", "1x1", "2x1", node_roles=ROLES),
            "4rollout",
            "cluster.node_roles: learner needs a node whose label "
            "role is learner; the nodes' free GPUs are [4 of 4 (rollout)]",
        ),
        (
            config("1x1", "1x1", "2x1", node_roles=ROLES),
            "1learner 8rollout",
            "cluster.device: learner needs 2 times 1 "
            "GPUs, each on one node whose label role is learner; the nodes' free GPUs are [0 of 1 (learner), 8 of 8 (rollout)]",  # noqa: E501
        ),
        (
            config("1x1", "1x1", "1x1", grows=True),
            "4",
            "cluster.device='auto': must be cpu or cuda with cluster.grows=true",
        ),
        (config("1x1", "1x1", "1x1", node_roles=ROLES, device="cpu"), "0", "cluster.node_roles: learner needs a node"),
    ],
)
def test_what_does_not_fit_names_need_and_have(mine: Config, cluster: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(mine, nodes(cluster))
    assert str(caught.value).startswith(words)


def test_what_may_still_come_is_planned_without_nodes() -> None:
    mine = config("2x1", "1x1", "4x2", grows=True, device="cuda", node_roles=ROLES)
    planned = plan(mine, nodes("0"))
    assert planned.nodes == () and planned.layout.gpus_learner == 1
    learner = planned.groups[0]
    assert learner == Group("learner", ("learner-0", "learner-1", "learner-2", "learner-3"), 1, 2, "learner")
    assert (learner.bundle_gpus, learner.per_bundle, learner.strategy) == (2, 2, "PACK")
    assert {group.strategy for group in planned.groups[1:]} == {"STRICT_PACK"}
    assert dict(describe(planned, nodes("0")))["node 0"] == "unknown yet"


def test_the_plan_says_what_is_on_each_node() -> None:
    mine = config("2x2", "1x1", "4x2", node_roles=ROLES)
    cluster = nodes("4learner 8rollout")
    lines = dict(describe(plan(mine, cluster), cluster))
    assert lines["devices"] == "cuda, on 2 nodes with 4+8 GPUs"
    assert lines["places of learner"] == "2 x 2 actors of 1 GPUs on a node with role learner"
    assert lines["places of rollout-1"] == "2 actors of 1 GPUs on a node with role rollout"
    assert lines["node 0 (learner)"] == "learner" and lines["node 1 (rollout)"] == "rollout-0, rollout-1, reward-0"


@pytest.mark.parametrize(
    ("selector", "role", "expected"),
    [
        ("", "", True),
        ("a", "a", True),
        ("a", "", False),
        ("!a", "", True),
        ("!a", "a", False),
        ("in(a,b)", "b", True),
        ("in(a, b)", "c", False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", "a", False),
    ],
)
def test_selectors_are_rays(selector: str, role: str, expected: bool) -> None:
    assert matches(selector, role) == expected
