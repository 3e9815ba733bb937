"""Takes secrets out of what people read: logs, the run page, W&B."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"(?i)(secret|passw|token(?!i|s\b|_)|api_?key|access_?key|private_?key|credential|authorization|cookie)"
)
"""Names of settings and of environment variables whose values nobody should read; "max_batch_tokens" is none."""
USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
"""User and password of a URL."""
PARAMETER = re.compile(r"(?i)([?&;][^=&\s]*(?:secret|token|key|signature|sig|password|credential)[^=&\s]*=)[^&\s'\"]+")
"""A secret among a URL's parameters."""
BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
SHORTEST = 6
"""Characters below which the value of a variable is no secret, but a word that may stand anywhere."""


def is_secret_name(name: str) -> bool:
    """Whether the value under this name is hidden."""
    return SECRET_NAME.search(name) is not None


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text without users, passwords and tokens of URLs, bearer tokens, and values of secret environment variables.

    Args: environment: None takes this process's.
    """
    text = USER_INFO.sub(f"{HIDDEN}@", text)
    text = PARAMETER.sub(rf"\g<1>{HIDDEN}", text)
    text = BEARER.sub(rf"\g<1>{HIDDEN}", text)
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= SHORTEST and is_secret_name(name) and not os.path.exists(value):
            text = text.replace(value, HIDDEN)
    return text


def redacted(value: Any, name: str = "") -> Any:
    """The same of settings: dicts, lists and scalars; a value under a secret name is hidden whole."""
    if isinstance(value, Mapping):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, name) for inner in value]
    if name and value is not None and is_secret_name(name):
        return HIDDEN
    return redact(value) if isinstance(value, str) else value
