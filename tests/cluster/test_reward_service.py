"""A group that cannot be scored has no numbers; when nothing can be scored the run stops."""

import numpy as np
import pytest
import ray

from actors.cluster import Layout
from actors.pools import RewardService
from tests.small import small_config

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
PROMPT = "a small red circle moves left slowly on a gray background"


@pytest.fixture(scope="module")
def service(tmp_path_factory, ray_cluster):
    made = RewardService(
        small_config(tmp_path_factory.mktemp("reward"), ["reward.timeout_s=120"]), Layout("cpu", 0, 0, 0)
    )
    ray.get(made.ready(), timeout=120)
    yield made
    for worker in made.workers:
        ray.kill(worker)


def clips(dtype: type) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (4, 9, 32, 32, 3)).astype(dtype)


def test_a_failed_group_is_nan_and_the_others_keep_their_scores(service) -> None:
    worker = service.workers[0]
    refs = [worker.score.remote(clips(np.uint8), PROMPT), worker.score.remote(clips(np.float32), PROMPT)]
    good, bad = service.collect(refs, 4)
    assert np.isfinite(good.axes).all() and np.isfinite(good.truth).all()
    assert bad.axes.shape == (4, 3) and np.isnan(bad.axes).all() and np.isnan(bad.truth).all()


def test_nothing_scored_raises_the_reason(service) -> None:
    ref = service.workers[0].score.remote(clips(np.float32), PROMPT)
    with pytest.raises(ray.exceptions.RayTaskError, match="uint8"):
        service.collect([ref], 4)


def test_a_late_group_is_nan(service) -> None:
    quick = service.workers[0].score.remote(clips(np.uint8), PROMPT)
    never = _never.remote()
    service.timeout_s = 5.0
    try:
        good, late = service.collect([quick, never], 4)
    finally:
        service.timeout_s = 120.0
    assert np.isfinite(good.axes).all() and np.isnan(late.axes).all()
    ray.cancel(never, force=True)


@ray.remote(num_cpus=0)
def _never() -> None:
    import time

    time.sleep(100)
