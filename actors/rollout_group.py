"""A rollout group: one worker, or rollout.sp_size actors on one node that share the tokens of every forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
import torch.distributed as dist

from actors import cluster
from actors.clocked import phase
from actors.cluster import free_address, node_of, start_actor
from actors.layout import Layout, group_names
from actors.places import anywhere, place_of, places_together, release
from actors.publisher import Publication
from actors.rollout_worker import RolloutWorker
from sage_ray.config import Config
from sage_ray.parallel import start_process_group
from sage_ray.types import GroupRequest


class RolloutMember(RolloutWorker):
    """A worker that computes together with others. The lead, rank 0, answers; the others only denoise along.

    All members must get the same calls in the same order.
    """

    def __init__(self, config: Config, device: str, name: str, rank: int):
        super().__init__(config, device, name)
        self.rank, self.device = rank, device

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this member's host."""
        return free_address()

    def join(self, address: tuple[str, int]) -> None:
        """Form the group; unblocked by the last member."""
        settings = self.config.rollout
        start_process_group(self.rank, settings.sp_size, *address, device=self.device, timeout_s=settings.timeout_s)
        self.model.velocity.share_tokens(dist.group.WORLD)

    @phase("denoise")
    def follow(self, *requests: GroupRequest) -> None:
        """The lead's `generate` without what comes after denoising."""
        with self._denoising:
            self._check_version(requests)
            self.rollout.denoise(requests)


@dataclass(frozen=True)
class GroupRefs:
    """References of one group of videos in the object store, and the request it answers.

    task, publication: what it was made with, by which it can be made again: all requests of one call (shared forwards
    round as they are shared), and the weights.
    """

    request: GroupRequest
    trajectory: ray.ObjectRef
    frames: ray.ObjectRef | None
    info: ray.ObjectRef
    task: tuple[GroupRequest, ...] = ()
    publication: Publication | None = None

    def without_frames(self) -> GroupRefs:
        """The same group; what nobody else refers to leaves the object store."""
        return replace(self, frames=None)


@dataclass(frozen=True)
class RolloutGroup:
    """Actors that act as one worker, the lead first."""

    members: tuple[ray.actor.ActorHandle, ...]

    def ready(self) -> list[ray.ObjectRef]:
        """References that are done once every model is loaded and the members know each other."""
        lead, *others = self.members
        if not others:
            return [lead.ready.remote()]
        address = lead.rendezvous.remote()
        return [member.join.remote(address) for member in self.members]

    def generate(self, task: Sequence[GroupRequest]) -> tuple[list[GroupRefs], list[ray.ObjectRef]]:
        """(the groups that the lead makes, references that are done when the other members are; they raise what these
        raise, while the lead would wait for them in vain)."""
        lead, *others = self.members
        refs = lead.generate.options(num_returns=3 * len(task)).remote(*task)
        groups = [GroupRefs(request, *refs[3 * i : 3 * i + 3]) for i, request in enumerate(task)]
        return groups, [member.follow.remote(*task) for member in others]

    def nodes(self) -> frozenset[str]:
        """Ids of the nodes that its actors are on."""
        return frozenset(node for node in map(node_of, self.members) if node)


def start_group(config: Config, layout: Layout, number: int) -> RolloutGroup:
    """Start a group's actors; where there are several, one node must have room for all."""
    settings, device, names = config.rollout, layout.device, group_names(config, number)
    places = [place_of(name) for name in names]
    if not all(places):  # not planned with the run
        selector = config.cluster.node_roles.get("rollout", "")
        places = [anywhere(selector)]
        if settings.sp_size > 1:
            start_s = config.cluster.start_timeout_s
            places = places_together(names, layout.gpus_rollout, f"rollout-{number}", start_s, selector)
    if settings.sp_size == 1:
        worker = start_actor(
            RolloutWorker,
            layout.gpus_rollout,
            config,
            device,
            names[0],
            max_concurrency=2 if settings.overlap_decode else 1,
            place=places[0],
            name=names[0],
        )
        return RolloutGroup((worker,))
    return RolloutGroup(
        tuple(
            start_actor(
                RolloutMember,
                layout.gpus_rollout,
                config,
                device,
                f"rollout-{number}.{rank}",
                rank,
                place=place,
                name=names[rank],
            )
            for rank, place in enumerate(places)
        )
    )


def end_group(group: RolloutGroup, config: Config, number: int, gives_place_back: bool) -> None:
    """End a group's actors, whatever they do. Args: gives_place_back: nobody follows in its reserved place."""
    for member in group.members:
        cluster.end_actor(member)
    if gives_place_back:
        release(group_names(config, number))
