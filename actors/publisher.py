"""A publish: the learner's weights on their way to the rollout workers, by broadcast or through the object store.

Both ways give the same digest, that of the content, however many ranks hold it. A broadcast needs its receivers there
at the time: they are looked up before every publish, and a new group is formed when they have changed or a broadcast
failed. Who joins later takes the weights from the object store, where they are put when the first one asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.cluster import Layout, started
from actors.wait import wait_all
from sage_ray.checksum import Content, merge
from sage_ray.config import Config
from sage_ray.weight_stream import Meeting, call_off
from sage_ray.weights import verify

Handle = ray.actor.ActorHandle
Parts = tuple[ray.ObjectRef, ...]
GRACE_S = 5.0
"""How much longer than the stream's own bound its actors are waited for."""


class PublishError(RuntimeError):
    """A broadcast did not reach everybody. Its group is gone; the next publish, to whoever is left, forms another.

    missing: names of those who did not answer, or answered something else.
    """

    def __init__(self, message: str, missing: Sequence[str] = ()):
        super().__init__(message)
        self.missing = tuple(missing)


@dataclass(frozen=True)
class Publication:
    """One published policy version: its digest, and the references of its parts where they are in the object store.

    received: ids of the actors that were sent it. late: puts it into the object store. metrics: what it took. token:
    tells it from another publication of the same weights, which a worker may have begun to receive in vain.
    """

    version: int
    digest: str
    parts: Parts = ()
    received: frozenset[str] = frozenset()
    late: Callable[[], Parts] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    token: object = field(default_factory=object, compare=False, repr=False)

    def parts_for(self, member: Handle) -> Parts:
        """What an actor is given beside version and digest: nothing where it was sent them."""
        if self.late is None or actor_key(member) in self.received:
            return self.parts
        return self.late()

    def is_there_for(self, members: Sequence[Handle]) -> bool:
        """Whether `load_on` waits for nobody: they were sent it, or it is in the object store."""
        return self.late is None or all(actor_key(member) in self.received for member in members)

    def load_on(self, members: Sequence[Handle]) -> list[ray.ObjectRef]:
        """Rollout actors take the weights; references of what they confirm (`check_loaded`)."""
        return [m.load_weights.remote(self.version, self.digest, *self.parts_for(m)) for m in members]

    def check_loaded(self, answers: Sequence[dict[str, Any]]) -> None:
        """Raises: RuntimeError when an actor confirms anything else."""
        for answer in answers:
            if (answer["version"], answer["digest"]) != (self.version, self.digest):
                raise RuntimeError(f"rollout worker answers {answer} to version {self.version}")


def broadcasts(config: Config, layout: Layout) -> bool:
    """Whether publishes are broadcast: publish.transport, where auto wants a whole GPU for every actor of both sides,
    at the same time, and rollout workers that are idle then."""
    if config.publish.transport != "auto":
        return config.publish.transport == "collective"
    whole = layout.device == "cuda" and min(layout.gpus_learner, layout.gpus_rollout) >= 1
    idle = not config.overlap.enabled or config.overlap.max_policy_age == 0
    return whole and idle and not config.cluster.take_turns


def actor_key(member: Handle) -> str:
    """An actor's identity."""
    return member._actor_id.hex()


