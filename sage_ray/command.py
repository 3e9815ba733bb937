"""The end of a small command: print what was done, or one line of what is wrong and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run(action: Callable[[], object]) -> int:
    """Exit code of a command whose bad input is a ValueError; `action` returns what it wrote."""
    try:
        print(f"wrote {action()}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
