"""Newcomers in the rollout pool: who may make videos beside those who do."""

from __future__ import annotations

import asyncio

import ray

from actors.membership import Membership
from actors.publisher import PublishError
from actors.seat import Seat, is_loss
from actors.stop import ENDS, reason
from actors.task_board import Made, Task, TaskBoard
from actors.wait import wait_async
from sage_ray.agreement import allowed_disagreement
from sage_ray.config import Config
from sage_ray.models.packed_velocity import TORCH_DTYPES

LOOK_S = 0.5
"""Between two looks at whether anybody is left to be compared with."""


class Admission:
    """A newcomer serves once it gives another's trajectory the log-probs that the other gave, as far as the learner's
    gate demands. Its log-probs of its own videos would tell nothing: they depend on the noise alone."""

    def __init__(self, config: Config, board: TaskBoard, staff: Membership):
        self.config, self.board, self.staff = config, board, staff
        loss, dtype = config.loss, TORCH_DTYPES[config.model.dtype]
        self.allowed = allowed_disagreement(loss.max_disagreement, loss.clip_range, dtype)
        self._newcomers: dict[Seat, asyncio.Future[tuple[Task, Made]]] = {}

    def show(self, task: Task, made: Made) -> None:
        """A group that counts was made: whoever waits is compared with it."""
        for newcomer in self._newcomers.values():
            if not newcomer.done():
                newcomer.set_result((task, made))

    async def wait(self, seat: Seat) -> None:
        """Until a newcomer may serve, or is lost."""
        while not await self._may_serve(seat):
            pass

    async def _may_serve(self, seat: Seat) -> bool:
        """After the next group that is made, or half a second: whether it is replayed as it was made. None is needed
        where nobody serves, or where those who do cannot make what waits."""
        if not self.staff.serving or seat.is_lost or seat.leaves or self.somebody_else_is_needed():
            return True
        group = self._newcomers[seat] = asyncio.get_running_loop().create_future()
        await asyncio.wait([group], timeout=LOOK_S)
        del self._newcomers[seat]
        return group.done() and await self._is_alike(seat, *group.result())

    def somebody_else_is_needed(self) -> bool:
        """Whether some task may be made by nobody who serves."""
        serving = self.staff.serving
        return any(not any(seat.may_make(task) for seat in serving) for task in self.board.waiting())

    async def _is_alike(self, seat: Seat, task: Task, made: Made) -> bool:
        """A newcomer that replays otherwise, or not at all, is lost."""
        try:
            async with seat.holding(task.publication, self.config.cluster.start_timeout_s):
                asked = [member.disagreement.remote(made.refs.trajectory) for member in seat.group.members]
                replaying = wait_async(asked, f"{seat.name} to replay a group", self.config.cluster.start_timeout_s)
                difference = (await seat.unless_lost(replaying))[0]
        except PublishError:
            seat.unheard.add(task.publication.token)
            return False
        except ray.exceptions.ObjectLostError:  # gone with who made it
            return False
        except ENDS as error:
            self.staff.lose(seat, "deaths" if is_loss(error) else "errors", reason(error))
            return False
        if difference > self.allowed:
            words = f"replays another's log-probs with a difference of {difference:.3g}, {self.allowed:.3g} is allowed"
            self.staff.lose(seat, "faulty", words)
        return difference <= self.allowed
