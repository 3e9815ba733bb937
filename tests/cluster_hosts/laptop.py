"""The machine of somebody who starts a cluster: its home with a token, `ray` and launch.py, and the hosts beside it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sage_ray.parallel import free_port
from tests.small import ROOT

NETWORK = "10.231.77"
SCRIPT = Path(__file__).with_name("hosts.sh")
BIN = Path(sys.executable).parent


class Laptop:
    """Commands run with its own home; each is a process of this machine, in the bridge's network."""

    def __init__(self, home: Path):
        self.home, self.processes = home, []
        (home / ".ray").mkdir(parents=True)
        (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
        (home / ".ray" / "auth_token").chmod(0o600)
        self.hosts_folder = home / "hosts"
        self.variables = os.environ | {
            "HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOSTS": str(self.hosts_folder), "VENV": str(BIN.parent),
            "NET": NETWORK, "OMP_NUM_THREADS": "1", "no_proxy": "*", "PYTHONPATH": str(Path(__file__).parent),
        }  # fmt: skip

    @property
    def token(self) -> str:
        return (self.home / ".ray" / "auth_token").read_text()

    def hosts(self, *words: object) -> None:
        """hosts.sh with these words."""
        subprocess.run([str(SCRIPT), *map(str, words)], check=True, env=self.variables, timeout=120)

    def ssh(self, host: int, command: str) -> str:
        """What the command prints there."""
        options = ["-q", "-i", str(self.hosts_folder / "key"), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]
        options += ["-o", "UserKnownHostsFile=/dev/null"]
        words = ["ssh", *options, f"root@{address(host)}", f"bash -lc '{command}'"]
        return subprocess.run(words, check=True, env=self.variables, timeout=120, capture_output=True, text=True).stdout

    def ray(self, *words: str, timeout_s: float = 240, **variables: str) -> str:
        """What `ray WORDS` prints; it must succeed."""
        done = subprocess.run(
            ["ray", *words], env=self.variables | variables, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def forward(self, file: Path) -> str:
        """`ray dashboard`: the URL at which the cluster's dashboard is found here, once it answers."""
        port = free_port()
        self.start("ray", "dashboard", "--no-config-cache", "--port", str(port), str(file))
        return f"http://127.0.0.1:{port}"

    def start(self, *words: str) -> Watched:
        """A process whose output is read while it runs; `close` ends it."""
        self.processes.append(Watched([*words], self.variables))
        return self.processes[-1]

    def launch(self, *words: str) -> Watched:
        """launch.py."""
        return self.start(sys.executable, "launch.py", *words)

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self.hosts("down")


class Watched:
    """A process and the lines that it has written so far."""

    def __init__(self, words: list[str], variables: dict[str, str]):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def says(self, words: str) -> bool:
        """Whether a line holds these words."""
        return any(words in line for line in self.lines)

    def ended(self, timeout_s: float) -> int:
        """Its exit code, and all lines are there."""
        code = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=10)
        return code

    def end(self) -> None:
        """Ctrl-C, then harder."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()


def address(host: int) -> str:
    return f"{NETWORK}.{10 + host}"


def until(ready: Callable[[], Any], what: str, timeout_s: float = 150) -> float:
    """Seconds until `ready` is true."""
    start = time.monotonic()
    while not ready():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.3)
    return time.monotonic() - start


def small(commands: list[str]) -> list[str]:
    """Start commands of a deployment file for hosts that share this machine's memory and two cores."""
    size = "ray start --object-store-memory=200000000"
    return [one.replace("ray start", size) for one in commands]


def write(file: Path, content: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    return file
