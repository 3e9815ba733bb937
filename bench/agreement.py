"""Log-probs of rollout and learner at the real size: `python -m bench.agreement [--guidance 1 6] [--steps 4]`.

What the actors call, in one process and without folders: GroupRollout samples with a bfloat16 policy; PolicyUpdate
replays under FSDP2 of one rank, in the training forward itself, blocks recomputed; weights go over by pack and unpack.
Prints every trained step as it is compared. By default LoRA at all layers, which leaves one 80 GB card room for the
weights of both; `--lora 0 --layers 12` trains float32 master weights of a shorter model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers.utils import logging
from torch import distributed

from bench.real_size import SIZES, Size, blank, fill_random, random_condition, random_weights, transformer
from bench.timing import GIB, free
from sage_ray.agreement import Agreement
from sage_ray.config import Config
from sage_ray.group_batch import GroupBatch, Pass, ReplayRules, count_pairs
from sage_ray.group_rollout import GroupRollout
from sage_ray.models.lora import adapt
from sage_ray.models.packed_velocity import TORCH_DTYPES, PackedVelocity
from sage_ray.parallel import free_port, gather_objects, shard, start_process_group
from sage_ray.policy_update import PolicyUpdate
from sage_ray.training_schedule import TrainingSchedule, training_schedule
from sage_ray.types import Condition, GroupRequest, Prompt, Trajectory
from sage_ray.weights import pack, unpack

SHIFT = 5.0
"""Of the sigma grid: the real model's for 480 lines."""


