"""Weights straight from their files into the tensors that keep them.

A model is built without storage, gets storage where it will live (whole, or a rank's share of every parameter), and is
filled tensor by tensor. Of a sharded parameter only this rank's rows are read, so every rank reads its share once, and
the host holds one tensor at a time beyond what the model itself keeps there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from sage_ray.json_object import read_object
from sage_ray.models.components import blank
from sage_ray.shards import local_share
from sage_ray.tensor_files import TensorFiles

STEM = "diffusion_pytorch_model"
GLYPHS = "context_embedder_2"
"""The byT5 projection: whether a checkpoint stores it as zeros decides what is trained (`freeze_unused`)."""


def blank_transformer(folder: Path) -> HunyuanVideo15Transformer3DModel:
    """The model of a transformer folder on the meta device; only its small byT5 projection is read, onto the CPU."""
    file = Path(folder) / "config.json"
    # diffusers writes a model's origin there, which would put this machine's path into every checkpoint.
    settings = {key: value for key, value in read_object(file).items() if key != "_name_or_path"}
    model = blank("transformer", str(file), settings)
    assert isinstance(model, HunyuanVideo15Transformer3DModel)
    model.context_embedder_2.to_empty(device="cpu")
    _read(model.context_embedder_2, TensorFiles(folder, STEM), lambda name: f"{GLYPHS}.{name}")
    return model.eval()


def load_transformer(folder: Path, dtype: torch.dtype, device: torch.device | str) -> HunyuanVideo15Transformer3DModel:
    """A whole transformer in `dtype` on `device`, every parameter in fresh, aligned storage.

    Raises: ValueError as `fill`.
    """
    model = blank_transformer(folder).to("meta", dtype).to_empty(device=device)
    fill(model, folder)
    return model


def fill(model: nn.Module, folder: Path, prefix: str = "", given: Mapping[str, torch.Tensor] | None = None) -> None:
    """Fill every parameter of a model that has storage, plain or sharded, rounding to its dtype.

    Args:
        folder: a transformer folder. prefix: what stands before its keys in the parameters' names, where PEFT also
            puts ".base_layer".
        given: whole values of parameters that are not in the files (adapters), by name; each rank takes its share.
    Raises: ValueError naming folder and key: a parameter that is nowhere, a tensor that no parameter takes, a shape.
    """
    files, given = TensorFiles(folder, STEM), given or {}

    def key_of(name: str) -> str | None:
        return None if name in given else name.removeprefix(prefix).replace(".base_layer.", ".")

    wanted = {key_of(name) for name, _ in model.named_parameters()} - {None}
    for key in sorted(files.shapes.keys() ^ wanted):
        where = "in no file" if key in wanted else "unknown to the model of config.json"
        raise ValueError(f"{folder}: {key} is {where}")
    _read(model, files, key_of)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in given:
                held, rows = local_share(parameter)
                held.copy_(given[name][rows])


@torch.no_grad()
def _read(model: nn.Module, files: TensorFiles, key_of) -> None:
    """Read the parameters whose name has a key in the files."""
    for name, parameter in model.named_parameters():
        key = key_of(name)
        if key is None:
            continue
        if files.shapes.get(key) != tuple(parameter.shape):
            is_now, rule = files.shapes.get(key, "missing"), tuple(parameter.shape)
            raise ValueError(f"{files.folder}: {key} is {is_now}, config.json makes it {rule}")
        held, rows = local_share(parameter)
        held.copy_(files.read(key, rows))
