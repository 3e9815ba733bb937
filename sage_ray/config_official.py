"""Flags of the official program (Tencent-Hunyuan/SAGE-GRPO, g. post_train.py) in terms of our keys.

ALIASES mean exactly one of our settings. CONVERTED flags have other values, or only one value that fits. SWITCHES are
read together. REFUSED flags say why: the official program ignores them, or the matter does not exist here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

ALIASES: dict[str, tuple[str, ...]] = {
    "learning_rate": ("optimizer.learning_rate",),
    "weight_decay": ("optimizer.weight_decay",),
    "max_grad_norm": ("optimizer.max_grad_norm",),
    "save_interval": ("save_interval",),
    "output_dir": ("output_dir",),
    "resume_from_checkpoint": ("resume",),
    "seed": ("seed",),
    "batch_size": ("data.batch_size",),
    "gradient_accumulation_steps": ("data.gradient_accumulation_steps",),
    "num_generations": ("data.group_size",),
    "sde_type": ("sampling.sde_type",),
    "eta": ("sampling.eta",),
    "cfg_scale": ("sampling.guidance_scale",),
    "grpo_sampling_steps": ("sampling.num_steps",),
    "infer_flow_shift_video": ("sampling.shift",),
    "neg_prompt": ("sampling.negative_prompt",),
    "sample_n_frames": ("sampling.num_frames",),
    "video_fps": ("sampling.fps",),
    "use_same_noise": ("sampling.same_noise_per_group",),
    "adv_clip_max": ("advantage.clip",),
    "clip_range": ("loss.clip_range",),
    "timestep_fraction": ("loss.timestep_fraction",),
    "enable_timestep_permutation": ("loss.timestep_permutation",),
    "use_grad_balancing": ("loss.equalizer",),
    "kl_weight": ("kl.weight",),
    "kl_coef": ("kl.coef",),
    "kl_min_coef": ("kl.min_coef",),
    "update_ref_model_step": ("kl.anchor_interval",),
    "dual_kl_moving_weight": ("kl.moving_weight",),
    "dual_kl_step_weight": ("kl.step_weight",),
    "reference_mode_offload": ("learner.reference_offload",),
    "enable_gradient_checkpointing": ("model.gradient_checkpointing",),
    "sp_size": ("learner.sp_size", "rollout.sp_size", "rollout.gpus_per_group"),
    "lora_alpha": ("lora.alpha",),
    "pretrained_lora_path": ("lora.path",),
    "validation_interval": ("evaluation.interval",),
    "validation_global_seed": ("evaluation.seed",),
    "validation_num_inference_steps": ("evaluation.num_steps",),
}
"""Official flag -> our keys; the official sp_size is one number for the learner and the rollout."""

SWITCHES = ("use_moving_KL", "use_dual_kl", "use_lora", "lora_r", "max_steps")
"""Flags whose meaning depends on other settings (`switched`)."""

_UNUSED = "the official program does not use it in GRPO"
_SIZE = "evaluation videos have the size of the rollouts (sampling.height, width, num_frames)"
REFUSED: dict[str, str] = {
    "warmup_steps": "the official program ignores it, its learning rate is constant; optimizer.warmup_steps is real",
    "train_timestep_shift": f"{_UNUSED}; the grid's shift is sampling.shift",
    "validation_timestep_shift": f"{_UNUSED}; the grid's shift is sampling.shift",
    "flow_snr_type": _UNUSED,
    "i2v_prob": f"{_UNUSED}; only text-to-video is trained",
    "num_workers": "prompts are text, there is no data loader (its tokens were never used in GRPO)",
    "prefetch_factor": "prompts are text, there is no data loader (its tokens were never used in GRPO)",
    "remote_reward_url": "the official remote reward is a stub that returns nothing",
    "debug_grad_flow": "every iteration's diagnostics are in metrics.jsonl",
    "debug_train_diagnostics_interval": "every iteration's diagnostics are in metrics.jsonl",
    "log_interval": "every iteration is logged",
    "validation_prompts": "give a file of prompts as data.held_out_prompts",
    "validation_fixed_size": _SIZE,
    "validate_video_length": _SIZE,
    "validation_video_length": _SIZE,
    "video_length": _SIZE,
    "pretrained_model_root": "model.path takes a HunyuanVideo15Pipeline directory in diffusers' layout",
    "pretrained_transformer_version": "model.path takes a HunyuanVideo15Pipeline directory in diffusers' layout",
    "enable_grpo_policy_update": _UNUSED,
    "reward_config": _UNUSED,
}


def as_bool(value: Any) -> bool:
    """true/1/yes/on or false/0/no/off in any case; ValueError with the rule for anything else."""
    word = str(value).lower()
    if word not in TRUE + FALSE:
        raise ValueError("must be true or false")
    return word in TRUE


def _only(wanted: Any, why: str) -> Callable[[Any], dict[str, Any]]:
    """Accepts one value, which is what happens here anyway."""

    def convert(value: Any) -> dict[str, Any]:
        same = as_bool(value) is wanted if isinstance(wanted, bool) else str(value) == str(wanted)
        if not same:
            raise ValueError(f"can only be {wanted}: {why}")
        return {}

    return convert


def _one_of(key: str, meanings: dict[str, str]) -> Callable[[Any], dict[str, Any]]:
    def convert(value: Any) -> dict[str, Any]:
        if str(value) not in meanings:
            raise ValueError(f"must be one of {', '.join(meanings)}")
        return {key: meanings[str(value)]}

    return convert


def _reward_weights(value: Any) -> dict[str, Any]:
    try:
        weights = json.loads(value) if isinstance(value, str) else dict(value)
        if set(weights) != {"VQ", "MQ", "TA"}:
            raise TypeError
        return {f"reward.weight_{axis.lower()}": float(weight) for axis, weight in weights.items()}
    except (TypeError, ValueError, AttributeError):
        raise ValueError('must be a JSON object as {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}') from None


def _no_dropout(value: Any) -> dict[str, Any]:
    try:
        zero = float(value) == 0
    except (TypeError, ValueError):
        zero = False
    if not zero:
        raise ValueError("can only be 0: with dropout, rollout and learner would not compute the same policy")
    return {}


def _lora_targets(value: Any) -> dict[str, Any]:
    if value in (None, "all-linear", "None", "null"):
        return {"lora.targets": None}
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return {"lora.targets": [str(name) for name in names]}


def _files(key: str) -> Callable[[Any], dict[str, Any]]:
    """One file, several (the command line's words, or a YAML list)."""

    def convert(value: Any) -> dict[str, Any]:
        return {key: [str(file) for file in value] if isinstance(value, list) else str(value).split()}

    return convert


CONVERTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "train_video_csv": _files("data.prompts"),
    "valid_video_csv": _files("data.held_out_prompts"),
    "post_train_type": _only("grpo", "the official standard mode runs GRPO on a dummy loader"),
    "task_type": _only("t2v", "only text-to-video is trained"),
    "reward_model": _only("videoalign_local", "the official remote rewards are stubs that return nothing"),
    "reward_checkpoint_mode": lambda value: {},  # the loader recognises every layout by itself
    "reward_weights": _reward_weights,
    "dtype": _one_of("model.dtype", {"bf16": "bfloat16", "fp32": "float32"}),
    "master_weight_type": _only("fp32", "master weights are float32"),
    "use_muon": lambda value: {"optimizer.name": "muon" if as_bool(value) else "adamw"},
    "enable_fsdp": _only(True, "the learner is always FSDP2"),
    "dp_replicate": _only(1, "the learner shards over all ranks"),
    "validate_at_step0": _only(True, "evaluation starts before training; evaluation.num_prompts=0 turns it off"),
    "lora_dropout": _no_dropout,
    "lora_target_modules": _lora_targets,
    "kl_compute_mode": _one_of("kl.previous", {"rollout_phase": "rollout"}),
    "mini_batch_size_per_update": _only(1, "the group is the batch unit; loss.num_updates splits an iteration"),
    "num_train_timesteps": _only(1000, "the model's timestep is 1000 sigma"),
}

