"""Every kind of actor, node and driver, killed, stopped, slowed or made to give nonsense in the middle of a run:
`python -m tests.chaos_matrix [--only WORDS]`, or `make chaos-matrix`.

Each run is of three iterations on a Ray of three nodes (a head, two that rollout workers take). Prints a table: how
long the iteration took in which it came, and whether weights and numbers are the undisturbed run's. Fails when a run
does not complete, or where only rollout or reward workers failed and a bit differs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import psutil
import ray
from ray.cluster_utils import Cluster

from actors.controller import Controller
from actors.learner import LearnerRank
from sage_ray.metrics import read_lines
from sage_ray.parallel import local_shards
from tests.cluster.test_resume import Run
from tests.cluster.troubles import (
    BrokenScorer,
    BrokenWorker,
    Ended,
    SlowRank,
    SlowScorer,
    SlowWorker,
    killed,
    odd_actors,
    run,
    stopped,
    wait_until,
)
from tests.small import without_times

ROLES = "cluster.node_roles={learner: head, reward: head, rollout: rollout}"
COUNTED = ("deaths", "errors", "retries", "timeouts", "lost_frames")
STOPPED_S = 20
NAMED = "transformer.proj_out.bias"


class NanRank(LearnerRank):
    """A weight becomes nan when the third update begins."""

    def update(self, *arguments):
        if self.update_rule.version == 2:
            local_shards(self.update_rule.model)[NAMED].view(-1)[0] = float("nan")
        return super().update(*arguments)


class Nodes:
    """A Ray of a head and two nodes for rollouts. Nodes come from the main thread only: Ray sets signal handlers."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "include_dashboard": False, "labels": {"role": "head"}}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": 200_000_000})
        self.nodes, self.drained = list(), set[str]()
        self.fill()
        ray.init(self.cluster.address, namespace="sage_ray_tests", log_to_driver=False, logging_level="error")

    def fill(self) -> None:
        """Two nodes that live and are not drained."""
        while sum(node.node_id not in self.drained for node in self.nodes) < 2:
            size = {"num_cpus": 1, "object_store_memory": 200_000_000}
            self.nodes.append(self.cluster.add_node(labels={"role": "rollout"}, **size))

    def kill_one(self, controller: Controller) -> None:
        """The node of a rollout worker that is at work dies."""
        seat = controller.rollouts.rollouts.staff.seats[0]
        wait_until(lambda: seat.tasks, "a worker to work")
        (where,) = seat.group.nodes()
        node = next(one for one in self.nodes if one.node_id == where)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain_one(self, controller: Controller) -> None:
        """The node of a rollout worker is about to go."""
        from ray._raylet import GcsClient

        seat = controller.rollouts.rollouts.staff.seats[0]
        (where,) = seat.group.nodes()
        deadline_ms = int(1000 * (time.time() + 600))
        accepted, why = GcsClient(address=self.cluster.address).drain_node(where, 2, "a spot notice", deadline_ms)
        assert accepted, why
        self.drained.add(where)
        wait_until(lambda: seat not in controller.rollouts.rollouts.staff.seats, "the worker to leave")

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


class Cell(NamedTuple):
    """A row of the table. exact: only rollout or reward workers fail, so that every bit must be the same."""

    what: str
    how: str
    make: Callable[[Path], Ended]
    exact: bool = True


def cells(nodes: Nodes) -> list[Cell]:
    """All of them, in order."""

    def one(*words: str, odd: dict[str, type] | None = None, **how) -> Callable[[Path], Ended]:
        def make(folder: Path) -> Ended:
            nodes.fill()
            with odd_actors(odd or {}):
                return run(folder, ROLES, *words, **how)

        return make

    return [
        Cell("nothing", "", one()),
        Cell("rollout worker", "SIGKILL", one(trouble=killed("rollout-0"))),
        Cell("rollout worker", "SIGSTOP", one(trouble=stopped("rollout-0"))),
        Cell("rollout worker", "10 x slow", one(odd={"rollout-0": SlowWorker})),
        Cell("rollout worker", "nan", one(odd={"rollout-0": BrokenWorker})),
        Cell("reward worker", "SIGKILL", one(trouble=killed("reward-0"))),
        Cell("reward worker", "SIGSTOP", one(trouble=stopped("reward-0"))),
        Cell("reward worker", "10 x slow", one(odd={"reward-0": SlowScorer})),
        Cell("reward worker", "nan", one(odd={"reward-0": BrokenScorer})),
        Cell("rollout node", "SIGKILL", one(trouble=nodes.kill_one)),
        Cell("rollout node", "drained", one(trouble=nodes.drain_one)),
        Cell("learner rank", "SIGKILL", one(trouble=killed("learner-0"), iteration=3), False),
        Cell("learner rank", "SIGSTOP", one(trouble=stopped("learner-0"), iteration=3), False),
        Cell("learner rank", "10 x slow", one(odd={"learner-0": SlowRank}, iteration=3), False),
        Cell("learner rank", "nan, then resume=auto", stops_by_rule, False),
        Cell("driver", "SIGKILL, then resume=auto", driver_killed, False),
        Cell("driver", f"SIGSTOP for {STOPPED_S} s", driver_stopped, False),
    ]


