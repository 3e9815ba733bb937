"""Who is in the rollout pool: groups that join, leave, are lost and replaced. Lives in the pool's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray
from ray._private.state import state as cluster_state

from actors.layout import Layout
from actors.places import have
from actors.rollout_group import RolloutGroup, end_group, start_group
from actors.seat import Seat
from actors.stacks import stacks_of
from actors.stop import ENDS, reason
from actors.wait import WaitTimeoutError, wait_async
from sage_ray.busy_share import BusyShare
from sage_ray.config import Config

logger = logging.getLogger("sage_ray")
FAULTS = ("deaths", "hung", "errors", "faulty", "slow")
LONGEST_PAUSE_S = 30.0
"""Between two tries to start a group that does not come up."""


class Membership:
    """Keeps the number of rollout groups at `wanted`.

    Args: clock: of the seats. admit: called with a group whose models are loaded; decides when it serves. told: gets
        lines for people. changed: called when who serves has changed.

    seats: groups that were started and not lost. counts: what has happened, by kind. losses: groups lost since a task
    was last finished.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        clock: Callable[[], float],
        admit: Callable[[Seat], Awaitable[None]],
        changed: Callable[[], None],
    ):
        self.config, self.layout, self._clock, self._admit, self._changed = config, layout, clock, admit, changed
        self.wanted = config.rollout.num_workers
        self.busy = BusyShare(self.wanted)
        self.counts: Counter[str] = Counter()
        self.losses, self.last_loss = 0, ""
        self.tell: Callable[[str], None] = logger.warning
        self.failed: Callable[[BaseException], None] = lambda error: None
        self.broke: Callable[[BaseException], None] = lambda error: None
        self._joining: dict[int, asyncio.Task[None]] = {}
        self._doing: set[asyncio.Task[None]] = set()
        self.seats = [Seat(n, start_group(config, layout, n), clock, self.busy) for n in range(self.wanted)]
        for seat in self.seats:
            seat.serves = True

    @property
    def serving(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.serves]

    def metrics(self) -> dict[str, float]:
        """What has happened so far, and how many groups there are."""
        failures = {f"failures/rollout_{kind}": float(self.counts[kind]) for kind in FAULTS}
        moves = {f"rollout_pool/{kind}": float(self.counts[kind]) for kind in ("joined", "left", "drained")}
        sizes = {"rollout_pool/serving": float(len(self.serving)), "rollout_pool/wanted": float(self.wanted)}
        return failures | moves | sizes

    def resize(self, wanted: int) -> None:
        """From now on there should be so many groups."""
        self.wanted = wanted
        self.fill()

    def fill(self) -> None:
        """Start groups that are missing; let those go that are too many, the newest first."""
        staying = [seat for seat in self.seats if not seat.leaves]
        for _ in range(self.wanted - len(staying) - len(self._joining)):
            used = {seat.number for seat in self.seats} | self._joining.keys()
            number = next(n for n in range(len(used) + 1) if n not in used)
            self._joining[number] = self.begin(self._join(number))
        too_many = len(staying) + len(self._joining) - self.wanted
        for number in sorted(self._joining, reverse=True)[: max(0, too_many)]:
            self._joining.pop(number).cancel()
            too_many -= 1
        newest_first = sorted(staying, key=lambda seat: (seat.serves, -seat.number))
        for seat in newest_first[: max(0, too_many)]:
            self.retire(seat)

    def retire(self, seat: Seat) -> None:
        """It ends after the tasks that it has."""
        seat.serves, seat.leaves = False, True
        self._serving_changed()
        if not seat.tasks:
            self._end(seat)
            self.counts["left"] += 1

    def look_at_leaving(self, seat: Seat) -> None:
        """To be called when a task of it has ended."""
        if seat.leaves and not seat.tasks and seat in self.seats:
            self.retire(seat)

    def lose(self, seat: Seat, kind: str, words: str, stuck: bool = False) -> None:
        """End a group that cannot go on, and start another. Args: stuck: its stacks are printed first."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        seat.lose()
        self.losses, self.last_loss = self.losses + 1, f"{seat.name}: {words}"
        self.counts[kind] += 1
        self.tell(f"warning: {seat.name} is replaced ({kind}): {words}")
        self.begin(self._bury(seat, stuck))
        self._serving_changed()
        self._look_at_losses()
        self.fill()

    def _look_at_losses(self) -> None:
        """All may be lost at once, with their nodes; when those who follow are lost too, the run ends."""
        most = self.config.faults.max_losses
        if self.losses > most + self.wanted:
            self.failed(
                RuntimeError(
                    f"{self.losses} rollout workers were lost and no task was finished (faults.max_losses={most} more "
                    f"than the {self.wanted} that are wanted); the last one was {self.last_loss}"
                )
            )

    async def look_at_nodes(self) -> None:
        """Groups on nodes that are about to go are replaced by others elsewhere, and end after the tasks they have."""
        try:
            leaving = await asyncio.to_thread(cluster_state.get_draining_nodes)
            if leaving:
                for seat in self.seats:
                    seat.nodes = seat.nodes or seat.group.nodes()
        except ray.exceptions.RayError as error:  # Ray's head may come back
            logger.warning("no news of the nodes: %s", error)
            return
        if not leaving:
            return
        for seat in [one for one in self.seats if not one.leaves]:
            if seat.nodes & leaving.keys():
                self.counts["drained"] += 1
                self.tell(f"{seat.name} leaves: its node is drained")
                self.retire(seat)
        self.fill()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do some work beside the rest. An error in it is a fault of ours and ends everything that waits."""
        doing = asyncio.ensure_future(work)
        self._doing.add(doing)
        doing.add_done_callback(self._look_at_end)
        return doing

    def _look_at_end(self, done: asyncio.Task[None]) -> None:
        self._doing.discard(done)
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("the rollout pool broke", exc_info=error)
            self.broke(error)

    async def _join(self, number: int) -> None:
        """Start a group and bring it to where it serves; another try follows one that failed."""
        group: RolloutGroup | None = None
        start_s = self.config.cluster.start_timeout_s
        try:
            if self.losses:
                await asyncio.sleep(min(LONGEST_PAUSE_S, 0.5 * 2**self.losses))
            group = await asyncio.to_thread(start_group, self.config, self.layout, number)
            seat = Seat(number, group, self._clock, self.busy)
            await wait_async(group.ready(), f"{seat.name} to come up", start_s)
        except WaitTimeoutError as error:  # there is no place for it: that is nobody's fault
            self._give_up(number, group)
            self.tell(f"{error}; {have()}")
        except ENDS as error:
            self._give_up(number, group)
            self.losses, self.last_loss = self.losses + 1, f"rollout-{number} did not come up: {reason(error)}"
            self.tell(f"warning: {self.last_loss}")
        except asyncio.CancelledError:
            self._give_up(number, group)
            raise
        else:
            del self._joining[number]
            self.seats.append(seat)
            self.counts["joined"] += 1
            await self._admit(seat)
            return
        self._look_at_losses()
        self.fill()

    def _give_up(self, number: int, group: RolloutGroup | None) -> None:
        if self._joining.get(number) is asyncio.current_task():
            del self._joining[number]
        if group is not None:
            end_group(group, self.config, number, gives_place_back=True)

    async def _bury(self, seat: Seat, stuck: bool) -> None:
        try:
            for words in await asyncio.to_thread(stacks_of, seat.group.members) if stuck else ():
                logger.warning("%s", words)
        finally:
            end_group(seat.group, self.config, seat.number, gives_place_back=False)

    def _end(self, seat: Seat) -> None:
        self.seats.remove(seat)
        seat.lose()
        end_group(seat.group, self.config, seat.number, gives_place_back=True)

    def admitted(self, seat: Seat) -> None:
        """It serves from now on."""
        if seat in self.seats and not seat.leaves:
            seat.serves = True
            self._serving_changed()
            self.tell(f"{seat.name} has joined, {len(self.serving)} of {self.wanted} serve")

    def _serving_changed(self) -> None:
        self.busy.resize(max(1, len(self.serving)))
        self._changed()
