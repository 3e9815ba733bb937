"""A Ray cluster of the tests' own, with a dashboard and a token, on free ports of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sage_ray.parallel import free_port
from tests.small import ROOT

TOKEN = "a-token-of-the-tests-" + "0123456789abcdef" * 2


@dataclass(frozen=True)
class Cluster:
    """dashboard: its URL; address: of its GCS; variables: of a process that may speak to it."""

    dashboard: str
    address: str
    variables: dict[str, str]

    def start(self, *words: str, **variables: str) -> subprocess.Popen:
        """launch.py with these words and variables, whose output is read later."""
        pipe = subprocess.PIPE
        environment = os.environ | self.variables | variables
        command = [sys.executable, "launch.py", *words]
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=environment)

    def launch(self, *words: str, **variables: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of launch.py."""
        return ended(self.start(*words, **variables))


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a process that `Cluster.start` started."""
    out, error = process.communicate(timeout=280)
    return process.returncode, out, error


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A token; three GPUs that nobody uses: Ray counts what it is told. One node, as two raylets on a machine
    would share, and clear, one folder of uploaded projects."""
    folder = tmp_path_factory.mktemp("ray")
    program = Path(__file__).parent / "cluster_process.py"
    port, dashboard = free_port(), free_port()
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    variables |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}
    process = subprocess.Popen(
        [sys.executable, str(program), str(port), str(dashboard)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    assert process.stdin is not None and process.stdout is not None
    address = process.stdout.readline().strip()
    assert address, "the cluster did not start"
    url = f"http://127.0.0.1:{dashboard}"
    yield Cluster(url, address, variables | {"RAY_API_SERVER_ADDRESS": url})
    process.stdin.close()
    process.wait(timeout=60)
