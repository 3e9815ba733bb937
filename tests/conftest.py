"""Shared fixtures: the shipped small world, and a Ray of the tests' own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

ROOT = Path(__file__).parents[1]
POLICY = ROOT / "assets" / "shapes" / "policy"
REWARD = ROOT / "assets" / "shapes" / "reward" / "VideoReward"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Kernels depend on the number of threads: every process of the tests uses one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy():
    """The shipped policy, loaded once; tests must not change it."""
    from sage_ray.models.hunyuan_video import HunyuanVideo

    return HunyuanVideo.load(POLICY)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """An embedded Ray for all tests that need one."""
    import ray

    if not ray.is_initialized():
        _start_ray()
    yield
    ray.shutdown()


@pytest.fixture
def no_ray() -> Iterator[None]:
    """No Ray runs at first, for what starts its own; the other tests' comes back afterwards."""
    import ray

    ran = ray.is_initialized()
    ray.shutdown()
    yield
    ray.shutdown()
    if ran:
        _start_ray()


def _start_ray() -> None:
    import ray

    ray.init(
        address="local",  # whatever other Ray runs on this machine
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=400_000_000,
        namespace="sage_ray_tests",
        log_to_driver=False,
        logging_level="warning",
    )
