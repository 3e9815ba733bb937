"""A run of `launch.py train` as it is seen from outside: its words, its phases, and the GPUs' memory meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGINS = re.compile(r": (\w+) \.\.\.$")
"""A line with which a phase begins, as a log file gets it."""
ENDS = re.compile(r"^iteration (\d+)/\d+  ")
"""A line that ends an iteration."""


@dataclass
class Timeline:
    """Phases of a run as its words arrive, and GPU memory in use. finished: iterations; peaks: phase -> GPU -> most
    bytes, all processes together."""

    phase: str = "start"
    finished: int = 0
    began: float = field(default_factory=time.monotonic)
    peaks: dict[str, dict[int, int]] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Take one line of the run's output."""
        if found := BEGINS.search(line.rstrip()):
            self.phase = found.group(1)
        if found := ENDS.search(line):
            self.finished = int(found.group(1))
        print(f"{time.monotonic() - self.began:6.1f} s  {line.rstrip()}", flush=True)

    def sample(self, gpu: int, used_bytes: int) -> None:
        """Take one reading of the memory in use."""
        peaks = self.peaks.setdefault(self.phase, {})
        peaks[gpu] = max(peaks.get(gpu, 0), used_bytes)


def watch(timeline: Timeline) -> subprocess.Popen | None:
    """Read the memory of all GPUs five times a second, in a thread, until the returned process is ended; None without
    nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
    if cards := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", cards]
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return None

    def follow() -> None:
        for line in process.stdout or ():
            numbers = line.replace(",", " ").split()
            if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                timeline.sample(int(numbers[0]), int(numbers[1]) * 2**20)

    threading.Thread(target=follow, daemon=True).start()
    return process


def train(recipe: Path, words: Sequence[str], timeline: Timeline, timeout_s: float, iterations: int | None) -> int:
    """Run `launch.py train`; its exit status.

    Args: iterations: the run is ended after so many, before it saves what they made (a checkpoint of a full training
        state is 12 bytes a parameter); None lets it come to its end.
    """
    command = [sys.executable, str(ROOT / "launch.py"), "train", "--config", str(recipe), *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process, watcher = subprocess.Popen(command, cwd=ROOT, env=environment, **streams), watch(timeline)
    limit = threading.Timer(timeout_s, _end, [process])
    limit.start()
    for line in process.stdout or ():
        timeline.read(line)
        if timeline.finished == iterations and process.poll() is None:
            _end(process)
            break
    limit.cancel()
    if watcher is not None:
        watcher.terminate()
    return process.wait()


def _end(process: subprocess.Popen) -> None:
    """Two signals: the first asks a run to save and end, the second ends it at once."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)  # nothing where it has ended
        time.sleep(0.5)
