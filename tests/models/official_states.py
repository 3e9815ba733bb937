"""Whole state dicts through the key map; the product converts folders tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sage_ray.models.official.keys import check_keys, rules


def to_diffusers(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Official weights of a transformer or VAE under diffusers' names; no number changes.

    Args: state: official key -> tensor of any dtype. config: diffusers' config.json of the model, with _class_name.
    Raises: ValueError as `check_keys`.
    """
    return _convert(state, config, "official")


def to_official(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inverse of `to_diffusers`; args and errors alike."""
    return _convert(state, config, "diffusers")


def _convert(state: Mapping[str, torch.Tensor], config: Mapping[str, Any], side: str) -> dict[str, torch.Tensor]:
    found = rules(config)
    check_keys(found, {key: tuple(tensor.shape) for key, tensor in state.items()}, side, f"{side} weights")
    converted: dict[str, torch.Tensor] = {}
    for rule in found:
        converted |= rule.apply([state[key] for key in rule.keys(side)], side)
    return converted
