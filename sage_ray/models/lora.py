"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on a HunyuanVideo15Transformer3DModel, through PEFT.

An adapted linear layer computes y = W x + b + (alpha / rank) B A x, A [rank, in], B [out, rank]. There is no dropout
(rollout and learner must compute the same bits), no bias adapter and one adapter per model, named "default".

Dtypes. PEFT casts a layer's input to the dtype that A has at that moment. A rollout worker holds W, A and B in the
compute dtype; a learner holds W in the compute dtype and A, B as float32 masters, which FSDP2's
MixedPrecisionPolicy(param_dtype) casts before the forward. Both then multiply the same bits. FSDP2 wants one dtype
among the *trainable* parameters of a group only, so a frozen bfloat16 base may share it. Without FSDP2 a float32
adapter on a bfloat16 base is computed in float32 and does not agree with a worker.
Flags. On a sliced input torch takes mm or bmm as the weight requires a gradient or not, even under no_grad. The base is
frozen on both sides, and A sees contiguous inputs only, so that a worker may freeze it.

Adapters go in before the model is sharded. Left out: merging into the live base (PEFT's merge and unmerge leave
rounding behind in W; `merged_state` works beside it), several adapters, adapters on convolutions and embeddings.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sage_ray.config import LoraConfig as LoraSettings
from sage_ray.models.adapter_file import FILE, METADATA, PREFIX, read_settings
from sage_ray.models.packed_velocity import PackedVelocity, freeze_unused
from sage_ray.tensor_files import read_header

ADAPTER = "default"


def adapt(velocity: PackedVelocity, settings: LoraSettings, seed: int, *, dtype: torch.dtype) -> None:
    """Turn a policy into a frozen base in its compute dtype with trainable adapters of `dtype`, in place.

    Starts from `settings.path` where one is given. Raises: as `add_lora` and `load_adapter`.
    """
    transformer = velocity.transformer.to(velocity.dtype)
    names = add_lora(
        transformer, rank=settings.rank, alpha=settings.alpha, targets=settings.targets, seed=seed, dtype=dtype
    )
    if settings.path is not None:
        load_adapter(transformer, Path(settings.path))
    velocity.trainable_names = frozenset(PREFIX + name for name in names)


