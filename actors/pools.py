"""Rollout pool and learner group as the controller sees them: a few verbs, references inside."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import ray

from actors.cluster import Layout, start_actor, wait_until_ready
from actors.learner import LearnerRank
from actors.rollout_worker import RolloutWorker
from actors.wait import wait_all, wait_some
from sage_ray.config import Config
from sage_ray.group_batch import split_groups
from sage_ray.types import GroupRequest
from sage_ray.weights import combined_digest


@dataclass(frozen=True)
class Publication:
    """One published policy version: its digest and the references of its parts."""

    version: int
    digest: str
    parts: tuple[ray.ObjectRef, ...]


@dataclass(frozen=True)
class GroupRefs:
    """References of one group in the object store, and the request it answers."""

    request: GroupRequest
    trajectory: ray.ObjectRef
    frames: ray.ObjectRef
    info: ray.ObjectRef


class RolloutPool:
    """Rollout workers. A worker gets work only at the version it has confirmed."""

    def __init__(self, config: Config, layout: Layout):
        self.timeout_s, self.groups_per_task = config.rollout.timeout_s, config.rollout.groups_per_task
        at_once = 2 if config.rollout.overlap_decode else 1
        self.workers = [
            start_actor(
                RolloutWorker, layout.gpus_rollout, config, layout.device, f"rollout-{n}", max_concurrency=at_once
            )
            for n in range(config.rollout.num_workers)
        ]

    def ready(self) -> list[ray.ObjectRef]:
        """References that are done once every model is loaded."""
        return [worker.ready.remote() for worker in self.workers]

    def leave(self) -> int:
        """Every worker's weights wait on the host; bytes freed on the devices."""
        return sum(wait_all([w.leave.remote() for w in self.workers], "rollout workers to leave", self.timeout_s))

    def enter(self) -> None:
        """Every worker's weights come back."""
        wait_all([w.enter.remote() for w in self.workers], "rollout workers to come back", self.timeout_s)

    def load_weights(self, publication: Publication) -> None:
        """Give every worker one version; waits for all, raises when one confirms anything else."""
        answers = wait_all(
            [w.load_weights.remote(publication.version, publication.digest, *publication.parts) for w in self.workers],
            f"weights of version {publication.version} on {len(self.workers)} rollout workers",
            self.timeout_s,
        )
        for answer in answers:
            if answer["version"] != publication.version or answer["digest"] != publication.digest:
                raise RuntimeError(f"rollout worker answers {answer} to version {publication.version}")

    def generate(self, requests: Sequence[GroupRequest]) -> Iterator[GroupRefs]:
        """Groups in the order in which they finish; each worker has one task running and one waiting."""
        size = self.groups_per_task
        queue = deque(requests[i : i + size] for i in range(0, len(requests), size))
        running: dict[ray.ObjectRef, tuple[ray.actor.ActorHandle, list[GroupRefs]]] = {}

        def submit(worker: ray.actor.ActorHandle) -> None:
            if queue:
                task = queue.popleft()
                name = f"generate step {task[0].step} groups {task[0].group} to {task[-1].group}"
                refs = worker.generate.options(num_returns=3 * len(task), name=name).remote(*task)
                groups = [GroupRefs(request, *refs[3 * i : 3 * i + 3]) for i, request in enumerate(task)]
                running[groups[-1].info] = worker, groups

        for worker in [*self.workers, *self.workers]:
            submit(worker)
        while running:
            done, _ = wait_some(list(running), 1, f"{len(running) + len(queue)} rollout tasks", self.timeout_s)
            for info in done:
                worker, groups = running.pop(info)
                submit(worker)
                yield from groups


class LearnerGroup:
    """FSDP2 ranks that act as one."""

    def __init__(self, config: Config, layout: Layout):
        self.config, self.timeout_s = config, config.learner.timeout_s
        self.ranks = [
            start_actor(LearnerRank, layout.gpus_learner, config, rank, layout.device)
            for rank in range(config.learner.num_ranks)
        ]

    def setup(self) -> int:
        """Form the group and load the policy; returns the number of trainable parameters."""
        start_s = self.config.cluster.start_timeout_s
        address, port = wait_until_ready([self.ranks[0].rendezvous.remote()], "learner rank 0", start_s)[0]
        sizes = wait_until_ready([r.setup.remote(address, port) for r in self.ranks], "the learner's ranks", start_s)
        return sizes[0]

    def leave(self) -> int:
        """Everything that the ranks keep waits on the host; bytes freed on the devices."""
        return sum(wait_all([rank.leave.remote() for rank in self.ranks], "the learner to leave", self.timeout_s))

    def enter(self) -> None:
        """Everything comes back; the first time, before `setup`, there is nothing."""
        wait_all([rank.enter.remote() for rank in self.ranks], "the learner to come back", self.timeout_s)

    def update(
        self, trajectories: Sequence[ray.ObjectRef], advantages: np.ndarray, weights: np.ndarray, num_trained: int
    ) -> dict[str, float]:
        """One iteration of learning on groups given in order; metrics of rank 0 (the same everywhere)."""
        loss = self.config.loss
        plan = split_groups(len(trajectories), loss.num_updates, len(self.ranks)) * loss.num_epochs
        refs = [
            rank.update.remote(list(trajectories), [shares[i] for shares in plan], advantages, weights, num_trained)
            for i, rank in enumerate(self.ranks)
        ]
        return wait_all(refs, f"the update of {len(trajectories)} groups", self.timeout_s)[0]

    def publish(self, version: int, average: bool = False) -> Publication:
        """Put the present weights (or their moving average) into the object store, every rank its own shards."""
        pairs = [rank.publish.options(num_returns=2).remote(average) for rank in self.ranks]
        digests = wait_all([digest for _, digest in pairs], f"publication of version {version}", self.timeout_s)
        return Publication(version, combined_digest(digests), tuple(part for part, _ in pairs))

    def save(self, folder: str) -> None:
        """Write a checkpoint; every rank takes part."""
        wait_all([rank.save.remote(folder) for rank in self.ranks], f"checkpoint {folder}", self.timeout_s)
