"""The policy's weights as people use them: diffusers' transformer folder, or the adapter's file alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from sage_ray.models.lora import adapter_state, save_adapter
from sage_ray.models.streamed import STEM
from sage_ray.parallel import reshard
from sage_ray.policy_update import PolicyUpdate

States = dict[str, dict[str, torch.Tensor]]
"""Suffix of the folder ("" or "_average") -> whole tensors on the CPU under the names of their file."""


def gather_policy(rule: PolicyUpdate, *, adapter: bool, keep: bool) -> States:
    """Copies of the whole weights, and of their moving average where one is kept; every rank takes part.

    Args: adapter: its A and B alone. keep: whether this rank wants them; the others give theirs and get {}.
    """
    reshard(rule.model)
    states = {"": _gather(rule, adapter, keep)}
    if rule.settings.ema_decay is not None:
        with rule.averaged_weights():
            states["_average"] = _gather(rule, adapter, keep)
    return states if keep else {}


def write_policy(folder: Path, transformer: nn.Module, states: States, *, adapter: bool) -> None:
    """Write folder/transformer or folder/adapter, and beside it the moving average."""
    for suffix, state in states.items():
        if adapter:
            save_adapter(transformer, folder / f"adapter{suffix}", state)
            continue
        target = folder / f"transformer{suffix}"
        target.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, target / f"{STEM}.safetensors", metadata={"format": "pt"})
        transformer.save_config(target)  # pyright: ignore[reportCallIssue]


def _gather(rule: PolicyUpdate, adapter: bool, keep: bool) -> dict[str, torch.Tensor]:
    """Copies: on a CPU they would be the live weights, which change before they are written."""
    if adapter:
        state = adapter_state(rule.model.transformer)
        return {name: tensor.clone() if tensor.device == rule.device else tensor for name, tensor in state.items()}
    found = {}
    for name, parameter in rule.model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if keep:
            found[name.removeprefix("transformer.")] = whole.detach().to("cpu", copy=True)
    return found
