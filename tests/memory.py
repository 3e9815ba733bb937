"""A whole run's memory, looked at from outside: `python -m tests.memory [--iterations 100] [key=value ...]`.

`launch.py train` trains the small world on a Ray of its own. Of every iteration (metrics.jsonl says when one ends):

- of every process of the run, found by the process tree, the least anonymous resident memory (RssAnon) since the
  iteration before. Libraries and pages of the object store that it has looked at are left out, and so is what it needs
  while it works, as it may be looked at in any phase.
- of the object store, at the end, what its raylet answers: bytes of objects that somebody refers to, of all (what
  nobody refers to leaves it up to a second later), and bytes that were ever spilled. It is asked by GetNodeStats, as by
  `ray memory`, which is exact and of that moment; Ray's metrics are as old as their last report, and the store's file
  in /dev/shm has no name.

Fails when, in the last half of the iterations, the slope of a process may be 0.1 MB per iteration or more (slope.py);
when the least that is referred to after an iteration of the last quarter is more than in the second quarter, by as much
as an iteration's videos; or when anything was spilled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from ray._private.internal_api import get_state_from_address, node_stats

from sage_ray.metrics import FILE_NAME, read_metrics
from tests.slope import FEWEST, upper_slope
from tests.small import ROOT

LIMIT_MB, LOOK_S, PATIENCE_S = 0.1, 0.02, 900.0
NUM_PROMPTS = 8
"""So few are all encoded, and kept by every worker, long before the last half begins. With all of the small world's
(data.prompts=[assets/shapes/prompts_train.txt]) that takes 650 iterations."""
SETTINGS = (
    *("data.num_prompts=2", "data.group_size=2", "sampling.num_steps=4", "evaluation.num_prompts=0"),
    *("save_interval=1000000", "reward.max_batch_tokens=1"),
)
"""A batch of the reward's is one video: batches of many sizes, as they come by chance, let the worker's allocator keep
tens of MB more or less for many iterations."""
RAY = {"RAY_max_direct_call_object_size": "10000", "RAY_task_events_max_num_task_in_gcs": "500"}
"""Trajectories and frames go through the object store though they are small here, as they do at the real size; and the
table of tasks that gcs_server keeps, of 100,000 rows else (about 2.5 kB each), is full before the last half begins."""
STORE = ("object_store_bytes_primary_copy", "object_store_bytes_used", "spilled_bytes_total")


@dataclass(frozen=True)
class Process:
    """name: the actor's, else the program's."""

    pid: int
    name: str


@dataclass
class Samples:
    """After every iteration but the last. memory: MB, None while a process is not there; store: bytes by STORE."""

    memory: dict[Process, list[float | None]] = field(default_factory=dict)
    store: list[dict[str, int]] = field(default_factory=list)

    def add(self, memory: dict[Process, float], store: dict[str, int]) -> None:
        for process in memory:
            self.memory.setdefault(process, [None] * len(self.store))
        for process, values in self.memory.items():
            values.append(memory.get(process))
        self.store.append(store)


class Watched:
    """The processes and the object store of a driver's embedded Ray. session: its folder."""

    def __init__(self, driver: int, session: Path):
        port = next(session.glob("gcs_server_port_*")).read_text().strip()
        self.driver, self.state = driver, get_state_from_address(f"127.0.0.1:{port}")
        node = self.state.node_table()[0]
        self._raylet = node["NodeManagerAddress"], node["NodeManagerPort"]
        self._processes: dict[int, Process] = {}
        self._least: dict[int, float] = {}

    def look(self) -> None:
        """At the memory of every process that is known."""
        for pid in self._processes:
            if (mb := _anonymous_mb(pid)) is not None:
                self._least[pid] = min(mb, self._least.get(pid, mb))

    def memory(self) -> dict[Process, float]:
        """The least MB of every process since the last call; new ones are known from then on."""
        running = _tree(self.driver)
        if new := set(running) - self._processes.keys():
            actors = {one["Pid"]: one["Name"].partition("@")[0] for one in self.state.actor_table(None, None).values()}
            actors[self.driver] = "driver"
            self._processes |= {pid: Process(pid, actors.get(pid) or _program(pid)) for pid in new}
        self.look()
        least, self._least = self._least, {}
        return {self._processes[pid]: least[pid] for pid in running if pid in least}

    def store(self) -> dict[str, int]:
        stats = node_stats(*self._raylet, include_memory_info=False).store_stats
        return {name: getattr(stats, name) for name in STORE}


