"""Actors that compute nothing, many in one process, in the places of the real ones: the controller cannot tell.

A `Host` is one Ray actor; each of its stand-ins answers one call after the other, after drawn delays, as the real actor
would. Trajectories, frames and weights go through the object store; what reaches the driver has the real size.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from sage_ray.actor_clock import ActorClock, ClockReport
from sage_ray.checksum import Content
from sage_ray.throughput import Device
from sage_ray.types import AXES, Condition, GroupInfo, GroupRequest, Trajectory, VideoScore

STORED_BYTES = 120_000
"""Of a value that must go through the object store: what is smaller than 100 kB travels with Ray's answers."""
TENSORS, CHUNKS = 1_600, 2_700
"""Published tensors of the real model, and chunks of their checksum."""
LABELS = {"generate": "denoise", "score": "score", "accumulate": "update", "load_weights": "weights"}


@dataclass(frozen=True)
class Delays:
    """Mean seconds, lognormal with `spread`, and shares that fail.

    slow: rollouts that take three times as long; errors: batches of a reward worker that raise; unscored: videos that a
    reward worker gives no score; broken: videos whose latents are not finite.
    """

    generate_s: float = 2.0
    score_s: float = 0.02
    accumulate_s: float = 0.2
    load_s: float = 0.05
    spread: float = 0.1
    slow: float = 0.01
    errors: float = 0.01
    unscored: float = 0.002
    broken: float = 0.002

    def draw(self, luck: random.Random, mean_s: float) -> float:
        """Seconds."""
        return mean_s * luck.lognormvariate(-(self.spread**2) / 2, self.spread)


class StandIn:
    """Any actor: a clock, and one call at a time."""

    def __init__(self, name: str, delays: Delays):
        self.name, self.delays = name, delays
        self.luck, self.turn, self.clock = random.Random(name), asyncio.Lock(), ActorClock()

    async def pause(self, mean_s: float) -> None:
        """Take some time."""
        await asyncio.sleep(self.delays.draw(self.luck, mean_s))

    async def clock_report(self) -> ClockReport:
        return self.clock.report()

    async def device_rate(self, device: str, dtype: str) -> Device:
        return Device(f"stand-in for a {device} in {dtype}", 1e12, measured=True)