def stops_by_rule(folder: Path) -> Ended:
    """The run ends by itself; the next one goes on from what is whole."""
    with odd_actors({"learner-0": NanRank}):
        try:
            run(folder, ROLES)
        except ray.exceptions.RayTaskError as error:
            assert isinstance(error.cause, FloatingPointError), error
        else:
            raise AssertionError("nan did not stop the run")
    return run(folder, ROLES, "resume=auto", iteration=3)


LAUNCHED = """evaluation.num_prompts=0 num_iterations=3 save_interval=1 evaluation.interval=0
optimizer.ema_decay=null""".split()


def as_ended(folder: Path) -> Ended:
    """Of a run of launch.py; its weights are told by the numbers of the next iterations."""
    lines = read_lines(folder / "metrics.jsonl")
    seconds = [line["time_s"] for line in lines]
    return Ended("", [without_times(line) for line in lines], [], seconds[2] - seconds[1])


def launched(folder: Path) -> Ended:
    process = Run(folder, *LAUNCHED)
    assert process.end() == 0, process.lines
    return as_ended(folder)


def driver_killed(folder: Path) -> Ended:
    """In its third iteration; its numbers are those of a run of launch.py that nobody disturbs."""
    first = Run(folder / "run", *LAUNCHED)
    first.until("iteration 3/3: update")
    children = psutil.Process(first.process.pid).children(recursive=True)
    first.process.kill()
    first.end()
    psutil.wait_procs(children, timeout=60)
    second = Run(folder / "run", *LAUNCHED, "resume=auto")
    assert second.end() == 0, second.lines
    return compared(folder)


def driver_stopped(folder: Path) -> Ended:
    """While the others go on."""
    process = Run(folder / "run", *LAUNCHED)
    process.until("iteration 3/3: rollout")
    os.kill(process.process.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(process.process.pid, signal.SIGCONT)
    assert process.end() == 0, process.lines
    assert not any("replaced" in line for line in process.lines), process.lines
    return compared(folder)


def compared(folder: Path) -> Ended:
    mine, straight = as_ended(folder / "run"), launched(folder / "straight")
    assert mine.is_as(straight), "other numbers"
    return mine


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="cells whose names hold these words")
    parsed = parser.parse_args()
    nodes, rows, undisturbed = Nodes(), list[str](), None
    try:
        for cell in cells(nodes):
            if cell.what != "nothing" and parsed.only not in f"{cell.what} {cell.how}":
                continue
            with tempfile.TemporaryDirectory() as folder:
                ended = cell.make(Path(folder))
            undisturbed = undisturbed or ended
            same = "the same" if not ended.digest else words_of(ended, undisturbed)
            assert same == "the same" or not cell.exact, f"{cell.what}, {cell.how}: {same}"
            rows.append(f"| {cell.what} | {cell.how} | {ended.took_s:.1f} | {same} |")
            print(rows[-1], flush=True)
    finally:
        nodes.close()
    print("\n| what | how | seconds of that iteration | weights and numbers |\n|---|---|---|---|")
    print("\n".join(rows))
    return 0


def words_of(ended: Ended, undisturbed: Ended) -> str:
    """How a run compares with the undisturbed one; failures that are counted are no difference."""

    def kept(one: Ended) -> list[dict]:
        counted = {f"reward_service/{name}" for name in COUNTED}
        return [{k: v for k, v in line.items() if k not in counted} for line in one.lines]

    if ended.digest != undisturbed.digest:
        return "other weights"
    differ = [k for a, b in zip(kept(ended), kept(undisturbed), strict=True) for k in a if a[k] != b.get(k)]
    return f"other numbers: {', '.join(sorted(set(differ)))}" if differ else "the same"


if __name__ == "__main__":
    sys.exit(main())
