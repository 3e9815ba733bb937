"""Scorers from settings: VideoAlign, CLIPScore, PickScore, a remote service, a class of one's own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from sage_ray.config import ConfigError, RewardConfig, ScorerConfig, axis_weights
from sage_ray.rewards import clip_score
from sage_ray.rewards.remote import TOKEN_VARIABLE, RemoteScorer
from sage_ray.rewards.user_scorer import CheckedScorer, load_user_scorer
from sage_ray.rewards.videoalign import VideoAlign, VideoAlignScorer
from sage_ray.rewards.weight_files import DTYPES
from sage_ray.types import AXES

FOLDER_KINDS = {"clip_score": clip_score.ClipScore, "pick_score": clip_score.PickScore}


class NamedScorer(NamedTuple):
    """A scorer, the run's names of its parts, and why rows of its last call have no score, where it can tell."""

    scorer: CheckedScorer
    parts: tuple[str, ...]
    reasons: Callable[[], Sequence[str | None]] = tuple


def check_scorers(reward: RewardConfig) -> None:
    """Everything about the scorers that can be seen on disk. Raises ConfigError naming key, value and rule.

    A class of one's own is only imported where it will run: its packages may live in the reward's own environment.
    """
    if reward.path is not None:
        _named("reward.path", reward.path, lambda: VideoAlign.check(Path(str(reward.path))))
    elif not reward.extra:
        raise ConfigError("reward.path=None: needs reward.extra, there is no other reward")
    extra_weights = [weight for settings in reward.extra.values() for weight in settings.weights.values()]
    if not any((*extra_weights, *(axis_weights(reward) if reward.path is not None else ()))):
        raise ConfigError("reward: no part has a weight, so there is nothing to train on")
    for name, settings in reward.extra.items():
        _check_extra(f"reward.extra.{name}", settings)
        if name in AXES or "." in name:
            raise ConfigError(f"reward.extra.{name}: the name must not be one of {', '.join(AXES)} or hold a dot")


def check_runtime_env(file: Path) -> dict:
    """The Ray runtime_env in a YAML file; ConfigError when it is not a mapping."""
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"reward.runtime_env={str(file)!r}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"reward.runtime_env={str(file)!r}: must hold a mapping, as in pip: [package==1.0]")
    return content


def _check_extra(key: str, settings: ScorerConfig) -> None:
    kind = settings.kind
    for part, weight in settings.weights.items():
        if not math.isfinite(weight):
            raise ConfigError(f"{key}.weights.{part}={weight}: must be finite")
        if kind in FOLDER_KINDS and part not in FOLDER_KINDS[kind].parts:
            raise ConfigError(
                f"{key}.weights: kind={kind} has no part {part!r}; there is {FOLDER_KINDS[kind].parts[0]}"
            )
    if kind in FOLDER_KINDS:
        if settings.path is None:
            raise ConfigError(f"{key}.path=None: kind={kind} needs the folder of its checkpoint")
        _named(f"{key}.path", settings.path, lambda: clip_score.check(Path(str(settings.path))))
    elif kind == "http":
        if not str(settings.url or "").startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url={settings.url!r}: must be an http:// or https:// address")
    elif ":" not in kind:
        known = ", ".join((*FOLDER_KINDS, "http"))
        raise ConfigError(f"{key}.kind={kind!r}: must be one of {known}, or a class as module:Class")


def _named(key: str, value: str, check) -> None:
    try:
        check()
    except ValueError as error:
        raise ConfigError(f"{key}={value!r}: {error}") from error


def build_scorers(reward: RewardConfig, device: str) -> list[NamedScorer]:
    """Load every scorer of a run. Raises ValueError (or ConnectionError) naming what cannot be had."""
    dtype, scorers = DTYPES[reward.dtype], []
    if reward.path is not None:
        scorers.append(NamedScorer(CheckedScorer(VideoAlignScorer(reward.path, device, dtype), "VideoAlign"), AXES))
    for name, settings in reward.extra.items():
        scorer = _extra(settings, device, reward.timeout_s)
        parts = (name,) if len(scorer.parts) == 1 else tuple(f"{name}.{part}" for part in scorer.parts)
        remote = scorer.scorer
        reasons = partial(_last_errors, remote) if isinstance(remote, RemoteScorer) else tuple
        scorers.append(NamedScorer(scorer, parts, reasons))
    part_weights(reward, [part for scorer in scorers for part in scorer.parts])
    return scorers


def _last_errors(remote: RemoteScorer) -> Sequence[str | None]:
    return remote.last_errors


def _extra(settings: ScorerConfig, device: str, timeout_s: float) -> CheckedScorer:
    if settings.kind in FOLDER_KINDS:
        scorer = FOLDER_KINDS[settings.kind].load(Path(str(settings.path)), device, torch.float32)
        return CheckedScorer(scorer, settings.kind)
    if settings.kind == "http":
        return CheckedScorer(
            RemoteScorer(str(settings.url), timeout_s / 4, token=os.environ.get(TOKEN_VARIABLE)), str(settings.url)
        )
    return load_user_scorer(settings.kind, dict(settings.options))


def part_weights(reward: RewardConfig, parts: Sequence[str]) -> tuple[float, ...]:
    """Weight of every part in the reward; 0 is logged and not trained on.

    Raises: ConfigError for a weight of a part that does not exist, or when nothing has a weight.
    """
    weights = dict.fromkeys(parts, 0.0)
    if reward.path is not None:
        weights |= dict(zip(AXES, axis_weights(reward), strict=True))
    for name, settings in reward.extra.items():
        own = [part for part in parts if part == name or part.startswith(f"{name}.")]
        for part, weight in settings.weights.items():
            whole = own[0] if len(own) == 1 and own[0] == name else f"{name}.{part}"
            if whole not in own:
                raise ConfigError(f"reward.extra.{name}.weights: has no part {part!r}; there are {', '.join(own)}")
            weights[whole] = float(weight)
    if not any(weights.values()):
        raise ConfigError("reward: no part has a weight, so there is nothing to train on")
    return tuple(weights[part] for part in parts)
