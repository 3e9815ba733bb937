"""The one reader of safetensors: headers, shards and tensors, without torch until a tensor is read.

A header is read as the safetensors library reads it and nothing more is believed: the file is as long as the header
says, every tensor's bytes are what dtype and shape come to, and the tensors fill the file without gap or overlap. So a
half-written, truncated or edited file is found from a few kilobytes of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sage_ray.json_object import read_object

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
DTYPES = ("F32", "BF16", "F16")
"""What a component may be stored in, by safetensors' names: all of its tensors in the same one."""
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library takes no longer header."""
METADATA = "__metadata__"
MAX_NAMED = 3


class Entry(NamedTuple):
    """A tensor as the header describes it; `start` counts from the end of the header."""

    dtype: str
    shape: Shape
    start: int
    num_bytes: int


class Header(NamedTuple):
    """tensors: name -> Entry. metadata: the texts that the file's writer left."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """The header of a safetensors file whose length and offsets agree with it.

    Raises: ValueError naming file and, where there is one, key: missing, not readable, half-written, inconsistent.
    """
    try:
        if not file.is_file():
            what = "must be a file, is something else" if file.exists() else "the file does not exist"
            raise ValueError(f"{file}: {what}")
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little") if len(prefix) == 8 else size_bytes
            if 8 + header_bytes > size_bytes:
                raise ValueError(f"{file}: half-written: {size_bytes} bytes end inside the safetensors header")
            if header_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"{file}: the safetensors header is not readable: {header_bytes} bytes are too many")
            text = stream.read(header_bytes)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    header = _parsed(file, text)
    expected_bytes = 8 + header_bytes + sum(entry.num_bytes for entry in header.tensors.values())
    if size_bytes != expected_bytes:
        raise ValueError(f"{file}: half-written: {size_bytes} bytes, its header says {expected_bytes}")
    return header


def _parsed(file: Path, text: bytes) -> Header:
    try:
        content = json.loads(text, object_pairs_hook=_once)
        metadata = content.pop(METADATA, {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError(f"{METADATA} must hold texts")
        tensors = {name: _entry(name, described) for name, described in content.items()}
        _check_gapless(tensors)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        words = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"{file}: the safetensors header is not readable: {words}") from error
    return Header(tensors, metadata)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"key {key} comes {count} times")
    return dict(pairs)


def _entry(name: str, described: dict[str, Any]) -> Entry:
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    whole = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not whole or any(type(number) is not int or number < 0 for number in (*shape, *offsets)):
        raise ValueError(f"key {name} has shape {shape} and data_offsets {offsets}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"key {name} has dtype {dtype}, must be of {[*ITEM_BYTES]}")
    num_bytes = ITEM_BYTES[dtype] * math.prod(shape)
    if offsets[1] - offsets[0] != num_bytes:
        raise ValueError(f"key {name} has {offsets[1] - offsets[0]} bytes, {dtype} of {shape} needs {num_bytes}")
    return Entry(dtype, tuple(shape), offsets[0], num_bytes)


def _check_gapless(tensors: dict[str, Entry]) -> None:
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            raise ValueError(f"key {name} starts at byte {entry.start}, the tensors before it end at {end}")
        end += entry.num_bytes


class TensorFiles:
    """The tensors of `folder/stem.safetensors`, or of the shards that `stem.safetensors.index.json` lists.

    shapes, dtypes, bytes, files: by key. main: the index, or the one file. Only headers are read until `read`.
    """

    def __init__(self, folder: Path, stem: str):
        """Raises: ValueError naming file and key: what `read_header` refuses, a key in two files, shards that are not
        what the index says, an index beside a whole file, pickled weights only."""
        self.folder, self.stem = folder, stem
        index = folder / f"{stem}.safetensors.index.json"
        listed = _weight_map(index) if index.exists() or index.is_symlink() else None
        self.main = index if listed else folder / f"{stem}.safetensors"
        names = sorted(set(listed.values())) if listed else [self.main.name]
        if listed is None:
            _refuse_pickles(folder, stem)
        elif f"{stem}.safetensors" not in names and (folder / f"{stem}.safetensors").exists():
            raise ValueError(f"{index}: lies beside {stem}.safetensors; remove the one that is not meant")
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.bytes: dict[str, int] = {}
        self.files: dict[str, Path] = {}
        for name in names:
            self._add(folder / name)
        for key, name in (listed or {}).items():
            if key not in self.files or self.files[key].name != name:
                raise ValueError(f"{folder / name}: must hold {key}, as {index.name} says")
        for key in sorted(self.files.keys() - (listed or self.files).keys()):
            raise ValueError(f"{index}: key {key} is not listed")

    def _add(self, file: Path) -> None:
        for key, entry in read_header(file).tensors.items():
            if key in self.files:
                raise ValueError(f"{file}: key {key} is also in {self.files[key].name}")
            self.files[key], self.shapes[key] = file, entry.shape
            self.dtypes[key], self.bytes[key] = entry.dtype, entry.num_bytes

    def read(self, key: str, rows: slice | None = None) -> torch.Tensor:
        """One tensor, or some of its rows (only those are read), on the CPU."""
        from safetensors import safe_open

        with safe_open(self.files[key], framework="pt") as opened:
            if rows is None or not self.shapes[key]:
                return opened.get_tensor(key)
            return opened.get_slice(key)[rows]

    def only_dtype(self) -> str:
        """The dtype of all tensors. Raises: ValueError naming two keys of different ones, or a key of another kind."""
        return only_dtype(self.folder, self.dtypes)


def only_dtype(where: Path, dtypes: dict[str, str]) -> str:
    """The one of DTYPES that all keys have. Raises: ValueError naming `where` and the keys that break the rule."""
    first: dict[str, str] = {}
    for key, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{where}: key {key} is {dtype}, must be one of {', '.join(DTYPES)}")
        first.setdefault(dtype, key)
    if len(first) != 1:
        words = " and ".join(f"{key} is {dtype}" for dtype, key in first.items())
        raise ValueError(f"{where}: must be of one dtype, {words or 'holds no tensor'}")
    return next(iter(first))


def _weight_map(index: Path) -> dict[str, str]:
    content = read_object(index)
    listed = content.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: must hold a weight_map of tensors and shards")
    for key, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: weight_map.{key}={name!r} must be the name of a file beside it")
    if not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index}: must hold metadata, an object; diffusers reads it")
    return listed


def _refuse_pickles(folder: Path, stem: str) -> None:
    """Pickled weights can run code and are never opened; say so instead of that a file is missing."""
    if (folder / f"{stem}.safetensors").exists():
        return
    found = pickled_weights(folder)
    if found:
        words = ", ".join(found[:MAX_NAMED])
        raise ValueError(
            f"{folder / stem}.safetensors: the file does not exist; the folder's pickled weights ({words}) are never "
            "opened, save them with save_pretrained(..., safe_serialization=True)"
        )


def pickled_weights(folder: Path, suffixes: Sequence[str] = (".bin", ".pt", ".pth", ".ckpt", ".pkl")) -> list[str]:
    """Names of the files in a folder that may be pickles."""
    return sorted(path.name for path in folder.glob("*") if path.suffix in suffixes)


def refuse_partial(folder: Path) -> None:
    """Raises ValueError for a folder, or one in a folder, that is still being written by this package."""
    if any(".partial" in path.suffixes for path in (folder, folder.absolute().parent)):
        raise ValueError(f"{folder}: is half written; a finished folder's name does not hold .partial")