SEVERAL = {"train_video_csv", "valid_video_csv"}
"""Flags that take every following word that is no other flag."""

BARE = {"use_moving_KL", "use_dual_kl", "use_lora", "use_muon", "enable_fsdp", "validate_at_step0"}
"""Converted flags and switches that may stand alone on a command line, meaning true."""

KNOWN = frozenset((*ALIASES, *SWITCHES, *CONVERTED, *REFUSED))


def switched(given: dict[str, Any], rollouts_per_step: int) -> dict[str, Any]:
    """Our settings for the switches that were given.

    Args: rollouts_per_step: data.gradient_accumulation_steps. Raises: ValueError("flag", value, rule).
    """
    settings: dict[str, Any] = {}
    if "use_moving_KL" in given or "use_dual_kl" in given:
        moving = _switch(given, "use_moving_KL", True)
        dual = _switch(given, "use_dual_kl", moving)
        if dual and not moving:
            raise ValueError("use_dual_kl", given["use_dual_kl"], "needs use_moving_KL, there is no such kl.mode")
        settings["kl.mode"] = "dual_moving" if dual else "moving" if moving else "fixed"
    if _switch(given, "use_lora", False):
        settings["lora.rank"] = _count(given, "lora_r", 8)
    elif "lora_r" in given:
        raise ValueError("lora_r", given["lora_r"], "needs use_lora; without it the official program ignores it")
    if "max_steps" in given:
        rollouts = _count(given, "max_steps", 1)
        if rollouts % rollouts_per_step:
            rule = f"counts rollouts and must be a multiple of gradient_accumulation_steps={rollouts_per_step}"
            raise ValueError("max_steps", rollouts, rule)
        settings["num_iterations"] = rollouts // rollouts_per_step
    return settings


def _switch(given: dict[str, Any], name: str, default: bool) -> bool:
    try:
        return as_bool(given.get(name, default))
    except ValueError as error:
        raise ValueError(name, given[name], str(error)) from None


def _count(given: dict[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if not str(value).isdigit() or int(value) < 1:
        raise ValueError(name, value, "must be a whole number of at least 1")
    return int(value)
