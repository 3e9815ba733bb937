"""Parquet files of rows that are frozen dataclasses: the dataclass is the schema."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet

Row = TypeVar("Row")

ARROW = {
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "str": pyarrow.string(),
    "dict[str, float | None]": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
}
"""Annotations that a column may have, each also with `| None`; they are text because of the __future__ import."""


def schema(kind: type[Any]) -> pyarrow.Schema:
    """Columns of a file of such rows."""
    return pyarrow.schema(
        pyarrow.field(column.name, ARROW[column.type.removesuffix(" | None")], nullable=column.type.endswith(" | None"))
        for column in dataclasses.fields(kind)
    )


def write_rows(file: Path, kind: type[Row], rows: Sequence[Row]) -> Path:
    """Writes the rows and returns the file; it appears complete and replaces one that is there.

    Raises:
        ValueError: a value that its column cannot hold.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in schema(kind).names}
    columns |= {name: [list(values.items()) for values in columns[name]] for name in _maps(kind)}
    try:
        table = pyarrow.table(columns, schema=schema(kind))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file}: {error}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    pyarrow.parquet.write_table(table, partial, compression="zstd")
    os.replace(partial, file)
    return file


def read_rows(file: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that `write_rows` wrote."""
    rows = pyarrow.parquet.read_table(file, schema=schema(kind)).to_pylist()
    return [kind(**row | {name: dict(row[name]) for name in _maps(kind)}) for row in rows]


def _maps(kind: type[Any]) -> list[str]:
    return [column.name for column in dataclasses.fields(kind) if str(column.type).startswith("dict")]
