"""Weights from learner ranks to rollout workers by broadcast, from shards into parameters, through a process group of
their own.

One group holds all senders (ranks 0 to N - 1) and all receivers. Sender after sender casts its shards into a bucket and
broadcasts it, and fills the next one meanwhile; a receiver copies a bucket into the slices of its parameters while the
next one arrives. Parameters keep their storage, so compiled code stays valid. The other senders pass buckets on and
drop them. Who is in the group is fixed: another one is made when the receivers change or a broadcast failed.

Ray's own tensor transport is not used: when a transfer fails it kills the actors at both ends, so a rollout worker that
dies would take the learner with it. Here a failure, or the bound `timeout_s`, ends in StreamError in every process that
still lives; the group is gone, and nothing else is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sage_ray.weight_plan import Plan, drain, fill

POLL_S, LOOK_S = 0.0005, 0.25
NUM_BUCKETS = 2
CALLED_OFF = "called_off"
CALM = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""While a group is made: by default NCCL's watchdog ends the process when a broadcast fails. The bound is kept here."""
Value = TypeVar("Value")


class StreamError(RuntimeError):
    """A broadcast of weights failed or outlasted its bound; its process group is gone."""


@dataclass(frozen=True)
class Meeting:
    """Where and as whom a process joins a group. round: a number that no other group of the store has."""

    host: str
    port: int
    round: int
    rank: int
    size: int


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The meeting point of groups, on a free port of this host (`store.port`)."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def call_off(host: str, port: int, number: int) -> None:
    """Tell the members of a group, from outside, that a broadcast will not end. Nothing where the store is gone."""
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LOOK_S * 8)
        )
        dist.PrefixStore(f"weights/{number}", store).set(CALLED_OFF, "1")


class WeightStream:
    """One process's end of a group; the last member's joining completes it.

    Args:
        device: NCCL on cuda, gloo on cpu. timeout_s: bound of joining, and of one send or receive.

    Raises: StreamError when the others do not come.
    """

    def __init__(self, meeting: Meeting, device: torch.device, timeout_s: float) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.meeting, self.device, self.timeout_s = meeting, device, timeout_s
        self._buckets: list[torch.Tensor] = []
        self._slots = [torch.cuda.Stream(device) for _ in range(NUM_BUCKETS)] if device.type == "cuda" else []
        self._group: dist.Backend | None = _bounded(
            self._join, timeout_s, f"{meeting.size} processes to form a group for weights"
        )

    def _join(self) -> Any:
        meeting, limit = self.meeting, timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
        self._store = dist.PrefixStore(f"weights/{meeting.round}", store)
        if self.device.type == "cpu":
            group = dist.ProcessGroupGloo(self._store, meeting.rank, meeting.size, limit)
        else:
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(days=1)
            with _environment(CALM):
                group = dist.ProcessGroupNCCL(self._store, meeting.rank, meeting.size, options)
        _broadcast(group, torch.zeros(1, device=self.device), 0).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return group

    @torch.no_grad()
    def send(self, plans: Sequence[Plan], shards: Mapping[str, torch.Tensor]) -> None:
        """Broadcast this rank's shards, cast to its plan's dtype, in its turn; the others' buckets go by.

        Args: plans: of all senders. Raises: StreamError.
        """
        with self._bound() as group:
            for root, number, bucket in self._turns(plans):
                if root == self.meeting.rank:
                    fill(bucket, number, plans[root], shards)
                _broadcast(group, bucket, root).wait()

    @torch.no_grad()
    def receive(self, plans: Sequence[Plan], parameters: Mapping[str, torch.Tensor]) -> None:
        """Write all senders' shards into full parameters, in place.

        Raises: StreamError; then some of the parameters may hold new values and others old ones.
        """
        with self._bound() as group:
            for root, number, bucket in self._turns(plans):
                _broadcast(group, bucket, root).wait()
                drain(bucket, number, plans[root], parameters)

    def call_off(self) -> None:
        """Tell the others that nothing will come. Raises nothing where nobody can be told."""
        with contextlib.suppress(RuntimeError):
            self._store.set(CALLED_OFF, "1")

    def close(self) -> None:
        """Leave the group, whatever it is doing."""
        group, self._group, self._buckets = self._group, None, []
        if group is not None:
            group.abort()

    @contextmanager
    def _bound(self) -> Iterator[dist.Backend]:
        """The group; when the block ends, what it queued is done. After any error the group is gone."""
        if self._group is None:
            raise StreamError("weights: this end of the stream is closed")
        self._deadline = time.monotonic() + self.timeout_s
        done = False
        try:
            yield self._group
            self._finish()
            done = True
        except RuntimeError as error:
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StreamError(f"weights: member {self.meeting.rank} of {self.meeting.size}: {words}") from error
        finally:
            if not done:
                self.call_off()
                self.close()

    def _turns(self, plans: Sequence[Plan]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(root, number of its bucket, buffer) of every broadcast, in the order that all members keep. The caller's
        work on a buffer is queued behind what used it before."""
        self._make_buckets(max(size for plan in plans for size in plan.sizes))
        turns = [(root, number) for root, plan in enumerate(plans) for number in range(len(plan.sizes))]
        for turn, (root, number) in enumerate(turns):
            with self._slot(turn % NUM_BUCKETS):
                yield root, number, self._buckets[turn % NUM_BUCKETS][: plans[root].sizes[number]]

    def _make_buckets(self, num_bytes: int) -> None:
        if not self._buckets or self._buckets[0].numel() < num_bytes:
            self._buckets = []
            self._buckets = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(NUM_BUCKETS)]
        for slot in self._slots:
            slot.wait_stream(torch.cuda.current_stream(self.device))

    def _slot(self, number: int):
        """On a GPU the stream of a buffer: two of them, so that copies and broadcasts overlap."""
        return torch.cuda.stream(self._slots[number]) if self._slots else contextlib.nullcontext()

    def _finish(self) -> None:
        """Wait for what is queued, within the bound."""
        waited, looked = [slot.record_event() for slot in self._slots], time.monotonic()
        while not all(event.query() for event in waited):
            now = time.monotonic()
            if now > self._deadline:
                raise StreamError(f"not through after {self.timeout_s:g} s")
            if now > looked + LOOK_S:
                looked = now
                if self._store.check([CALLED_OFF]):
                    raise StreamError("called off by another member")
            time.sleep(POLL_S)


def _broadcast(group: dist.Backend, tensor: torch.Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    return group.broadcast([tensor], options)


def _bounded(make: Callable[[], Value], timeout_s: float, what: str) -> Value:
    """The value of `make`, called in a thread: NCCL forms a group without a bound. A thread that outlasts it stays."""
    results: list[Value] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            results.append(make())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if results:
        return results[0]
    reason = str(errors[0]).splitlines()[0] if errors else "they did not come"
    raise StreamError(f"weights: waited {timeout_s:g} s at most for {what}: {reason}")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
