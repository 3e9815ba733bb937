"""A stored run: what tables and figures need of it, small enough to be committed (about 60 kB).

A folder with run.json (how it was made), config.yaml, metrics.jsonl (six digits, without what only debugging needs),
evaluation.parquet (one row per evaluated video) and, of some runs, videos/.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_ray.config import Config
from sage_ray.config_load import load_config, to_yaml
from sage_ray.evaluation_rows import EvaluationRow
from sage_ray.metrics import FILE_NAME as METRICS
from sage_ray.metrics import read_metrics
from sage_ray.row_file import read_rows

NOTE, CONFIG, ROWS, VIDEOS = "run.json", "config.yaml", "evaluation.parquet", "videos"
DROPPED = ("frames/", "reward_service/", "rollout/", "turns/")
"""Metrics that no table or figure reads."""
DIGITS = 6


@dataclass(frozen=True)
class StoredRun:
    """note: run.json; metrics: by iteration; rows: of the evaluation after training."""

    path: Path
    note: dict[str, Any]
    config: Config
    metrics: list[dict[str, Any]]
    rows: list[EvaluationRow]


def store(output: Path, place: Path, note: dict[str, Any], keep_videos: bool) -> None:
    """Copy what counts of a finished run's folder to `place`, which appears complete or not at all."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / NOTE).write_text(json.dumps(note, indent=1) + "\n", "utf-8")
    config = load_config([output / CONFIG], [])
    config.output_dir = place.name  # where a run lay on the machine that made it says nothing to others
    (partial / CONFIG).write_text(to_yaml(config), "utf-8")
    shutil.copyfile(output / ROWS, partial / ROWS)
    lines = read_metrics(output / METRICS) if (output / METRICS).exists() else []
    with (partial / METRICS).open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(_short(line)) + "\n")
    if keep_videos:
        shutil.copytree(output / VIDEOS, partial / VIDEOS)
    shutil.rmtree(place, ignore_errors=True)  # what another process stored of the same run at the same time
    os.replace(partial, place)


def _short(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics with fewer names and digits; times keep theirs."""
    kept = {name: value for name, value in line.items() if not name.startswith(DROPPED)}
    short = {n: float(f"{v:.{DIGITS}g}") if isinstance(v, float) and n != "time_s" else v for n, v in kept.items()}
    return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in short.items()}


def is_stored(runs: Path, key: str) -> bool:
    """Whether the run is there, whole."""
    return (runs / key / NOTE).is_file()


def read_run(path: Path) -> StoredRun:
    """A stored run. Raises: ValueError, OSError."""
    note = json.loads((path / NOTE).read_text("utf-8"))
    config = load_config([path / CONFIG], [])
    return StoredRun(path, note, config, read_metrics(path / METRICS), read_rows(path / ROWS, EvaluationRow))


def keys(runs: Path) -> Iterator[str]:
    """Keys of all stored runs."""
    for note in sorted(runs.rglob(NOTE)):
        yield note.parent.relative_to(runs).as_posix()
