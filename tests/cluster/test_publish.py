"""Broadcast of weights between real actors: two FSDP ranks, two rollout workers, gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import ray

from actors.cluster import Layout
from actors.learner_group import LearnerGroup
from actors.publisher import PublishError, name_of
from actors.rollout_pool import RolloutPool
from tests.cluster.made import end_actors, end_pool
from tests.small import small_config

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
CPU = Layout("cpu", 0, 0, 0)
TIMEOUT_S = 60


class Ring:
    """A learner of two ranks and a pool of two workers."""

    def __init__(self, tmp_path, *overrides: str):
        own = ["learner.num_ranks=2", "rollout.num_workers=2", "publish.transport=collective"]
        self.config = small_config(tmp_path, [*own, f"publish.timeout_s={TIMEOUT_S}", *overrides])
        self.learner, self.pool = LearnerGroup(self.config, CPU), RolloutPool(self.config, CPU)
        self.learner.setup()
        self.learner.publisher.receivers = lambda: self.pool.idle_members

    def held(self) -> list[tuple[int, str]]:
        return ray.get([m.holds.remote() for m in self.pool.members], timeout=120)

    def close(self) -> None:
        end_pool(self.pool)
        end_actors(self.learner.ranks)


@pytest.fixture
def ring(tmp_path, request) -> Iterator[Ring]:
    made = Ring(tmp_path, *getattr(request, "param", ()))
    yield made
    made.close()


def call(actor, function):
    """What a function says of the object inside of an actor."""
    return ray.get(actor.__ray_call__.remote(function), timeout=120)


@pytest.mark.parametrize("ring", [(), ("lora.rank=3",)], ids=["full", "lora"], indirect=True)
def test_a_broadcast_is_what_the_object_store_gives(ring: Ring) -> None:
    for rank in ring.learner.ranks:
        call(rank, shift)
    sent = ring.learner.publish(0)
    assert sent.metrics["publish/transport"] == 1 and sent.parts == ()
    assert [version for version, _ in ring.held()] == [-1, -1]  # sent, but not announced yet
    ring.pool.load_weights(sent)
    assert ring.held() == [(0, sent.digest)] * 2
    received = [call(worker, trained_bytes) for worker in ring.pool.members]
    ring.learner.publisher.receivers = None
    stored = ring.learner.publish(0)
    assert stored.metrics["publish/transport"] == 0 and stored.digest == sent.digest
    assert stored.metrics["publish/bytes"] == sent.metrics["publish/bytes"] > 0
    for worker in ring.pool.members:
        call(worker, zero)
    ring.pool.load_weights(stored)
    assert [call(worker, trained_bytes) for worker in ring.pool.members] == received


def test_other_content_and_other_names_are_named(ring: Ring) -> None:
    worker = ring.pool.members[1]
    call(worker, damage_what_arrives)
    with pytest.raises(
        PublishError, match=r"rollout-1.*: weights of version 0: transformer\.proj_out\.bias is not what"
    ):
        ring.learner.publish(0)
    call(worker, rename)
    ring.learner.publisher._joined = []
    with pytest.raises(PublishError, match=r"transformer\.proj_out\.bias was sent, the receiver has no such parameter"):
        ring.learner.publish(0)


def test_a_killed_receiver_ends_the_publish_and_the_next_one_does_without(ring: Ring) -> None:
    ring.pool.load_weights(ring.learner.publish(0))
    victim = call(ring.pool.members[1], lambda worker: os.getpid())
    os.kill(victim, signal.SIGSTOP)
    killer = threading.Timer(3, os.kill, (victim, signal.SIGKILL))  # the others wait for it by then
    killer.start()
    start = time.monotonic()
    with pytest.raises(PublishError, match="publish of version 0: rollout-1.* did not answer"):
        ring.learner.publish(0)
    assert time.monotonic() - start < 2 * (TIMEOUT_S + 10)
    ring.pool.replace([name_of(ring.pool.members[1])], "a test")
    assert len(ring.pool.idle_members) == 1
    again = ring.learner.publish(0)
    ring.pool.load_weights(again)
    held = ray.get(ring.pool.idle_members[0].holds.remote(), timeout=120)
    assert held == (0, again.digest)


def shift(rank) -> None:
    """Weights that are no checkpoint's."""
    import torch

    from sage_ray.parallel import local_shards

    with torch.no_grad():
        for shard in local_shards(rank.update_rule.model).values():
            shard.add_(0.01 * (1 + rank.rank))


def trained_bytes(worker) -> list[bytes]:
    parameters = worker.parameters()
    return [parameters[name].cpu().numpy().tobytes() for name in sorted(worker.expected_names())]


def zero(worker) -> None:
    for name in worker.expected_names():
        worker.parameters()[name].zero_()


def damage_what_arrives(worker) -> None:
    receive = worker.receive_into_parameters

    def damaged():
        from sage_ray.weight_plan import held_content

        _, seconds = receive()
        import torch

        bias = worker.parameters()["transformer.proj_out.bias"]
        bias.view(torch.int32)[3] ^= 1
        return held_content(worker.plans[0], worker.parameters()), seconds

    worker.receive_into_parameters = damaged


def rename(worker) -> None:
    parameters = worker.parameters
    worker.parameters = lambda: {
        ("x" * (name == "transformer.proj_out.bias")) + name: p for name, p in parameters().items()
    }
