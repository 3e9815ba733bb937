"""A small configuration over the shipped checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sage_ray.config import Config
from sage_ray.config_load import load_config
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.streamed import load_transformer

ROOT = Path(__file__).parents[1]


def load_velocity(folder: Path, dtype: torch.dtype, device: str) -> PackedVelocity:
    """The transformer of a pipeline directory with float32 master weights, in one process and unsharded."""
    return PackedVelocity(load_transformer(folder / "transformer", torch.float32, device), dtype)


def small_config(tmp_path: Path, overrides: Sequence[str] = ()) -> Config:
    """configs/shapes_cpu.yaml with absolute paths, four prompts of four videos, no evaluation."""
    shapes = ROOT / "assets" / "shapes"
    return load_config(
        [ROOT / "configs" / "shapes_cpu.yaml"],
        [
            f"output_dir={tmp_path / 'run'}",
            f"model.path={shapes / 'policy'}",
            f"reward.path={shapes / 'reward' / 'VideoReward'}",
            f"data.prompts=[{shapes / 'prompts_train.txt'}]",
            f"data.held_out_prompts=[{shapes / 'prompts_held_out.txt'}]",
            "num_iterations=1",
            "data.num_prompts=4",
            "data.group_size=4",
            "evaluation.num_prompts=0",
            "rollout.num_workers=1",
            *overrides,
        ],
    )


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of an iteration that a second run repeats: no seconds, nothing that follows from seconds, and not who
    was replaced."""
    timed = ("pool/", "throughput/", "turns/", "time/", "rollout_pool/", "failures/")
    return {k: v for k, v in metrics.items() if not k.endswith("_s") and not k.startswith(timed)}
