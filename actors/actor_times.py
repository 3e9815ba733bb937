"""What the run's actors do and how they are, asked without waiting for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private.state import state as cluster_state

from actors import cluster
from actors.clocked import role_of
from sage_ray.actor_clock import ActorClock, ClockReport
from sage_ray.run_files import ACTORS
from sage_ray.watched import Sample


class ActorTimes:
    """Reports of the actors' clocks, one an actor and iteration, in output/actors.jsonl. A busy actor answers later.

    Args: driver: the clock of this process, which is the controller's.
    """

    def __init__(self, output: Path, driver: ActorClock):
        self.driver = driver
        self._file = output / ACTORS
        self._pending: dict[ray.ObjectRef, tuple[str, int]] = {}
        self._states: set[tuple[str, str]] = set()

    def ask(self, iteration: int) -> dict[str, ClockReport]:
        """Ask everybody for the time up to now, in which `iteration` was finished, but those who have not answered yet;
        the controller's answer."""
        waiting = {name for name, _ in self._pending.values()}
        for name, actor in list(cluster.started.items()):
            if name not in waiting and hasattr(actor, "clock_report"):
                self._pending[actor.clock_report.remote()] = name, iteration
        report = self.driver.report()
        self._write("controller", iteration, report)
        return {"controller": report}

    def collect(self, wait_s: float = 0.0) -> list[tuple[str, int, ClockReport]]:
        """(actor, iteration, report) of those who have answered; the dead are asked no more."""
        if not self._pending:
            return []
        refs = list(self._pending)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=wait_s)
        return [found for ref in done if (found := self._take(ref)) is not None]

    def _take(self, ref: ray.ObjectRef) -> tuple[str, int, ClockReport] | None:
        name, iteration = self._pending.pop(ref)
        try:
            report = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayActorError:
            cluster.started.pop(name, None)
            return None
        self._write(name, iteration, report)
        return name, iteration, report

    def _write(self, name: str, iteration: int, report: ClockReport) -> None:
        line = {"step": iteration, "actor": name, "role": role_of(name), "start_s": round(report.start_s, 3)}
        line |= {"wall_s": round(report.wall_s, 6), "phases": {k: round(v, 6) for k, v in report.phases.items()}}
        with self._file.open("a", encoding="utf-8") as file:  # a run that goes back replaces it
            file.write(json.dumps(line) + "\n")

    def states(self) -> Iterator[Sample]:
        """How many of the job's actors are in which state, by role; 0 for what was there before."""
        table = cluster_state.actor_table(None, ray.get_runtime_context().worker.current_job_id)
        found = Counter((role_of(one["Name"]), one["State"]) for one in table.values() if "@" in one["Name"])
        self._states |= found.keys()
        for role, state in sorted(self._states):
            yield Sample("sage_workers", {"role": role, "state": state}, float(found[role, state]))
