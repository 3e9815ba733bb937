"""Configuration: typed dataclasses are the truth; YAML and `key=value` are merged over them.

A file under configs/ states only what differs from the defaults below. Unknown keys and wrong types (config_load),
broken rules (config_check) and missing files (config_files) end in one `ConfigError` that names key, value and rule,
before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any

SDE_TYPES = ("sage_grpo", "dance_grpo", "flow_grpo", "cps", "ode")
KL_MODES = ("none", "fixed", "stepwise", "moving", "dual_moving")
DTYPES = ("float32", "bfloat16")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names key, value and rule."""


@dataclass
class ModelConfig:
    path: str = "assets/shapes/policy"
    """Directory of a HunyuanVideo15Pipeline in diffusers' layout."""
    dtype: str = "float32"
    """Compute dtype of the transformer in rollout and learner; master weights are always float32."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass."""


@dataclass
class SamplingConfig:
    sde_type: str = "sage_grpo"
    """Transition used in training rollouts: sage_grpo, dance_grpo, flow_grpo, cps (ode serves evaluation only)."""
    num_steps: int = 20
    """Denoising steps of one training rollout."""
    eta: float = 0.5
    """Scale of the injected noise."""
    shift: float | None = None
    """Shift of the sigma grid; null takes the checkpoint's scheduler_config.json."""
    guidance_scale: float = 6.0
    """Classifier-free guidance in rollout, reference and training forward; 1 is off."""
    negative_prompt: str = ""
    """Prompt of the unconditional branch."""
    height: int = 480
    """Frame height in pixels."""
    width: int = 832
    """Frame width in pixels."""
    num_frames: int = 81
    """Frames of a video; (num_frames - 1) must be a multiple of the VAE's temporal ratio."""
    fps: float = 24.0
    """Frames per second that videos are scored and written at."""
    last_step: str = "ode"
    """The last step (sigma_next = 0): "ode" is deterministic and untrained, "sde" is the official run."""
    sde_window_start: int = 0
    """First stochastic step."""
    sde_window_size: int | None = None
    """Number of stochastic (and trained) steps, the others are ode; null makes every step stochastic."""
    same_noise_per_group: bool = False
    """Start every video of a group from the same initial noise (DanceGRPO)."""


@dataclass
class DataConfig:
    prompts: list[str] = field(default_factory=lambda: ["assets/shapes/prompts_train.txt"])
    """Training prompt files: csv (column prompt, optional index and seed), txt, jsonl or parquet."""
    held_out_prompts: list[str] = field(default_factory=lambda: ["assets/shapes/prompts_held_out.txt"])
    """Prompt files that are only evaluated."""
    group_size: int = 4
    """Videos per prompt in one iteration (official: num_generations)."""
    num_prompts: int | None = None
    """Prompts per iteration; null derives it from batch_size as the official program does."""
    batch_size: int | None = None
    """Videos per learner data-parallel rank and iteration (official: batch_size)."""


@dataclass
class RewardConfig:
    path: str = "assets/shapes/reward/VideoReward"
    """VideoAlign checkpoint directory (model_config.json, checkpoint-*/)."""
    dtype: str = "bfloat16"
    """Weights and compute dtype of the reward model."""
    weight_vq: float = 0.5
    """Weight of visual quality in the reward (paper, setting B)."""
    weight_mq: float = 0.5
    """Weight of motion quality."""
    weight_ta: float = 1.0
    """Weight of text alignment."""
    truth: str | None = None
    """Held-out judge that is logged and never trained on: "shapes" in the small world."""
    num_workers: int = 1
    """Reward actors."""
    timeout_s: float = 600.0
    """A score that takes longer counts as failed."""


@dataclass
class AdvantageConfig:
    eps: float = 1e-6
    """Added to a group's standard deviation."""
    clip: float = 5.0
    """Advantages are clipped to [-clip, clip]."""
    min_std: float = 1e-8
    """A group whose reward std is below this contributes no gradient."""


@dataclass
class LossConfig:
    clip_range: float = 1e-4
    """Ratio clip; 1e-4 belongs to per-dimension mean log-probs over about 1e6 dimensions."""
    equalizer: bool = True
    """Temporal gradient equalizer (eq. 9), official: use_grad_balancing."""
    cps_log_prob: str = "normalised"
    """cps log-prob: "normalised" is the Gaussian's, "published" drops normaliser and 1/(2 std^2)."""
    max_disagreement: float | None = None
    """Largest allowed difference of rollout and learner log-prob, nats per dimension; above it the run stops. Null is
    clip_range / 10 in float32; in bfloat16 the difference is logged and nothing stops."""
    num_updates: int = 1
    """Optimizer steps per iteration; groups are split evenly over them in order."""


