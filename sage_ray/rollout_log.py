"""The table of everything that was sampled: one parquet file per iteration, so a crash loses no finished iteration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet


@dataclass(frozen=True)
class RolloutRow:
    """One video. A score that failed is None, and so is the advantage of a video that left its group."""

    iteration: int
    prompt: str
    prompt_index: int
    seed: int | None
    """The prompt file's seed, if it has one."""
    group: int
    sample: int
    """Position in the group."""
    policy_version: int
    """Optimizer steps of the policy that sampled it."""
    reward: float | None
    advantage: float | None
    generate_s: float | None
    score_s: float | None
    VQ: float | None = None
    MQ: float | None = None
    TA: float | None = None
    failure: str | None = None
    """Why there is no score."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """Further parts of the reward, and measures."""
    frames: dict[str, float | None] = field(default_factory=dict)
    """Statistics of the pixels (frame_statistics)."""
    truth: float | None = None
    """Held-out judge, total and axes, where the run has one."""
    truth_VQ: float | None = None
    truth_MQ: float | None = None
    truth_TA: float | None = None


ARROW = {
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "str": pyarrow.string(),
    "dict[str, float | None]": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
}
MAPS = tuple(column.name for column in dataclasses.fields(RolloutRow) if str(column.type).startswith("dict"))

SCHEMA = pyarrow.schema(
    pyarrow.field(column.name, ARROW[column.type.removesuffix(" | None")], nullable=column.type.endswith(" | None"))
    for column in dataclasses.fields(RolloutRow)
)
"""Columns of the file; the annotations above are text because of the __future__ import."""


class RolloutLog:
    """Writes folder/iteration_000123.parquet; each file appears complete. A repeated iteration replaces its file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, iteration: int, rows: Sequence[RolloutRow]) -> Path:
        """Writes the rows of one iteration and returns the file.

        Raises:
            ValueError: a row of another iteration, or a value that its column cannot hold.
        """
        if others := [row.iteration for row in rows if row.iteration != iteration]:
            raise ValueError(f"iteration={others[0]}: every row must be of iteration {iteration}")
        columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
        columns |= {name: [list(values.items()) for values in columns[name]] for name in MAPS}
        try:
            table = pyarrow.table(columns, schema=SCHEMA)
        except pyarrow.ArrowException as error:
            raise ValueError(f"rollout rows of iteration {iteration}: {error}") from error
        file = self.folder / f"iteration_{iteration:06d}.parquet"
        partial = file.with_suffix(".partial")
        pyarrow.parquet.write_table(table, partial, compression="zstd")
        os.replace(partial, file)
        return file


def read_rollouts(folder: str | Path) -> list[RolloutRow]:
    """All finished iterations in order; ValueError when there are none."""
    files = sorted(Path(folder).glob("iteration_*.parquet"))
    if not files:
        raise ValueError(f"{folder}: holds no iteration_*.parquet")
    rows = [row for file in files for row in pyarrow.parquet.read_table(file, schema=SCHEMA).to_pylist()]
    return [RolloutRow(**row | {name: dict(row[name]) for name in MAPS}) for row in rows]
