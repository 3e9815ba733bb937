"""Rollout pool and learner group as the controller sees them: a few verbs, references inside."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from actors.cluster import Layout, start_actor, wait_until_ready
from actors.learner import LearnerRank
from actors.publisher import Publication, Publisher
from actors.rollout_group import GroupRefs, RolloutGroup, start_group
from actors.wait import REPORT_S, wait_all, wait_some
from sage_ray.advantage import Advantages
from sage_ray.config import Config
from sage_ray.config_check import dp_degree
from sage_ray.group_batch import split_groups
from sage_ray.group_chunks import Chunk
from sage_ray.types import GroupRequest


class RolloutPool:
    """Rollout groups. A group gets work only at the version that all its members have confirmed."""

    def __init__(self, config: Config, layout: Layout):
        self.timeout_s, self.groups_per_task = config.rollout.timeout_s, config.rollout.groups_per_task
        self.groups = [start_group(config, layout, n) for n in range(config.rollout.num_workers)]

    @property
    def members(self) -> list[ray.actor.ActorHandle]:
        """The actors of all groups."""
        return [member for group in self.groups for member in group.members]

    def ready(self) -> list[ray.ObjectRef]:
        """References that are done once every model is loaded."""
        return [ref for group in self.groups for ref in group.ready()]

    def leave(self) -> int:
        """All weights wait on the host; bytes freed on the devices."""
        return sum(wait_all([m.leave.remote() for m in self.members], "rollout workers to leave", self.timeout_s))

    def enter(self) -> None:
        """All weights come back."""
        wait_all([m.enter.remote() for m in self.members], "rollout workers to come back", self.timeout_s)

    def load_weights(self, publication: Publication) -> None:
        """Give every actor one version; waits for all, raises when one confirms anything else."""
        what = f"weights of version {publication.version} on {len(self.members)} rollout workers"
        publication.check_loaded(wait_all(publication.load_on(self.members), what, self.timeout_s))

    def generate(self, requests: Sequence[GroupRequest]) -> Iterator[GroupRefs]:
        """Groups in the order in which they finish; each rollout group has one task running and one waiting."""
        size = self.groups_per_task
        queue = deque(requests[i : i + size] for i in range(0, len(requests), size))
        running: dict[ray.ObjectRef, tuple[RolloutGroup, list[GroupRefs]]] = {}
        following: set[ray.ObjectRef] = set()

        def submit(group: RolloutGroup) -> None:
            if queue:
                task = queue.popleft()
                groups, others = group.generate(task)
                running[groups[-1].info] = group, groups
                following.update(others)

        for group in [*self.groups, *self.groups]:
            submit(group)
        while running:
            what = f"{len(running) + len(queue)} rollout tasks"
            done, _ = wait_some([*running, *following], 1, what, self.timeout_s)
            ray.get([ref for ref in done if ref in following], timeout=REPORT_S)
            following.difference_update(done)
            for info in [ref for ref in done if ref in running]:
                group, groups = running.pop(info)
                submit(group)
                yield from groups


class LearnerGroup:
    """FSDP2 ranks that act as one. The ranks of a sequence parallel group take the same groups of videos."""

    def __init__(self, config: Config, layout: Layout):
        self.config, self.timeout_s = config, config.learner.timeout_s
        self.ranks = [
            start_actor(LearnerRank, layout.gpus_learner, config, rank, layout.device, name=f"learner-{rank}")
            for rank in range(config.learner.num_ranks)
        ]
        self.publisher = Publisher(config, layout, self.ranks)

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
        sp_size, dp = self.config.learner.sp_size, dp_degree(self.config)
        plan = split_groups(len(trajectories), loss.num_updates, dp) * loss.num_epochs
        mine = [[shares[rank // sp_size] for shares in plan] for rank in range(len(self.ranks))]
        refs = [
            rank.update.remote(list(trajectories), own, advantages, weights, num_trained)
            for rank, own in zip(self.ranks, mine, strict=True)
        ]
        return wait_all(refs, f"the update of {len(trajectories)} groups", self.timeout_s)[0]

    def begin(self) -> None:
        """An iteration begins whose groups come bit by bit (`accumulate`)."""
        wait_all([rank.begin.remote() for rank in self.ranks], "the learner to begin", self.timeout_s)

    def accumulate(self, chunk: Chunk, refs: Mapping[int, ray.ObjectRef], advantages: Advantages) -> None:
        """Learn from some groups of an iteration; where they are the last of an optimizer step, take it.

        Args: refs: trajectories by group number; advantages: rows [P, G] of the whole iteration.
        """
        sp_size, values, weights = self.config.learner.sp_size, advantages.values, advantages.weights
        shares = [chunk.shares[number // sp_size] for number in range(len(self.ranks))]
        calls = [
            rank.accumulate.remote(
                _only(share, refs), share, _only(share, values), _only(share, weights), chunk.all_pairs, chunk.last
            )
            for rank, share in zip(self.ranks, shares, strict=True)
        ]
        if chunk.last:
            calls += [rank.step.remote(chunk.weighted_pairs(weights)) for rank in self.ranks]
        wait_all(calls, f"the learner to take groups {chunk.groups[0]} to {chunk.groups[-1]}", self.timeout_s)

    def finish(self) -> dict[str, float]:
        """Metrics of the iteration that `begin` began."""
        return wait_all([rank.finish.remote() for rank in self.ranks], "the learner's metrics", self.timeout_s)[0]

    def publish(self, version: int, average: bool = False) -> Publication:
        """Send the present weights (or their moving average), every rank its own shards."""
        return self.publisher.publish(version, average)

    def save(self, place: str, note: dict[str, Any]) -> None:
        """Begin to write a checkpoint; every rank takes part. It is written while the learner goes on."""
        wait_all([rank.save.remote(place, note) for rank in self.ranks], f"checkpoint {place}", self.timeout_s)

    def saved(self, wait_s: float = 0.0) -> str | None:
        """The checkpoint that was written since the last call, if any; waits for one that is being written.

        Raises: CheckpointError, WaitTimeoutError.
        """
        refs = [rank.saved.remote(wait_s > 0) for rank in self.ranks]
        return wait_all(refs, "a checkpoint to be written", wait_s or self.timeout_s)[0]

    def load(self, place: str) -> int:
        """Go on from a complete checkpoint; the policy version."""
        return wait_all([rank.load.remote(place) for rank in self.ranks], f"checkpoint {place}", self.timeout_s)[0]


def _only(share: Sequence[int], whole: Mapping[int, Any] | np.ndarray) -> dict[int, Any]:
    """What is a rank's of references or rows by group number: the whole of them would go to every rank."""
    return {number: whole[number] for number in (group if group >= 0 else -group - 1 for group in share)}
