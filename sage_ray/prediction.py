"""Seconds and GPU memory of a configuration at the real size, from the rates of `cost.H100`. Nothing is allocated.

Left out of the seconds: optimizer steps, collectives (those of sequence parallelism too), turns, evaluation,
checkpoints. Left out of the bytes: text encoders (they wait on the host), the reward model, CUDA contexts,
fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sage_ray.config import Config
from sage_ray.config_check import dp_degree, num_prompts
from sage_ray.cost import H100, Dims, Way, forward_flops, forward_s, update_s
from sage_ray.group_batch import split_groups
from sage_ray.json_object import read_object
from sage_ray.trust_region import KL_TERMS

SMALLEST = 10**9
"""Parameters below which kernel launches, not arithmetic, take the time: nothing is predicted."""
TEXT_TOKENS = 200
"""Valid tokens of a prompt that are assumed, as in the measurements."""
SPATIAL, TEMPORAL = 16, 4
"""Compression of the real VAE."""
REFERENCE_PIXELS = 480 * 832


@dataclass(frozen=True)
class Prediction:
    """rollout_s, update_s: parts of the two phases, one beside the other's end; publish_s: weights to the workers.
    rollout_bytes, learner_bytes: parts of the peak of a rollout worker and of a learner rank."""

    rollout_s: dict[str, float]
    update_s: dict[str, float]
    publish_s: float
    rollout_bytes: dict[str, float]
    learner_bytes: dict[str, float]

    @property
    def iteration_s(self) -> float:
        """Of one iteration of the synchronous loop."""
        return sum(self.rollout_s.values()) + sum(self.update_s.values()) + self.publish_s


def read_dims(folder: Path) -> Dims | None:
    """Of a pipeline's transformer; None where there is no such file, or another model's."""
    file = folder / "transformer" / "config.json"
    try:
        return Dims.of(read_object(file))
    except (KeyError, TypeError, ValueError, OSError):  # what is wrong with it is for the checks to say
        return None


def predict(config: Config, dims: Dims, num_trained: int, rates: H100) -> Prediction:
    """Args: num_trained: trained steps of a group."""
    return Prediction(
        rollout_s=_rollout_s(config, dims, rates),
        update_s=_update_s(config, dims, num_trained, rates),
        publish_s=published_bytes(config, dims)
        * (1 / config.learner.num_ranks / rates.pack_bytes_s + 1 / rates.unpack_bytes_s),
        rollout_bytes=_rollout_bytes(config, dims, rates),
        learner_bytes=_learner_bytes(config, dims, num_trained, rates),
    )


def useful_flops(config: Config, dims: Dims, num_trained: int) -> dict[str, float]:
    """Useful work of one iteration, all GPUs together: of "rollout" and of "update". A backward counts as two forwards,
    references and old log-probs as one each, recomputation and the KL's share as nothing."""
    loss, branches = config.loss, _branches(config)
    forward = forward_flops(dims.dim, dims.layers, forward_tokens(config, dims)) * branches
    videos, steps = num_prompts(config) * config.data.group_size, loss.num_updates * loss.num_epochs
    pairs = videos * num_trained * loss.num_epochs
    rollout = videos * config.sampling.num_steps * forward
    return {"rollout": rollout, "update": pairs * forward * (3 + _held(config) + (steps - 1) / steps)}


def forward_tokens(config: Config, dims: Dims) -> int:
    """Video and text tokens of one forward of one video."""
    sampling = config.sampling
    latent = (sampling.num_frames - 1) // TEMPORAL + 1, sampling.height // SPATIAL, sampling.width // SPATIAL
    return dims.tokens(latent) + TEXT_TOKENS


def _branches(config: Config) -> int:
    """Forwards of a velocity: two under guidance."""
    return 1 if config.sampling.guidance_scale == 1.0 else 2


def _held(config: Config) -> int:
    """References that need a forward of their own."""
    terms = KL_TERMS[config.kl.mode]
    return int(terms.anchor) + int(terms.previous and config.kl.previous != "rollout")


def _trained(config: Config, dims: Dims) -> int:
    return dims.lora_parameters(config.lora.rank) if config.lora.rank else dims.parameters


def published_bytes(config: Config, dims: Dims) -> float:
    """What the learner gives to a rollout worker."""
    return 2.0 * _trained(config, dims)


def _rollout_s(config: Config, dims: Dims, rates: H100) -> dict[str, float]:
    """Of the busiest group. The reward model scores beside it, all but the last group, unless they take turns. One of
    its actors decodes."""
    sampling, group = config.sampling, config.data.group_size
    prompts = num_prompts(config)
    videos = math.ceil(prompts / config.rollout.num_workers) * group
    forward = forward_s(dims, forward_tokens(config, dims), config.model.compile, rates)
    pixels = sampling.num_frames * sampling.height * sampling.width
    scored = prompts * group / config.reward.num_workers if config.cluster.take_turns else group
    parts = {
        "denoise": videos * sampling.num_steps * _branches(config) * forward / config.rollout.sp_size,
        "decode": videos * pixels / rates.decode_pixels_s,
    }
    if config.reward.path is not None:
        parts["reward"] = scored / rates.reward_rate(group)
    return parts


