"""Fifty publishes between real actors, and what they leave behind: `python -m tests.publishes [--count 50]`.

Every actor's resident memory after each publish; fails when the 95 % upper bound of its slope is 0.1 MB per publish or
more, or the object store holds more at the end than at the tenth publish.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

from tests.cluster.test_publish import Ring, call
from tests.slope import FEWEST, upper_slope

WARM_UP, LIMIT_MB = 10, 0.1


def resident_mb(_) -> float:
    """Of the process that is asked."""
    import gc

    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def stored_bytes() -> float:
    """That the object store holds."""
    state = ray._private.internal_api.memory_summary(stats_only=True)
    line = next(line for line in state.splitlines() if "Plasma memory usage" in line)
    return float(line.split("Plasma memory usage")[1].split("MiB")[0]) * 2**20


def run(transport: str, count: int) -> bool:
    """Publish and load `count` times; whether everything stayed flat."""
    ring = Ring(Path(tempfile.mkdtemp()), f"publish.transport={transport}")
    actors = {"learner": ring.learner.ranks[0], "rollout": ring.pool.members[0]}
    memory, store = {name: [] for name in actors}, []
    for number in range(count):
        publication = ring.learner.publish(0)
        ring.pool.load_weights(publication)
        del publication
        for name, actor in actors.items():
            memory[name].append(call(actor, resident_mb))
        if number + 1 in (WARM_UP, count):
            store.append(stored_bytes())
    ring.close()
    flat = store[-1] <= store[0]
    print(f"{transport}: object store {store[0] / 1e6:.1f} MB, then {store[-1] / 1e6:.1f} MB", flush=True)
    for name, values in memory.items():
        slope, bound = upper_slope(values[WARM_UP:])
        flat = flat and bound < LIMIT_MB
        print(f"{transport}: {name} {values[-1]:.0f} MB, {slope:+.4f} MB per publish, at most {bound:+.4f}", flush=True)
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=50)
    parsed = parser.parse_args()
    if parsed.count < WARM_UP + FEWEST:
        parser.error(f"--count {parsed.count}: must be at least {WARM_UP + FEWEST}")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=400_000_000, log_to_driver=False)
    results = [run(transport, parsed.count) for transport in ("collective", "object_store")]
    ray.shutdown()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
