"""The end of a small command: one line of what was written or of what is wrong, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run(action: Callable[[], object]) -> int:
    """Exit code of a command whose bad input is a ValueError; `action` returns what it wrote, or None when it has said
    that itself."""
    try:
        written = action()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: interrupted", file=sys.stderr)
        return 130
    if written is not None:
        print(f"wrote {written}")
    return 0
