"""Ray's metrics of this process, made from the table in sage_ray/watched.py.

Ray forgets a gauge that was not set again within about two of its report intervals (a second and more each), so that
what has ended disappears. A run's last values should stay while it goes on: `refresh` sets them again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ray.util.metrics import Counter, Gauge

from sage_ray.watched import ACTOR_PHASES, ACTOR_WALL, FAMILIES, Sample


class Exporter:
    """Gauges and counters of a run; those of the actors' clocks are each actor's own."""

    def __init__(self, run: str):
        """run: label of every value."""
        self.run = run
        self._held: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()
        self._metrics = {
            family.name: (Counter if family.kind == "counter" else Gauge)(
                family.name, family.description, ("run", *family.labels)
            )
            for family in FAMILIES.values()
            if family.name not in (ACTOR_PHASES, ACTOR_WALL)
        }

    def export(self, samples: Iterable[Sample]) -> None:
        """Set gauges, and let counters rise. From any thread."""
        for sample in samples:
            metric, labels = self._metrics[sample.family], {"run": self.run, **sample.labels}
            if isinstance(metric, Gauge):
                with self._lock:
                    self._held[sample.family, tuple(labels.items())] = sample.value
                metric.set(sample.value, labels)
            elif sample.value > 0:
                metric.inc(sample.value, labels)

    def refresh(self) -> None:
        """Set every gauge to its last value again."""
        with self._lock:
            held = list(self._held.items())
        for (family, labels), value in held:
            self._metrics[family].set(value, dict(labels))
