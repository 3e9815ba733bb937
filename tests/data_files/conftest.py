"""The local hub of the tests of `launch.py fetch`."""

from collections.abc import Iterator

import huggingface_hub.constants
import pytest

from sage_ray.fetch import transfer
from tests.data_files.fake_hub import PIPELINE, REPO, FakeHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the small world's policy under the name of the official one; waits and timeouts are short."""
    server = FakeHub()
    server.repos[REPO] = {**PIPELINE, ".gitattributes": b"not wanted"}
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("GITHUB_RAW_ENDPOINT", server.url + "/raw")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr(transfer, "ATTEMPTS", 3)
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.01)
    yield server
    server.close()
