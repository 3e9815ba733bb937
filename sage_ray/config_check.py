"""The rules a configuration must keep, checked before anything is allocated. Pure: looks at no file and no device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sage_ray.config import (
    DTYPES,
    KL_MODES,
    SDE_TYPES,
    SETTINGS,
    Config,
    ConfigError,
    SamplingConfig,
    axis_weights,
    dotted_keys,
    total_optimizer_steps,
    value_at,
)


class Broken(NamedTuple):
    """A broken rule: the key, and what it demands."""

    key: str
    rule: str


CHOICES: dict[str, tuple[str | None, ...]] = {
    "sampling.sde_type": SDE_TYPES,
    "sampling.last_step": ("ode", "sde"),
    "kl.mode": KL_MODES,
    "kl.direction": ("paper", "ppo"),
    "kl.previous": ("last_step", "iteration_start", "rollout"),
    "kl.schedule": ("fixed", "two_stage", "feedback"),
    "sampling.sde_window_move": ("none", "slide", "random"),
    "reward.setting": tuple(SETTINGS),
    "advantage.combine": ("reward", "axis"),
    "advantage.std_rule": ("add", "clamp"),
    "loss.equalizer_median": ("lower", "true"),
    "optimizer.name": ("muon", "adamw"),
    "optimizer.schedule": ("constant", "cosine"),
    "optimizer.muon_dtype": DTYPES,
    "loss.cps_log_prob": ("normalised", "published"),
    "model.dtype": DTYPES,
    "reward.dtype": DTYPES,
    "reward.truth": (None, "shapes"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "publish.transport": ("auto", "collective", "object_store"),
}

SETS = ("training", "held_out")
"""Of evaluation.sets."""

AT_LEAST: dict[str, float] = {
    "seed": 0, "num_iterations": 1, "save_interval": 1,
    "sampling.num_steps": 1, "sampling.height": 1, "sampling.width": 1, "sampling.num_frames": 1,
    "sampling.guidance_scale": 1, "sampling.sde_window_start": 0, "sampling.sde_window_size": 1,
    "sampling.sde_window_stride": 1, "sampling.sde_window_interval": 1,
    "data.group_size": 2, "data.num_prompts": 1, "data.batch_size": 1, "data.gradient_accumulation_steps": 1,
    "reward.num_workers": 1,
    "reward.max_batch_tokens": 1, "reward.max_pending": 1, "reward.gpus_per_worker": 0,
    "cluster.num_cpus": 1, "reward.max_failed_share": 0,
    "advantage.min_std": 0, "loss.num_updates": 1, "loss.num_epochs": 1,
    "loss.equalizer_eps": 0, "kl.share_interval": 0, "lora.rank": 0,
    "optimizer.warmup_steps": 0, "optimizer.min_factor": 0,
    "kl.coef": 0, "kl.min_coef": 0, "kl.moving_weight": 0, "kl.step_weight": 0,
    "kl.warmup_steps": 0, "kl.anchor_interval": 1, "optimizer.weight_decay": 0,
    "learner.num_ranks": 1, "learner.sp_size": 1,
    "rollout.num_workers": 1, "rollout.min_workers": 1, "rollout.max_workers": 1, "rollout.scale_cooldown_s": 0,
    "faults.slow_factor": 1, "faults.hung_factor": 1, "faults.max_losses": 0, "faults.max_rebuilds": 0,
    "rollout.gpus_per_group": 1, "rollout.sp_size": 1,
    "rollout.groups_per_task": 1, "rollout.decode_frames": 1, "learner.videos_per_pass": 1,
    "evaluation.num_prompts": 0, "evaluation.videos_per_prompt": 1, "evaluation.num_steps": 1,
    "evaluation.interval": 0, "evaluation.seed": 0, "cluster.object_store_bytes": 1,
    "overlap.max_policy_age": 0, "overlap.max_groups": 1, "checkpoint.keep_last": 1, "checkpoint.keep_every": 1,
    "watch.page_interval_s": 0, "watch.trace_iteration": 1, "watch.max_kl_share": 0, "watch.max_clip_share": 0,
    "watch.max_agreement_share": 0, "watch.min_effective_samples": 0,
}  # fmt: skip

POSITIVE = (
    "sampling.shift", "sampling.fps", "reward.timeout_s", "advantage.eps", "advantage.clip", "loss.clip_range",
    "loss.importance_cap", "optimizer.learning_rate", "optimizer.eps", "optimizer.max_grad_norm", "lora.alpha",
    "sampling.sde_fraction", "loss.timestep_fraction",
    "learner.timeout_s", "rollout.timeout_s", "cluster.start_timeout_s", "publish.timeout_s",
    "faults.hung_min_s", "faults.no_worker_s",
)  # fmt: skip

BELOW_ONE = ("loss.clip_range", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "optimizer.ema_decay")

AT_MOST_ONE = (
    "reward.max_failed_share", "sampling.sde_fraction", "loss.timestep_fraction", "optimizer.min_factor",
    "watch.min_effective_samples",
)  # fmt: skip

SELECTOR = re.compile(r"!?(?:[A-Za-z0-9._-]+|in\([A-Za-z0-9._-]+(?:, ?[A-Za-z0-9._-]+)*\))")
"""Of a node's label, as Ray has them."""

