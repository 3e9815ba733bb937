"""Write a safetensors copy of a VideoAlign checkpoint once: `python -m sage_ray.rewards.convert VideoReward`.

The copy lies beside the original as model.safetensors and is what `VideoAlign.load` reads from then on: it is mapped
into memory and needs no pickle. The keys stay official, so the folder stays one that upstream's layout describes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from safetensors.torch import save_file

from sage_ray.command import run
from sage_ray.rewards.checkpoint import open_folder
from sage_ray.rewards.network import RewardNetwork
from sage_ray.rewards.prompt_input import PromptEncoder
from sage_ray.rewards.videoalign import match_tensors
from sage_ray.rewards.weight_files import read_tensors


def convert(folder: Path) -> Path:
    """Returns the file. Raises: ValueError for a folder that `VideoAlign.load` would refuse, or one that has a copy."""
    opened = open_folder(folder)
    target = opened.weights[0].parent / "model.safetensors"
    if opened.weights[0] == target:
        raise ValueError(f"{target}: is there already")
    config = opened.config
    rows = PromptEncoder(opened.tokenizer, opened.template).rows
    network = RewardNetwork(opened.base_config, rows, config["peft_lora_config"], config["model_config"]["output_dim"])
    state = read_tensors(opened.weights)
    match_tensors(network, state, opened.weights)
    embedding = state[f"{network.prefix}model.embed_tokens.weight"]
    state[f"{network.prefix}lm_head.weight"] = embedding.clone()
    partial = target.with_suffix(".partial")
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="the VideoReward directory")
    folder = parser.parse_args().folder
    return run(lambda: convert(folder))


if __name__ == "__main__":
    sys.exit(main())