def add_lora(
    transformer: HunyuanVideo15Transformer3DModel,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] | None,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Freeze `transformer` and give it one trainable adapter, in place, before it is sharded.

    A is uniform in +-1/sqrt(in), drawn in float32 from `seed` alone, layer by layer; B is zero. The adapted model's
    first output is therefore bitwise the base's. The global random state is left as it was.

    Args:
        rank: >= 1. alpha: > 0.
        targets: a layer's full name takes that layer; anything else ("to_q", "ff.net.2") takes every name that ends
            in it by whole dotted parts, the text refiner's included. None: every linear layer of the transformer
            blocks (the official program's "all-linear" also takes the embedders and the output layer, 2 % of the
            weights). Either way layers that text-to-video never reads, or whose output is dropped, get none, as an
            adapter there would have no gradient: image_embedder, the last block's add_q_proj, to_add_out and
            ff_context, and the byT5 projection where the checkpoint stores zeros (`freeze_unused`).
        dtype: of A and B. float32 on a learner; the compute dtype on a rollout worker.
    Returns: names of the trainable parameters in the order of `named_parameters`, relative to `transformer`.
    Raises: ValueError for a rank or alpha out of range, an unknown target, or a second adapter.
    """
    if rank < 1 or not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"lora: rank {rank} must be at least 1 and alpha {alpha} positive")
    if any(isinstance(module, LoraLayer) for module in transformer.modules()):
        raise ValueError("lora: the transformer has an adapter already")
    chosen = target_layers(transformer, targets)
    transformer.requires_grad_(False)
    # A pattern, not a list: PEFT takes entries as suffixes, and norm_out.linear also ends a refiner layer's name.
    pattern = "|".join(re.escape(name) for name in chosen)
    with torch.random.fork_rng(devices=[]):
        transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=pattern, bias="none"), ADAPTER)
    _initialise(transformer, seed, dtype)
    return [name for name, parameter in transformer.named_parameters() if parameter.requires_grad]


def _initialise(transformer: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """`initial_values` in `dtype` for PEFT's own; and what A's input must be (module docstring)."""
    values = initial_values(transformer, seed)
    for name, layer in adapted_layers(transformer).items():
        device = layer.get_base_layer().weight.device
        for part, half in ((layer.lora_A, "lora_A"), (layer.lora_B, "lora_B")):
            part[ADAPTER].weight = nn.Parameter(values[f"{name}.{half}.{ADAPTER}.weight"].to(device, dtype))
        layer.lora_A[ADAPTER].register_forward_pre_hook(_contiguous)


def initial_values(transformer: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """What an adapter starts from, by parameter name: A uniform from `seed`, layer by layer, B zero; float32, CPU."""
    generator, values, rank = torch.Generator().manual_seed(seed), {}, transformer.peft_config[ADAPTER].r
    for name, layer in adapted_layers(transformer).items():
        a = torch.rand(rank, layer.in_features, generator=generator, dtype=torch.float32) * 2 - 1
        values[f"{name}.lora_A.{ADAPTER}.weight"] = a / math.sqrt(layer.in_features)
        values[f"{name}.lora_B.{ADAPTER}.weight"] = torch.zeros(layer.out_features, rank)
    return values


def adapter_values(velocity: PackedVelocity, settings: LoraSettings, seed: int) -> dict[str, torch.Tensor]:
    """What `adapt` gave the adapters of `velocity`, whole, by parameter name: for a model without storage, which can
    only be filled after it is sharded."""
    values = initial_values(velocity.transformer, seed)
    if settings.path is not None:
        with safe_open(Path(settings.path) / FILE, framework="pt") as file:
            values = {_parameter_name(key): file.get_tensor(key) for key in file.keys()}
    return {PREFIX + name: value for name, value in values.items()}


def _parameter_name(key: str) -> str:
    """Key in the file to the parameter's name: {layer}.lora_A.default.weight."""
    return key.removeprefix(PREFIX).removesuffix(".weight") + f".{ADAPTER}.weight"


def _contiguous(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous() for x in inputs)