PATHS = (
    "output_dir", "resume", "model.path", "reward.path", "reward.runtime_env", "lora.path", "checkpoint.path",
    "data.prompts", "data.held_out_prompts",
)  # fmt: skip

NOT_EMPTY = ("output_dir", "model.path", "data.prompts")


def validate(config: Config) -> None:
    """Checks every rule in order and reports the first that is broken.

    Raises:
        ConfigError: names key, value and rule.
    """
    for rules in RULES:
        for broken in rules(config):
            raise ConfigError(f"{broken.key}={value_at(config, broken.key)!r}: {broken.rule}")


def num_prompts(config: Config) -> int:
    """Prompts per iteration: data.num_prompts, or batch_size * dp * gradient_accumulation_steps / group_size as the
    official program has it."""
    data = config.data
    if data.num_prompts is not None:
        return data.num_prompts
    if data.batch_size is None:
        raise ConfigError("data.num_prompts=None: exactly one of data.num_prompts and data.batch_size must be set")
    return data.batch_size * dp_degree(config) // data.group_size * data.gradient_accumulation_steps


def dp_degree(config: Config) -> int:
    """Data-parallel degree of the learner."""
    return config.learner.num_ranks // config.learner.sp_size


def _paths(config: Config) -> Iterator[Broken]:
    """Names that no file system takes."""
    for key in PATHS:
        value = value_at(config, key)
        for path in value if isinstance(value, list) else [value or ""]:
            longest = max(len(part.encode("utf-8", "replace")) for part in path.split("/"))
            if "\0" in path or longest > 255 or len(path.encode("utf-8", "replace")) > 4095:
                yield Broken(key, "must be a path: no zero byte, at most 255 bytes a name and 4095 in all")


def is_small(value: float) -> bool:
    """Whether a whole number is one that computers count with."""
    return isinstance(value, float) or abs(value) < 2**63


