"""Everything that can be checked about a run before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_ray.config import Config, ConfigError
from sage_ray.config_check import num_prompts, validate
from sage_ray.config_files import check_model, check_output_dir
from sage_ray.config_load import load_config
from sage_ray.data.prompts import read_prompts
from sage_ray.json_object import read_object
from sage_ray.models.adapter_file import check_adapter
from sage_ray.models.lora import check_targets
from sage_ray.models.policy_folder import check_fits
from sage_ray.resume import Resume, find_resume
from sage_ray.rewards.build import check_runtime_env, check_scorers
from sage_ray.shapes.world import parse_caption
from sage_ray.training_schedule import training_schedule
from sage_ray.types import Prompt
from sage_ray.wandb_log import check_wandb


@dataclass(frozen=True)
class CheckedRun:
    """A configuration whose every file and rule has been checked."""

    config: Config
    prompts: list[Prompt]
    held_out: list[Prompt]
    resume: Resume | None = None
    """Where a run of before goes on."""


def check(files: Sequence[Path], overrides: Sequence[str], *, trains: bool = True) -> CheckedRun:
    """Raises ValueError naming key or file, value and rule, for the first fault.

    Args: trains: else nothing is resumed, whatever the configuration says.
    """
    config = load_config(files, overrides)
    if not trains:
        config.resume = None
    validate(config)
    for rule in FILE_RULES:
        rule(config)
    prompts, held_out = _prompts(config)
    return CheckedRun(config, prompts, held_out, find_resume(config, prompts))


def problems(config: Config) -> list[str]:
    """Every fault in the files of a configuration that has passed `validate`.

    A policy that cannot be loaded is one fault: what follows from its files is then not checked.
    """
    found = []
    for rule in (*FILE_RULES, _prompts, _check_resume):
        if rule is _check_resume and found:
            continue
        if rule in NEED_MODEL and any(fault.startswith("model.path") for fault in found):
            continue
        try:
            rule(config)
        except ValueError as error:
            found.append(str(error))
    return found


def _check_output(config: Config) -> None:
    if config.resume is None:
        check_output_dir(Path(config.output_dir))


def _check_resume(config: Config) -> None:
    find_resume(config, _prompts(config)[0])


def _check_reward(config: Config) -> None:
    check_scorers(config.reward)
    if config.reward.runtime_env is not None:
        check_runtime_env(Path(config.reward.runtime_env))


def _prompts(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts: their files are readable, there are enough, and the judge knows them."""
    prompts = read_prompts(config.data.prompts)
    evaluation = config.evaluation
    asked = evaluation.num_prompts and "held_out" in evaluation.sets
    held_out = read_prompts(config.data.held_out_prompts) if asked else []
    if num_prompts(config) > len(prompts):
        raise ConfigError(
            f"data.num_prompts: {num_prompts(config)} an iteration, but {', '.join(config.data.prompts)} "
            f"hold only {len(prompts)} prompts"
        )
    if config.reward.truth == "shapes":
        for prompt in (*prompts, *held_out):
            parse_caption(prompt.text)
    return prompts, held_out


def _check_schedule(config: Config) -> None:
    training_schedule(config)


def _check_lora(config: Config) -> None:
    if config.lora.targets is not None:
        check_targets(Path(config.model.path) / "transformer", config.lora.targets)
    if config.lora.path is not None:
        try:
            check_adapter(Path(config.lora.path), config.lora.rank, config.lora.alpha)
            check_fits(Path(config.lora.path), Path(config.model.path) / "transformer")
        except ValueError as error:
            raise ConfigError(f"lora.path={config.lora.path!r}: {error}") from error


def _check_heads(config: Config) -> None:
    """In attention every actor of a sequence parallel group has whole heads."""
    file = Path(config.model.path) / "transformer" / "config.json"
    heads = read_object(file)["num_attention_heads"]
    for key, size in (("learner.sp_size", config.learner.sp_size), ("rollout.sp_size", config.rollout.sp_size)):
        if heads % size:
            raise ConfigError(f"{key}={size}: must divide num_attention_heads={heads} of {file}")


NEED_MODEL = (_check_schedule, _check_heads, _check_lora)
FILE_RULES: tuple[Callable[[Config], None], ...] = (
    *(_check_output, check_model, *NEED_MODEL),
    *(_check_reward, check_wandb),
)
