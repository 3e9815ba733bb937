"""Alarms about values that left their range: one when it happens, and again only after the value came back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from sage_ray.agreement import allowed_disagreement
from sage_ray.config import Config
from sage_ray.models.packed_velocity import TORCH_DTYPES

DIVERGENCE = "divergence"
"""Kind of the alarms that Divergence gives."""


class Range(NamedTuple):
    """What a metric must keep. low, high: inclusive."""

    kind: str
    metric: str
    low: float
    high: float
    advice: str


class Alarm(NamedTuple):
    """kind: divergence, or that of a Range; message: one line."""

    kind: str
    message: str


def ranges(config: Config) -> tuple[Range, ...]:
    """The ranges of a run, from watch.* and the settings that they follow from."""
    watch = config.watch
    allowed = allowed_disagreement(
        config.loss.max_disagreement, config.loss.clip_range, TORCH_DTYPES[config.model.dtype]
    )
    age = float(config.overlap.max_policy_age if config.overlap.enabled else 0)
    return (
        Range("kl_share", "kl/gradient_share", 0.0, watch.max_kl_share, "the KL outweighs the reward: lower kl.weight"),
        Range("clip_share", "loss/clip_share", 0.0, watch.max_clip_share, "most pairs are clipped: smaller steps"),
        Range(
            "agreement", "agreement/max_abs", 0.0, watch.max_agreement_share * allowed,
            f"the run stops at {allowed:.3g} (loss.max_disagreement)",
        ),
        Range("policy_age", "policy/age", 0.0, age, "groups are older than overlap.max_policy_age"),
        Range(
            "effective_sample_size", "policy/effective_sample_size", watch.min_effective_samples, math.inf,
            "a few pairs carry the gradient: smaller steps, or a lower overlap.max_policy_age",
        ),
    )  # fmt: skip


class Alarms:
    """Fed once per iteration. counts: alarms so far, by kind, those of the divergence too."""

    def __init__(self, ranges: tuple[Range, ...]):
        self.ranges = ranges
        self.counts = dict.fromkeys((DIVERGENCE, *(one.kind for one in ranges)), 0)
        self._outside: set[str] = set()

    def update(self, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Takes one iteration's metrics; returns the alarms that are new. A metric that is missing, None or not finite
        changes nothing."""
        found = []
        for one in self.ranges:
            value = metrics.get(one.metric)
            if value is None or not math.isfinite(value):
                continue
            if one.low <= value <= one.high:
                self._outside.discard(one.kind)
            elif one.kind not in self._outside:
                self._outside.add(one.kind)
                self.counts[one.kind] += 1
                bound = f"below {one.low:.4g}" if value < one.low else f"above {one.high:.4g}"
                found.append(Alarm(one.kind, f"{one.metric} is {value:.4g}, {bound}: {one.advice}"))
        return found

    def diverged(self, message: str) -> Alarm:
        """An alarm of the divergence, counted."""
        self.counts[DIVERGENCE] += 1
        return Alarm(DIVERGENCE, message)
