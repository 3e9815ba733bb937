"""SIGKILL at random moments in and around checkpoint writes: `make chaos`, or python -m tests.chaos --kills 50.

A process trains and saves every step, with the older checkpoints removed; it is killed, and the next one goes on from
the newest complete checkpoint. After every kill that checkpoint must be at least the last one that was reported as
written, and hold exactly the state of its version.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing as mp
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import torch.distributed as dist

from sage_ray.checkpoint import Checkpointer
from sage_ray.checkpoint_store import CheckpointStore
from sage_ray.config import CheckpointConfig
from sage_ray.parallel import free_port, start_process_group
from tests.learner.checkpointed import read_state
from tests.learner.tiny_rule import begin_save, step, tiny_rule

FORK = mp.get_context("fork")
SIZE = 2048
"""Of the tiny model: 8 MB of state, so that a write takes as long as the rest of a step."""
LONGEST_S = 0.6
PATIENCE_S = 60


def writer(folder: str, port: int, written: Synchronized) -> None:
    """Go on from the newest complete checkpoint, step and save until killed; `written` is the last that was."""
    torch.set_num_threads(1)
    start_process_group(0, 1, "127.0.0.1", port, device="cpu", timeout_s=PATIENCE_S)
    store, rule, checkpointer = (
        CheckpointStore(folder),
        tiny_rule(SIZE),
        Checkpointer(60, CheckpointConfig(keep_last=2)),
    )
    store.clean()
    if found := store.all():
        checkpointer.load(rule, found[-1])
    assert rule.version >= written.value
    while True:
        step(rule)
        begin_save(rule, checkpointer, store)
        version = rule.version
        checkpointer.finished(wait=True)
        written.value = version


def expected(digests: list[str]) -> Iterator[str]:
    """Digests of the state of every version of a run that nobody kills, by its own checkpoints."""
    rule, checkpointer = tiny_rule(SIZE), Checkpointer(60, CheckpointConfig())
    while True:
        with tempfile.TemporaryDirectory() as folder:
            begin_save(rule, checkpointer, CheckpointStore(folder))
            place = checkpointer.finished(wait=True)
            digests.append(digest(Path(str(place))))
        yield digests[-1]
        step(rule)


def digest(checkpoint: Path) -> str:
    found = hashlib.sha256()
    for key, value in sorted(read_state(checkpoint).items()):
        found.update(key.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(kills: int, seed: int) -> None:
    """Raises AssertionError when a checkpoint is lost, half or of another state."""
    torch.set_num_threads(1)
    moments, port, found = random.Random(seed), free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        written = FORK.Value("q", 0)
        for kill in range(kills):
            before = written.value
            process = FORK.Process(target=writer, args=(folder, free_port(), written))
            process.start()
            deadline = time.monotonic() + PATIENCE_S
            while written.value == before and kill % 2 and process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)  # every other time the kill comes in the steady state, else also at the start
            time.sleep(moments.random() * LONGEST_S)
            assert process.is_alive(), "the writer ended by itself"
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            complete = CheckpointStore(folder).all()
            assert not complete and not written.value or complete[-1].version >= written.value
            found += [(kill, one.version, digest(Path(one.path))) for one in complete]
            partial = any(path.suffix == ".partial" for path in Path(folder).iterdir())
            words = f"kill {kill + 1}: {written.value} was written, complete {[one.version for one in complete]}"
            print(words + (", a half one beside them" if partial else ""), flush=True)
    start_process_group(0, 1, "127.0.0.1", port, device="cpu", timeout_s=PATIENCE_S)
    digests: list[str] = []
    states = expected(digests)
    for _ in range(max(version for _, version, _ in found) + 1):
        next(states)
    wrong = [(kill, version) for kill, version, state in found if state != digests[version]]
    dist.destroy_process_group()
    assert not wrong, f"of another state: {wrong}"
    print(
        f"{kills} kills, {len(found)} checkpoints looked at, {len(digests) - 1} versions: every one is whole and right"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    main(parsed.kills, parsed.seed)
