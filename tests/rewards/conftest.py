"""Golden checkpoints and models, made once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sage_ray.rewards.videoalign import VideoAlign
from tests.rewards.golden import write_golden


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory) -> Path:
    """The float32 golden checkpoint; not to be written to."""
    return write_golden(tmp_path_factory.mktemp("golden") / "VideoReward")


@pytest.fixture(scope="session")
def golden_model(golden_folder) -> VideoAlign:
    return VideoAlign.load(golden_folder)


@pytest.fixture
def folder(golden_folder, tmp_path) -> Path:
    """A copy of the golden checkpoint to break."""
    return shutil.copytree(golden_folder, tmp_path / "VideoReward")
