"""The size of the rollout pool while a run goes on: asked for by `launch.py scale`, or by the load."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import ray

from actors import demand, scale
from actors.layout import Layout
from actors.rollout_pool import RolloutPool
from sage_ray.config import Config
from sage_ray.pool_size import Load, wanted_groups
from sage_ray.progress import Progress
from sage_ray.types import GroupInfo

logger = logging.getLogger("sage_ray")
EVERY = 4
"""Looks of the pool between two at what was asked for."""


class Elastic:
    """Between `start` and `close` a run listens for a number of rollout groups, and follows its load where
    rollout.max_workers is given. What is asked for by hand stays until the next word."""

    def __init__(self, config: Config, layout: Layout, pool: RolloutPool, progress: Progress):
        self.config, self.layout, self.pool, self.progress = config, layout, pool, progress
        self._looks, self._asked, self._listens = 0, None, False
        self._changed_s = time.monotonic()

    def start(self) -> None:
        """Once the run's actors are there. One of many runs of a job (actors/sweep.py) is asked for nothing."""
        if ray.get_runtime_context().get_actor_id() is not None:
            return
        scale.listen(Path(self.config.output_dir).name)
        self._listens = True
        demand.ask(self.config, self.layout, self.pool.staff.wanted)
        self.pool.on_look = self._look

    def close(self) -> None:
        """A second call does nothing."""
        if self._listens:
            self._listens = False
            self.pool.on_look = lambda: None
            scale.stop_listening()
            demand.withdraw(self.config)

    def after_iteration(self, infos: Sequence[GroupInfo], update_s: float, num_pending: int) -> None:
        """Follow the load. Args: infos: of the iteration's groups. num_pending: videos without a score."""
        settings = self.config.rollout
        if settings.min_workers is None or settings.max_workers is None or self._asked is not None:
            return
        work_s = sum(info.denoise_s + info.decode_s for info in infos)
        load = Load(work_s, update_s, num_pending / self.config.reward.max_pending)
        bounds, since_s = (settings.min_workers, settings.max_workers), time.monotonic() - self._changed_s
        wanted = wanted_groups(load, self.pool.staff.wanted, *bounds, since_s, settings.scale_cooldown_s)
        self._resize(wanted, f"rollouts take {work_s:.1f} s of work, an update {update_s:.1f} s")

    def _look(self) -> None:
        """In the pool's thread."""
        self._looks += 1
        if self._looks % EVERY:
            return
        try:
            self._look_at_wish()
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:  # Ray's head may come back
            logger.warning("no news of launch.py scale: %s", error)

    def _look_at_wish(self) -> None:
        asked = scale.desired_workers()
        if asked is not None and asked != self._asked:
            self._asked = asked
            most = self.config.rollout.max_workers or asked
            self._resize(min(asked, most), f"launch.py scale asked for {asked}")

    def _resize(self, wanted: int, why: str) -> None:
        before = self.pool.staff.wanted
        if wanted != before:
            self._changed_s = time.monotonic()
            self.progress.message(f"rollout groups: {wanted} from now on, {before} before: {why}")
            self.pool.resize(wanted)
            demand.ask(self.config, self.layout, wanted)
