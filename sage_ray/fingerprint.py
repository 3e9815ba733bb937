"""Whether two folders hold the same model, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUFFIXES = (".json", ".safetensors", ".bin", ".pth", ".pt", ".model", ".txt")
PIECES, PIECE_BYTES = 16, 2**16
"""Of every file that many pieces of that size, spread evenly, are compared."""


def fingerprint(folder: Path) -> str:
    """Hex digest of the names, sizes and samples of all settings and weights under a folder; training changes it, as it
    changes nearly every weight."""
    digest = hashlib.sha256()
    for file in sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with file.open("rb") as stream:
            for piece in range(PIECES):
                stream.seek(piece * max(0, size - PIECE_BYTES) // (PIECES - 1), os.SEEK_SET)
                digest.update(stream.read(PIECE_BYTES))
                if size <= PIECE_BYTES:
                    break
    return digest.hexdigest()
