"""Reads a JSON file that must hold an object; every checkpoint has some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises: ValueError naming file and rule when it is missing, unreadable or another thing."""
    if file.exists() and not file.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{file}: must be readable JSON: is not a file")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: the file does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: must be readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, holds {type(content).__name__}")
    return content