def target_layers(transformer: HunyuanVideo15Transformer3DModel, targets: Sequence[str] | None) -> list[str]:
    """Names of the layers that `add_lora` adapts, in module order; sets requires_grad flags. Raises as it does."""
    transformer.requires_grad_(True)
    freeze_unused(transformer)
    usable = [name for name, m in transformer.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    if targets is None:
        return [name for name in usable if name.startswith("transformer_blocks.")]
    chosen: set[str] = set()
    for target in targets:
        found = {target} if target in usable else {name for name in usable if name.endswith(f".{target}")}
        if not found:
            known = ", ".join(sorted({re.sub(r"^.*blocks\.\d+\.", "", name) for name in usable}))
            raise ValueError(f"lora: target {target!r} is no linear layer that text-to-video trains; there are {known}")
        chosen |= found
    if not chosen:
        raise ValueError("lora: targets is empty; null takes every linear layer of the blocks")
    return [name for name in usable if name in chosen]


def adapted_layers(transformer: nn.Module) -> dict[str, LoraLayer]:
    """Base name of the layer to PEFT's layer; raises ValueError when there is none."""
    layers = {name: m for name, m in transformer.named_modules() if isinstance(m, LoraLayer)}
    if not layers:
        raise ValueError("lora: the transformer has no adapter")
    return layers


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


@torch.no_grad()
def merged_state(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """The base model's state dict with W + (alpha / rank) B A in it, as a plain HunyuanVideo15Transformer3DModel loads.

    The sum is taken beside W in float32 and rounded once to W's dtype: W is only read. On a sharded model every rank
    must call it, after `sage_ray.parallel.reshard` of the FSDP root (a gathered root shows compute-dtype copies).

    Returns: base names, on the CPU; entries without an adapter share the model's storage when that is there too.
    """
    layers, state = adapted_layers(transformer), {}
    for name, parameter in transformer.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if ".lora_" in owner:
            continue
        value, base = _full(parameter), owner.removesuffix(".base_layer")
        if base != owner and leaf == "weight":
            layer = layers[base]
            a, b = (_full(part[ADAPTER].weight).float() for part in (layer.lora_A, layer.lora_B))
            value = (value.float() + layer.scaling[ADAPTER] * (b @ a)).to(value.dtype)
        state[f"{base}.{leaf}"] = value.cpu()
    return state


def _file_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Key in the file to the live A or B: transformer.{layer}.lora_A.weight."""
    layers = adapted_layers(transformer).items()
    parts = [(f"{name}.lora_{k}", getattr(layer, f"lora_{k}")[ADAPTER]) for name, layer in layers for k in "AB"]
    return {f"{PREFIX}{name}.weight": part.weight for name, part in parts}


def adapter_state(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """A and B under the keys of the file, whole, on the CPU, in the dtype held. Sharded: as for `merged_state`."""
    return {key: _full(parameter).cpu().contiguous() for key, parameter in _file_parameters(transformer).items()}


def save_adapter(transformer: nn.Module, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write `folder`/pytorch_lora_weights.safetensors, under a temporary name first.

    diffusers 0.42.1 has no LoRA loader for HunyuanVideo15Pipeline; a user calls
    `pipeline.transformer.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors")`. Rank and alpha
    travel in the file's header; without it diffusers would take alpha = rank.

    Args: state: what `adapter_state` gave, on a sharded model, where all ranks gather and one writes.
    """
    config, partial = transformer.peft_config[ADAPTER], Path(folder) / f"{FILE}.partial"
    metadata = json.dumps({PREFIX + key: getattr(config, key) for key in ("r", "lora_alpha", "target_modules")})
    partial.parent.mkdir(parents=True, exist_ok=True)
    save_file(state or adapter_state(transformer), partial, metadata={"format": "pt", METADATA: metadata})
    os.replace(partial, partial.with_name(FILE))


def check_targets(transformer_folder: Path, targets: Sequence[str]) -> None:
    """Raises ValueError for a target that names no linear layer of the checkpoint; reads its config.json only."""
    config = HunyuanVideo15Transformer3DModel.load_config(transformer_folder)
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel.from_config(config)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = ", ".join(sorted({re.sub(r"^.*blocks\.\d+\.", "", name) for name in names}))
            raise ValueError(f"lora.targets: {target!r} is no linear layer of the model; there are {known}")


@torch.no_grad()
def load_adapter(transformer: nn.Module, folder: Path) -> None:
    """Copy what `save_adapter` wrote into the adapter that `add_lora` made, rounding to its dtype; before sharding.

    Raises: ValueError naming the key when layers, rank or alpha differ; nothing is copied then.
    """
    path, parameters, config = Path(folder) / FILE, _file_parameters(transformer), transformer.peft_config[ADAPTER]
    header = read_settings(path, read_header(path))
    with safe_open(path, framework="pt") as file:
        state = {key: file.get_tensor(key) for key in file.keys()}
    for key in sorted(parameters.keys() ^ state.keys()):
        raise ValueError(f"{path}: {key} is only in the {'file' if key in state else 'model'}; lora targets differ")
    for key, parameter in parameters.items():
        if parameter.shape != state[key].shape:
            raise ValueError(f"{path}: {key} is {tuple(state[key].shape)}, the model has {tuple(parameter.shape)}")
    if (alpha := header.get(f"{PREFIX}lora_alpha")) != config.lora_alpha:
        raise ValueError(f"{path}: {PREFIX}lora_alpha is {alpha}, the model has {config.lora_alpha}")
    for key, parameter in parameters.items():
        parameter.copy_(state[key])
