"""What a stuck actor is doing, asked of its process from outside: a stopped or blocked one answers nobody itself."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray._private.state import state as cluster_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SIGNAL = signal.SIGUSR2
NAME = "sage_ray_stacks"
PATIENCE_S, ANSWER_S = 10.0, 2.0


def answer_with_stacks() -> None:
    """From now on this process writes the stacks of all its threads to a file in its memory when it gets SIGUSR2."""
    faulthandler.register(SIGNAL, file=os.memfd_create(NAME), all_threads=True)


def stacks_of(actors: Sequence[ray.actor.ActorHandle]) -> list[str]:
    """For every actor what its process does, in lines; what is not known is said. Takes PATIENCE_S at most."""
    asked = {}
    for actor in actors:
        found = cluster_state.actor_table(actor._actor_id.hex())
        node, process = found.get("Address", {}).get("NodeID", ""), int(found.get("Pid", 0))
        if node and process:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            asked[_look.options(scheduling_strategy=there).remote(process)] = found.get("Name", "")
    done, late = ray.wait(list(asked), num_returns=max(1, len(asked)), timeout=PATIENCE_S) if asked else ([], [])
    words = []
    for ref in done:
        try:
            words.append(f"{asked[ref]}: {ray.get(ref, timeout=PATIENCE_S)}")
        except ray.exceptions.RayError as error:
            words.append(f"{asked[ref]}: no stacks: {type(error).__name__}")
    return words + [f"{asked[ref]}: no stacks, its node does not answer" for ref in late]


@ray.remote(num_cpus=0, max_retries=0)
def _look(process: int) -> str:
    """On the process's node: its state, and the stacks that it writes."""
    return look(process)


def look(process: int) -> str:
    """State of a process of this machine, and the stacks that it writes within two seconds."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        state = next(line for line in status.splitlines() if line.startswith("State:"))
        files = [file for file in Path(f"/proc/{process}/fd").iterdir() if NAME in os.readlink(file)]
        if not files:
            return f"process {process}, {state}; it was not asked to write stacks"
        before = len(files[0].read_bytes())
        os.kill(process, SIGNAL)
        deadline = time.monotonic() + ANSWER_S
        while (words := files[0].read_bytes()[before:]) == b"" and time.monotonic() < deadline:
            time.sleep(0.1)
    except (OSError, StopIteration) as error:
        return f"process {process}: no stacks: {error}"
    return f"process {process}, {state}; " + (words.decode(errors="replace") or "it writes no stacks")
