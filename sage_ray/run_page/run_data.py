"""What the run page shows, read from the files of a run's folder; a growing file is read on from where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_ray.alarms import Alarm
from sage_ray.evaluation import EvaluatedPolicy, EvaluatedSet, preview_places
from sage_ray.evaluation_rows import EvaluationRow, evaluated_policy
from sage_ray.metrics import FILE_NAME as METRICS
from sage_ray.row_file import read_rows
from sage_ray.run_files import ACTORS, ALARMS

MAX_POINTS = 300
"""Of a curve; of a longer one every n-th is shown."""


@dataclass(frozen=True)
class Clip:
    """A video of an evaluation. file: relative to the run's folder; scores: name -> value, nan where it failed."""

    name: str
    file: str
    scores: dict[str, float]
    failure: str


@dataclass(frozen=True)
class Comparison:
    """A prompt before training and at the newest evaluation; after is None while there is only one."""

    prompts: str
    prompt: str
    before: Clip
    after: Clip | None


class GrowingFile:
    """Complete JSON lines that were added since the last `read`. A file that became shorter is read anew."""

    def __init__(self, file: Path):
        self.file, self._place = file, 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(new lines, whether they replace all before)."""
        if not self.file.exists():
            return [], False
        again = self.file.stat().st_size < self._place
        with self.file.open("rb") as stream:
            stream.seek(0 if again else self._place)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._place = (0 if again else self._place) + len(whole)
        return [json.loads(line) for line in whole.splitlines()], again


@dataclass
class RunData:
    """curves: metric -> step -> value; actors: name -> its newest line; alarms: lines."""

    folder: Path
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    actors: dict[str, dict[str, Any]] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    start_s: float | None = None
    end_s: float | None = None
    comparisons: list[Comparison] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._files = {name: GrowingFile(self.folder / name) for name in (METRICS, ACTORS, ALARMS)}
        self._evaluated: tuple[str, ...] = ()

    def refresh(self) -> None:
        """Read what was added. Raises: OSError, ValueError for a damaged file."""
        lines, again = self._files[METRICS].read()
        if again:
            self.curves, self.step = {}, 0
        for line in lines:
            self._take(line)
        lines, again = self._files[ACTORS].read()
        self.actors = ({} if again else self.actors) | {line["actor"]: line for line in lines}
        lines, again = self._files[ALARMS].read()
        self.alarms = ([] if again else self.alarms) + lines
        files = tuple(sorted(path.name for path in (self.folder / "evaluations").glob("iteration_*.parquet")))
        if files != self._evaluated:
            self.comparisons = list(comparisons(self.folder, [Path(file).stem for file in files]))
            self._evaluated = files

    def _take(self, line: dict[str, Any]) -> None:
        step, self.end_s = line.pop("step"), line.pop("time_s")
        self.start_s = self.end_s if self.start_s is None else self.start_s
        self.step = max(self.step, step)
        for name, value in line.items():
            if value is not None:
                self.curves.setdefault(name, {})[step] = value

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) in order, thinned; the last one stays."""
        found = sorted(self.curves.get(name, {}).items())
        stride = -(-len(found) // MAX_POINTS) or 1
        kept = found[::stride]
        return kept if not found or kept[-1] == found[-1] else [*kept, found[-1]]

    def ends(self, name: str) -> tuple[float, float] | None:
        """First and newest value."""
        found = sorted(self.curves.get(name, {}).items())
        return (found[0][1], found[-1][1]) if found else None


def comparisons(folder: Path, names: list[str]) -> Iterator[Comparison]:
    """Previews of the first and the newest evaluation, of the sets that both have."""
    ends = [_policy(folder, name) for name in ([names[0], names[-1]] if len(names) > 1 else names)]
    if not ends:
        return
    for which, first in ends[0].sets.items():
        last = ends[1].sets.get(which) if len(ends) > 1 else None
        for number, place in enumerate(preview_places(len(first.prompts))):
            before = _clip(folder, names[0], which, first, number, place)
            after = None if last is None else _clip(folder, names[-1], which, last, number, place)
            if before is not None:
                yield Comparison(which, first.prompts[place].text, before, after)


def _policy(folder: Path, name: str) -> EvaluatedPolicy:
    return evaluated_policy(name, read_rows(folder / "evaluations" / f"{name}.parquet", EvaluationRow))


def _clip(folder: Path, name: str, which: str, evaluated: EvaluatedSet, number: int, place: int) -> Clip | None:
    file = f"videos/{name}/{which}_{number:02d}.mp4"
    if place >= len(evaluated.prompts) or not (folder / file).exists():
        return None
    video = place * evaluated.videos_per_prompt
    scores = {score: float(values[video]) for score, values in evaluated.scores.items()}
    return Clip(f"iteration {int(name.partition('_')[2])}", file, scores, evaluated.failures[video])


def read_alarms(folder: Path) -> list[dict[str, Any]]:
    """The alarms of a run so far."""
    return GrowingFile(folder / ALARMS).read()[0]


def append_alarm(folder: Path, iteration: int, alarm: Alarm) -> None:
    """Add an alarm to folder/alarms.jsonl."""
    line = {"step": iteration, "time_s": round(time.time(), 3), "kind": alarm.kind, "message": alarm.message}
    with (folder / ALARMS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