def _single_values(config: Config) -> Iterator[Broken]:
    """Rules about one value each; null is outside of every range rule."""
    for key, choices in CHOICES.items():
        if value_at(config, key) not in choices:
            yield Broken(key, f"must be one of {', '.join('null' if c is None else c for c in choices)}")

    def numbers(keys: Any, holds: Callable[[float, str], bool]) -> Iterator[str]:
        given = ((key, value_at(config, key)) for key in keys)
        return (key for key, value in given if isinstance(value, int | float) and not holds(value, key))

    yield from (Broken(key, "must be below 2**63") for key in numbers(dotted_keys(), lambda v, _: is_small(v)))
    yield from (Broken(key, "must be finite") for key in numbers(dotted_keys(), lambda v, _: math.isfinite(v)))
    for key in numbers(AT_LEAST, lambda v, key: v >= AT_LEAST[key]):
        yield Broken(key, f"must be at least {AT_LEAST[key]}")
    yield from (Broken(key, "must be greater than 0") for key in numbers(POSITIVE, lambda v, _: v > 0))
    yield from (Broken(key, "must be in [0, 1)") for key in numbers(BELOW_ONE, lambda v, _: 0 <= v < 1))
    yield from (Broken(key, "must be at most 1") for key in numbers(AT_MOST_ONE, lambda v, _: v <= 1))
    yield from (Broken(key, "must not be empty") for key in NOT_EMPTY if not value_at(config, key))
    for key in ("seed", "evaluation.seed"):
        if value_at(config, key) >= 2**31:
            yield Broken(key, "must be less than 2**31")


def _sampling(config: Config) -> Iterator[Broken]:
    """The transition must have a density, and at least one step must be trained."""
    sampling = config.sampling
    if sampling.sde_type == "ode":
        yield Broken(
            "sampling.sde_type",
            "training needs noise (eta > 0 and an sde_type other than ode); ode only serves evaluation",
        )
    if sampling.eta <= 0:
        yield Broken(
            "sampling.eta",
            f"training with sde_type={sampling.sde_type} needs eta > 0: without noise a step has no log-prob",
        )
    if 0 < sampling.eta < 1e-3:
        yield Broken("sampling.eta", "must be at least 0.001: below it float32 log-probs lose every digit")
    if sampling.sde_type == "cps" and sampling.eta > 1:
        yield Broken("sampling.eta", "sde_type=cps needs eta <= 1: its sine folds back above 1")
    if not 0.1 <= sampling.fps <= 1000:
        yield Broken("sampling.fps", "must be in [0.1, 1000], what a video file can hold")
    yield from _window(sampling)


def _window(sampling: SamplingConfig) -> Iterator[Broken]:
    """Which steps are stochastic."""
    start, size, steps = sampling.sde_window_start, sampling.sde_window_size, sampling.num_steps
    stochastic_end = steps - 1 if sampling.last_step == "ode" else steps
    if size is None and start != 0:
        yield Broken("sampling.sde_window_start", "needs sde_window_size; without it every step is stochastic")
    if size is None and sampling.sde_window_move != "none":
        yield Broken("sampling.sde_window_move", "needs sde_window_size; without it every step is stochastic")
    if size is not None and sampling.sde_fraction != 1:
        yield Broken("sampling.sde_fraction", "must be 1 with sde_window_size: one of the two chooses the steps")
    if size is not None and start + size > steps:
        yield Broken(
            "sampling.sde_window_size", f"sde_window_start={start} + sde_window_size must be at most num_steps={steps}"
        )
    if start >= stochastic_end:
        key = "sampling.num_steps" if size is None else "sampling.sde_window_start"
        yield Broken(
            key,
            f"no step is left to train: with last_step={sampling.last_step} only the steps 0 to "
            f"{stochastic_end - 1} of num_steps={steps} can be stochastic",
        )


def _kl_and_reward(config: Config) -> Iterator[Broken]:
    kl, reward = config.kl, config.reward
    if kl.mode != "none":
        if kl.weight <= 0:
            yield Broken("kl.weight", f"must be greater than 0 with kl.mode={kl.mode}; kl.mode=none turns KL off")
        used = {"fixed": (), "two_stage": ("kl.coef",), "feedback": ("kl.coef", "kl.min_coef")}[kl.schedule]
        for key in used:
            if value_at(config, key) > kl.weight:
                yield Broken(key, f"must be at most kl.weight={kl.weight}, the largest lambda")
    share = reward.gpus_per_worker
    if share is not None and share > 1 and share != int(share):
        yield Broken("reward.gpus_per_worker", "must be at most 1, or a whole number of GPUs")
    if reward.path is not None and not reward.extra and not any(axis_weights(reward)):
        yield Broken("reward.weight_ta", "weight_vq, weight_mq and weight_ta must not all be 0")


