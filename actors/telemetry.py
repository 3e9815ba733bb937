"""Everything by which people watch a training run, fed in one place with an iteration's metrics.

Prometheus, run page, alarms, trace, structured log and W&B. None of it may end a run: what fails is told in the log,
once a kind, and the run goes on.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from actors import cluster
from actors.actor_times import ActorTimes
from actors.clocked import role_of
from actors.exporter import Exporter
from actors.layout import Layout
from actors.wait import wait_all
from sage_ray.alarms import Alarms, ranges
from sage_ray.checks import CheckedRun
from sage_ray.environment import environment, write_environment
from sage_ray.progress import Progress
from sage_ray.run_page.page import RunPage
from sage_ray.run_page.run_data import append_alarm, read_alarms
from sage_ray.structured_log import LogFile, note
from sage_ray.throughput import Work, iteration_work
from sage_ray.trace import Tracer
from sage_ray.wandb_log import WandbLog
from sage_ray.watched import Sample, samples

logger = logging.getLogger("sage_ray")
FAULTS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    ray.exceptions.RayError,
)
"""What a fault of watching may be; it must not end what is watched."""
FAILURES = ("errors", "timeouts", "deaths", "retries", "failed", "measure_failures")
"""Kinds that are shown before there are any."""
SAMPLE_S = 1.0
RATE_S, LAST_ANSWERS_S = 20.0, 3.0
"""Bounds of the waits for a device's rate, once, and for the last reports at the end."""


