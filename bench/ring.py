"""The whole ring at the real size: `python -m bench.ring --gpus 1|2|4 [--rollouts 2] [--folder PATH] [key=value ...]`.

Writes a random policy and a random VideoAlign folder, runs `launch.py train` for two iterations (the first compiles),
and prints for each: the seconds of every phase beside the plan's, useful TFLOP/s of a GPU and their share of the card's
peak (MFU), peak memory of every role, GPU-seconds of a video. 81 frames of 480 x 832 without guidance:

    --gpus 1                 configs/lora_one_gpu.yaml by turns: 2 videos, 4 steps
    --gpus 2                 all weights, 1 rollout + 1 learner (cards of 120 GB): 4 videos, 4 steps
    --gpus 4                 all weights, 1 rollout + 3 learners: 3 x 4 videos, 3 steps
    --gpus 4 --rollouts 2    all weights, 2 + 2: 2 x 4 videos, 4 steps, references in pinned host memory

The last step is deterministic and untrained. VideoAlign has a tenth of the rollout's GPU. Both references are held
policies; the KL's share, one pass more in ten steps, is not measured. The run is ended before it saves unless --save.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from diffusers.utils import logging

from bench import videoalign_speed
from bench.random_folders import write_policy
from bench.real_size import SIZES
from bench.timeline import ROOT, Timeline, train
from sage_ray.config import Config
from sage_ray.config_check import num_prompts
from sage_ray.config_load import load_config
from sage_ray.cost import H100
from sage_ray.metrics import read_metrics
from sage_ray.prediction import SMALLEST, predict, read_dims, useful_flops
from sage_ray.training_schedule import training_schedule

CUT = "sampling.guidance_scale=1.0 sampling.last_step=ode evaluation.num_prompts=0 kl.share_interval=0 "
ALL_WEIGHTS = CUT + (
    "data.batch_size=null kl.previous=last_step reward.gpus_per_worker=0.1 cluster.start_timeout_s=900 "
    "cluster.object_store_bytes=40000000000 "
)
SMALL = """model.compile=false sampling.height=32 sampling.width=32 sampling.num_frames=9 sampling.fps=8
cluster.device=cpu cluster.object_store_bytes=300000000 reward.dtype=float32"""
CAPTION = "a small red circle moves left slowly on a gray background"
SHOWN = ("rollout/denoise_s", "rollout/decode_s", "reward/score_s", "agreement/max_abs", "learner/stepped")
"""Metrics shown beside the phases; without a step (learner/stepped) no update was measured."""


@dataclass(frozen=True)
class Ring:
    """A recipe and what is cut of it."""

    recipe: str
    words: str

    @property
    def file(self) -> Path:
        return ROOT / "configs" / f"{self.recipe}.yaml"


RINGS = {
    (1, 1): Ring("lora_one_gpu", CUT + "data.group_size=2 data.num_prompts=1 sampling.num_steps=4"),
    (2, 1): Ring(
        "official_8gpu",
        ALL_WEIGHTS + "rollout.num_workers=1 learner.num_ranks=1 data.num_prompts=1 sampling.num_steps=4",
    ),
    (4, 1): Ring(
        "official_8gpu",
        ALL_WEIGHTS + "rollout.num_workers=1 learner.num_ranks=3 data.num_prompts=3 sampling.num_steps=3 "
        "learner.reference_offload=false",
    ),
    (4, 2): Ring(
        "official_8gpu",
        ALL_WEIGHTS + "rollout.num_workers=2 learner.num_ranks=2 data.num_prompts=2 sampling.num_steps=4",
    ),
}
"""(GPUs, rollout workers) -> what runs there."""


def plan_of(config: Config) -> dict[str, float]:
    """Seconds and bytes that the plan says, and useful FLOPs; only the last for a small model."""
    dims, trained = read_dims(Path(config.model.path)), training_schedule(config).rule.num_trained
    if dims is None:
        return {}
    found = {f"{phase}_flops": flops for phase, flops in useful_flops(config, dims, trained).items()}
    if dims.parameters < SMALLEST:
        return found
    expected = predict(config, dims, trained, H100())
    return found | {
        "rollout_s": sum(expected.rollout_s.values()),
        "update_s": sum(expected.update_s.values()),
        "publish_s": expected.publish_s,
        "rollout_bytes": sum(expected.rollout_bytes.values()),
        "learner_bytes": sum(expected.learner_bytes.values()),
    }


def numbers(row: dict, config: Config, plan: dict[str, float], num_gpus: int) -> dict[str, float]:
    """Of one iteration: seconds, TFLOP/s and MFU of a GPU in each phase, peak of every role, GPU-seconds of a video."""
    found = {f"{name}_s": row[f"phase/{name}_s"] for name in ("rollout", "update", "publish")}
    found["turns_s"] = row.get("phase/turn_s", 0.0)
    found["iteration_s"] = sum(found.values())
    videos = num_prompts(config) * config.data.group_size
    found["gpu_s_per_video"] = num_gpus * found["iteration_s"] / videos
    gpus = {"rollout": config.rollout.num_workers * config.rollout.gpus_per_group, "update": config.learner.num_ranks}
    flops = {phase: plan.get(f"{phase}_flops", 0.0) for phase in gpus}
    for phase, count in (*gpus.items(), ("iteration", num_gpus)):
        work = flops.get(phase, sum(flops.values()))
        found[f"{phase}_tflops"] = work / found[f"{phase}_s"] / count / 1e12
        found[f"{phase}_mfu"] = found[f"{phase}_tflops"] * 1e12 / H100.peak_flops_s
    peaks = {f"{role}_bytes": row.get(f"memory/{role}_peak_bytes") for role in ("rollout", "learner")}
    others = peaks | {key: row.get(key) for key in SHOWN}
    return found | {key: value for key, value in others.items() if value is not None}


def text(found: dict[str, float], plan: dict[str, float]) -> str:
    """One iteration in lines: measured, predicted, how far apart."""
    lines = []
    for key, value in found.items():
        size, unit = (value / 2**30, " GiB") if key.endswith("_bytes") else (value, "")
        words = f"  {key.replace('_bytes', '_peak'):28} {size:10.4g}{unit}"
        if plan.get(key) and value:
            words += f"  plan {plan[key] / (2**30 if unit else 1):.4g}{unit}, {100 * (value / plan[key] - 1):+.0f} %"
        lines.append(words)
    return "\n".join(lines)


def write_folders(folder: Path, size: str) -> list[str]:
    """Policy, reward and prompts, where they are missing; the settings that name them."""
    policy, reward, start = folder / "policy", folder / "VideoReward", time.monotonic()
    reward_size = "official" if size == "official" else "tiny"
    with ThreadPoolExecutor() as pool:
        jobs = [(policy, write_policy, SIZES[size]), (reward, videoalign_speed.write_random, reward_size)]
        for done in [pool.submit(write, path, what) for path, write, what in jobs if not path.exists()]:
            done.result()
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join([" ".join([CAPTION] * 18)] * 4) + "\n", "utf-8")
    print(f"folders written in {time.monotonic() - start:.1f} s", flush=True)
    sets = [f"data.{key}=[{prompts}]" for key in ("prompts", "held_out_prompts")]
    return [f"output_dir={folder / f'run_{int(time.time())}'}", f"model.path={policy}", f"reward.path={reward}", *sets]


def options() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1, choices=sorted({gpus for gpus, _ in RINGS}))
    parser.add_argument("--rollouts", type=int, default=1, help="rollout workers of them; the others learn")
    parser.add_argument("--size", choices=SIZES, default="official", help="small runs on a CPU")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/ring"), help="for weights and the run")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds after which the run is ended")
    parser.add_argument("--save", action="store_true", help="let the run save and end by itself")
    parser.add_argument("--json", type=Path, help="where the numbers are written too")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict:
    """Write what is missing, train, and say what it took."""
    parser = options()
    parsed, settings = parser.parse_known_args(arguments)
    ring = RINGS.get((parsed.gpus, parsed.rollouts))
    if ring is None:
        parser.error(f"--rollouts {parsed.rollouts}: of {parsed.gpus} GPUs no such ring is measured")
    logging.set_verbosity_error()
    words = [*write_folders(parsed.folder, parsed.size), f"num_iterations={parsed.iterations}", *ring.words.split()]
    words += [*(SMALL.split() if parsed.size == "small" else ()), *settings]
    config, timeline = load_config([ring.file], words), Timeline()
    status = train(ring.file, words, timeline, parsed.timeout, None if parsed.save else parsed.iterations)
    done = timeline.finished == parsed.iterations
    file, plan = Path(config.output_dir) / "metrics.jsonl", plan_of(config)
    rows = [row for row in (read_metrics(file) if file.exists() else []) if "phase/update_s" in row]
    found = [numbers(row, config, plan, parsed.gpus) for row in rows if "phase/publish_s" in row]
    for number, one in enumerate(found, 1):
        print(f"iteration {number}\n{text(one, plan)}", flush=True)
    for phase, peaks in timeline.peaks.items():
        each = "  ".join(f"{peak / 2**30:.1f}" for _, peak in sorted(peaks.items()))
        print(f"GiB in use on the GPUs while {phase}, at most: {each}", flush=True)
    result = {"words": words, "iterations": found, "metrics": rows, "plan": plan, "peak_bytes": timeline.peaks}
    result |= {"exit_code": status, "status": 0 if done else status or 1}
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return result


if __name__ == "__main__":
    sys.exit(main()["status"])
