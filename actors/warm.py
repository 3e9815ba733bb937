"""Actors that outlive a run: the next run of the same process gets them in place of new ones.

An actor that starts pays for a new process, its imports and a GPU context, 20 s and more; one that is renewed only
loads its models. Everything that an actor holds is made anew by its class's __init__, as in a new one.
"""

from __future__ import annotations

import gc
import json
import os
from collections import defaultdict
from typing import Any

import ray
import torch
import torch.distributed as dist

from actors.wait import wait_all


def renewable(cls: type) -> type:
    """The class with a further method: become what a new actor with these arguments would be."""

    def renew(self: Any, *arguments: Any) -> None:
        vars(self).clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.__init__(*arguments)

    return type(cls.__name__, (cls,), {"renew": renew, "__doc__": cls.__doc__})


class WarmActors:
    """Makes actors, or renews idle ones of the same class and options. One run at a time uses them."""

    def __init__(self) -> None:
        self._idle: dict[str, list[ray.actor.ActorHandle]] = defaultdict(list)
        self._busy: list[tuple[str, ray.actor.ActorHandle]] = []
        self._renewals: list[ray.ObjectRef] = []
        self.num_started = self.num_renewed = 0

    def make(self, cls: type, options: dict[str, Any], arguments: tuple[Any, ...]) -> ray.actor.ActorHandle:
        """As `ray.remote(cls).options(**options).remote(*arguments)`."""
        alike = {key: value for key, value in options.items() if key != "name"}
        key = json.dumps([cls.__module__, cls.__qualname__, alike], sort_keys=True, default=str)
        if self._idle[key]:
            actor = self._idle[key].pop()
            self._renewals.append(actor.renew.remote(*arguments))
            self.num_renewed += 1
        else:
            named = (
                {"name": f"{options['name']}-{os.getpid()}"} if options.get("name") else {}
            )  # several hosts, one job
            actor = ray.remote(renewable(cls)).options(**options | named).remote(*arguments)
            self.num_started += 1
        self._busy.append((key, actor))
        return actor

    def wait(self, timeout_s: float) -> None:
        """Until every actor asked for is renewed. Raises its error, or WaitTimeoutError."""
        renewals, self._renewals = self._renewals, []
        wait_all(renewals, f"{len(renewals)} actors to become new", timeout_s)

    def release(self, actors: list[ray.actor.ActorHandle] | None = None) -> None:
        """Actors that the run needs no more, all of them unless some are named, are there for the next."""
        ids = None if actors is None else {actor._actor_id for actor in actors}
        kept = []
        for key, actor in self._busy:
            if ids is None or actor._actor_id in ids:
                self._idle[key].append(actor)
            else:
                kept.append((key, actor))
        self._busy = kept

    def kill(self, actor: ray.actor.ActorHandle) -> None:
        """End one that its run has given up; it is nobody's any more."""
        self._busy = [(key, one) for key, one in self._busy if one._actor_id != actor._actor_id]
        ray.kill(actor)

    def end(self) -> None:
        """End all of them: after an error nobody knows what state they are in."""
        for actor in [*(actor for _, actor in self._busy), *(a for actors in self._idle.values() for a in actors)]:
            ray.kill(actor)
        self._idle.clear()
        self._busy, self._renewals = [], []
