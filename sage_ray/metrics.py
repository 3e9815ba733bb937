"""Metrics of a run: one JSON line per write in metrics.jsonl, and TensorBoard scalars beside it.

Names are "area/what": reward/total, reward/VQ, truth/total, evaluation/held_out/reward/total ... (see report.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to folder/metrics.jsonl and folder/tensorboard; a resumed run goes on in the same files."""

    def __init__(self, folder: str | Path, first_step: int | None = None) -> None:
        """folder is made when missing. A half-written last line, left by a crash, is cut off.

        Args: first_step: of a resumed run; TensorBoard forgets points from there on, which an earlier process wrote.
        """
        self.folder, self._first_step = Path(folder), first_step
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / FILE_NAME).open("a+b")
        self._cut_partial_line()
        self._board: SummaryWriter | None = None

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Writes one line at once; a value that is not finite (or None) is null and has no TensorBoard point.

        Raises:
            ValueError: a metric named step or time_s, or a closed writer.
            TypeError: a value that is no number.
        """
        if reserved := {"step", "time_s"} & set(metrics):
            raise ValueError(f"metric {min(reserved)!r}: the name is taken by the writer")
        numbers = {name: None if value is None else float(value) for name, value in metrics.items()}
        numbers = {
            name: None if value is None or not math.isfinite(value) else value for name, value in numbers.items()
        }
        line = json.dumps({"step": int(step), "time_s": round(time.time(), 3), **numbers}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        for name, value in numbers.items():
            if value is not None:
                self._tensorboard().add_scalar(name, value, step)

    def close(self) -> None:
        """Ends both files; a second call does nothing."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensorboard(self) -> SummaryWriter:
        """Imported at the first write: it costs about a second that a dry run should not pay."""
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._first_step)
        return self._board

    def _cut_partial_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)


def read_lines(file: str | Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl as they were written. A last line without an end is a write in progress and is left out.

    Raises:
        ValueError: names file, line and rule.
    """
    lines = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            values = json.loads(line)
            values["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: must be a JSON object with the key step") from error
        lines.append(values)
    return lines


def read_metrics(file: str | Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl merged by step, in order of steps; where a step has a metric twice the later counts.

    A step is written twice when evaluation adds to it. Raises: as `read_lines`.
    """
    steps: dict[int, dict[str, Any]] = {}
    for values in read_lines(file):
        steps[values["step"]] = steps.get(values["step"], {}) | values
    return [steps[step] for step in sorted(steps)]
