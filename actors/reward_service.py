"""The reward service: reward workers behind a queue of single videos.

A video is scored as soon as it is there, while others are still being generated, in batches as large as the token
budget allows. A batch that fails, hangs or whose worker dies is tried once more, video by video, on another worker;
then a video is marked failed with its reason. Nothing is ever given a number that no scorer gave.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors import cluster
from actors.cluster import Layout, start_actor, wait_until_ready
from actors.loop_thread import LoopThread
from actors.reward_worker import RewardWorker
from actors.rollout_group import GroupRefs
from actors.stacks import stacks_of
from actors.wait import REPORT_S, wait_async, wait_future
from sage_ray.config import Config
from sage_ray.reward_parts import as_scores, failed
from sage_ray.rewards.build import check_runtime_env
from sage_ray.types import Scores, VideoScore

logger = logging.getLogger("sage_ray")
STRIKES = 3
"""So many speak against a worker before it is replaced."""
Value = TypeVar("Value")


@ray.remote(num_cpus=0, max_retries=0)
def _is_there(frames: Any) -> bool:
    """Raises ObjectLostError, as every use of lost frames does."""
    return frames is not None


class FramesLostError(RuntimeError):
    """Frames are in no object store any more: whoever held them has died."""


@dataclass(eq=False)
class _Video:
    """One video on its way. avoid: workers that failed on it, with the number of the batch; alone: to be scored by
    itself."""

    frames: ray.ObjectRef
    index: int
    prompt: str
    done: asyncio.Future[VideoScore]
    avoid: dict[int, int] = field(default_factory=dict)
    alone: bool = False


@dataclass(eq=False)
class _Worker:
    """One replica. struck: its batches since its last success of which another one could score a video."""

    number: int
    actor: ray.actor.ActorHandle
    struck: set[int] = field(default_factory=set)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class RewardService:
    """Replicas of the reward worker. Scheduling runs in a thread of its own, beside the controller's waits.

    Args: batch_videos: videos of one forward, from the token budget.
    """

    def __init__(self, config: Config, layout: Layout, batch_videos: int):
        self.config, self.layout, self.batch_videos = config, layout, batch_videos
        self.timeout_s = config.reward.timeout_s
        self.counts: Counter[str] = Counter()
        file = config.reward.runtime_env
        self._runtime_env = {} if file is None else check_runtime_env(Path(file))
        self._broken: BaseException | None = None
        self._noted: set[str] = set()
        self.parts: tuple[str, ...] = ()
        self.workers = [_Worker(number, self._start_worker(number)) for number in range(config.reward.num_workers)]
        self._queue: deque[_Video] = deque()
        self._seconds: deque[float] = deque(maxlen=64)
        self._num_submitted = self._num_finished = 0  # the caller's thread writes the first, the loop's the second
        self._num_failures = 0
        self._loop = LoopThread("reward-service")
        self._arrived = asyncio.Condition()

    def _start_worker(self, number: int) -> ray.actor.ActorHandle:
        return start_actor(
            RewardWorker,
            self.layout.gpus_reward,
            self.config,
            self.layout.device if self.layout.gpus_reward else "cpu",
            runtime_env=self._runtime_env,
            name=f"reward-{number}",
        )

    def start(self) -> tuple[str, ...]:
        """Wait until every worker has loaded its models; the names of the parts of a score."""
        refs = [worker.actor.ready.remote() for worker in self.workers]
        answers = wait_until_ready(refs, "the reward workers", self.config.cluster.start_timeout_s)
        if len(set(answers)) != 1:
            raise RuntimeError(f"the reward workers score different parts: {sorted(set(answers))}")
        self.parts = answers[0]
        for worker in self.workers:
            self._submit(self._serve(worker)).add_done_callback(self._served)
        return self.parts

    def close(self) -> None:
        """End the thread; the workers end with Ray. Raises nothing: it runs while another error is on its way."""
        self._loop.close()

    def leave(self) -> int:
        """Every worker's models wait on the host, once it has no work; bytes freed on the devices."""
        return sum(self._ask_all("leave"))

    def enter(self) -> None:
        """Every worker's models come back."""
        self._ask_all("enter")

    def _ask_all(self, verb: str) -> list[Any]:
        """Answers of all workers; none of workers on the CPU beside others on GPUs, which are in nobody's way."""
        if self.layout.device != "cpu" and not self.layout.gpus_reward:
            return []
        timeout_s = self.timeout_s + self.config.cluster.start_timeout_s  # one may just be started again
        return wait_future(self._submit(self._ask(verb)), f"the reward workers to {verb}", timeout_s)

    async def _ask(self, verb: str) -> list[Any]:
        return await asyncio.gather(*(self._ask_one(worker, verb) for worker in self.workers))

    async def _ask_one(self, worker: _Worker, verb: str) -> Any:
        async with worker.busy:
            try:
                return await asyncio.wrap_future(getattr(worker.actor, verb).remote().future())
            except ray.exceptions.RayActorError:  # it dies, and is started again for its next batch
                cluster.end_actor(worker.actor)
                return 0

    def _served(self, future: Future[Any]) -> None:
        """A worker's loop has ended. An error in it would leave videos waiting for ever, so it is told to the waits."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self._broken = error

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"the reward service broke: {type(self._broken).__name__}: {self._broken}")

    def score(self, refs: GroupRefs, group_size: int) -> Future[Scores]:
        """The group's Scores, some time; scoring starts when its frames are there."""
        self._num_submitted += group_size
        return self._submit(self._score_group(refs, group_size))

    @property
    def num_pending(self) -> int:
        """Videos that were submitted and have neither a score nor a reason yet."""
        return self._num_submitted - self._num_finished

    def result(self, future: Future[Value], what: str) -> Value:
        """Value of work that this service has a part in; ends with it when it breaks."""
        said = time.monotonic()
        while not future.done():
            wait([future], timeout=1.0)
            self._check_alive()
            if time.monotonic() - said >= REPORT_S:
                said = time.monotonic()
                logger.warning("still waiting for %s to be made and scored, %d videos wait", what, self.num_pending)
        return future.result()

    def check_failures(self, scores: Sequence[Scores]) -> None:
        """Say why videos have no score.

        Raises: RuntimeError when more than reward.max_failed_share of the videos failed, with the commonest reason.
        """
        reasons = Counter(reason for score in scores for reason in score.reasons if reason)
        num_failed, num_videos = sum(reasons.values()), sum(len(score.axes) for score in scores)
        for reason, count in reasons.most_common(3):
            logger.warning("%d videos have no score: %s", count, reason)
        if num_failed > self.config.reward.max_failed_share * num_videos:
            raise RuntimeError(
                f"{num_failed} of {num_videos} videos have no score (reward.max_failed_share="
                f"{self.config.reward.max_failed_share:g}); the commonest reason: {reasons.most_common(1)[0][0]}"
            )

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return self._loop.submit(work)

    async def _score_group(self, refs: GroupRefs, group_size: int) -> Scores:
        """Raises: FramesLostError."""
        videos = [
            _Video(refs.frames, index, refs.request.prompt.text, asyncio.get_running_loop().create_future())
            for index in range(group_size)
        ]
        await self._put(videos)
        try:
            found = await asyncio.gather(*(video.done for video in videos), return_exceptions=True)
        finally:  # nobody waits for the rest of a group that is called off
            for video in videos:
                self._num_finished += not video.done.done() or video.done.cancelled()
                video.done.cancel()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return as_scores([one for one in found if not isinstance(one, BaseException)])

    async def _put(self, videos: Sequence[_Video], front: bool = False) -> None:
        async with self._arrived:
            self._queue.extendleft(reversed(videos)) if front else self._queue.extend(videos)
            self._arrived.notify_all()

    async def _take(self, worker: _Worker) -> list[_Video]:
        """The next batch for a worker. A video avoids a worker that failed on it as long as there is another."""
        async with self._arrived:
            while True:
                for video in [one for one in self._queue if one.done.done()]:
                    self._queue.remove(video)
                alternatives = len(self.workers) > 1
                mine = [v for v in self._queue if not (alternatives and worker.number in v.avoid)]
                if mine:
                    break
                await self._arrived.wait()
            together = [v for v in mine if not v.alone][: self.batch_videos]
            batch = mine[:1] if mine[0].alone else together
            for video in batch:
                self._queue.remove(video)
            return batch

    async def _serve(self, worker: _Worker) -> None:
        """Score batch after batch on one worker, until it cannot be kept alive."""
        serves = True
        while serves:
            batch = await self._take(worker)
            async with worker.busy:
                serves = await self._serve_batch(worker, batch)
                if serves and len(worker.struck) >= STRIKES:
                    serves = await self._replace(worker, "fails where others do not")
        if not self.workers:
            await self._give_up()

    async def _serve_batch(self, worker: _Worker, batch: list[_Video]) -> bool:
        """Score one batch; whether the worker can take another. Holds no frames once it has returned."""
        ref = worker.actor.score.remote(
            [video.index for video in batch], [video.prompt for video in batch], *(video.frames for video in batch)
        )
        start, bound_s = time.monotonic(), self._bound_s(len(batch))
        try:
            (results,) = await wait_async([ref], f"{len(batch)} videos to be scored", bound_s)
        except ray.exceptions.ObjectLostError:
            await self._sort_out_lost(batch)
        except ray.exceptions.RayTaskError as error:  # first: it also is what its cause is, such as a death
            await self._retry(batch, worker, str(error).strip().splitlines()[-1], "errors")
        except TimeoutError:
            await self._retry(batch, worker, f"no score within {bound_s:.0f} s", "timeouts")
            for words in await asyncio.to_thread(stacks_of, [worker.actor]):
                logger.warning("%s", words)
            return await self._replace(worker, "hangs")
        except ray.exceptions.RayActorError:
            await self._retry(batch, worker, "the reward worker died", "deaths")
            return await self._replace(worker, "died")
        except ray.exceptions.RayError as error:
            await self._retry(batch, worker, str(error).strip().splitlines()[-1], "errors")
        else:
            self._seconds.append((time.monotonic() - start) / len(batch))
            again = []
            for video, result in zip(batch, results, strict=True):
                if result.reason and not video.avoid:
                    again.append(video)
                else:
                    self._strike(video, result)
                    self._finish(video, result)
                    if not result.reason:
                        worker.struck.clear()
            if again:
                await self._retry(again, worker, "", "errors")
        return True

    def _bound_s(self, num_videos: int) -> float:
        """When a worker with so many videos counts as hung."""
        if not self._seconds:
            return self.timeout_s
        faults, usual_s = self.config.faults, statistics.median(self._seconds) * num_videos
        return min(self.timeout_s, max(faults.hung_min_s, faults.hung_factor * usual_s))

    def _strike(self, video: _Video, result: VideoScore) -> None:
        """A video that one worker could not score and another one could speaks against the first."""
        for worker in self.workers:
            if worker.number in video.avoid and not result.reason:
                worker.struck.add(video.avoid[worker.number])

    async def _sort_out_lost(self, batch: list[_Video]) -> None:
        """Some frames are in no object store any more: tell who waits for them; the others go back."""
        kept = []
        for video in [one for one in batch if not one.done.done()]:
            try:
                await asyncio.wrap_future(_is_there.remote(video.frames).future())
                kept.append(video)
            except ray.exceptions.ObjectLostError as error:
                self.counts["lost_frames"] += 1
                self._num_finished += 1
                video.done.set_exception(FramesLostError(str(error)))
            except ray.exceptions.RayError:
                kept.append(video)
        await self._put(kept, front=True)

    async def _retry(self, batch: list[_Video], worker: _Worker, reason: str, kind: str) -> None:
        """Once more, each by itself; a video that has failed before is given up."""
        self.counts[kind] += 1
        self._num_failures += 1
        again = [video for video in batch if not video.avoid]
        for video in batch:
            if video.avoid:
                self._finish(video, failed(reason, len(self.parts)))
        for video in again:
            video.avoid[worker.number] = self._num_failures
            video.alone = True
        self.counts["retries"] += len(again)
        await self._put(again, front=True)

    def _finish(self, video: _Video, result: VideoScore) -> None:
        if not video.done.done():
            self._num_finished += 1
            if result.note:
                self.counts["measure_failures"] += 1
                if result.note not in self._noted:
                    self._noted.add(result.note)
                    logger.warning("a measure has no score: %s", result.note)
            self.counts["failed"] += bool(result.reason)
            video.done.set_result(result)

    async def _replace(self, worker: _Worker, why: str) -> bool:
        """Start a worker in place of one; False when it does not come up, then it serves no more."""
        cluster.end_actor(worker.actor)
        logger.warning("reward worker %d %s: it is started again", worker.number, why)
        worker.actor, worker.struck = self._start_worker(worker.number), set()
        try:
            ready = asyncio.wrap_future(worker.actor.ready.remote().future())
            await asyncio.wait_for(ready, self.config.cluster.start_timeout_s)
            return True
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("reward worker %d did not come up again: %s", worker.number, error)
            cluster.end_actor(worker.actor)
        self.workers.remove(worker)
        await self._put([])  # the others may now take what avoided them
        return False

    async def _give_up(self) -> None:
        """No worker is left: every waiting video has failed, and so does every later one."""
        while True:
            async with self._arrived:
                while not self._queue:
                    await self._arrived.wait()
                waiting = list(self._queue)
                self._queue.clear()
            for video in waiting:
                self._finish(video, failed("no reward worker is left", len(self.parts)))