class Telemetry:
    """Of one run; made before its actors are. The controller calls `start` when all models are loaded, `judge` before
    an iteration's metrics are written and `iteration` after that, `evaluated` after an evaluation, and `close`."""

    def __init__(self, run: CheckedRun, layout: Layout, progress: Progress):
        config = self.config = run.config
        cluster.started.clear()
        self.layout, self.progress, self.output = layout, progress, Path(config.output_dir)
        self.output.mkdir(parents=True, exist_ok=True)
        self.log = LogFile(self.output, self.output.name)
        progress.listeners.append(self._line)
        self.alarms, self.exporter = Alarms(ranges(config)), Exporter(self.output.name)
        for alarm in read_alarms(self.output):  # of a run that goes on
            self.alarms.counts[alarm["kind"]] += 1
        self.actors = ActorTimes(self.output, progress.clock)
        self.page = RunPage(self.output, config.num_iterations, config.watch.page_interval_s)
        self.wandb = WandbLog(config) if config.watch.wandb is not None else None
        self.tracer = Tracer(config.watch.trace_iteration, config.num_iterations, self.output)
        self.queue_depth: Callable[[], int] = lambda: 0
        self._rate: float | None = None
        self._told: set[str] = set()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="telemetry", daemon=True)
        self._mark_s = time.monotonic()

    def start(self, num_trained: int, queue_depth: Callable[[], int]) -> None:
        """All models are loaded. Args: num_trained: trained steps of a group. queue_depth: videos without a score."""
        self.work, self.queue_depth = iteration_work(self.config, num_trained), queue_depth
        self._guard("the run's environment", self._write_environment)
        self._guard("metrics", lambda: self.exporter.export([*self._counts(), *map(_no_failure, FAILURES)]))
        self._guard("the run page", lambda: self.page.write("running", force=True))
        self._sampler.start()
        self._mark_s = time.monotonic()

    def diverged(self, iteration: int, warning: str) -> None:
        """A warning of the divergence, which the terminal has."""
        alarm = self.alarms.diverged(warning)
        self._guard("an alarm", lambda: append_alarm(self.output, iteration, alarm))

    def judge(self, iteration: int, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """What is added to an iteration's metrics: rates, and which alarms began with it."""
        note(step=iteration, version=int(metrics.get("policy_version") or 0))
        alarms = self.alarms.update(metrics)
        for alarm in alarms:
            self.progress.message(f"warning: {alarm.message}")
            self._guard("an alarm", lambda alarm=alarm: append_alarm(self.output, iteration, alarm))
        began = {f"alarms/{one.kind}": float(one.kind in {a.kind for a in alarms}) for one in self.alarms.ranges}
        now = time.monotonic()
        seconds, self._mark_s = now - self._mark_s, now
        return began | self._rates(self.work, seconds)

    def iteration(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """An iteration is finished and written."""
        self._guard("metrics", lambda: self.exporter.export(self._samples(iteration, metrics)))
        self._guard("the actors' clocks", lambda: self._clocks(iteration))
        self._guard("the run page", lambda: self.page.write("running"))
        self._guard("W&B", lambda: self.wandb and self.wandb.write(iteration, metrics))

    def evaluated(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """An evaluation after so many iterations is written; its time is no iteration's."""
        self._mark_s = time.monotonic()
        self._guard("metrics", lambda: self.exporter.export(samples(metrics)))
        self._guard("the run page", lambda: self.page.write("running"))
        self._guard("W&B", lambda: self.wandb and self.wandb.write(iteration, metrics))

    def close(self) -> None:
        """The last reports, page and lines. Raises nothing: it runs while another error may be on its way."""
        error = sys.exception()
        state = "finished" if error is None else f"stopped: {type(error).__name__}: {error}"
        self._ended.set()
        if self._sampler.is_alive():
            self._sampler.join(timeout=2 * SAMPLE_S)
        self._guard("the actors' clocks", self._last_clocks)
        self._guard("the run page", lambda: self.page.write(state, force=True))
        if self.wandb is not None:
            self._guard("W&B", self.wandb.close)
        self.log.write(logging.INFO, state)
        if self._line in self.progress.listeners:
            self.progress.listeners.remove(self._line)
        self.log.close()

    def _line(self, text: str) -> None:
        self.log.write(logging.WARNING if text.startswith("warning:") else logging.INFO, text)

    def _samples(self, iteration: int, metrics: Mapping[str, float | None]) -> Iterator[Sample]:
        yield Sample("sage_iteration", {}, float(iteration))
        yield Sample("sage_videos", {}, float(self.work.videos))
        yield from samples(metrics)
        yield from self._counts()

    def _counts(self) -> Iterator[Sample]:
        for kind, count in self.alarms.counts.items():
            yield Sample("sage_alarms", {"kind": kind}, float(count))

    def _rates(self, work: Work, seconds: float) -> dict[str, float]:
        """Names of what depends on time end in _s."""
        if seconds <= 0:
            return {}
        if self._rate is None:
            self._rate = math.nan
            self._guard("the devices' rate", self._measure)
        values = {"videos": work.videos, "tokens": work.tokens, "flops": work.flops}
        rates = {f"throughput/{name}_per_s": value / seconds for name, value in values.items()}
        return rates | {"throughput/mfu": rates["throughput/flops_per_s"] / self._rate}

    def _measure(self) -> None:
        """The peak of all devices of the run together, asked of a learner rank once."""
        learner = next(actor for name, actor in cluster.started.items() if role_of(name) == "learner")
        asked = learner.device_rate.remote(self.layout.device, self.config.model.dtype)
        device = wait_all([asked], "the rate of a device", RATE_S)[0]
        count = self._num_devices()
        self._rate = device.peak_flops * count
        how = "measured by a matrix product" if device.measured else "of its data sheet"
        words = f"{count} x {device.name}, {device.peak_flops / 1e12:.3g} TFLOP/s each, {how}"
        write_environment(self.output, environment(self._cluster() | {"peak of the devices": words}))

    def _num_devices(self) -> int:
        if self.layout.device == "cpu":
            return max(1, int(ray.cluster_resources().get("CPU", 1)))
        rollout, reward, learner = self.config.rollout, self.config.reward, self.config.learner
        share = rollout.num_workers * rollout.sp_size * self.layout.gpus_rollout
        share += reward.num_workers * self.layout.gpus_reward + learner.num_ranks * self.layout.gpus_learner
        return max(1, math.ceil(share - 1e-6))

    def _write_environment(self) -> None:
        write_environment(self.output, environment(self._cluster()))

    def _cluster(self) -> dict[str, str]:
        kept = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU") or k.startswith("accelerator")}
        resources = ", ".join(f"{name} {value:g}" for name, value in sorted(kept.items()))
        return {"device": self.layout.device, "nodes": str(len(ray.nodes())), "resources": resources}

    def _clocks(self, iteration: int) -> None:
        for name, asked, report in self.actors.collect():
            self.tracer.add(name, asked, report)
        self.tracer.write_when_complete(iteration)
        for name, report in self.actors.ask(iteration).items():
            self.tracer.add(name, iteration, report)

    def _last_clocks(self) -> None:
        """Everybody's time since the last iteration, where there was one."""
        if ray.is_initialized():
            for name, asked, report in self.actors.collect(LAST_ANSWERS_S):
                self.tracer.add(name, asked, report)
        self.tracer.write_when_complete(self.config.num_iterations + 1)

    def _sample(self) -> None:
        """In a thread: what changes between iterations."""
        while not self._ended.wait(SAMPLE_S):
            self._guard("live metrics", self._sample_once)

    def _sample_once(self) -> None:
        live: list[Sample] = [Sample("sage_queue_depth", {"queue": "reward"}, float(self.queue_depth()))]
        self.exporter.export([*live, *self.actors.states()])
        self.exporter.refresh()

    def _guard(self, what: str, act: Callable[[], Any]) -> None:
        """Do it; tell the first fault of each kind."""
        try:
            act()
        except FAULTS as error:
            kind = f"{what}: {type(error).__name__}"
            if kind not in self._told:
                self._told.add(kind)
                logger.warning("%s could not be written, the run goes on", what, exc_info=error)


def _no_failure(kind: str) -> Sample:
    return Sample("sage_failures", {"kind": kind}, 0.0)
