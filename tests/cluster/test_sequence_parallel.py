"""A rollout group of two actors and a learner of two that share tokens: real Ray, the whole controller."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from actors.places import places_together
from actors.wait import WaitTimeoutError
from sage_ray.metrics import read_metrics
from tests.cluster.made import end_controller, generate
from tests.cluster.test_turns import make
from tests.rollout.small_rollout import requests

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
WORDS = "sp_size=2 learner.num_ranks=2 data.num_prompts=3 num_iterations=1 loss.num_updates=3".split()


def test_a_run_in_which_everybody_shares_tokens(tmp_path: Path) -> None:
    """Three groups in three optimizer steps; other weights than there are cannot be asked for; weights leave and come
    back on every member."""
    controller = make(tmp_path, *WORDS)
    controller.start()
    controller.run_sync(lambda iteration: None)
    (line,) = read_metrics(controller.output / "metrics.jsonl")
    assert line["policy_version"] == controller.version == 3
    assert line["agreement/max_abs"] == 0.0 and line["learner/grad_norm"] > 0
    pool = controller.rollouts.rollouts
    assert len(pool.groups) == 1 and len(pool.members) == 2
    with pytest.raises(ValueError, match=r"policy versions \[99\] were asked for, the weights are of version 3"):
        pool.generate(requests(1, version=99))
    assert pool.leave() > 0
    pool.enter()
    ((group, info),) = generate(pool, requests(1, version=3))
    trajectory = ray.get(group.trajectory, timeout=60)
    assert info.worker.startswith("rollout-0.0 on ") and trajectory.policy_version == 3
    end_controller(controller)


def test_places_that_no_node_has_are_waited_for_with_a_bound() -> None:
    expected = r"waited 2 s for rollout-0: 2 places of {'GPU': 1} on one node; GPUs of the nodes are \[0\]"
    with pytest.raises(WaitTimeoutError, match=expected):
        places_together(["rollout-0r0", "rollout-0r1"], 1, "rollout-0", 2.0)