class RandomPolicy:
    """What GroupRollout asks of a HunyuanVideo, with random weights and prompts, and no VAE."""

    def __init__(self, size: Size, velocity: PackedVelocity, device: torch.device):
        self.size, self.velocity, self.device = size, velocity, device

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the size's videos."""
        return self.size.latent_shape(num_frames)

    def encode_prompts(self, texts: Sequence[str]) -> list[Condition]:
        """Random tokens; the empty prompt gets fewer."""
        encoded = (random_condition(self.size, self.device, seed=len(text)) for text in texts)
        lengths = (self.size.text if text else self.size.text // 3 + 1 for text in texts)
        parts = ((c.text[0, :n].cpu().numpy(), c.byt5[0].cpu().numpy()) for c, n in zip(encoded, lengths, strict=True))
        return [Condition(*part) for part in parts]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Nothing to see: uint8 [B, 1, 1, 1, 3]."""
        return torch.zeros(len(latents), 1, 1, 1, 3, dtype=torch.uint8)


class PrintedAgreement(Agreement):
    """The product's comparison, which prints and keeps every pair and lets all pass that are finite."""

    def __init__(self, schedule: TrainingSchedule, sp_size: int = 1):
        super().__init__(math.inf, sp_size)
        self.coefs, self.pairs = schedule.coefs, []

    def check(self, passes: Sequence[Pass], replayed: Sequence[torch.Tensor]) -> None:
        """Print one line for every (video, step); rank 0 does."""
        for one, learner in zip(passes, replayed, strict=True):
            for place, ours, theirs in zip(one.places, learner.tolist(), one.rollout_log_prob.tolist(), strict=True):
                step, by = place.step, place.worker
                sigma, std = float(self.coefs.sigmas[step]), float(self.coefs.std[step])
                pair = {"by": by, "step": step, "sigma": sigma, "std": std}
                pair |= {"rollout": theirs, "learner": ours, "difference": ours - theirs}
                self.pairs.append(pair)
                numbers = f"sigma {sigma:.4f}  std {std:.4f}  rollout {theirs:.9f}  learner {ours:.9f}"
                if distributed.get_rank() == 0:
                    print(f"  {by:4} step {step:2}  {numbers}  difference {ours - theirs:+.3g}".rstrip(), flush=True)
        super().check(passes, replayed)


def configuration(parsed: argparse.Namespace, guidance: float) -> Config:
    """The product's settings of this comparison."""
    config = Config()
    config.model.dtype, config.model.gradient_checkpointing = parsed.dtype, True
    config.sampling.guidance_scale, config.sampling.shift = guidance, SHIFT
    config.sampling.num_steps, config.sampling.num_frames = parsed.steps, parsed.frames
    config.data.group_size, config.learner.videos_per_pass = parsed.videos, 1
    config.lora.rank, config.kl.mode = parsed.lora, "none"
    return config


def learner(parsed: argparse.Namespace, size: Size, config: Config, device: torch.device) -> PackedVelocity:
    """The learner's model as `load_sharded` makes it, over all ranks, random; adapters change something."""
    model = blank(size, parsed.layers)
    model.context_embedder_2.to_empty(device="cpu").requires_grad_(True)
    for parameter in model.context_embedder_2.parameters():
        torch.nn.init.ones_(parameter)
    velocity = PackedVelocity(model, TORCH_DTYPES[parsed.dtype], compiled=parsed.compile, keep_attention=parsed.keep)
    if config.lora.rank:
        adapt(velocity, config.lora, config.seed, dtype=torch.float32)
    shard(velocity.to("meta"), distributed.get_world_size(), device.type).to_empty(device=device)
    shards = ((name, parameter.to_local()) for name, parameter in velocity.named_parameters())
    fill_random(shards, seed=distributed.get_rank())
    velocity.transformer.gradient_checkpointing = True
    return velocity


@torch.no_grad()
def policy(
    parsed: argparse.Namespace, size: Size, config: Config, trained: PackedVelocity, device: torch.device
) -> RandomPolicy:
    """A rollout worker's model with the learner's frozen weights; `publish` gives it the others."""
    dtype = TORCH_DTYPES[parsed.dtype]
    weights = random_weights(size, device, dtype, parsed.layers)
    velocity = PackedVelocity(transformer(size, weights, parsed.layers), dtype, compiled=parsed.compile)
    if config.lora.rank:
        adapt(velocity, config.lora, config.seed, dtype=dtype)
    held = dict(trained.named_parameters())
    for name, parameter in velocity.named_parameters():
        parameter.copy_(held[name].full_tensor())
    return RandomPolicy(size, velocity.requires_grad_(False), device)


def publish(trained: PackedVelocity, receiver: RandomPolicy, version: int, dtype: torch.dtype) -> None:
    """As LearnerRank.publish and RolloutWorker.load_weights do."""
    part = pack(trained, version, distributed.get_rank(), dtype)
    unpack(receiver.velocity, gather_objects(part), receiver.velocity.trainable_names)


def sample(config: Config, schedule: TrainingSchedule, receiver: RandomPolicy) -> Trajectory:
    """One group by the rollout worker's path."""
    steps, sampling = schedule.rule.at(config.seed, 0, 0), config.sampling
    request = GroupRequest(
        step=0,
        group=0,
        prompt=Prompt(0, "a prompt"),
        group_size=config.data.group_size,
        policy_version=0,
        seed=config.seed,
        sigmas=tuple(map(float, schedule.coefs.sigmas)),
        sde_type=sampling.sde_type,
        eta=sampling.eta,
        sde_steps=steps.sde_steps,
        trained_steps=steps.trained_steps,
    )
    rollout = GroupRollout(config, receiver)  # type: ignore[arg-type]
    return next(rollout.decode(rollout.denoise([request])[0])).trajectory


def compare(config: Config, trained: PackedVelocity, receiver: RandomPolicy, total_steps: int) -> dict:
    """Publish, roll out, update once; the numbers of one guidance scale."""
    schedule, sampling, start = training_schedule(config), config.sampling, time.monotonic()
    publish(trained, receiver, 0, TORCH_DTYPES[config.model.dtype])
    published, start = time.monotonic() - start, time.monotonic()
    trajectory = sample(config, schedule, receiver)
    free()
    sampled, start = time.monotonic() - start, time.monotonic()
    rules = ReplayRules(sampling.guidance_scale, sampling.last_step, schedule.rule.candidates)
    rule = PolicyUpdate(trained, config.loss, config.kl, config.optimizer, rules, total_steps, config.learner)
    rule.agreement = agreement = PrintedAgreement(schedule)
    ones = np.ones(config.data.group_size, np.float32)
    metrics = rule.update(
        [[GroupBatch(trajectory, ones, ones)]], count_pairs(ones[None], 1, len(trajectory.trained_steps))
    )
    result = {"guidance": sampling.guidance_scale, "publish_s": published, "rollout_s": sampled}
    result |= {"update_s": time.monotonic() - start, "pairs": agreement.pairs}
    result["max_abs"] = max(abs(pair["difference"]) for pair in agreement.pairs)
    result["bitwise"] = result["max_abs"] == 0
    return result | {"grad_norm": metrics["learner/grad_norm"]}


def options() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="official", help="small takes seconds on a CPU")
    parser.add_argument("--layers", type=int, help="fewer blocks than the size has")
    parser.add_argument("--lora", type=int, default=8, help="rank of adapters; 0 trains float32 master weights")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 6.0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--videos", type=int, default=1, help="of the group; each has a pass of its own")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="bfloat16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="attention outputs")
    parser.add_argument("--json", type=Path, help="where the numbers are written too")
    return parser


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """One comparison per guidance scale."""
    parsed = options().parse_args(arguments)
    logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start_process_group(0, 1, "127.0.0.1", free_port(), device=device.type, timeout_s=600)
    size, results = SIZES[parsed.size], []
    trained = learner(parsed, size, configuration(parsed, 1.0), device)
    receiver = policy(parsed, size, configuration(parsed, 1.0), trained, device)
    free()
    for guidance in parsed.guidance:
        print(f"guidance {guidance:g}, {parsed.dtype}, {'compiled' if parsed.compile else 'eager'}", flush=True)
        result = compare(configuration(parsed, guidance), trained, receiver, len(parsed.guidance))
        peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
        seconds = "  ".join(f"{key} {result[key]:.1f}" for key in ("publish_s", "rollout_s", "update_s"))
        same = "bitwise equal" if result["bitwise"] else f"max |difference| {result['max_abs']:.3g}"
        print(f"guidance {guidance:g}: {same}  {seconds}  peak {peak:.1f} GiB", flush=True)
        results.append(result)
        if parsed.json is not None:
            parsed.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        free()
    distributed.destroy_process_group()
    return results


if __name__ == "__main__":
    main()
