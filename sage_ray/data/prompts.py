"""Prompt files and the order in which training visits them.

CSV as in the official program (column prompt, optional index and seed, other columns ignored), txt, jsonl, parquet.
Every defect of a file is an error that names file, place and rule; nothing is skipped except blank lines.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from sage_ray.types import Prompt

WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(\.0*)?")


class Row(NamedTuple):
    """One prompt as its file has it, unchecked; place says where, for messages."""

    place: str
    values: dict[str, Any]


def read_prompts(paths: Sequence[str | Path]) -> list[Prompt]:
    """Reads and concatenates prompt files.

    A prompt without an index gets its position in the concatenation, so that indices stay distinct over files.

    Raises:
        ValueError: names file, line or row, and the rule.
    """
    if not paths:
        raise ValueError("prompts: no prompt file is named")
    prompts: list[Prompt] = []
    for path in map(Path, paths):
        count = len(prompts)
        prompts += (_prompt(path, row, count + offset) for offset, row in enumerate(_rows(path)))
        if len(prompts) == count:
            raise ValueError(f"{path}: holds no prompts")
    return prompts


class PromptCursor:
    """Deterministic order of prompts: every epoch is a new permutation, a pure function of (seed, epoch).

    Holds no position: `at(step)` is a pure function, so a run resumes with its step alone.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, num_prompts: int) -> None:
        """prompts: at least one; seed: >= 0; num_prompts: prompts per step, may exceed the number of prompts."""
        if not prompts:
            raise ValueError("prompts: must hold at least one prompt")
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed}: must be at least 0")
        self.prompts, self.seed, self.num_prompts = tuple(prompts), seed, num_prompts
        self._order = functools.lru_cache(maxsize=4)(self._permutation)

    def at(self, step: int) -> list[Prompt]:
        """The num_prompts prompts of step >= 0; a step may straddle two epochs."""
        if step < 0:
            raise ValueError(f"step={step}: must be at least 0")
        positions = range(step * self.num_prompts, (step + 1) * self.num_prompts)
        epochs = (divmod(position, len(self.prompts)) for position in positions)
        return [self.prompts[self._order(epoch)[place]] for epoch, place in epochs]

    @property
    def state(self) -> dict[str, int | str]:
        """What must be equal for two cursors to give the same prompts; compared when a run resumes."""
        content = json.dumps([(prompt.index, prompt.text, prompt.seed) for prompt in self.prompts])
        digest = hashlib.sha256(content.encode()).hexdigest()
        return {"seed": self.seed, "num_prompts": self.num_prompts, "prompts_sha256": digest}

    def _permutation(self, epoch: int) -> np.ndarray:
        """int [len(prompts)]. Raw Philox words, whose stream numpy keeps the same in every version."""
        words = np.random.Philox(np.random.SeedSequence((self.seed, epoch))).random_raw(len(self.prompts))
        return np.argsort(words, kind="stable")


def _rows(path: Path) -> Iterator[Row]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown kind of prompt file, must end in one of {', '.join(READERS)}")
    if not path.is_file():
        raise ValueError(f"{path}: the prompt file does not exist")
    return reader(path)


def _prompt(path: Path, row: Row, position: int) -> Prompt:
    """Checks the values of one row."""
    text = row.values.get("prompt")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{path}, {row.place}: prompt={text!r} must be text")
    if text is None or not text.strip():
        raise ValueError(f"{path}, {row.place}: the prompt is empty")
    index, seed = (_integer(path, row, name) for name in ("index", "seed"))
    return Prompt(index=position if index is None else index, text=text, seed=seed)


def _integer(path: Path, row: Row, name: str) -> int | None:
    """An optional whole number; "42.0" is one, because pandas writes it so for a column with gaps."""
    value = row.values.get(name)
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str) and WHOLE_NUMBER.fullmatch(value.strip()):
        return int(value.partition(".")[0])
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    raise ValueError(f"{path}, {row.place}: {name}={value!r} must be a whole number")


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: must be UTF-8, has byte 0x{content[error.start]:02x}") from None


def _csv_rows(path: Path) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    filled = filter(None, reader)
    try:
        header = next(filled, [])
        if header and "prompt" not in header:
            raise ValueError(f"{path}: must have a column named prompt, has {', '.join(header)}")
        for cells in filled:
            place = f"line {reader.line_num}"
            if len(cells) > len(header):
                raise ValueError(
                    f"{path}, {place}: {len(cells)} cells under {len(header)} columns; quote a prompt that has commas"
                )
            yield Row(place, dict(zip(header, cells, strict=False)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(place, line) of the lines that are not blank."""
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield f"line {number}", line.strip()


def _txt_rows(path: Path) -> Iterator[Row]:
    return (Row(place, {"prompt": line}) for place, line in _lines(path))


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for place, line in _lines(path):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, {place}: not valid JSON: {error}") from error
        if not isinstance(values, dict) or "prompt" not in values:
            raise ValueError(f"{path}, {place}: must be a JSON object with the key prompt")
        yield Row(place, values)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if "prompt" not in names:
            raise ValueError(f"{path}: must have a column named prompt, has {', '.join(names)}")
        table = file.read(columns=[name for name in ("prompt", "index", "seed") if name in names])
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
    for number, values in enumerate(table.to_pylist(), start=1):
        yield Row(f"row {number}", values)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _csv_rows,
    ".txt": _txt_rows,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}
"""Suffix -> reader of its rows."""