@dataclass
class KLConfig:
    mode: str = "dual_moving"
    """none, fixed, stepwise, moving or dual_moving."""
    weight: float = 1e-5
    """Largest lambda and feedback target D_target (official: kl_weight)."""
    coef: float = 1e-7
    """Lambda at the start of the warm-up (official: kl_coef)."""
    min_coef: float = 1e-7
    """Smallest lambda (official: kl_min_coef)."""
    warmup_steps: int = 100
    """Optimizer steps of the linear warm-up."""
    direction: str = "paper"
    """Feedback direction: "paper" weakens lambda when KL is large, "ppo" strengthens it."""
    anchor_interval: int = 10
    """Optimizer steps between copies of the policy into the anchor (official: update_ref_model_step)."""
    moving_weight: float = 1.0
    """Weight of the KL to the anchor (official: dual_kl_moving_weight)."""
    step_weight: float = 0.1
    """Weight of the KL to the previous step (official: dual_kl_step_weight)."""
    previous: str = "last_step"
    """The held previous policy: "last_step" (before the last optimizer step) or "iteration_start"."""


@dataclass
class OptimizerConfig:
    learning_rate: float = 1e-5
    """Constant learning rate."""
    beta1: float = 0.9
    """AdamW first moment decay."""
    beta2: float = 0.95
    """AdamW second moment decay."""
    eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global gradient norm clip."""


@dataclass
class LearnerConfig:
    num_ranks: int = 1
    """FSDP2 ranks, one actor each."""
    sp_size: int = 1
    """Sequence parallel degree inside the learner."""
    timeout_s: float = 3600.0
    """Bound of one update, publish, save or load."""


@dataclass
class RolloutConfig:
    num_workers: int = 1
    """Rollout groups at the start."""
    gpus_per_group: int = 1
    """GPUs of one rollout group when devices are GPUs."""
    sp_size: int = 1
    """Sequence parallel degree of a rollout group; must divide gpus_per_group."""
    timeout_s: float = 3600.0
    """Bound of one generate call."""


@dataclass
class EvaluationConfig:
    num_prompts: int = 0
    """Prompts of each set (training, held out) that are evaluated; 0 turns evaluation off."""
    videos_per_prompt: int = 1
    """Videos per evaluated prompt."""
    num_steps: int = 40
    """ODE steps of an evaluation video."""
    interval: int = 0
    """Iterations between evaluations; 0 evaluates before and after training only."""
    seed: int = 930
    """Seed of the evaluation noise; the same before and after."""


@dataclass
class ClusterConfig:
    device: str = "auto"
    """auto, cpu or cuda; auto takes GPUs when Ray sees one."""
    share_gpu: bool = True
    """Let actors share GPUs when there are fewer GPUs than actors (one learner rank)."""
    num_cpus: int | None = None
    """CPUs of an embedded Ray; null takes the machine's."""
    object_store_bytes: int = 1_000_000_000
    """Object store of an embedded Ray."""
    start_timeout_s: float = 300.0
    """Bound of placing and starting the actors."""


@dataclass
class Config:
    output_dir: str = "outputs/run"
    """Everything the run writes; must be new or empty."""
    seed: int = 42
    """Seed of prompts order and of all rollout noise."""
    num_iterations: int = 100
    """Iterations: rollout, reward, advantage, update, publish."""
    save_interval: int = 100
    """Iterations between checkpoints; the last iteration is always saved."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@functools.cache
def dotted_keys() -> dict[str, Any]:
    """Every settable key, "sampling.eta" or "seed", in file order, with its declared type."""
    found: dict[str, Any] = {}

    def collect(section: type, prefix: str) -> None:
        for name, kind in typing.get_type_hints(section).items():
            if dataclasses.is_dataclass(kind):
                collect(typing.cast(type, kind), f"{prefix}{name}.")
            else:
                found[prefix + name] = kind

    collect(Config, "")
    return found


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key; AttributeError for a key that does not exist."""
    return functools.reduce(getattr, key.split("."), config)


def type_words(kind: Any) -> str:
    """A declared type in words: "int", "float or null", "list of str"."""
    if isinstance(kind, types.UnionType):
        return " or ".join(type_words(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"list of {type_words(typing.get_args(kind)[0])}"
    return "null" if kind is type(None) else kind.__name__
