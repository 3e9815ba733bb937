"""Seconds of forward, update and decode at the real size, each beside its floor and beside diffusers as shipped.

    python bench.py [forward update error decode] [--frames 81 121] [--text 200] [--repeats 3] [--json PATH]

Random bfloat16 weights of the real configuration, one video of 480 x 832, one prompt, no guidance, one process. Useful
work is counted as in sage_ray/cost.py. A median is over `--repeats` calls (at most two of an update) after one that
warms up and compiles; diffusers as shipped, and every decode, is called once after its warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers.utils import logging

from bench.decode import CHUNKS, UNTILED, decode
from bench.real_size import SIZES, Size
from bench.timing import Report, Row, free
from bench.velocity import COMPILED, EAGER, KEPT, NOT_KEPT, SHIPPED, VelocityBench

PARTS = ("forward", "update", "error", "decode")


def whole_video(report: Report, frames: int, steps: int) -> None:
    """What the rows come to for one video: a rollout, and the training of all its steps, without guidance."""
    decodes = [row for row in report.rows if row.part == "decode" and row.frames == frames and row.seconds]
    chunked = [row.seconds for row in decodes if row.name.startswith(CHUNKS)]
    ways = (
        (SHIPPED, SHIPPED, report.seconds("decode", UNTILED, frames)),
        (COMPILED, KEPT, min(chunked, default=None)),
    )
    for forward, update, decode_s in ways:
        forward_s, update_s = report.seconds("forward", forward, frames), report.seconds("update", update, frames)
        if forward_s and decode_s:
            name = f"rollout, {steps} steps and decode, {forward}"
            report.add(Row("video", name, frames, steps * forward_s + decode_s))
        if update_s:
            report.add(Row("video", f"training, {steps} steps, {update}", frames, steps * update_s))


def run_parts(parsed: argparse.Namespace, size: Size, device: torch.device, report: Report) -> None:
    """The chosen parts in turn; what one way held is given back before the next."""
    bench, parts = VelocityBench(size, device, parsed.repeats, report), parsed.parts or PARTS
    updates = (*((SHIPPED,) if parsed.shipped_update else ()), KEPT, NOT_KEPT)
    for frames in parsed.frames:
        torch._dynamo.reset()  # a second number of frames would be compiled for any number
        for name in (SHIPPED, EAGER, COMPILED) if "forward" in parts else ():
            bench.forward(frames, name)
            free()
        for name in updates if "update" in parts else ():
            bench.update(frames, name)
            free()
    if "error" in parts:
        torch._dynamo.reset()
        truth = bench.truth(parsed.error_frames)
        free()
        for name in (SHIPPED, EAGER, COMPILED):
            bench.error(parsed.error_frames, name, truth)
            free()
    bench.weights = {}
    torch._dynamo.reset()  # compiled code holds the transformer, whose room an untiled decode needs
    free()
    for frames in parsed.frames:
        if "decode" in parts:
            decode(size, frames, parsed.chunks, device, report)
            free()
        whole_video(report, frames, parsed.steps)


def main(arguments: Sequence[str] | None = None) -> Report:
    """Every row is printed, and written to --json, as it comes."""
    parser = argparse.ArgumentParser(prog="bench.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--size", choices=SIZES, default="official", help="small takes seconds on a CPU")
    parser.add_argument("--frames", type=int, nargs="+", default=[81])
    parser.add_argument("--error-frames", type=int, default=9, help="frames at which float32 is the reference")
    parser.add_argument("--text", type=int, help="valid text tokens of the prompt")
    parser.add_argument("--shipped-update", action="store_true", help="diffusers' own update too, 15 s a call")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4], help="latent frames decoded at once")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of the video that is summed up")
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    parsed = parser.parse_args(arguments)
    if unknown := sorted(set(parsed.parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]}, there are {', '.join(PARTS)}")
    logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = dataclasses.replace(SIZES[parsed.size], text=parsed.text or SIZES[parsed.size].text)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    facts = {"card": card, "torch": torch.__version__, "size": parsed.size, "text_tokens": size.text}
    print("  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    report = Report(parsed.json, facts)
    run_parts(parsed, size, device, report)
    return report
