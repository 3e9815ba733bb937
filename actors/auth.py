"""Whether Ray is spoken to with a token. Imports no Ray: it reads the environment when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

MODES = ("token", "disabled")
VARIABLE = "RAY_AUTH_MODE"


def settle_auth() -> str:
    """Make the mode explicit for this process and those that it starts, before Ray is imported; the mode.

    RAY_AUTH_MODE where it is set; else token with (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token),
    else disabled.

    Raises: ValueError for a mode that Ray does not know.
    """
    mode = os.environ.get(VARIABLE)
    if mode is None:
        mode = os.environ[VARIABLE] = "token" if _has_token() else "disabled"
    if mode not in MODES:
        raise ValueError(f"{VARIABLE}={mode!r}: must be token or disabled")
    return mode


def _has_token() -> bool:
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(given) or (Path.home() / ".ray" / "auth_token").is_file()


def explain(status: str) -> str:
    """What to do about a refusal, from Ray's words, which hold no token."""
    where = "in ~/.ray/auth_token, or RAY_AUTH_TOKEN_PATH names its file"
    if "required" in status or "Missing" in status or "no authentication token" in status:
        return f"the cluster wants a token: set RAY_AUTH_MODE=token and put the cluster's token {where}"
    return f"the cluster refuses the token of this machine: it must be the cluster's own, {where}"
