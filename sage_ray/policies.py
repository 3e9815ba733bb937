"""Which policies an evaluation compares: names and folders from the command line, checked before anything starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_ray.config import Config, ConfigError
from sage_ray.json_object import read_object
from sage_ray.models.policy_folder import PolicyFolder, check_fits, find_policy

BASE = "base"
"""Name of model.path itself, which every other policy is compared with."""
UNSAID = ("checkpoints",)
"""Folders between a run and its versions, left out of names."""


@dataclass(frozen=True)
class NamedPolicy:
    """name: its own, in tables and files; group: what it shares with runs that differ in their seed only."""

    name: str
    group: str
    folder: PolicyFolder


def check_evaluation(config: Config, checkpoints: Sequence[str]) -> list[NamedPolicy]:
    """The base and the policies that it is compared with, in order.

    Args:
        checkpoints: PATH or NAME=PATH (NAME without a slash); what `find_policy` takes. Paths that share a NAME are
            runs of the same kind that differ in their seed: they are called "NAME 1", "NAME 2" ...

    Raises:
        ValueError: evaluation is off, nothing is given, a name or path comes twice, or a folder is no policy of this
            base.
    """
    if not config.evaluation.num_prompts:
        raise ConfigError("evaluation.num_prompts=0: must be at least 1; a large number takes every prompt of a set")
    if not checkpoints:
        raise ConfigError("--checkpoint: must be given at least once; the base is always evaluated")
    base = find_policy(Path(config.model.path))
    given = [_split(text) for text in checkpoints]
    folders = [find_policy(path) for _, path in given]
    for folder in folders:
        _check_same_kind(folder, base)
    _check_once([str(folder.path.resolve()) for folder in folders])
    groups = [name or short for (name, _), short in zip(given, short_names([path for _, path in given]), strict=True)]
    policies = [NamedPolicy(BASE, BASE, base)]
    for place, (group, folder) in enumerate(zip(groups, folders, strict=True)):
        number = f" {groups[: place + 1].count(group)}" if groups.count(group) > 1 else ""
        policies.append(NamedPolicy(group + number, group, folder))
    _check_once([policy.name for policy in policies])
    return policies


def _check_once(texts: Sequence[str]) -> None:
    for text, count in Counter(texts).items():
        if count > 1:
            raise ValueError(f"--checkpoint: {text} comes {count} times; a policy and its name must come once")


def _split(text: str) -> tuple[str, Path]:
    """(name or "", path) of one argument."""
    name, equals, path = text.partition("=")
    if equals and "/" not in name:
        if not name.strip() or not path:
            raise ValueError(f"--checkpoint {text!r}: must be PATH or NAME=PATH")
        return name.strip(), Path(path)
    return "", Path(text)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of paths, as long as all need to differ, at least run and version: a/version_1 and b/version_1 of
    outputs/a/checkpoints/version_1 and outputs/b/checkpoints/version_1."""
    parts = [[part for part in path.resolve().parts[1:] if part not in UNSAID] for path in paths]
    lengths = range(2, max((len(words) for words in parts), default=0) + 1)
    named = (["/".join(words[-length:]) for words in parts] for length in lengths)
    return next((names for names in named if len(set(names)) == len(names)), [str(path) for path in paths])


def folder_name(number: int, name: str) -> str:
    """A folder for one policy's files; the number keeps names apart that differ in odd characters only."""
    return f"{number:02d}_{re.sub('[^A-Za-z0-9.-]+', '_', name)}"


def _check_same_kind(policy: PolicyFolder, base: PolicyFolder) -> None:
    """The policy is one of the base's architecture, as far as two configurations or the adapter's header say."""
    if policy.kind == "adapter":
        check_fits(policy.path, base.path)
        return
    ours, theirs = (read_object(folder.path / "config.json") for folder in (policy, base))
    for key in sorted(ours.keys() & theirs.keys()):
        if not key.startswith("_") and ours[key] != theirs[key]:
            raise ValueError(f"{policy.path / 'config.json'}: {key}={ours[key]!r}, the base has {theirs[key]!r}")
