"""Makes library objects from a file's settings, which may be anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub.errors import StrictDataclassError

Made = TypeVar("Made")
MISFITS = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError, NameError),
    StrictDataclassError,
)
"""What classes of diffusers and transformers raise for settings that they were not made for."""


def made_from(file: Path | str, name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns. Raises: ValueError naming the file where its settings make no `name`."""
    try:
        return make()
    except MISFITS as error:
        raise ValueError(f"{file}: makes no {name}: {' '.join(repr(error).split())}") from error
