"""What a configuration comes to: the numbers that follow from it, as `launch.py plan` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sage_ray.balance_report import plan_lines
from sage_ray.config import Config, RewardConfig, axis_weights, total_optimizer_steps
from sage_ray.config_check import dp_degree, num_prompts
from sage_ray.cost import H100
from sage_ray.equalizer import equalizer_scales
from sage_ray.folder_report import describe_policy, describe_reward
from sage_ray.group_batch import split_groups
from sage_ray.optim import learning_rate_factor
from sage_ray.prediction import SMALLEST, predict, read_dims
from sage_ray.training_schedule import TrainingSchedule
from sage_ray.trust_region import KL_TERMS
from sage_ray.types import AXES


class Line(NamedTuple):
    """One line of the plan."""

    name: str
    value: str


def plan(config: Config, schedule: TrainingSchedule | None) -> list[Line]:
    """The derived numbers of a valid configuration; `schedule` is None when the checkpoint that gives it is missing."""
    steps = list(_schedule(config, schedule)) if schedule is not None else [Line("steps", "unknown without the shift")]
    cost = _cost(config, schedule) if schedule is not None else []
    parts = _folders(config), _iteration(config), _learner(config), steps, _objective(config), _devices(config), cost
    return [line for part in parts for line in part]


def _folders(config: Config) -> Iterator[Line]:
    yield Line("policy", describe_policy(Path(config.model.path)))
    if config.reward.path is not None:
        yield Line("reward model", describe_reward(Path(config.reward.path)))


def _iteration(config: Config) -> Iterator[Line]:
    data, prompts = config.data, num_prompts(config)
    yield Line("iterations", f"{config.num_iterations}, a checkpoint every {config.save_interval}")
    how = ""
    if data.batch_size is not None:
        how = (
            f" = batch_size {data.batch_size} x dp {dp_degree(config)} / num_generations {data.group_size}"
            f" x gradient_accumulation_steps {data.gradient_accumulation_steps}"
        )
    yield Line("prompts an iteration", f"{prompts}{how}")
    yield Line("videos an iteration", f"{prompts * data.group_size} = {prompts} groups of {data.group_size}")


def _learner(config: Config) -> Iterator[Line]:
    learner, loss = config.learner, config.loss
    shares = split_groups(num_prompts(config), loss.num_updates, dp_degree(config))
    real = [sum(group >= 0 for group in rank) for update in shares for rank in update]
    padded = sum(group < 0 for update in shares for rank in update for group in rank)
    yield Line("learner", f"{learner.num_ranks} ranks = dp {dp_degree(config)} x sp {learner.sp_size}")
    spread = f"{min(real)}" if min(real) == max(real) else f"{min(real)} to {max(real)}"
    idle = f", {padded} places are filled with weight 0" if padded else ""
    yield Line("groups a rank and optimizer step", f"{spread}{idle}")
    yield Line(
        "optimizer steps",
        f"{loss.num_updates * loss.num_epochs} an iteration ({loss.num_updates} updates x {loss.num_epochs} epochs), "
        f"{total_optimizer_steps(config)} in all",
    )
    yield Line("trained", f"LoRA of rank {config.lora.rank}" if config.lora.rank else "all weights")
    optimizer, last = config.optimizer, total_optimizer_steps(config) - 1
    end = optimizer.learning_rate * learning_rate_factor(
        last,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=last + 1,
        floor=optimizer.min_factor,
    )
    yield Line(
        "learning rate",
        f"{optimizer.name}, {optimizer.learning_rate:g} after {optimizer.warmup_steps} warm-up steps, "
        f"{optimizer.schedule}, {end:.3g} at the end",
    )


def _schedule(config: Config, schedule: TrainingSchedule) -> Iterator[Line]:
    coefs, rule = schedule.coefs, schedule.rule
    yield Line("sigma grid", f"{len(coefs.std)} steps, shift {schedule.shift:g}: {_numbers(coefs.sigmas)}")
    yield Line("stochastic steps", schedule.describe())
    never = sorted(set(range(len(coefs.std))) - set(rule.candidates))
    if never:
        yield Line("deterministic steps", f"{len(never)}, never trained: {', '.join(map(str, never))}")
    yield Line("std of the stochastic steps", _numbers(coefs.std[list(rule.candidates)]))
    if config.loss.equalizer:
        scales = equalizer_scales(
            coefs.gradient_scale(published_cps=config.loss.cps_log_prob == "published"),
            median=config.loss.equalizer_median,
            eps=config.loss.equalizer_eps,
        )
        yield Line("equalizer S", _numbers(scales[list(rule.candidates)]))
    pairs = num_prompts(config) * config.data.group_size * rule.num_trained // config.loss.num_updates
    yield Line("(video, step) pairs an optimizer step", f"{pairs} when no score fails")


def _objective(config: Config) -> Iterator[Line]:
    yield Line("reward", " + ".join(_reward(config.reward)) or "nothing")
    kl = config.kl
    yield Line("advantage", f"per {config.advantage.combine}, clipped to {config.advantage.clip:g}")
    terms = KL_TERMS[kl.mode]
    parts = []
    if terms.anchor:
        moves = f"moved every {kl.anchor_interval} steps" if terms.moves else "the pretrained policy"
        parts.append(f"{kl.moving_weight:g} x anchor ({moves})")
    if terms.previous:
        parts.append(f"{kl.step_weight:g} x previous step ({kl.previous})")
    yield Line("KL", f"{kl.mode}: {' + '.join(parts) or 'nothing'}")
    if parts:
        yield Line("lambda", f"{kl.schedule}, up to {kl.weight:g}")


def _reward(reward: RewardConfig) -> Iterator[str]:
    if reward.path is not None:
        yield from (f"{weight:g} {axis}" for weight, axis in zip(axis_weights(reward), AXES, strict=True))
    for name, settings in reward.extra.items():
        yield from (f"{weight:g} {name}.{part}" for part, weight in settings.weights.items())


def _devices(config: Config) -> Iterator[Line]:
    rollout, reward, learner = config.rollout, config.reward, config.learner
    share = 1 if reward.gpus_per_worker is None else reward.gpus_per_worker
    total = rollout.num_workers * rollout.gpus_per_group + reward.num_workers * share + learner.num_ranks
    together = f" (sp {rollout.sp_size})" if rollout.sp_size > 1 else ""
    yield Line(
        "GPUs",
        f"{total:g} = {rollout.num_workers} rollout groups of {rollout.gpus_per_group}{together} + "
        f"{reward.num_workers} reward of {share:g} + "
        f"{learner.num_ranks} learner; fewer are shared where one learner rank or reward.gpus_per_worker allows it, "
        "none means CPU",
    )


def _cost(config: Config, schedule: TrainingSchedule) -> Iterator[Line]:
    """Seconds and bytes where the model is large enough to be predicted."""
    dims = read_dims(Path(config.model.path))
    if dims is None:
        return
    if dims.parameters < SMALLEST or config.model.dtype != "bfloat16":
        yield Line("time and GPU memory", "predicted for bfloat16 models of a billion parameters or more")
        return
    expected = predict(config, dims, schedule.rule.num_trained, H100())
    phases = {"rollout": sum(expected.rollout_s.values()), "update": sum(expected.update_s.values())}
    phases["publish"] = expected.publish_s
    yield Line("time an iteration (H100)", f"about {_sum(phases, 's')}; without optimizer, collectives and turns")
    yield Line("rollout, busiest worker", _sum(expected.rollout_s, "s"))
    yield Line("update, busiest rank", _sum(expected.update_s, "s"))
    yield Line("GPU memory, rollout worker", _gib(expected.rollout_bytes))
    yield Line("GPU memory, learner rank", _gib(expected.learner_bytes))
    for name, words in plan_lines(config, dims, schedule.rule, H100()):
        yield Line(name, words)


def _gib(parts: dict[str, float]) -> str:
    full = ", more than an 80 GB card has" if sum(parts.values()) > H100.card_bytes else ""
    return _sum({name: size / 2**30 for name, size in parts.items()}, "GiB") + full


def _sum(parts: dict[str, float], unit: str) -> str:
    """The sum and its parts, as in: 12.0 s = rollout 5.0 + update 7.0."""
    each = " + ".join(f"{name} {value:.1f}" for name, value in parts.items())
    return f"{sum(parts.values()):.1f} {unit} = {each}"


def _numbers(values: np.ndarray) -> str:
    return " ".join(f"{value:.4g}" for value in values)