class Publisher:
    """Publishes the weights of a learner's ranks.

    receivers: the rollout actors of the moment; None, as before the pool is there, publishes to the object store.
    """

    def __init__(self, config: Config, layout: Layout, ranks: Sequence[Handle]):
        self.config, self.ranks, self.device = config, list(ranks), layout.device
        self.broadcasts = broadcasts(config, layout)
        self.receivers: Callable[[], Sequence[Handle]] | None = None
        self._joined: list[Handle] = []
        self._place: tuple[str, int] | None = None
        self._round = 0

    def publish(self, version: int, average: bool = False, timeout_s: float | None = None) -> Publication:
        """The present weights, or their moving average. Args: timeout_s: of packing them for the object store; None
        takes learner.timeout_s. Raises: PublishError."""
        start = time.monotonic()
        receivers = list(self.receivers()) if self.broadcasts and self.receivers else []
        made = self._broadcast(version, average, receivers) if receivers else self._store(version, average, timeout_s)
        made.metrics["publish/all_s"] = time.monotonic() - start
        return made

    def _store(self, version: int, average: bool, timeout_s: float | None = None) -> Publication:
        pairs = [rank.publish.options(num_returns=2).remote(average) for rank in self.ranks]
        bound_s = timeout_s or self.config.learner.timeout_s
        contents = wait_all([content for _, content in pairs], f"publication of version {version}", bound_s)
        metrics = {"publish/transport": 0.0, "publish/bytes": float(contents[0].num_bytes)}
        return Publication(version, merge(contents).digest, tuple(part for part, _ in pairs), metrics=metrics)

    def _broadcast(self, version: int, average: bool, receivers: list[Handle]) -> Publication:
        members, timeout_s = [*self.ranks, *receivers], self.config.publish.timeout_s
        try:
            metrics = self._join(receivers)
            refs = [rank.send_weights.remote(average) for rank in self.ranks]
            refs += [member.receive_weights.remote(version) for member in receivers]
            what = f"version {version} to reach {len(receivers)} rollout workers"
            answers = wait_all(refs, what, timeout_s + GRACE_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            missing = self._tear_down(members)
            cause = getattr(error, "cause", None) or error
            names = f"{', '.join(missing)} did not answer: " if missing else ""
            raise PublishError(f"publish of version {version}: {names}{cause}", missing) from error
        sent = merge([content for content, _ in answers[: len(self.ranks)]])
        for member, (held, _) in zip(receivers, answers[len(self.ranks) :], strict=True):
            _verify(version, name_of(member), held, sent)
        for _, seconds in answers:
            metrics |= {f"publish/{k}": max(s, metrics.get(f"publish/{k}", 0.0)) for k, s in seconds.items()}
        metrics |= {"publish/transport": 1.0, "publish/bytes": float(sent.num_bytes)}
        late = _Late(lambda: self._store(version, average), sent.digest)
        return Publication(version, sent.digest, (), frozenset(map(actor_key, receivers)), late, metrics)

    def _join(self, receivers: list[Handle]) -> dict[str, float]:
        """Form a group where there is none of these receivers."""
        if self._joined == receivers:
            return {}
        start, timeout_s, size = time.monotonic(), self.config.publish.timeout_s, len(self.ranks) + len(receivers)
        if self._place is None:
            self._place = wait_all([self.ranks[0].open_meeting.remote(timeout_s)], "a meeting point", timeout_s)[0]
        plans = ray.put(wait_all([rank.weight_plan.remote() for rank in self.ranks], "what is published", timeout_s))
        self._round += 1
        meetings = [Meeting(*self._place, self._round, number, size) for number in range(size)]
        joining = [
            member.join_stream.remote(meeting, self.device, timeout_s, plans)
            for member, meeting in zip([*self.ranks, *receivers], meetings, strict=True)
        ]
        wait_all(joining, f"{size} actors to form a group for weights", timeout_s + GRACE_S)
        self._joined = receivers
        return {"publish/join_s": time.monotonic() - start}

    def _tear_down(self, members: Sequence[Handle]) -> list[str]:
        """Everybody who lives leaves the group; names of those who do not say so."""
        self._joined = []
        if self._place is not None:
            call_off(*self._place, self._round)
        leaving = {member.leave_stream.remote(): name_of(member) for member in members}
        done, hung = ray.wait(list(leaving), num_returns=len(leaving), timeout=self.config.publish.timeout_s + GRACE_S)
        missing = [leaving[ref] for ref in hung]
        for ref in done:
            try:
                ray.get(ref, timeout=GRACE_S)
            except ray.exceptions.RayError:
                missing.append(leaving[ref])
        if name_of(members[0]) in missing:
            self._place = None
        return sorted(missing)


class _Late:
    """A publication in the object store, for who was not there; put there once."""

    def __init__(self, store: Callable[[], Publication], digest: str):
        self.store, self.digest, self.parts = store, digest, ()

    def __call__(self) -> Parts:
        if not self.parts:
            try:
                made = self.store()
            except (ray.exceptions.RayError, TimeoutError) as error:
                raise PublishError(f"weights with digest {self.digest} are gone with the learner: {error}") from error
            if made.digest != self.digest:
                raise PublishError(f"version {made.version} with digest {self.digest} is gone: the learner has gone on")
            self.parts = made.parts
        return self.parts


def name_of(member: Handle) -> str:
    """The name that `start_actor` gave, else the id."""
    names = [name for name, handle in list(started.items()) if handle == member]
    return names[0] if names else actor_key(member)[:12]


def _verify(version: int, name: str, held: Content, sent: Content) -> None:
    try:
        verify(version, held, sent)
    except RuntimeError as error:
        raise PublishError(f"{name}: {error}", [name]) from None
