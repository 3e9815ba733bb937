"""The whole ring on one GPU at the real size: `python -m bench.one_gpu [--folder /dev/shm/one_gpu] [key=value ...]`.

Writes a random policy and a random VideoAlign folder, runs `launch.py train` with configs/lora_one_gpu.yaml cut to two
videos of one prompt, four steps, no guidance, and prints the seconds of every phase and the most GPU memory in use in
it (nvidia-smi, five times a second, all processes together), beside what `launch.py plan` predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from diffusers.utils import logging

from bench import videoalign_speed
from bench.random_folders import write_policy
from bench.real_size import SIZES
from sage_ray.config_load import load_config
from sage_ray.cost import H100
from sage_ray.metrics import read_metrics
from sage_ray.prediction import SMALLEST, Prediction, predict, read_dims
from sage_ray.training_schedule import training_schedule

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs" / "lora_one_gpu.yaml"
CUT = "data.group_size=2 data.num_prompts=1 sampling.num_steps=4 sampling.guidance_scale=1.0 evaluation.num_prompts=0"
SMALL = """model.compile=false sampling.height=32 sampling.width=32 sampling.num_frames=9 sampling.fps=8 lora.rank=4
cluster.device=cpu reward.dtype=float32"""
CAPTION = "a small red circle moves left slowly on a gray background"
START = re.compile(r": (\w+) \.\.\.$")
"""A line with which a phase begins, as a log file gets it."""


@dataclass
class Timeline:
    """Phases of a run as its words arrive, and GPU memory in use. peaks: phase -> most bytes."""

    phase: str = "start"
    began: float = field(default_factory=time.monotonic)
    peaks: dict[str, int] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Take one line of the run's output."""
        if found := START.search(line.rstrip()):
            self.phase = found.group(1)
        print(f"{time.monotonic() - self.began:6.1f} s  {line.rstrip()}", flush=True)

    def sample(self, used_bytes: int) -> None:
        """Take one reading of the memory in use."""
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), used_bytes)


def watch(timeline: Timeline) -> subprocess.Popen | None:
    """Read the GPU's memory in a thread until the returned process is ended; None without nvidia-smi."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    query = ["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return None

    def follow() -> None:
        for line in process.stdout or ():
            if line.strip().isdigit():
                timeline.sample(int(line) * 2**20)

    threading.Thread(target=follow, daemon=True).start()
    return process


def train(words: Sequence[str], timeline: Timeline, timeout_s: float) -> int:
    """Run `launch.py train`; its exit status."""
    command = [sys.executable, str(ROOT / "launch.py"), "train", "--config", str(RECIPE), *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process, watcher = subprocess.Popen(command, cwd=ROOT, env=environment, **streams), watch(timeline)
    limit = threading.Timer(timeout_s, lambda: process.send_signal(signal.SIGINT))
    limit.start()
    for line in process.stdout or ():
        timeline.read(line)
    limit.cancel()
    if watcher is not None:
        watcher.terminate()
    return process.wait()


def expected(words: Sequence[str]) -> Prediction | None:
    """What the plan says; None for a small model."""
    config = load_config([RECIPE], words)
    dims = read_dims(Path(config.model.path))
    if dims is None or dims.parameters < SMALLEST:
        return None
    return predict(config, dims, training_schedule(config).rule.num_trained, H100())


def summary(rows: Sequence[dict], timeline: Timeline, prediction: Prediction | None) -> dict:
    """Print and return measured numbers of every iteration, and the predicted ones."""
    seconds = [
        {k: v for k, v in row.items() if k.startswith(("phase/", "turns/", "memory/")) or k in EXTRA} for row in rows
    ]
    for number, row in enumerate(seconds, 1):
        print(f"iteration {number}: " + "  ".join(f"{k} {v:.4g}" for k, v in row.items() if v is not None), flush=True)
    for phase, peak in timeline.peaks.items():
        print(f"GPU memory while {phase}: {peak / 2**30:.1f} GiB at most", flush=True)
    result = {"iterations": seconds, "peak_bytes": timeline.peaks}
    if prediction is None:
        return result
    guess = {
        "rollout_s": sum(prediction.rollout_s.values()),
        "update_s": sum(prediction.update_s.values()),
        "publish_s": prediction.publish_s,
        "rollout_GiB": sum(prediction.rollout_bytes.values()) / 2**30,
        "learner_GiB": sum(prediction.learner_bytes.values()) / 2**30,
    }
    print("predicted: " + "  ".join(f"{key} {value:.1f}" for key, value in guess.items()), flush=True)
    return result | {"predicted": guess}


EXTRA = ("rollout/denoise_s", "rollout/decode_s", "reward/score_s", "agreement/max_abs", "learner/stepped")
"""Metrics shown beside the phases; without a step (learner/stepped) no update was measured."""


def main(arguments: Sequence[str] | None = None) -> dict:
    """Write what is missing, train, and say what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="official", help="small runs on a CPU")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/one_gpu"), help="for weights and the run")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds after which the run is interrupted")
    parser.add_argument("--json", type=Path, help="where the numbers are written too")
    parsed, settings = parser.parse_known_args(arguments)
    logging.set_verbosity_error()
    policy, reward = parsed.folder / "policy", parsed.folder / "VideoReward"
    start = time.monotonic()
    reward_size = "official" if parsed.size == "official" else "tiny"
    with ThreadPoolExecutor() as pool:
        jobs = [(policy, write_policy, SIZES[parsed.size]), (reward, videoalign_speed.write_random, reward_size)]
        for done in [pool.submit(write, folder, size) for folder, write, size in jobs if not folder.exists()]:
            done.result()
    (parsed.folder / "prompts.txt").write_text("\n".join([" ".join([CAPTION] * 18)] * 4) + "\n", "utf-8")
    print(f"folders written in {time.monotonic() - start:.1f} s", flush=True)
    words = [f"output_dir={parsed.folder / f'run_{int(time.time())}'}", f"model.path={policy}", f"reward.path={reward}"]
    words += [f"data.{key}=[{parsed.folder / 'prompts.txt'}]" for key in ("prompts", "held_out_prompts")]
    words += [f"num_iterations={parsed.iterations}", *CUT.split()]
    words += [*(SMALL.split() if parsed.size == "small" else ()), *settings]
    timeline = Timeline()
    status = train(words, timeline, parsed.timeout)
    file = Path(words[0].partition("=")[2]) / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    result = summary(rows, timeline, expected(words)) | {"status": status}
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return result


if __name__ == "__main__":
    sys.exit(main()["status"])