class RolloutStandIn(StandIn):
    """Makes groups of nothing."""

    version, digest = -1, ""

    async def memory(self) -> list:
        """It holds nothing."""
        return []

    async def ready(self) -> bool:
        return True

    async def load_weights(self, version: int, digest: str, *parts: Any) -> dict[str, Any]:
        await self.pause(self.delays.load_s)
        self.version, self.digest = version, digest
        return {"version": version, "digest": digest, "seconds": 0.0}

    async def generate(self, *requests: GroupRequest) -> tuple[Any, ...]:
        found: list[Any] = []
        for request in requests:
            if request.policy_version != self.version:
                raise RuntimeError(f"asked for version {request.policy_version}, holds {self.version}")
            await self.pause(self.delays.generate_s * (3 if self.luck.random() < self.delays.slow else 1))
            found += [self._trajectory(request), np.zeros(STORED_BYTES, np.uint8), self._info(request)]
        return tuple(found)

    def _trajectory(self, request: GroupRequest) -> Trajectory:
        nothing, latents = np.zeros((0, 0), np.float32), np.zeros(STORED_BYTES // 4, np.float32)
        return Trajectory(
            request.step, request.group, request.prompt, request.policy_version, request.sde_type, request.eta,
            np.array(request.sigmas), np.array(request.sde_steps), np.array(request.trained_steps),
            np.zeros(0, np.int64), latents, nothing, Condition(nothing, nothing), None, self.name,
        )  # fmt: skip

    def _info(self, request: GroupRequest) -> GroupInfo:
        luck = random.Random(f"{request.step} {request.group}")  # whoever makes it
        finite = tuple(luck.random() >= self.delays.broken for _ in range(request.group_size))
        return GroupInfo(
            request.step, request.group, request.policy_version, self.digest, request.sigmas, finite,
            denoise_s=self.delays.generate_s, decode_s=0.0, worker=self.name, trajectory_bytes=STORED_BYTES,
            frames_bytes=STORED_BYTES,
        )  # fmt: skip


class RewardStandIn(StandIn):
    """Scores at random; some batches raise, some videos have no score."""

    async def ready(self) -> tuple[str, ...]:
        return AXES

    async def score(self, indices: Sequence[int], prompts: Sequence[str], *groups: np.ndarray) -> list[VideoScore]:
        await self.pause(self.delays.score_s)
        if self.luck.random() < self.delays.errors:
            raise RuntimeError("a reward worker's error")
        return [self._score() for _ in indices]

    def _score(self) -> VideoScore:
        bad = self.luck.random() < self.delays.unscored
        parts = np.full(3, np.nan) if bad else np.array([self.luck.gauss(0, 1) for _ in AXES])
        return VideoScore(parts, "no score for it" if bad else "", "", None, None, {}, self.delays.score_s)


class LearnerStandIn(StandIn):
    """Fetches its share of the trajectories and forgets it; its weights have the real model's names and checksums."""

    version, groups, place = 0, 0, None

    async def memory(self) -> list:
        """It holds nothing."""
        return []

    async def rendezvous(self) -> tuple[str, int]:
        return "nowhere", 1

    async def setup(self, address: str, port: int) -> int:
        names = (f"transformer_blocks.{n // 30}.attention.projection_{n % 30}.weight" for n in range(TENSORS))
        self.shapes = tuple((name, (2048, 2048)) for name in names)
        return 1

    async def missing(self, numbers: Sequence[int], refs: Sequence[Any], bound_s: float) -> list[int]:
        return []

    async def begin(self) -> None:
        self.groups = 0

    async def accumulate(self, refs: Mapping[int, Any], share: Sequence[int], *others: Any) -> None:
        mine = [number for number in share if number >= 0]
        for number, trajectory in zip(mine, await asyncio.gather(*(refs[n] for n in mine)), strict=True):
            if trajectory.group != number:
                raise RuntimeError(f"{self.name}: trajectory {trajectory.group} came as group {number}")
        self.groups += len(mine)
        await self.pause(self.delays.accumulate_s)

    async def step(self, num_pairs: float) -> None:
        self.version += 1

    async def finish(self) -> dict[str, float]:
        return {"policy_version": float(self.version), "stand_in/groups": float(self.groups), "loss/total": 0.0}

    async def publish(self, average: bool = False) -> tuple[np.ndarray, Content]:
        sums = np.full((CHUNKS, 2), self.version, np.uint64)
        return np.zeros(STORED_BYTES, np.uint8), Content("bfloat16", self.shapes, sums.tobytes())

    async def save(self, place: str, note: Mapping[str, Any]) -> None:
        self.place = place

    async def saved(self, wait: bool) -> str | None:
        place, self.place = self.place, None
        return place


ROLES: dict[str, type[StandIn]] = {
    "RolloutWorker": RolloutStandIn,
    "RewardWorker": RewardStandIn,
    "LearnerRank": LearnerStandIn,
}
"""Name of the real class -> what stands in for it."""


class Host:
    """Many stand-ins in one process."""

    def __init__(self, delays: Delays):
        self.delays, self.members = delays, dict[str, StandIn]()
        self.added = asyncio.Condition()

    async def add(self, role: str, name: str) -> None:
        """One more."""
        async with self.added:
            self.members[name] = ROLES[role](name, self.delays)
            self.added.notify_all()

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        """A call of a member, after those before it; Ray may begin it before the `add`."""
        async with self.added:
            await self.added.wait_for(lambda: name in self.members)
        member = self.members[name]
        async with member.turn:
            with member.clock.phase(LABELS.get(method, "other")):
                return await getattr(member, method)(*arguments)


class Handle:
    """As a Ray actor's handle, of one member of a host."""

    def __init__(self, host: ray.actor.ActorHandle, role: str, name: str):
        self._host, self._role, self._name = host, role, name

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_") or not hasattr(ROLES[self._role], method):
            raise AttributeError(f"a stand-in for {self._role} has no {method}")
        return Method(self._host.call, (self._name, method))


class Method:
    """As a method of a Ray actor's handle."""

    def __init__(self, call: Any, words: tuple[str, str]):
        self._call, self._words = call, words

    def options(self, **options: Any) -> Method:
        return Method(self._call.options(**options), self._words)

    def remote(self, *arguments: Any) -> Any:
        return self._call.remote(*self._words, *arguments)


class Hosts:
    """Processes that hold all stand-ins of a run; `make` takes the place of actors.cluster.make_actor.

    Args: counts: processes for the stand-ins of each real class.
    """

    def __init__(self, delays: Delays, counts: Mapping[str, int]):
        remote = ray.remote(Host).options(num_cpus=0, max_concurrency=20_000)
        self._hosts = {role: [remote.remote(delays) for _ in range(count)] for role, count in counts.items()}
        self._made = dict.fromkeys(counts, 0)

    def make(self, cls: type, options: Mapping[str, Any], arguments: tuple[Any, ...]) -> Handle:
        """A stand-in on the next host of its kind."""
        role, name = cls.__name__, options["name"].partition("@")[0]
        mine = self._hosts[role]
        host = mine[self._made[role] % len(mine)]
        self._made[role] += 1
        host.add.remote(role, name)  # before every call of it: a host begins its calls in order
        return Handle(host, role, name)

    def end(self, member: Handle) -> None:
        """Takes the place of actors.cluster.end_actor: the member is asked nothing more."""

    def close(self) -> None:
        """End the processes."""
        for host in (host for hosts in self._hosts.values() for host in hosts):
            ray.kill(host)
