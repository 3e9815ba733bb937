"""Where checkpoints lie: a local folder, or the URL of any file system that fsspec opens.

A checkpoint is a folder version_000042. Its trainer.json is written last and lists every other file with its size: a
folder without it, or whose files differ from it, is no checkpoint. In a local folder it is also written beside its
place (version_000042.partial) and renamed; an object store cannot rename a folder at once.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

TRAINER = "trainer.json"
CONFIG = "config.yaml"
STATE = "state"
"""Folder of the training state inside a checkpoint."""
NAME = re.compile(r"version_\d{6,}")
PARTIAL = ".partial"
NEEDED = ("iteration", "policy_version", "files")
"""Keys of trainer.json without which nothing can go on."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. path: folder or URL; iteration: finished iterations; trainer: content of trainer.json."""

    path: str
    iteration: int
    version: int
    trainer: dict[str, Any]


def checkpoint_name(version: int) -> str:
    """The folder of a policy version (optimizer steps taken)."""
    return f"version_{version:06d}"


class CheckpointStore:
    """The checkpoints in one folder or under one URL."""

    def __init__(self, path: str | Path):
        self.path = str(path).rstrip("/")
        self.fs, self._root = url_to_fs(self.path)
        self.is_local = isinstance(self.fs, LocalFileSystem) and "://" not in self.path

    def place(self, name: str) -> str:
        """Path or URL of a checkpoint."""
        return f"{self.path}/{name}"

    def place_to_write(self, name: str) -> str:
        """Path or URL to which a checkpoint's files are written."""
        return self.place(name) + (PARTIAL if self.is_local else "")

    def prepare(self) -> None:
        """Make the folder and see that it can be written. Raises: OSError."""
        self.fs.makedirs(self._root, exist_ok=True)
        probe = f"{self._root}/.probe"
        self.fs.pipe_file(probe, b"probe")
        self.fs.rm_file(probe)

    @contextmanager
    def folder_to_fill(self, name: str) -> Iterator[Path]:
        """A local folder whose files are the checkpoint's: where it is written, or one that is uploaded at the end."""
        if self.is_local:
            folder = Path(self.place_to_write(name))
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
            return
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
            self.fs.makedirs(f"{self._root}/{name}", exist_ok=True)
            self.fs.put(f"{temporary}/", f"{self._root}/{name}/", recursive=True)

    def complete(self, name: str, trainer: dict[str, Any]) -> str:
        """Make a checkpoint of what was written: trainer.json, last of all, then its name. Returns its place."""
        folder = f"{self._root}/{name}" + (PARTIAL if self.is_local else "")
        files = {key: size for key, size in self._sizes(folder).items() if key != TRAINER}
        content = (json.dumps({**trainer, "files": files}, indent=2) + "\n").encode()
        if not self.is_local:
            self.fs.pipe_file(f"{folder}/{TRAINER}", content)
            return self.place(name)
        for file in files:
            _sync(Path(folder, file))
        Path(folder, TRAINER).write_bytes(content)
        _sync(Path(folder, TRAINER))
        os.replace(folder, f"{self._root}/{name}")
        _sync(Path(self._root))
        return self.place(name)

    def discard(self, name: str) -> None:
        """Remove what was written of a checkpoint that is not complete."""
        folder = f"{self._root}/{name}" + (PARTIAL if self.is_local else "")
        self._remove(folder)

    def clean(self) -> None:
        """Remove what writers and removals that were killed have left: folders of checkpoints without trainer.json."""
        for name in self._names():
            base = name.removesuffix(PARTIAL)
            if NAME.fullmatch(base) and (name != base or not self.fs.exists(f"{self._root}/{name}/{TRAINER}")):
                self._remove(f"{self._root}/{name}")

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, the oldest first."""
        found = []
        for name in self._names():
            if NAME.fullmatch(name):
                try:
                    found.append(self.read(name))
                except ValueError:
                    continue  # half removed, half copied, or of a program that could not resume
        return sorted(found, key=lambda checkpoint: (checkpoint.iteration, checkpoint.version))

    def read(self, name: str) -> Checkpoint:
        """One complete checkpoint. Raises: ValueError naming what is missing."""
        folder, place = f"{self._root}/{name}", self.place(name)
        self.fs.invalidate_cache()
        try:
            trainer = json.loads(self.fs.cat_file(f"{folder}/{TRAINER}"))
        except OSError as error:
            raise ValueError(f"{place}: is no complete checkpoint, {TRAINER} cannot be read: {error}") from error
        except ValueError as error:
            raise ValueError(f"{place}: is no complete checkpoint, {TRAINER} is not JSON: {error}") from error
        if not isinstance(trainer, dict) or any(key not in trainer for key in NEEDED):
            raise ValueError(f"{place}: cannot be resumed, {TRAINER} does not hold {', '.join(NEEDED)}")
        there = self._sizes(folder)
        for file, size in trainer["files"].items():
            if there.get(file) != size:
                raise ValueError(f"{place}: {file} must have {size} bytes, has {there.get(file, 'none')}")
        return Checkpoint(place, int(trainer["iteration"]), int(trainer["policy_version"]), trainer)

    def text(self, name: str, file: str) -> str:
        """A file of a checkpoint."""
        return self.fs.cat_file(f"{self._root}/{name}/{file}").decode()

    def prune(self, keep_last: int | None, keep_every: int | None) -> list[str]:
        """Remove complete checkpoints but the newest `keep_last` (None keeps all) and those of every `keep_every`-th
        iteration; names of those removed."""
        removed = []
        for checkpoint in self.all()[:-keep_last] if keep_last else []:
            if keep_every is None or checkpoint.iteration % keep_every:
                name = checkpoint.path.rpartition("/")[2]
                self.fs.rm_file(f"{self._root}/{name}/{TRAINER}")  # from here on it is none
                self._remove(f"{self._root}/{name}")
                removed.append(name)
        return removed

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.isdir(self._root):
            return []
        return sorted(PurePosixPath(entry.rstrip("/")).name for entry in self.fs.ls(self._root, detail=False))

    def _sizes(self, folder: str) -> dict[str, int]:
        """Every file under a folder, by its path in it, with its bytes."""
        self.fs.invalidate_cache()
        root = PurePosixPath(self.fs._strip_protocol(folder))
        found = self.fs.find(folder, detail=True)
        return {str(PurePosixPath(path).relative_to(root)): int(entry["size"]) for path, entry in found.items()}

    def _remove(self, folder: str) -> None:
        if self.fs.exists(folder):
            self.fs.rm(folder, recursive=True)


def _sync(path: Path) -> None:
    """What a file or folder holds is on the disk, whatever happens to the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
