"""How fast VideoAlign loads and scores: `python -m bench.videoalign_speed [--sizes official] [--device cuda]`.

Writes a random checkpoint of the asked sizes in the official layout, loads it strictly, and scores random clips of
81 frames, 480x832, 24 fps at batch 1, 4 and 8. Prints seconds, peak host memory and videos per second. Random weights
score nothing of meaning; speed and memory do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from sage_ray.rewards.initial_state import Sizes, base_config, random_state
from sage_ray.rewards.reward_tokenizer import train_tokenizer
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.rewards.videoalign_write import CheckpointSettings, write_checkpoint

SIZES = {
    "official": (Sizes(1536, 28, 12, 2, 8960, vision_dim=1280, vision_depth=32, vision_heads=16), 151660, 64, 128),
    "tiny": (Sizes(), 600, 8, 16),
}
"""name -> (sizes, rows of the embedding, LoRA rank, LoRA alpha)."""
TEMPLATE = (
    "\nJudge this video.\n"
    + "Look at sharpness, colour, structure and light. " * 80
    + "\nVisual quality: <|VQ_reward|>\nMotion quality: <|MQ_reward|>\n"
    "Textual prompt - {text_prompt}\nText alignment: <|TA_reward|>\n"
)
"""About as long as the official one."""


def padded_tokenizer(rows: int) -> Tokenizer:
    """A small tokenizer whose vocabulary is filled up to `rows` with words that never occur."""
    tokenizer = json.loads(train_tokenizer([TEMPLATE, "user assistant system"] * 20, 512).to_str())
    missing = rows - Tokenizer.from_str(json.dumps(tokenizer)).get_vocab_size(with_added_tokens=True)
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    ids = max([*vocab.values(), *(token["id"] for token in added)]) + 1
    vocab.update({f"filler{number}": ids + number for number in range(missing)})
    return Tokenizer.from_str(json.dumps(tokenizer))


def write_random(folder: Path, name: str) -> None:
    """A random VideoAlign folder of the named sizes, bfloat16."""
    sizes, rows, rank, alpha = SIZES[name]
    tokenizer = padded_tokenizer(rows)
    base = base_config(sizes, tokenizer)
    state = random_state(base, rows, rank, 1, seed=0)
    settings = CheckpointSettings(lora_r=rank, lora_alpha=alpha, torch_dtype="bfloat16")
    write_checkpoint(folder, state, settings=settings, base_config=base, tokenizer=tokenizer, prompt_template=TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", choices=SIZES, default="official")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of every batch size")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or will be, written")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp()) / "VideoReward"
    if not folder.exists():
        start = time.monotonic()
        write_random(folder, arguments.sizes)
        print(f"wrote {folder} in {time.monotonic() - start:.0f} s", flush=True)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    model = VideoAlign.load(folder, arguments.device)
    seconds = time.monotonic() - start
    parameters = sum(p.numel() for p in model.parameters())
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{parameters / 1e9:.3f} B parameters loaded in {seconds:.1f} s; peak host memory {peak_kib / 2**20:.1f} GiB "
        f"({before_kib / 2**20:.1f} before loading)",
        flush=True,
    )
    random = np.random.default_rng(0)
    clips = [random.integers(0, 255, (81, 480, 832, 3), np.uint8) for _ in range(8)]
    for batch in (1, 4, 8):
        model.score(clips[:batch], ["a boat on a lake"] * batch, 24.0)
        done, start = 0, time.monotonic()
        while time.monotonic() - start < arguments.seconds:
            model.score(clips[:batch], ["a boat on a lake"] * batch, 24.0)
            done += batch
        rate = done / (time.monotonic() - start)
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if arguments.device == "cuda" else ""
        print(f"batch {batch}: {rate:.2f} videos per second{peak}", flush=True)


if __name__ == "__main__":
    main()