def _evaluation(config: Config) -> Iterator[Broken]:
    settings = config.evaluation
    if not settings.sets or len(set(settings.sets)) < len(settings.sets) or set(settings.sets) - set(SETS):
        yield Broken("evaluation.sets", f"must hold one or both of {', '.join(SETS)}; num_prompts=0 evaluates nothing")
    if settings.num_prompts > 0 and "held_out" in settings.sets and not config.data.held_out_prompts:
        yield Broken(
            "data.held_out_prompts",
            "must not be empty while evaluation.num_prompts is greater than 0 and evaluation.sets holds held_out",
        )


def _optimizer(config: Config) -> Iterator[Broken]:
    steps = total_optimizer_steps(config)
    if config.optimizer.warmup_steps > steps:
        yield Broken("optimizer.warmup_steps", f"must be at most the {steps} optimizer steps of the run")
    if config.lora.rank == 0:
        for key in ("lora.targets", "lora.path"):
            if value_at(config, key) is not None:
                yield Broken(key, "needs lora.rank of at least 1; rank 0 trains all weights")
    if config.lora.targets is not None and not config.lora.targets:
        yield Broken("lora.targets", "must not be empty; null takes every linear layer of the blocks")


def _parallel(config: Config) -> Iterator[Broken]:
    for key, whole in (("rollout.sp_size", "rollout.gpus_per_group"), ("learner.sp_size", "learner.num_ranks")):
        size, available = value_at(config, key), value_at(config, whole)
        if available % size:
            yield Broken(key, f"must divide {whole}={available}")
        if size > 1 and config.model.stock_forward:
            yield Broken(key, "must be 1 with model.stock_forward=true: diffusers' forward runs on one device")
    if config.rollout.sp_size > 1:
        for key, why in (
            ("rollout.cuda_graphs", "a graph does not record what the GPUs of a group exchange"),
            ("rollout.overlap_decode", "threads would let the actors of a group denoise its tasks in different orders"),
        ):
            if value_at(config, key):
                yield Broken(key, f"must be false with rollout.sp_size={config.rollout.sp_size}: {why}")
    if config.rollout.cuda_graphs:
        for key, why in (
            ("rollout.overlap_decode", "no other thread may use the GPU while a graph is recorded"),
            ("cluster.take_turns", "a graph reads weights where they were when it was recorded"),
            ("model.compile", "one of the two"),
            ("model.stock_forward", "it asks the GPU for values while it is recorded"),
        ):
            if value_at(config, key):
                yield Broken(key, f"must be false with rollout.cuda_graphs=true: {why}")
    if config.model.compile and not config.model.gradient_checkpointing:
        yield Broken("model.compile", "needs model.gradient_checkpointing=true: else the learner runs other code")
    if config.model.stock_forward and config.model.compile:
        yield Broken("model.compile", "must be false with model.stock_forward=true, which runs as diffusers ships it")
    if config.cluster.take_turns and config.learner.num_ranks > 1:
        yield Broken("cluster.take_turns", "needs one learner rank: actors that share a GPU take turns on it")
    for pool, selector in config.cluster.node_roles.items():
        if pool not in ("learner", "rollout", "reward") or not SELECTOR.fullmatch(selector):
            yield Broken("cluster.node_roles", "must give learner, rollout or reward one of a, !a, in(a,b), !in(a,b)")
    if config.rollout.gpus_per_group > config.rollout.sp_size:
        yield Broken("rollout.gpus_per_group", f"must be rollout.sp_size={config.rollout.sp_size}, others would idle")


