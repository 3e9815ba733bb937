"""A training run as a user starts it, on a Ray of its own with the dashboard, watched while it goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.small import ROOT
from tests.watch.test_grafana import named_metrics

SAMPLE = re.compile(r"(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>[-+.eE0-9]+|NaN)")
LABEL = re.compile(r'(\w+)="([^"]*)"')
PROMETHEUS_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: ray
    http_sd_configs: [{{url: "{url}/api/prometheus/sd", refresh_interval: 2s}}]
"""


def get(url: str) -> str:
    """Body of a page of this machine, empty when nobody answers (any more)."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return ""


def prometheus_program() -> str | None:
    """Debian's binary: on the path, or where `make watch` unpacks it."""
    ours = ROOT / ".venv" / "prometheus" / "usr" / "bin" / "prometheus"
    return str(ours) if ours.exists() else shutil.which("prometheus")


@dataclass
class WatchedRun:
    """samples: name -> labels -> value, newest; complete_s: time of the last scrape that had every metric of the
    dashboard; actors, jobs: answers of Ray's own pages."""

    output: Path
    lines: list[str] = field(default_factory=list)
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)
    complete_s: float = 0.0
    actors: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    prometheus: str = ""
    """Its address, while it runs."""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    actor_lines: list[dict[str, Any]] = field(default_factory=list)
    """What the actors wrote to their logs."""
    code: int | None = None

    def run(self, *overrides: str) -> None:
        """Start it, watch it, and return when it has ended."""
        words = [
            sys.executable,
            "launch.py",
            "train",
            f"output_dir={self.output}",
            "cluster.dashboard=true",
            *overrides,
        ]
        with tempfile.TemporaryDirectory(
            prefix="sage", ignore_cleanup_errors=True
        ) as folder:  # a short path, for sockets
            more = {"RAY_TMPDIR": folder, "RAY_metrics_report_interval_ms": "1000", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            try:
                reader = threading.Thread(target=self._read, args=(process,))
                reader.start()
                url = self._wait_for_url(process)
                with Prometheus(url) as self.prometheus:
                    while process.poll() is None:
                        self._look(url)
                        time.sleep(0.5)
                    reader.join(timeout=60)
                    self.code = process.returncode
                    self.answers = self._ask_prometheus() if self.prometheus else {}
                    self.actor_lines = list(_json_lines(Path(folder, "ray", "session_latest", "logs")))
            finally:
                process.kill()

    def _read(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)

    def _wait_for_url(self, process: subprocess.Popen) -> str:
        while process.poll() is None:
            for line in list(self.lines):
                if found := re.search(r"Ray's dashboard: (\S+)", line):
                    return found[1]
            time.sleep(0.2)
        raise AssertionError("".join(self.lines))

    def _look(self, url: str) -> None:
        targets = [t for group in json.loads(get(f"{url}/api/prometheus/sd") or "[]") for t in group["targets"]]
        seen = {}
        for target in targets:
            for found in map(SAMPLE.fullmatch, get(f"http://{target}/metrics").splitlines()):
                if found and found["name"].startswith("ray_sage_"):
                    labels = tuple(sorted(LABEL.findall(found["labels"])))
                    seen.setdefault(found["name"], {})[labels] = float(found["value"])
        self.samples |= seen
        if seen.keys() >= named_metrics():
            self.complete_s = time.time()
        if not self.jobs and (answer := get(f"{url}/api/jobs/")):
            self.jobs = json.loads(answer)
        if answer := get(f"{url}/logical/actors"):
            self.actors |= json.loads(answer).get("data", {}).get("actors", {})

    def _ask_prometheus(self) -> dict[str, list[Any]]:
        """Query of the dashboard -> series, at the time when all were there."""
        answers = {}
        content = json.loads((ROOT / "deploy" / "grafana" / "sage_ray.json").read_text("utf-8"))
        for panel in content["panels"]:
            for target in panel.get("targets", ()):
                query = re.sub(r"\$\w+", ".*", target["expr"])
                asked = urllib.parse.urlencode({"query": query, "time": self.complete_s})
                answers[target["expr"]] = json.loads(get(f"{self.prometheus}/api/v1/query?{asked}"))["data"]["result"]
        return answers


def _json_lines(logs: Path) -> Iterator[dict[str, Any]]:
    for file in logs.glob("worker-*.err"):
        yield from (json.loads(line) for line in file.read_text("utf-8").splitlines() if line.startswith("{"))


class Prometheus:
    """Debian's Prometheus on the run's targets, where there is one; its address, else empty."""

    def __init__(self, url: str):
        self.url, self.program = url, prometheus_program()

    def __enter__(self) -> str:
        if self.program is None:
            return ""
        from sage_ray.parallel import free_port

        self.folder, address = tempfile.mkdtemp(prefix="prom"), f"127.0.0.1:{free_port()}"
        config = Path(self.folder, "prometheus.yml")
        config.write_text(PROMETHEUS_CONFIG.format(url=self.url))
        self.process = subprocess.Popen(
            [self.program, f"--config.file={config}", f"--storage.tsdb.path={self.folder}/data"]
            + [f"--web.listen-address={address}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return f"http://{address}"

    def __exit__(self, *error: Any) -> None:
        if self.program is not None:
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)