def _update_s(config: Config, dims: Dims, num_trained: int, rates: H100) -> dict[str, float]:
    """Of the busiest rank."""
    loss, kl, tokens = config.loss, config.kl, forward_tokens(config, dims)
    shares = split_groups(num_prompts(config), loss.num_updates, dp_degree(config))
    groups = sum(max(len(rank) for rank in update) for update in shares) * loss.num_epochs
    velocities = groups * config.data.group_size * num_trained * _branches(config) / config.learner.sp_size
    steps, forward = loss.num_updates * loss.num_epochs, forward_s(dims, tokens, config.model.compile, rates)
    training = velocities * update_s(dims, tokens, _way(config), rates)
    terms = KL_TERMS[kl.mode]
    parts = {
        "forward and backward": training,
        "references": velocities * _held(config) * forward,
        "old log-probs": velocities * forward * (steps - 1) / steps,
        "KL share": training / kl.share_interval if (terms.anchor or terms.previous) and kl.share_interval else 0.0,
    }
    return {name: seconds for name, seconds in parts.items() if seconds}


def _way(config: Config) -> Way:
    model = config.model
    return Way(model.compile, model.gradient_checkpointing, model.keep_attention, not config.lora.rank)


def _rollout_bytes(config: Config, dims: Dims, rates: H100) -> dict[str, float]:
    """Forwards and decodes take turns in a worker unless rollout.overlap_decode lets them run at once."""
    sampling, rollout, group = config.sampling, config.rollout, config.data.group_size
    at_once = min(config.learner.videos_per_pass or group, group)
    together = at_once * rollout.groups_per_task if at_once == group else at_once
    work = together * forward_tokens(config, dims) * dims.dim * 2.0 * rates.work_tokens / 2 / rollout.sp_size
    area = sampling.height * sampling.width / REFERENCE_PIXELS
    if rollout.decode_frames is None:
        videos = group * rollout.groups_per_task
        decode = videos * sampling.num_frames * sampling.height * sampling.width * rates.decode_pixel_bytes
    else:
        kept, frame = rates.chunk_bytes
        decode = (kept + frame * rollout.decode_frames) * area
    parts = {"weights": 2.0 * (dims.parameters + dims.lora_parameters(config.lora.rank)), "VAE": rates.vae_bytes}
    if rollout.overlap_decode:
        return parts | {"forward": work, "decode": decode}
    return parts | ({"decode": decode} if decode > work else {"forward": work})


def _learner_bytes(config: Config, dims: Dims, num_trained: int, rates: H100) -> dict[str, float]:
    """With float32 masters; the frozen base under adapters is bfloat16."""
    ranks, loss = config.learner.num_ranks, config.loss
    trained, group = _trained(config, dims), config.data.group_size
    copies = _held(config) + (loss.num_updates * loss.num_epochs > 1)
    moments = 1 if config.optimizer.name == "muon" else 2
    at_once = min(config.learner.videos_per_pass or group, group)
    parts = {
        "frozen base": 2.0 * dims.parameters / ranks if config.lora.rank else 0.0,
        "masters": 4.0 * trained / ranks,
        "gradients": 4.0 * trained / (1 if keeps_whole_gradients(config, num_trained) else ranks),
        "optimizer": 4.0 * moments * trained / ranks,
        # While a copy is in the module, the live weights wait beside it.
        "references": (2.0 * copies + 4.0) * trained / ranks
        if copies and not config.learner.reference_offload
        else 0.0,
        "moving average": 8.0 * trained / ranks if config.optimizer.ema_decay is not None else 0.0,
        "two gathered blocks": 4.0 * dims.block_parameters,
        "activations": _activations(config, dims, at_once, rates),
    }
    return {name: size for name, size in parts.items() if size}


def keeps_whole_gradients(config: Config, num_trained: int) -> bool:
    """Whether a rank's gradients are whole at some time: FSDP2 keeps them so, in float32, between passes that do not
    reduce."""
    group, updates = config.data.group_size, config.loss.num_updates
    at_once = min(config.learner.videos_per_pass or group, group)
    groups = max(len(rank) for rank in split_groups(num_prompts(config), updates, dp_degree(config))[0])
    return groups * num_trained * math.ceil(group / at_once) > 1 and not config.learner.shard_gradients


def _activations(config: Config, dims: Dims, videos: int, rates: H100) -> float:
    """Of all forwards of a pass, and what one block holds while it is recomputed."""
    token = videos * forward_tokens(config, dims) * dims.dim * 2.0 / config.learner.sp_size
    work = token * rates.work_tokens
    if not config.model.gradient_checkpointing:
        return _branches(config) * dims.layers * work
    kept = 2 if config.model.keep_attention else 1
    return _branches(config) * dims.layers * token * kept + work
