"""A user's own scorer, named "module:Class", and the check that every result of a scorer passes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sage_ray.rewards.scorer import Scorer

RULE = 'must be "module:Class", an import path and the name of a class in it'


class CheckedScorer:
    """A scorer whose every result is checked: float64 [B, len(parts)], nan and inf left as they are."""

    def __init__(self, scorer: Scorer, name: str):
        """name: begins every message. Raises: ValueError when `scorer` does not follow the protocol."""
        self.scorer, self.name = scorer, name
        self.parts = _checked_parts(scorer, name)

    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        """As `Scorer.score`; always a fresh array. Raises: also ValueError naming the scorer for any other result."""
        result = self.scorer.score(videos, prompts, fps)
        rule = f"{self.name}: score must return a plain numpy array of floats [{len(videos)}, {len(self.parts)}]"
        if type(result) is not np.ndarray:
            raise ValueError(f"{rule}, returned {type(result).__name__}")
        if not np.issubdtype(result.dtype, np.floating) or result.shape != (len(videos), len(self.parts)):
            raise ValueError(f"{rule}, returned {result.dtype} {list(result.shape)}")
        return result.astype(np.float64)


def load_user_scorer(name: str, options: Mapping[str, Any]) -> CheckedScorer:
    """Import "module:Class", call the class with `options` as keywords, and check every result of what comes back.

    Raises: ValueError naming the key `kind`, its value and the rule that is broken.
    """
    where = f"kind={name!r}"
    module_name, colon, attribute = name.partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(f"{where}: {RULE}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's, so its import may raise anything; nothing is swallowed
        raise ValueError(f"{where}: module {module_name} cannot be imported: {one_line(error)}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{where}: module {module_name} has no attribute {attribute}; {RULE}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise ValueError(f"{where}: {attribute} is a {type(factory).__name__}, must be a class or a callable")
    return construct(name, factory, options)


def construct(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> CheckedScorer:
    """The scorer that `factory` makes of the options, checked. Raises: ValueError as `load_user_scorer`."""
    where = f"kind={name!r}"
    try:
        scorer = factory(**options)
    except Exception as error:  # the constructor is the user's, so it may raise anything; nothing is swallowed
        raise ValueError(f"{where}: the constructor failed: {one_line(error)}") from error
    return CheckedScorer(scorer, where)


def one_line(error: BaseException) -> str:
    """Type and message of an exception on one line, at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _checked_parts(scorer: object, name: str) -> tuple[str, ...]:
    """The parts of what should be a scorer. Raises: ValueError naming it and the rule of the protocol it breaks."""
    if not callable(getattr(scorer, "score", None)):
        raise ValueError(f"{name}: must have a method score(videos, prompts, fps), {type(scorer).__name__} has none")
    if not hasattr(scorer, "parts"):
        raise ValueError(f"{name}: must have parts, a tuple of names, {type(scorer).__name__} has none")
    return check_parts(getattr(scorer, "parts"), name)  # noqa: B009


def check_parts(parts: object, name: str) -> tuple[str, ...]:
    """Raises: ValueError beginning with `name` unless `parts` is a non-empty tuple or list of distinct names."""
    rule = f"{name}: parts must be a non-empty tuple or list of distinct, non-empty strings, are {parts!r:.200}"
    if not isinstance(parts, tuple | list) or not parts:
        raise ValueError(rule)
    if not all(isinstance(part, str) and part for part in parts) or len(set(parts)) != len(parts):
        raise ValueError(rule)
    return tuple(parts)
