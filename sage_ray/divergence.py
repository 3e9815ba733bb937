"""Warns when the reward rises while what it should stand for does not: reward hacking, seen from a run's metrics."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

REWARD = "reward/total"
JUDGES = ("truth/total", "evaluation/held_out/reward/total", "evaluation/held_out/truth/total")
"""Metrics that must not fall while REWARD rises; each may be missing."""
FRAMES = "frames/"
"""Metrics that begin so must stay near their start while REWARD rises (see frame_statistics.py)."""
NUM_BASE, NUM_RECENT = 10, 5
"""Values of a frame statistic that make its start, and its present."""
FEWEST = 6
"""Points of a fitted line: four degrees of freedom for its error."""


class Trend(NamedTuple):
    """Least-squares line through points: its rise from the first to the last, and that in standard errors."""

    change: float
    errors: float


class Divergence:
    """Fed once per iteration with metrics; answers with the warnings that are new.

    A metric that is missing, None or not finite adds no point. Nothing is said in the first `window` iterations. Then,
    with the iterations counted from 1 and all trends least-squares lines over iterations:

    - A judge (JUDGES) parts from the reward when, over the same iterations, the line through reward/total rises by
      more than `rise_errors` of its standard errors and the line through the judge falls by more than `fall_errors` of
      its own. The iterations are the last `window`; from the judge's sixth last point on where it has fewer than six
      in them, as evaluations may. Either line needs six points.
    - A frame statistic (frames/...) parts from the reward when reward/total rises so over the last `window`, and the
      mean of its last 5 values is more than `frame_deviations` from the mean of its first 10. The unit is the standard
      deviation (n - 1) of those 10, at least 1 % of the size of their mean: a statistic that hardly varies in itself
      may move a little. The 5 come after the 10.

    A cause (one judge or statistic) is told once. It may be told again after it has cleared: a judge when its line
    falls by at most half of `fall_errors`, a statistic when it is within half of `frame_deviations`; a pause of the
    reward alone does not clear it.

    With the defaults and independent noise in three judges and six statistics, of 200 runs of 200 iterations none
    warned where the reward was noise too, and 5 where it rose all the time. The standard errors presume such noise, so
    slow waves in a judge count as trends.
    """

    def __init__(
        self, window: int = 20, rise_errors: float = 3.0, fall_errors: float = 4.5, frame_deviations: float = 6.0
    ) -> None:
        """window: iterations, at least 6; the others as above, positive. Raises: ValueError naming an argument."""
        if window < FEWEST:
            raise ValueError(f"window={window}: must be at least {FEWEST} iterations")
        for name, value in (
            ("rise_errors", rise_errors),
            ("fall_errors", fall_errors),
            ("frame_deviations", frame_deviations),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: must be positive")
        self.window, self.rise_errors = window, rise_errors
        self.fall_errors, self.frame_deviations = fall_errors, frame_deviations
        self._iteration = 0
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._told: set[str] = set()

    def update(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Takes one iteration's metrics, others among them. Returns new warnings, judges first, then by name."""
        self._iteration += 1
        for name, value in metrics.items():
            if (name in (REWARD, *JUDGES) or name.startswith(FRAMES)) and value is not None and math.isfinite(value):
                self._points.setdefault(name, []).append((self._iteration, float(value)))
        if self._iteration < self.window:
            return []
        statistics = sorted(name for name in self._points if name.startswith(FRAMES))
        found = [self._judge(name) for name in JUDGES] + [self._statistic(name) for name in statistics]
        return [warning for warning in found if warning is not None]

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Take what a run has written so far, in order: an iteration's line (it has "alarms/divergence") ends a look, a
        line of an evaluation belongs to the next. Returns what belongs to the coming one."""
        noted: dict[str, Any] = {}
        for line in lines:
            noted |= line
            if "alarms/divergence" in line:
                self.update(noted)
                noted = {}
        return noted

    def _judge(self, name: str) -> str | None:
        points = self._points.get(name, [])
        first = self._iteration - self.window + 1
        if len(points) >= FEWEST:
            first = min(first, points[-FEWEST][0])
        judge = trend(_since(points, first))
        if judge is None or judge.errors >= -self.fall_errors / 2:
            self._told.discard(name)
        if judge is None or judge.errors >= -self.fall_errors or name in self._told:
            return None
        if (rise := self._rise(first)) is None:
            return None
        self._told.add(name)
        return (
            f"{rise}, but {name} fell by {-judge.change:.4g} ({-judge.errors:.1f} standard "
            "errors): the policy may exploit the reward"
        )

    def _statistic(self, name: str) -> str | None:
        values = [value for _, value in self._points[name]]
        if len(values) < NUM_BASE + NUM_RECENT:
            return None
        base, recent = values[:NUM_BASE], math.fsum(values[-NUM_RECENT:]) / NUM_RECENT
        start = math.fsum(base) / NUM_BASE
        deviation = math.sqrt(math.fsum((value - start) ** 2 for value in base) / (NUM_BASE - 1))
        unit = max(deviation, 0.01 * abs(start), 1e-12)
        away = (recent - start) / unit
        if abs(away) <= self.frame_deviations / 2:
            self._told.discard(name)
        if abs(away) <= self.frame_deviations or name in self._told:
            return None
        if (rise := self._rise(self._iteration - self.window + 1)) is None:
            return None
        self._told.add(name)
        return (
            f"{rise}, but {name} went from {start:.4g} to {recent:.4g} ({away:+.1f} standard "
            "deviations of its start): the policy may exploit the reward"
        )

    def _rise(self, first: int) -> str | None:
        """Words for the reward's rise since iteration first, None when it does not rise enough."""
        reward = trend(_since(self._points.get(REWARD, []), first))
        if reward is None or reward.errors <= self.rise_errors:
            return None
        where = f"iterations {first} to {self._iteration}"
        return f"{where}: {REWARD} rose by {reward.change:.4g} ({reward.errors:.1f} standard errors)"


def trend(points: Sequence[tuple[int, float]]) -> Trend | None:
    """The least-squares line through (iteration, value) points; None for fewer than six.

    b = S_xy / S_xx with standard error sqrt(S_res / (n - 2) / S_xx); errors = b / error, infinite for points on a line.
    A rise below 1e-9 of the largest value is rounding, and counts as none.
    """
    if len(points) < FEWEST:
        return None
    x, y = np.array(points, np.float64).T
    x, centred = x - x.mean(), y - y.mean()
    slope = float(x @ centred / (x @ x))
    change = slope * float(x[-1] - x[0])
    tiny = 1e-9 * float(np.abs(y).max())
    if abs(change) <= tiny:
        return Trend(0.0, 0.0)
    residual = centred - slope * x
    error = math.sqrt(float(residual @ residual) / (len(x) - 2) / float(x @ x))
    if error * float(x[-1] - x[0]) <= tiny:
        return Trend(change, math.copysign(math.inf, change))
    return Trend(change, slope / error)


def _since(points: Sequence[tuple[int, float]], first: int) -> Sequence[tuple[int, float]]:
    """Points of the iterations from first on."""
    return points[bisect.bisect_left(points, (first,)) :]
