"""The table of everything that was sampled: one parquet file per iteration, so a crash loses no finished iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sage_ray.row_file import read_rows, write_rows


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
        return write_rows(self.folder / f"iteration_{iteration:06d}.parquet", RolloutRow, rows)


def read_rollouts(folder: str | Path) -> list[RolloutRow]:
    """All finished iterations in order; ValueError when there are none."""
    files = sorted(Path(folder).glob("iteration_*.parquet"))
    if not files:
        raise ValueError(f"{folder}: holds no iteration_*.parquet")
    return [row for file in files for row in read_rows(file, RolloutRow)]
