"""A rollout worker as a Ray actor that runs two tasks at once."""

import pytest
import ray

from actors.cluster import THREAD_VARIABLES
from actors.rollout_worker import RolloutWorker
from tests.rollout.small_rollout import equal, publication, requests
from tests.small import small_config

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def test_two_tasks_at_once_give_the_bits_of_one_after_the_other(tmp_path) -> None:
    config = small_config(tmp_path, ["rollout.overlap_decode=true", "rollout.decode_frames=2"])
    options = {"num_cpus": 0, "max_concurrency": 2, "runtime_env": {"env_vars": THREAD_VARIABLES}}
    actor = ray.remote(RolloutWorker).options(**options).remote(config, "cpu")
    plain, weights = RolloutWorker(config, "cpu"), publication(3, 1.03)
    plain.load_weights(*weights)
    ray.get(actor.load_weights.remote(*weights), timeout=120)
    asked = requests(4, version=3)
    refs = [actor.generate.options(num_returns=3).remote(request) for request in asked]
    for request, ref in zip(asked, refs, strict=True):
        assert equal(tuple(ray.get(ref, timeout=120)), plain.generate(request))
    ray.kill(actor)
