"""Merge an adapter into its base: `python -m sage_ray.models.merge_lora POLICY ADAPTER OUT`.

POLICY is the HunyuanVideo15Pipeline directory that was trained, ADAPTER a checkpoint's adapter folder, OUT a new folder
that gets transformer/ in diffusers' layout with W + (alpha / rank) B A, in the base's dtype. The base is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors import safe_open
from safetensors.torch import save_file

from sage_ray.command import run
from sage_ray.models.lora import FILE, METADATA, PREFIX, add_lora, check_adapter, load_adapter, merged_state

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""safetensors' names."""


def merge(policy: Path, adapter: Path, out: Path) -> Path:
    """Returns OUT/transformer. Raises: ValueError naming file and rule; nothing is written then."""
    target = out / "transformer"
    if target.exists():
        raise ValueError(f"{target}: is there already")
    if not (policy / "transformer" / "config.json").is_file():
        raise ValueError(f"{policy}: must be a HunyuanVideo15Pipeline directory, has no transformer/config.json")
    check_adapter(adapter)
    with safe_open(adapter / FILE, framework="pt") as file:
        header = json.loads(file.metadata()[METADATA])
        layers = sorted({key.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for key in file.keys()})
    dtype = stored_dtype(policy / "transformer")
    model = HunyuanVideo15Transformer3DModel.from_pretrained(policy / "transformer", torch_dtype=dtype)
    rank, alpha = header[f"{PREFIX}r"], header[f"{PREFIX}lora_alpha"]
    add_lora(model, rank=rank, alpha=alpha, targets=layers, seed=0, dtype=torch.float32)
    load_adapter(model, adapter)
    partial = out / "transformer.partial"
    partial.mkdir(parents=True)
    state = {name: tensor.contiguous() for name, tensor in merged_state(model).items()}
    save_file(state, partial / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    model.save_config(partial)
    os.replace(partial, target)
    return target


def stored_dtype(folder: Path) -> torch.dtype:
    """Of the first tensor of a folder's safetensors. Raises: ValueError when there is none, or it is another kind."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: holds no safetensors file")
    with safe_open(files[0], framework="pt") as file:
        name = file.get_slice(next(iter(file.keys()))).get_dtype()
    if name not in DTYPES:
        raise ValueError(f"{files[0]}: is {name}, must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("policy", "adapter", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    return run(lambda: merge(arguments.policy, arguments.adapter, arguments.out))


if __name__ == "__main__":
    sys.exit(main())
