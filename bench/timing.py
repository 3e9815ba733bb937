"""Seconds and memory of one thing at a time, and the lines in which a bench says them."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

GIB = 2**30


@dataclass
class Row:
    """One measured thing. seconds: median, None where it failed; first_s: the first call, with compilation; flops:
    useful work of one call; peak_bytes: of GPU memory during the measured calls, what was held before included;
    floor_s, shipped_s: what it is compared with; values: anything else."""

    part: str
    name: str
    frames: int
    seconds: float | None = None
    first_s: float | None = None
    flops: float | None = None
    peak_bytes: int | None = None
    floor_s: float | None = None
    shipped_s: float | None = None
    error: str | None = None
    values: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """The row as one line."""
        head = f"{self.part:8} {self.frames:4} frames  {self.name:52}"
        if self.error is not None:
            return f"{head} FAILED: {self.error}"
        words = [] if self.seconds is None else [f"{self.seconds:9.4f} s"]
        if self.seconds and self.flops:
            words.append(f"{self.flops / self.seconds / 1e12:6.1f} TFLOP/s")
        if self.peak_bytes is not None:
            words.append(f"{self.peak_bytes / GIB:5.1f} GiB")
        if self.seconds and self.floor_s:
            words.append(f"{self.seconds / self.floor_s:.2f} x floor")
        if self.seconds and self.shipped_s:
            words.append(f"{self.shipped_s / self.seconds:.2f} x faster than as shipped")
        if self.first_s is not None:
            words.append(f"first call {self.first_s:.1f} s")
        return "  ".join([head, *words, *(f"{key} {value:.4g}" for key, value in self.values.items())])


class Report:
    """Rows that are printed as they come (not when quiet), and kept as JSON after every one."""

    def __init__(self, path: Path | None, facts: dict, quiet: bool = False):
        self.path, self.facts, self.quiet, self.rows = path, facts, quiet, []

    def add(self, row: Row) -> Row:
        """Print and keep one row."""
        self.rows.append(row)
        if not self.quiet:
            print(row.text(), flush=True)
        if self.path is not None:
            content = {**self.facts, "rows": [asdict(row) for row in self.rows]}
            self.path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        return row

    def seconds(self, part: str, name: str, frames: int) -> float | None:
        """Of a row that is there and did not fail."""
        found = [row.seconds for row in self.rows if (row.part, row.name, row.frames) == (part, name, frames)]
        return found[-1] if found else None


def free() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def once(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, by CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def measure(row: Row, run: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 1) -> Row:
    """Fill a row with the median of `repeats` calls; a call that fails (out of memory) ends in `error`, not here."""
    try:
        first = [once(run, device) for _ in range(warm_up)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row.seconds = statistics.median([once(run, device) for _ in range(repeats)])
    except RuntimeError as error:
        row.error = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else repr(error)
        free()
        return row
    row.first_s = first[0] if first else None
    row.peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return row
