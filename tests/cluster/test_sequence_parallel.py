"""A rollout group of two actors and a learner of two that share tokens: real Ray, the whole controller."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from actors.places import places_together
from actors.wait import WaitTimeoutError
from sage_ray.metrics import read_metrics
from tests.cluster.test_turns import end, make
from tests.rollout.small_rollout import requests

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
WORDS = "sp_size=2 learner.num_ranks=2 data.num_prompts=3 num_iterations=1 loss.num_updates=3".split()


def test_a_run_in_which_everybody_shares_tokens(tmp_path: Path) -> None:
    """Three groups in three optimizer steps; a task that no member can do ends the wait at once; weights leave and come
    back on every member."""
    controller = make(tmp_path, *WORDS)
    controller.start()
    controller.run_sync(lambda iteration: None)
    (line,) = read_metrics(controller.output / "metrics.jsonl")
    assert line["policy_version"] == controller.version == 3
    assert line["agreement/max_abs"] == 0.0 and line["learner/grad_norm"] > 0
    pool = controller.rollouts.rollouts
    assert len(pool.groups) == 1 and len(pool.members) == 2
    with pytest.raises(ray.exceptions.RayTaskError, match="version 99 was asked for, this worker holds 3"):
        infos = [group.info for group in pool.generate(requests(1, version=99))]
        ray.get(infos, timeout=60)
    assert pool.leave() > 0
    pool.enter()
    (group,) = pool.generate(requests(1, version=3))
    trajectory, info = ray.get([group.trajectory, group.info], timeout=60)
    assert info.worker.startswith("rollout-0.0 on ") and trajectory.policy_version == 3
    end(controller)


def test_places_that_no_node_has_are_waited_for_with_a_bound() -> None:
    expected = r"waited 2 s for rollout-0: 2 places of {'GPU': 1} on one node; GPUs of the nodes are \[0\]"
    with pytest.raises(WaitTimeoutError, match=expected):
        places_together(2, 1, "rollout-0", 2.0)
