"""How many rollout groups a run should have: asked for by `launch.py scale`, read by the run.

Both meet in Ray's own key-value store, under the run's job, so that nothing stays when the run is gone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import ray
from ray._private.state import jobs
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

SPACE = b"sage_ray"
LISTENS, WANTED = b"listens/", b"workers/"
LARGEST = 4096


class ScaleError(ValueError):
    """A request that no run can take; one line."""


@dataclass(frozen=True)
class Listener:
    """A run that reads its number of rollout groups. job: Ray's id of its driver."""

    job: str
    name: str


def listen(name: str) -> None:
    """Say that this process's run reads `desired_workers`. Once, after ray.init; name: of the run, for people."""
    _put(LISTENS + _job(), name)


def desired_workers() -> int | None:
    """The number of rollout groups that was last asked of this process's run; None where nobody has asked."""
    found = _internal_kv_get(WANTED + _job(), namespace=SPACE)
    return None if found is None else int(json.loads(found))


def stop_listening() -> None:
    """Before the run ends."""
    for prefix in (LISTENS, WANTED):
        _internal_kv_del(prefix + _job(), namespace=SPACE)


def listeners() -> list[Listener]:
    """The runs of this cluster that listen and live."""
    living = {job["JobID"] for job in jobs() if not job["IsDead"]}
    keys = [key.removeprefix(LISTENS).decode() for key in _internal_kv_list(LISTENS, namespace=SPACE)]
    return [Listener(job, _name(job)) for job in keys if job in living]


def ask(count: int, run: str | None) -> Listener:
    """Ask a run for so many rollout groups; which run. None takes the only one.

    Raises: ScaleError when no run listens, when several do and none is named, or for a count that cannot be.
    """
    if not 1 <= count <= LARGEST:
        raise ScaleError(f"scale {count}: must be in [1, {LARGEST}] rollout groups")
    found = listeners()
    if not found:
        raise ScaleError(
            "no run on this cluster listens for a number of rollout groups: it keeps those it started with"
        )
    chosen = [one for one in found if run in (None, one.name, one.job)]
    names = ", ".join(f"{one.name} (job {one.job})" for one in found)
    if not chosen:
        raise ScaleError(f"--run {run}: no such run listens; those that do: {names}")
    if len(chosen) > 1:
        raise ScaleError(f"several runs listen, choose one by --run NAME or JOB: {names}")
    _put(WANTED + chosen[0].job.encode(), count)
    return chosen[0]


def _put(key: bytes, value: object) -> None:
    _internal_kv_put(key, json.dumps(value).encode(), overwrite=True, namespace=SPACE)


def _name(job: str) -> str:
    found = _internal_kv_get(LISTENS + job.encode(), namespace=SPACE)
    return json.loads(found) if found else ""


def _job() -> bytes:
    return ray.get_runtime_context().get_job_id().encode()
