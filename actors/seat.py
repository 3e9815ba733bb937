"""A rollout group in the asynchronous ring: it swaps weights between its tasks, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from actors.publisher import Publication
from actors.rollout_group import GroupRefs, RolloutGroup
from actors.wait import wait_async
from sage_ray.busy_share import BusyShare
from sage_ray.types import GroupInfo, GroupRequest


class Seat:
    """A rollout group, the weights it holds, and how many tasks it has.

    held: version and digest of the weights, None while they change. busy: counts the group as working while it has a
    task.
    """

    def __init__(self, group: RolloutGroup, held: tuple[int, str], timeout_s: float, busy: BusyShare):
        self.group, self.timeout_s = group, timeout_s
        self.held: tuple[int, str] | None = held
        self._busy, self._tasks, self._changed = busy, 0, asyncio.Condition()

    @asynccontextmanager
    async def holding(self, publication: Publication) -> AsyncIterator[None]:
        """Inside the group holds a publication's weights. It is given them once no task of it needs others."""
        wanted = publication.version, publication.digest
        async with self._changed:
            await self._changed.wait_for(lambda: self.held == wanted or not self._tasks)
            if self.held != wanted:
                self.held = None
                await self._load(publication)
                self.held = wanted
            self._tasks += 1
        try:
            yield
        finally:
            async with self._changed:
                self._tasks -= 1
                self._changed.notify_all()

    async def generate(self, requests: Sequence[GroupRequest]) -> list[tuple[GroupRefs, GroupInfo]]:
        """Make some groups of the publication that is held."""
        groups, others = self.group.generate(requests)
        what = f"groups {requests[0].group} to {requests[-1].group} of iteration {requests[0].step + 1}"
        with self._busy.working(self):
            infos, _ = await asyncio.gather(
                wait_async([group.info for group in groups], what, self.timeout_s),
                wait_async(others, what, self.timeout_s),
            )
        return list(zip(groups, infos, strict=True))

    async def _load(self, publication: Publication) -> None:
        """Every actor of the group takes the weights. Raises RuntimeError when one confirms anything else."""
        what = f"weights of version {publication.version} on a rollout group"
        publication.check_loaded(await wait_async(publication.load_on(self.group.members), what, self.timeout_s))
