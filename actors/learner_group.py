"""The learner's ranks as the controller sees them: a few verbs, references inside, and one error when they are lost."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from actors import cluster
from actors.cluster import Layout, is_dead, start_actor, wait_until_ready
from actors.learner import LearnerRank
from actors.publisher import Publication, Publisher, PublishError
from actors.stacks import stacks_of
from actors.stop import reason
from actors.wait import WaitTimeoutError, logger, wait_all
from sage_ray.advantage import Advantages
from sage_ray.config import Config
from sage_ray.config_check import dp_degree
from sage_ray.group_batch import split_groups
from sage_ray.group_chunks import Chunk

DEATH_S, ALONE_S = 20.0, 2.0
"""A rank whose call failed may have failed because another one has died, which Ray tells within this time."""


class LearnerLostError(RuntimeError):
    """A rank has died or answers no more: the group's weights are what its last checkpoint holds."""


class LearnerGroup:
    """FSDP2 ranks that act as one. The ranks of a sequence parallel group take the same groups of videos.

    Every verb raises LearnerLostError when a rank has died, or has not answered within faults.hung_factor times what
    the verb usually takes; what a rank itself raises comes as it is.
    """

    def __init__(self, config: Config, layout: Layout):
        self.config, self.layout, self.timeout_s = config, layout, config.learner.timeout_s
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.ranks: list[ray.actor.ActorHandle] = []
        self._start()

    def _start(self) -> None:
        gpus, device = self.layout.gpus_learner, self.layout.device
        self.ranks = [
            start_actor(LearnerRank, gpus, self.config, rank, device, name=f"learner-{rank}")
            for rank in range(self.config.learner.num_ranks)
        ]
        self.publisher = Publisher(self.config, self.layout, self.ranks)

    def setup(self) -> int:
        """Form the group and load the policy; returns the number of trainable parameters."""
        start_s = self.config.cluster.start_timeout_s
        address, port = wait_until_ready([self.ranks[0].rendezvous.remote()], "learner rank 0", start_s)[0]
        sizes = wait_until_ready([r.setup.remote(address, port) for r in self.ranks], "the learner's ranks", start_s)
        return sizes[0]

    def remake(self) -> int:
        """End what is left of the group and start it again, with the policy that the run began with; the number of
        trainable parameters."""
        receivers = self.publisher.receivers
        self.end()
        self._start()
        self.publisher.receivers = receivers
        return self._timed("setup", lambda _: self.setup())

    def end(self) -> None:
        """End the ranks, whatever they do; those that have ended too."""
        for rank in self.ranks:
            cluster.end_actor(rank)

    def leave(self) -> int:
        """Everything that the ranks keep waits on the host; bytes freed on the devices."""
        return sum(self._ask("leave", "the learner to leave"))

    def enter(self) -> None:
        """Everything comes back; the first time, before `setup`, there is nothing."""
        self._ask("enter", "the learner to come back")

    def missing(self, trajectories: Mapping[int, ray.ObjectRef]) -> list[int]:
        """Numbers of trajectories that are lost, as those of a node that has died; ranks look for equal shares."""
        numbers, sp_size, dp = sorted(trajectories), self.config.learner.sp_size, dp_degree(self.config)
        shares = [numbers[rank // sp_size :: dp] for rank in range(len(self.ranks))]
        refs = [
            rank.missing.remote(share, [trajectories[number] for number in share], self.config.faults.hung_min_s / 2)
            for rank, share in zip(self.ranks, shares, strict=True)
        ]
        found = self._wait("missing", refs, f"the learner to look for {len(numbers)} trajectories")
        return sorted({number for some in found for number in some})

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
        return self._wait("update", refs, f"the update of {len(trajectories)} groups")[0]

    def begin(self) -> None:
        """An iteration begins whose groups come bit by bit (`accumulate`)."""
        self._ask("begin", "the learner to begin")

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
        self._wait("accumulate", calls, f"the learner to take groups {chunk.groups[0]} to {chunk.groups[-1]}")

    def finish(self) -> dict[str, float]:
        """Metrics of the iteration that `begin` began."""
        return self._ask("finish", "the learner's metrics")[0]

    def publish(self, version: int, average: bool = False) -> Publication:
        """Send the present weights (or their moving average), every rank its own shards.

        Raises: LearnerLostError, PublishError when it was a receiver that did not take them.
        """
        try:
            return self._timed("publish", lambda bound_s: self.publisher.publish(version, average, bound_s))
        except PublishError as error:
            if any(name.startswith("learner-") for name in error.missing) or self._somebody_is_dead():
                raise LearnerLostError(f"the learner is lost: {reason(error)}") from error
            raise

    def save(self, place: str, note: dict[str, Any]) -> None:
        """Begin to write a checkpoint; every rank takes part. It is written while the learner goes on."""
        self._ask("save", f"checkpoint {place}", place, note)

    def saved(self, wait_s: float = 0.0) -> str | None:
        """The checkpoint that was written since the last call, if any; waits for one that is being written.

        Raises: CheckpointError, WaitTimeoutError.
        """
        refs = [rank.saved.remote(wait_s > 0) for rank in self.ranks]
        what = "a checkpoint to be written"
        return self._timed("be saved", lambda bound_s: wait_all(refs, what, wait_s or bound_s))[0]

    def load(self, place: str) -> int:
        """Go on from a complete checkpoint; the policy version."""
        return self._ask("load", f"checkpoint {place}", place)[0]

    def raise_if_lost(self, error: BaseException) -> None:
        """Raises: LearnerLostError when an error elsewhere is one because a rank has died, and its weights with it."""
        if self._somebody_is_dead():
            raise LearnerLostError(f"the learner is lost: {reason(error)}") from error

    def _ask(self, verb: str, what: str, *arguments: Any) -> list[Any]:
        return self._wait(verb, [getattr(rank, verb).remote(*arguments) for rank in self.ranks], what)

    def _wait(self, verb: str, refs: Sequence[ray.ObjectRef], what: str) -> list[Any]:
        return self._timed(verb, lambda bound_s: wait_all(refs, what, bound_s))

    def _timed(self, verb: str, act: Callable[[float], Any]) -> Any:
        """What `act` gives within its bound, which it is told. Raises: LearnerLostError, or a rank's own error."""
        start = time.monotonic()
        try:
            found = act(self._bound_s(verb))
        except (WaitTimeoutError, ray.exceptions.RayActorError) as error:
            raise self._lost(verb, error) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, VERDICTS) or not self._somebody_is_dead():
                raise
            raise self._lost(verb, error) from error
        self._seconds[verb] = [*self._seconds[verb][-32:], time.monotonic() - start]
        return found

    def _bound_s(self, verb: str) -> float:
        faults, seconds = self.config.faults, self._seconds[verb]
        if not seconds:
            return self.timeout_s
        return min(self.timeout_s, max(faults.hung_min_s, faults.hung_factor * statistics.median(seconds)))

    def _lost(self, verb: str, error: BaseException) -> LearnerLostError:
        if isinstance(error, WaitTimeoutError):
            for words in stacks_of(self.ranks):
                logger.warning("%s", words)
        return LearnerLostError(f"the learner is lost while it should {verb}: {reason(error)}")

    def _somebody_is_dead(self) -> bool:
        """Whether a rank has died just now. One alone that raised an error has not."""
        deadline = time.monotonic() + (DEATH_S if len(self.ranks) > 1 else ALONE_S)
        while not (dead := any(map(is_dead, self.ranks))) and time.monotonic() < deadline:
            time.sleep(0.2)
        return dead


VERDICTS = (FloatingPointError, ValueError)
"""What a rank says of its numbers, which every rank says alike: nobody has died of it."""


def _only(share: Sequence[int], whole: Mapping[int, Any] | np.ndarray) -> dict[int, Any]:
    """What is a rank's of references or rows by group number: the whole of them would go to every rank."""
    return {number: whole[number] for number in (group if group >= 0 else -group - 1 for group in share)}