def _tree(root: int) -> list[int]:
    """A process and all that come from it."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if words := _read(int(name), "stat").rpartition(")")[2].split():
            parents[int(name)] = int(words[1])
    found = [root]
    for parent in found:
        found += [pid for pid, above in parents.items() if above == parent]
    return found


def _anonymous_mb(pid: int) -> float | None:
    """None for a process that has ended."""
    line = next((line for line in _read(pid, "status").splitlines() if line.startswith("RssAnon:")), None)
    return None if line is None else int(line.split()[1]) * 1024 / 1e6


def _program(pid: int) -> str:
    """A title that Ray gave, the script that Python runs, or the program."""
    words = [word for word in _read(pid, "cmdline").split("\0") if word] or ["?"]
    scripts = [word for word in words if word.endswith(".py")]
    return Path(scripts[0]).name if scripts else Path(words[0]).name


def _read(pid: int, name: str) -> str:
    """A file of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def watch(iterations: int, settings: list[str], folder: Path) -> tuple[Samples, list[dict[str, Any]]]:
    """Samples and metrics of a run. Raises: RuntimeError when it fails or stands still."""
    output, log, prompts = folder / "run", folder / "log.txt", folder / "prompts.txt"
    lines = (ROOT / "assets" / "shapes" / "prompts_train.txt").read_text("utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:NUM_PROMPTS]), "utf-8")
    words = [f"output_dir={output}", f"data.prompts=[{prompts}]", f"num_iterations={iterations}", *SETTINGS, *settings]
    environment = {**os.environ, **RAY, "RAY_TMPDIR": str(folder)}
    with log.open("w") as told:
        command = [sys.executable, "launch.py", "train", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=told, stderr=subprocess.STDOUT)
    samples, watched, done = Samples(), None, 0
    try:
        for finished in _looks(process, output / FILE_NAME):
            if finished and watched is None:
                watched = Watched(process.pid, (folder / "ray" / "session_latest").resolve())
            if watched and done < finished < iterations:  # after the last one Ray may be ending
                store, done = watched.store(), finished
                samples.add(watched.memory(), store)
            elif watched:
                watched.look()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: {log.read_text()[-2000:]}")
    return samples, read_metrics(output / FILE_NAME)


def _looks(process: subprocess.Popen, metrics: Path) -> Iterator[int]:
    """Number of finished iterations, again and again until the process has ended. Raises: RuntimeError."""
    count, place, moved_s = 0, 0, time.monotonic()
    while process.poll() is None:
        if metrics.exists() and metrics.stat().st_size > place:
            content = metrics.read_bytes()
            count, place, moved_s = content.count(b'"policy_version"'), len(content), time.monotonic()
        yield count
        if time.monotonic() - moved_s > PATIENCE_S:
            raise RuntimeError(f"no iteration was finished in {PATIENCE_S:.0f} s, after {count}")
        time.sleep(LOOK_S)


def judge_processes(samples: Samples) -> bool:
    """Print a line for every process; whether none grows."""
    half, flat = len(samples.store) // 2, True
    print(f"{'process':<24}{'MB':>8}{'MB per iteration':>18}{'at most':>10}  verdict")
    for process, values in samples.memory.items():
        later = [value for value in values[half:] if value is not None]
        if values[-1] is None:
            print(f"{process.name:<24}{'':>36}  has ended")
            continue
        if len(later) < len(values) - half:
            flat = False
            print(f"{process.name:<24}{values[-1]:>8.1f}{'':>28}  NEW in the last half")
            continue
        slope, bound = upper_slope(later)
        flat = flat and bound < LIMIT_MB
        verdict = "flat" if bound < LIMIT_MB else "GROWS"
        print(f"{process.name:<24}{values[-1]:>8.1f}{slope:>+18.4f}{bound:>+10.4f}  {verdict}")
    return flat


def judge_store(samples: Samples, metrics: list[dict[str, Any]]) -> bool:
    """Print what the object store held; whether it keeps its level and spilled nothing."""
    quarter, last = len(samples.store) // 4, metrics[-1]
    referred, used, spilled = ([one[name] / 1e6 for one in samples.store] for name in STORE)
    before, after = min(referred[quarter : 2 * quarter]), min(referred[-quarter:])
    videos = (last["bytes/trajectories"] + last["bytes/frames"]) / 1e6
    keeps = after - before < videos
    print(
        f"object store: referred to {before:.2f} MB at least in the second quarter, {after:.2f} in the last, at most "
        f"{max(referred):.2f}; weights {last['publish/bytes'] / 1e6:.2f}, an iteration's videos {videos:.2f}: "
        f"{'keeps its level' if keeps else 'GROWS'}\nin all at most {max(used):.2f} MB; spilled {spilled[-1]:.2f} MB"
    )
    return keeps and not spilled[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the run, as launch.py train takes them")
    parser.add_argument("--samples", type=Path, help="write all samples to this file, as JSON")
    parsed = parser.parse_intermixed_args()
    if parsed.iterations <= 2 * FEWEST:
        parser.error(f"--iterations {parsed.iterations}: must be more than {2 * FEWEST}")
    with tempfile.TemporaryDirectory(prefix="sage", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        samples, metrics = watch(parsed.iterations, parsed.settings, Path(folder))
    if parsed.samples:
        memory = {f"{process.name} {process.pid}": values for process, values in samples.memory.items()}
        parsed.samples.write_text(json.dumps({"memory": memory, "store": samples.store}), "utf-8")
    results = [judge_processes(samples), judge_store(samples, metrics)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