def _pool(config: Config) -> Iterator[Broken]:
    """The rollout pool's size, and what counts as late."""
    least, most, start = config.rollout.min_workers, config.rollout.max_workers, config.rollout.num_workers
    if least is not None and most is None:
        yield Broken("rollout.max_workers", "must be set with rollout.min_workers")
    if most is not None and most < max(start, least or 1):
        yield Broken("rollout.max_workers", f"must be at least rollout.num_workers={start} and rollout.min_workers")
    if least is not None and least > start:
        yield Broken("rollout.min_workers", f"must be at most rollout.num_workers={start}")
    if config.faults.hung_factor < config.faults.slow_factor:
        yield Broken("faults.hung_factor", f"must be at least faults.slow_factor={config.faults.slow_factor}")


def _shapes(config: Config) -> Iterator[Broken]:
    """In bfloat16 another batch shape gives other bits, which the gate would take for other weights."""
    size, group = config.learner.videos_per_pass, config.data.group_size
    if config.model.dtype == "float32" or config.loss.max_disagreement is not None:
        return
    why = "in bfloat16 without loss.max_disagreement: rollout and learner must run the same batch shapes"
    if config.rollout.groups_per_task > 1:
        yield Broken("rollout.groups_per_task", f"must be 1 {why}")
    if size is not None and size > group:
        yield Broken("learner.videos_per_pass", f"must be at most data.group_size={group} {why}")


def _prompts(config: Config) -> Iterator[Broken]:
    """The number of prompts per iteration, in the official program's words too."""
    data, dp = config.data, dp_degree(config)
    if (data.num_prompts is None) == (data.batch_size is None):
        yield Broken(
            "data.num_prompts",
            f"with data.batch_size={data.batch_size}: exactly one of data.num_prompts and data.batch_size must be set",
        )
    if data.batch_size is not None and (data.batch_size * dp) % data.group_size:
        yield Broken(
            "data.batch_size",
            f"(batch_size * dp) % num_generations must be 0: batch_size={data.batch_size} "
            f"videos on each of dp={dp} data-parallel ranks do not fill groups of "
            f"data.group_size (num_generations) = {data.group_size}",
        )
    if data.batch_size is None and data.gradient_accumulation_steps > 1:
        yield Broken(
            "data.gradient_accumulation_steps", "needs data.batch_size; data.num_prompts counts the whole iteration"
        )
    size, group = config.learner.videos_per_pass, data.group_size
    if size is not None and size < group and group % size:
        yield Broken("learner.videos_per_pass", f"must divide data.group_size={group} or be at least as large")
    if num_prompts(config) % config.loss.num_updates:
        yield Broken("loss.num_updates", f"must divide the {num_prompts(config)} prompts of an iteration")


def _overlap(config: Config) -> Iterator[Broken]:
    """Rollouts beside updates."""
    overlap, prompts = config.overlap, num_prompts(config)
    if not overlap.enabled:
        return
    if config.cluster.take_turns:
        yield Broken("overlap.enabled", "must be false with cluster.take_turns=true: one side is away at any time")
    if overlap.max_groups is not None and overlap.max_groups < prompts:
        yield Broken("overlap.max_groups", f"must be at least the {prompts} prompts of an iteration")


def _publish(config: Config) -> Iterator[Broken]:
    """A broadcast goes into the weights of workers that are there and idle."""
    if config.publish.transport != "collective":
        return
    if config.cluster.take_turns:
        yield Broken("publish.transport", "must not be collective with cluster.take_turns=true: one side is away")
    if config.overlap.enabled and config.overlap.max_policy_age:
        yield Broken("publish.transport", "must not be collective with overlap.max_policy_age > 0: workers are busy")


RULES = (
    *(_single_values, _paths, _sampling, _kl_and_reward, _evaluation, _optimizer, _parallel, _pool, _shapes),
    *(_prompts, _overlap, _publish),
)
"""In the order in which they are reported."""
