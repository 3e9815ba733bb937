"""How a policy loads onto the learner's ranks: `python -m bench.load_memory [--sizes official] [--ranks 2] [--lora 0]`.

Writes a random transformer folder (bfloat16, several files), or takes `--folder`, and loads it with every rank in a
process of its own. Prints a JSON line per rank: seconds, the rank's share of the weights, and the peak of its host
memory over what it held before (and over its share, where that lies in host memory too).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.utils import logging

from bench.random_folders import random_numbers, write_transformer
from sage_ray.config import LoraConfig
from sage_ray.parallel import free_port, load_sharded, start_process_group

SIZES = {
    "official": (dict(num_layers=54, num_attention_heads=16, attention_head_dim=128), 5 * 10**9),
    "small": (
        dict(
            num_layers=8,
            num_attention_heads=8,
            attention_head_dim=64,
            rope_axes_dim=[16, 24, 24],
            text_embed_dim=128,
            text_embed_2_dim=64,
            image_embed_dim=64,
        ),
        32 * 10**6,
    ),
}
"""name -> (what differs from diffusers' defaults, most bytes of one file)."""


def write_random(folder: Path, name: str) -> None:
    """A random transformer folder, one file at a time."""
    settings, file_bytes = SIZES[name]
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(**settings)
    write_transformer(folder, model, random_numbers(), file_bytes)


def _status_bytes(key: str) -> int:
    """A number of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def load(rank: int, ranks: int, port: int, folder: Path, lora: int, device: str) -> None:
    """One rank: load, and print what it took."""
    start_process_group(rank, ranks, "127.0.0.1", port, device=device, timeout_s=600)
    if device == "cuda":
        torch.cuda.set_device(rank)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = _status_bytes("VmRSS"), time.monotonic()
    dtype = torch.bfloat16
    model = load_sharded(folder, dtype, LoraConfig(rank=lora), 0, ranks, device)
    share = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    above = _status_bytes("VmHWM") - before
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    line = {
        "rank": rank,
        "seconds": round(time.monotonic() - start, 2),
        "share_bytes": share,
        "host_peak_bytes": above,
        "host_peak_above_share_bytes": above - (share if device == "cpu" else 0),
        "largest_file_bytes": largest,
    }
    print(json.dumps(line), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", choices=SIZES, default="official")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 loads float32 master weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where the transformer is, or will be, written")
    parsed = parser.parse_args()
    logging.set_verbosity_error()
    folder = parsed.folder or Path(tempfile.mkdtemp()) / "transformer"
    if not folder.exists():
        write_random(folder, parsed.sizes)
    mp.spawn(load, (parsed.ranks, free_port(), folder, parsed.lora, parsed.device), nprocs=parsed.ranks)


if __name__ == "__main__":
    main()
