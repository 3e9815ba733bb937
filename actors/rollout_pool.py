"""The rollout pool: groups of actors that make videos, whoever of them lives, is quick, or has just come.

Tasks are given out in order; one whose maker is lost is given to another, and as noise is keyed by (seed, step, group,
sample, sde step) and weights by digest, what the other makes is the same. Scheduling runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import ray

from actors.admission import Admission
from actors.cluster import is_dead
from actors.layout import Layout
from actors.loop_thread import LoopThread
from actors.membership import Membership
from actors.places import have
from actors.publisher import Publication, PublishError, name_of
from actors.rollout_group import RolloutGroup
from actors.seat import TASKS_AT_ONCE, Seat, SeatLostError, is_loss
from actors.stop import ENDS, reason
from actors.task_board import Made, Task, TaskBoard
from actors.uptime import Uptime
from actors.wait import wait_async
from sage_ray.config import Config
from sage_ray.types import GroupRequest

logger = logging.getLogger("sage_ray")
LOOK_S = 0.5
"""Between two looks at who is slow, hung or gone."""
LONGEST_LOOK_S = 5.0
"""Two looks that lie further apart tell that this process stood still."""
NODES_EVERY = 4
"""Looks between two at the nodes."""


class RolloutPool:
    """Rollout groups that come and go. A group makes a task with the weights of the task's publication, and only those.

    may_begin: asked before a task is begun; what it says may change any time. on_look: called twice a second, in the
    pool's thread. current: the publication that newcomers take.
    """

    def __init__(self, config: Config, layout: Layout):
        self.config, self.timeout_s = config, config.rollout.timeout_s
        self.load_s = max(config.publish.timeout_s, config.cluster.start_timeout_s)
        self.clock = Uptime(LONGEST_LOOK_S)
        self.board = TaskBoard(config.faults, self.timeout_s)
        self.may_begin: Callable[[], bool] = lambda: True
        self.on_look: Callable[[], None] = lambda: None
        self.current: Publication | None = None
        self._free: tuple[dict[Seat, None], ...] = tuple({} for _ in range(TASKS_AT_ONCE))
        self._broken_versions: set[int] = set()
        self._without_since: float | None = None
        self._away = False
        self.staff = Membership(config, layout, self.clock, self._admit, self._serving_changed)
        self.admission = Admission(config, self.board, self.staff)
        self.staff.failed, self.staff.broke = self._fail, self._break
        self._broken: BaseException | None = None
        self.loop = LoopThread("rollout-pool")
        self._sort_all()
        self.loop.call(lambda: self.staff.begin(self._watch()))

    @property
    def groups(self) -> list[RolloutGroup]:
        """Groups that are there, whether they serve yet or not."""
        return [seat.group for seat in list(self.staff.seats)]

    @property
    def members(self) -> list[ray.actor.ActorHandle]:
        """The actors of all groups."""
        return [member for group in self.groups for member in group.members]

    @property
    def idle_members(self) -> list[ray.actor.ActorHandle]:
        """Actors of groups that serve and have no task."""
        return [member for seat in self.staff.serving if not seat.tasks for member in seat.group.members]

    def ready(self) -> list[ray.ObjectRef]:
        """References that are done once every model is loaded."""
        return [ref for group in self.groups for ref in group.ready()]

    def leave(self) -> int:
        """All weights wait on the host; bytes freed on the devices."""
        self._away = True
        return sum(self.loop.run(self._ask_all("leave"), "rollout workers to leave", self.timeout_s))

    def enter(self) -> None:
        """All weights come back."""
        self.loop.run(self._ask_all("enter"), "rollout workers to come back", self.timeout_s)
        self._away = False

    async def _ask_all(self, verb: str) -> list[int]:
        """Answers of all actors; groups that give none are lost."""
        answers = await asyncio.gather(*(self._ask(seat, verb) for seat in list(self.staff.seats)))
        return [answer for some in answers for answer in some]

    async def _ask(self, seat: Seat, verb: str) -> list[int]:
        asked = [getattr(member, verb).remote() for member in seat.group.members]
        bound_s = self.timeout_s if seat.tasks else self.load_s
        try:
            return await seat.unless_lost(wait_async(asked, f"{seat.name} to {verb}", bound_s))
        except ENDS as error:
            self.staff.lose(seat, "deaths" if is_loss(error) else "errors", reason(error))
            return []

    def load_weights(self, publication: Publication) -> None:
        """Give every group that has no task a version, at once; the others take it with their next task."""
        what = f"weights of version {publication.version} on the rollout workers"
        self.loop.run(self._load(publication), what, self.timeout_s)

    def generate(self, requests: Sequence[GroupRequest], publication: Publication | None = None) -> list[Future[Made]]:
        """Groups made by a publication's weights (those last loaded); each is there as soon as its task is made.

        The futures raise RuntimeError when no worker can make them. Cancelling one cancels its task.
        """
        chosen = publication or self.current
        if chosen is None or any(one.policy_version != chosen.version for one in requests):
            version = None if chosen is None else chosen.version
            asked = sorted({one.policy_version for one in requests})
            raise ValueError(f"policy versions {asked} were asked for, the weights are of version {version}")
        size = self.config.rollout.groups_per_task
        tasks = [self.loop.submit(self._put(requests[i : i + size], chosen)) for i in range(0, len(requests), size)]
        return [self.loop.submit(_part(tasks[i // size], i % size)) for i in range(len(requests))]

    def replace(self, names: Sequence[str], words: str) -> None:
        """End the groups of these actors, which have failed at something, and start others."""
        self.loop.run(self._replace(frozenset(names), words), "rollout workers to be replaced", self.timeout_s)

    async def _replace(self, names: frozenset[str], words: str) -> None:
        for seat in list(self.staff.seats):
            if names.intersection(map(name_of, seat.group.members)):
                self.staff.lose(seat, "deaths", words)

    def resize(self, wanted: int) -> None:
        """From now on there should be so many groups."""
        self.loop.call(self.staff.resize, wanted)

    def close(self) -> None:
        """End the thread; the actors end with Ray. Raises nothing."""
        self.loop.close()

    async def _put(self, requests: Sequence[GroupRequest], publication: Publication) -> list[Made]:
        if self._broken is not None:
            raise RuntimeError(f"the rollout pool broke: {reason(self._broken)}") from self._broken
        task = self.board.put(requests, publication, asyncio.get_running_loop().create_future())
        self._dispatch()
        return await task.made

    def _dispatch(self) -> None:
        """Give out what waits, then to who is idle what takes too long elsewhere."""
        for task in list(self.board.waiting()):
            if not any(self._free) or not self.may_begin():
                return
            if (seat := self._free_for(task, self._free)) is not None:
                self._begin(seat, task)
        for task in self.board.late() if self._free[0] else ():
            if (seat := self._free_for(task, self._free[:1])) is not None:
                self._begin(seat, task)

    @staticmethod
    def _free_for(task: Task, free: Sequence[dict[Seat, None]]) -> Seat | None:
        """All first tasks come before any second one: few tasks must not pile up on few groups."""
        return next((seat for some in free for seat in some if seat.may_make(task)), None)

    def _begin(self, seat: Seat, task: Task) -> None:
        self.board.give(task, seat)
        seat.take(task)
        self._sort(seat)
        self.staff.begin(self._make(seat, task))

    async def _make(self, seat: Seat, task: Task) -> None:
        try:
            made = await seat.make(task, self.load_s)
        except SeatLostError:
            pass
        except PublishError as error:  # it came too late for this version
            logger.warning("%s: %s", seat.name, error)
            seat.unheard.add(task.publication.token)
        except ENDS as error:
            self._failed(seat, task, error)
        else:
            self.board.took(task, sum(one.info.denoise_s + one.info.decode_s for one in made))
            self._made(seat, task, made)
        finally:
            seat.drop(task)
            self.board.leave(task, seat)
            self._sort(seat)
            self.staff.look_at_leaving(seat)
            self._dispatch()

    def _failed(self, seat: Seat, task: Task, error: BaseException) -> None:
        """A dead worker is replaced; so is one whose code failed, as its device may be at fault. Two whose code failed
        on the same task are right."""
        died = is_loss(error) or any(map(is_dead, seat.group.members))  # the others of a group tell it in their words
        if not died:
            task.errors[seat] = reason(error)
            if len(task.errors) > 1 and not task.made.done():
                task.made.set_exception(error)
        self.staff.lose(seat, "deaths" if died else "errors", reason(error))

    def _made(self, seat: Seat, task: Task, made: list[Made]) -> None:
        """The first result counts. Videos that are not finite count when a second worker makes the same: then it is the
        policy that is at fault, else it is the worker that made more of them."""
        self.staff.losses = 0
        version, broken = task.publication.version, _num_broken(made)
        if task.made.done():
            return
        if broken and task.doubted is None and version not in self._broken_versions:
            task.doubted = seat, made
            if self.staff.serving == [seat]:
                self.staff.lose(seat, "faulty", f"made {broken} videos that are not finite")
            return
        if task.doubted is not None:
            other, theirs = task.doubted
            assert isinstance(other, Seat)
            if _num_broken(theirs) == broken:
                self._broken_versions = {version}
            else:
                blamed = other if _num_broken(theirs) > broken else seat
                self.staff.lose(blamed, "faulty", "made videos that are not finite where another's are")
                made = made if blamed is other else theirs
        task.made.set_result(made)
        if task.is_compared and not broken:
            self.admission.show(task, made[0])

    async def _load(self, publication: Publication) -> None:
        self.current = publication
        idle = [seat for seat in self.staff.serving if not seat.tasks]
        errors = await asyncio.gather(*(self._hold(seat, publication) for seat in idle))
        if idle and all(error and not is_loss(error) for error in errors):  # nobody can load it
            raise next(error for error in errors if error)
        for seat, error in zip(idle, errors, strict=True):
            if isinstance(error, PublishError):
                seat.unheard.add(publication.token)
            elif error is not None:
                self.staff.lose(seat, "deaths" if is_loss(error) else "errors", reason(error))

    async def _hold(self, seat: Seat, publication: Publication) -> BaseException | None:
        """Load a version; the error, after which the group is lost where others are not."""
        try:
            async with seat.holding(publication, self.load_s):
                return None
        except ENDS as error:
            return error

    async def _admit(self, seat: Seat) -> None:
        """A newcomer loads the current weights, and serves as soon as it may."""
        if self._away:
            await self._ask(seat, "leave")
        elif self.current is not None and (error := await self._hold(seat, self.current)) is not None:
            if not isinstance(error, PublishError):
                self.staff.lose(seat, "deaths", reason(error))
                return
        await self.admission.wait(seat)
        self.staff.admitted(seat)

    async def _watch(self) -> None:
        looks, core = 0, ray._private.worker.global_worker.core_worker
        while True:
            await asyncio.sleep(LOOK_S)
            if ray._private.worker.global_worker.core_worker is not core:
                return  # Ray has ended; asking a head that is gone would end this process
            self.clock.tick()
            for seat in list(self.staff.seats):
                self._look_at(seat)
            self._look_for_workers()
            self.on_look()
            if (looks := looks + 1) % NODES_EVERY == 0:
                await self.staff.look_at_nodes()
            self._dispatch()

    def _look_at(self, seat: Seat) -> None:
        if not seat.tasks:
            return
        task, seconds = seat.tasks[0], seat.first_s
        bound_s = self.board.bound_s(task)
        if seat.is_new:  # it compiles
            bound_s = min(self.timeout_s, max(bound_s, self.config.cluster.start_timeout_s))
        if seconds > bound_s:
            self.staff.lose(seat, "hung", f"nothing came within {bound_s:.0f} s", stuck=True)
        elif seat.serves and not task.is_late and self.board.is_slow(task, seconds):
            self.staff.counts["slow"] += 1
            logger.warning("%s is slow: %.1f s; its tasks are also given to who is idle", seat.name, seconds)
            for one in seat.tasks:
                one.is_late = True

    def _look_for_workers(self) -> None:
        """Work that nobody can do is not waited for without a bound."""
        needed = not self.staff.serving or self.admission.somebody_else_is_needed()
        if not (needed and self.board.open()):
            self._without_since = None
        elif self._without_since is None:
            self._without_since = self.clock()
        elif (seconds := self.clock() - self._without_since) > self.config.faults.no_worker_s:
            words = f"no rollout worker for {seconds:.0f} s (faults.no_worker_s), {self.staff.wanted} are wanted"
            self._fail(RuntimeError(f"{words}; {self.staff.last_loss}; {have()}"))

    def _break(self, error: BaseException) -> None:
        """An error of our own: nothing is made any more."""
        self._broken = error
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Everything that waits ends with this error."""
        for task in self.board.open():
            task.made.set_exception(error)

    def _serving_changed(self) -> None:
        self._sort_all()
        self._dispatch()

    def _sort_all(self) -> None:
        for seat in [*self.staff.seats, *self._free[0], *self._free[1]]:
            self._sort(seat)

    def _sort(self, seat: Seat) -> None:
        """By how many tasks it may still take."""
        for some in self._free:
            some.pop(seat, None)
        if seat.serves and len(seat.tasks) < TASKS_AT_ONCE:
            self._free[len(seat.tasks)][seat] = None


async def _part(task: Future[list[Made]], number: int) -> Made:
    return (await asyncio.wrap_future(task))[number]


def _num_broken(made: Sequence[Made]) -> int:
    return sum(not ok for one in made for ok in one.info.finite)
