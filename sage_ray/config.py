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

from omegaconf import MISSING

SDE_TYPES = ("sage_grpo", "dance_grpo", "flow_grpo", "cps", "sage_cp", "ode")
KL_MODES = ("none", "fixed", "stepwise", "moving", "dual_moving")
DTYPES = ("float32", "bfloat16")
SETTINGS = {"A": (1.0, 1.0, 1.0), "B": (0.5, 0.5, 1.0)}
"""reward.setting -> weights of VQ, MQ and TA in the paper's Table 2."""


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
    keep_attention: bool = True
    """With gradient_checkpointing: keep what attention gave, which costs as much memory as the blocks' inputs and saves
    the dearest part of the recomputation."""
    compile: bool = False
    """Compile the transformer's blocks: for the real size on GPUs, about a minute once in every actor."""
    stock_forward: bool = False
    """Run diffusers' own forward: for comparison, about four times as slow at the real size."""


@dataclass
class SamplingConfig:
    sde_type: str = "sage_grpo"
    """Transition of training rollouts: sage_grpo, dance_grpo, flow_grpo, cps, sage_cp (ode serves evaluation only)."""
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
    """First step that may be stochastic, and the place where the window begins."""
    sde_window_size: int | None = None
    """Number of consecutive stochastic steps, the others are ode; null makes every step stochastic."""
    sde_window_move: str = "none"
    """How the window moves: none, slide (MixGRPO: by a stride over the iterations) or random (a place per group)."""
    sde_window_stride: int = 1
    """Steps that a sliding window moves at once; after the last place it starts again."""
    sde_window_interval: int = 1
    """Iterations between two moves of a sliding window."""
    sde_fraction: float = 1.0
    """Share of the steps that is stochastic, drawn anew for every group; not together with a window."""
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
    """Videos per learner data-parallel rank and rollout (official: batch_size)."""
    gradient_accumulation_steps: int = 1
    """Rollouts of batch_size that make one optimizer step. They are one iteration here: under the same weights, a sum
    over more prompts is the same gradient."""


@dataclass
class ScorerConfig:
    """A reward or measure beside VideoAlign."""

    kind: str = MISSING
    """clip_score, pick_score, http, or a class of one's own as "module:Class"."""
    path: str | None = None
    """Checkpoint folder (clip_score, pick_score)."""
    url: str | None = None
    """Address of the service (http)."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each of its parts in the reward; a part without one is logged and not trained on."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a class of one's own."""


@dataclass
class RewardConfig:
    path: str | None = "assets/shapes/reward/VideoReward"
    """VideoAlign checkpoint directory (model_config.json, checkpoint-*/); null does without VideoAlign."""
    dtype: str = "bfloat16"
    """Weights and compute dtype of the reward model."""
    setting: str = "B"
    """Weights of VQ, MQ and TA by the paper's name: A is 1, 1, 1 and B is 0.5, 0.5, 1."""
    weight_vq: float | None = None
    """Weight of visual quality in the reward; null takes the setting's."""
    weight_mq: float | None = None
    """Weight of motion quality; null takes the setting's."""
    weight_ta: float | None = None
    """Weight of text alignment; null takes the setting's."""
    extra: dict[str, ScorerConfig] = field(default_factory=dict)
    """Further scorers by a name of one's own, in YAML; their parts are called "name" or "name.part"."""
    truth: str | None = None
    """Held-out judge that is logged and never trained on: "shapes" in the small world."""
    num_workers: int = 1
    """Reward actors; each holds every scorer."""
    gpus_per_worker: float | None = None
    """GPU share of one reward actor, 0 for the CPU; null takes a whole one, or an equal share where GPUs are shared."""
    runtime_env: str | None = None
    """YAML file with a Ray runtime_env for the reward actors, for a reward with pins of its own."""
    max_batch_tokens: int = 65536
    """Vision tokens that a reward actor takes from the queue at once (VideoAlign runs at most 32 clips a forward)."""
    max_pending: int = 4096
    """Videos waiting for a score above which no further group is generated."""
    timeout_s: float = 600.0
    """A batch that takes longer counts as failed; its videos are tried once more on another actor."""
    max_failed_share: float = 0.25
    """Share of an iteration's videos without a score above which the run stops."""


@dataclass
class AdvantageConfig:
    combine: str = "reward"
    """"reward" weighs the axes into one reward and normalises that (SAGE), "axis" normalises every axis in its group
    and weighs the advantages (DanceGRPO)."""
    eps: float = 1e-6
    """Added to the standard deviation, or its smallest value, as std_rule says."""
    std_rule: str = "add"
    """"add" divides by std + eps, "clamp" by max(std, eps)."""
    global_std: bool = False
    """Divide by the standard deviation of all centred rewards of the groups that train, not by each group's own."""
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
    equalizer_median: str = "lower"
    """"lower" of the two middle values, as the official code takes it, or the "true" median, their mean."""
    equalizer_eps: float = 0.0
    """Added to a step's gradient scale before dividing by it."""
    timestep_fraction: float = 1.0
    """Share of the stochastic steps of a group that is trained."""
    timestep_permutation: bool = True
    """Train the steps of a group in random order, so that a fraction is a random one; else the first ones in order."""
    cps_log_prob: str = "normalised"
    """cps log-prob: "normalised" is the Gaussian's, "published" drops normaliser and 1/(2 std^2)."""
    max_disagreement: float | None = None
    """Largest allowed difference of rollout and learner log-prob, nats per dimension; above it the run stops and names
    the worker. Null is clip_range / 10 in float32, and 1e-5 in bfloat16."""
    num_updates: int = 1
    """Optimizer steps per pass over an iteration's groups, which are split evenly over them in order."""
    num_epochs: int = 1
    """Passes over an iteration's groups; ratios stay relative to the policy that sampled them."""
    importance_cap: float | None = None
    """Groups of an older policy (overlap): ratios start from the learner's own policy, and every term is weighted by
    its probability over the sampling policy's, at most this much. Null starts ratios from the policy that sampled."""


@dataclass
class KLConfig:
    mode: str = "dual_moving"
    """none, fixed, stepwise, moving or dual_moving."""
    schedule: str = "feedback"
    """lambda over optimizer steps: fixed (= weight), two_stage (warm-up, then weight) or feedback (eq. 41, 42)."""
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
    """The previous step's term: the Gaussian KL to a held policy, "last_step" (before the last optimizer step) or
    "iteration_start"; or "rollout", the official mean(old_log_prob - log_prob) (eq. 15), which does not damp."""
    share_interval: int = 10
    """Optimizer steps between measurements of the KL's share of the gradient norm (one more pass each); 0 never."""


@dataclass
class OptimizerConfig:
    name: str = "muon"
    """muon (matrices; everything else by AdamW) or adamw."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    schedule: str = "constant"
    """constant or cosine, after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    min_factor: float = 0.0
    """Share of the learning rate at the end of a cosine schedule."""
    momentum: float = 0.95
    """Muon's momentum."""
    muon_dtype: str = "bfloat16"
    """dtype of Muon's Newton-Schulz iteration."""
    beta1: float = 0.95
    """AdamW first moment decay."""
    beta2: float = 0.95
    """AdamW second moment decay."""
    eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global gradient norm clip."""
    ema_decay: float | None = None
    """Decay of a moving average of the weights, one step per optimizer step, that evaluation uses; null keeps none."""


@dataclass
class LoraConfig:
    rank: int = 0
    """Rank of the adapters that are trained instead of the weights; 0 trains the weights."""
    alpha: float = 16.0
    """Adapters count alpha / rank."""
    targets: list[str] | None = None
    """Linear layers by name or by the end of their name; null takes every one of the transformer blocks."""
    path: str | None = None
    """Folder with pytorch_lora_weights.safetensors to start from."""


@dataclass
class LearnerConfig:
    num_ranks: int = 1
    """FSDP2 ranks, one actor each."""
    sp_size: int = 1
    """Ranks that share the tokens of the same videos (Ulysses); must divide num_ranks and the transformer's heads."""
    videos_per_pass: int | None = None
    """Most videos in one forward and backward: more where a small model waits for kernel launches, fewer where memory
    is short. A pass holds whole groups, each at one step, or an equal part of one; null is one group."""
    shard_gradients: bool = False
    """Sum gradients over the ranks after every pass, not once: a rank keeps its share of them between passes instead of
    all of them (33 GB at the real size), for as many reductions as there are passes."""
    reference_offload: bool = False
    """Keep anchor and previous step in pinned host memory (official: reference_mode_offload)."""
    timeout_s: float = 3600.0
    """Bound of one update, publish, save or load."""


@dataclass
class RolloutConfig:
    num_workers: int = 1
    """Rollout groups at the start; `launch.py scale` asks a run for another number."""
    min_workers: int | None = None
    """With max_workers: the number follows the load between these two. Null keeps it."""
    max_workers: int | None = None
    """See min_workers; also the most that `launch.py scale` may ask for."""
    scale_cooldown_s: float = 120.0
    """Fewest seconds between two changes of the number by load."""
    gpus_per_group: int = 1
    """GPUs of one rollout group when devices are GPUs: one for each of its sp_size actors."""
    sp_size: int = 1
    """Actors of one rollout group, on one node, that share the tokens of its videos; must divide gpus_per_group and the
    transformer's heads. With learner.sp_size the same, log-probs agree bit for bit."""
    cuda_graphs: bool = False
    """Record a forward once for every shape and replay it: for small models on a GPU."""
    groups_per_task: int = 1
    """Groups that a worker makes at once, in shared forwards: more where a small model waits for kernel launches."""
    decode_frames: int | None = None
    """Latent frames that the VAE decodes at once, after those before them: fewer need less memory; null is all."""
    overlap_decode: bool = False
    """Decode a group while the next one is denoised."""
    timeout_s: float = 3600.0
    """Bound of one generate call."""


@dataclass
class FaultsConfig:
    """When somebody counts as slow or hung, and how often he is replaced. Time in which the controller itself stood
    still does not count."""

    slow_factor: float = 2.0
    """A rollout task that takes this many times the median is also given to a worker that is idle; the first result
    wins."""
    hung_factor: float = 8.0
    """A rollout task, a batch of scores or a call to the learner that takes this many times the median: who has it is
    ended and replaced."""
    hung_min_s: float = 120.0
    """But never sooner than this; longer than Ray needs to notice a dead node."""
    max_losses: int = 10
    """All rollout workers and so many more may be lost with no task finished in between; then the run ends."""
    max_rebuilds: int = 3
    """So many times the learner may be lost with no iteration finished in between; then the run ends."""
    no_worker_s: float = 1800.0
    """Longest time without any rollout worker while there is work, as when all spot nodes are gone."""


@dataclass
class OverlapConfig:
    enabled: bool = False
    """Make the next iterations' rollouts while the learner updates (run_async), instead of one after the other."""
    max_policy_age: int = 1
    """Publishes that lie between the weights an iteration is made by and those it trains: iteration k is made by the
    weights published after iteration k - max_policy_age. 0 is strictly on-policy."""
    max_groups: int | None = None
    """Most groups that are being made, or wait for the learner, at once; null is max_policy_age + 1 iterations."""


@dataclass
class PublishConfig:
    transport: str = "auto"
    """How new weights reach the rollout workers: collective (broadcast by NCCL, gloo on CPUs), object_store, or auto,
    which is collective where every rollout and learner actor has a GPU of its own, none takes turns, and workers are
    idle then."""
    timeout_s: float = 120.0
    """Bound of one broadcast, and of forming its group."""


@dataclass
class EvaluationConfig:
    num_prompts: int = 0
    """Prompts of each set that are evaluated, all where a set has fewer; 0 turns evaluation off."""
    sets: list[str] = field(default_factory=lambda: ["training", "held_out"])
    """Which sets: training (data.prompts), held_out (data.held_out_prompts)."""
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
    take_turns: bool = False
    """Rollout and reward actors, and the learner, hold GPU memory by turns; who waits keeps its weights on the host."""
    num_cpus: int | None = None
    """CPUs of an embedded Ray; null takes the machine's."""
    dashboard: bool = False
    """Start Ray's dashboard with an embedded Ray, and print its address."""
    object_store_bytes: int = 1_000_000_000
    """Object store of an embedded Ray."""
    start_timeout_s: float = 300.0
    """Bound of placing and starting the actors."""
    node_roles: dict[str, str] = field(default_factory=dict)
    """Which nodes the actors of a pool (learner, rollout, reward) take: what the node's label `role` must be, as Ray's
    selectors have it: a, !a, in(a,b), !in(a,b). A pool that is left out takes any node."""
    grows: bool = False
    """An autoscaler may add nodes: what does not fit yet is waited for, as long as start_timeout_s. Else that is an
    error at once."""


@dataclass
class WatchConfig:
    page_interval_s: float = 5.0
    """Fewest seconds between two writes of the run page (output_dir/run.html)."""
    trace_iteration: int | None = 2
    """Iteration whose trace is written (output_dir/trace.json), the last where there are fewer; null writes none."""
    max_kl_share: float = 0.5
    """Alarm above this share of the KL in the gradient norm."""
    max_clip_share: float = 0.5
    """Alarm above this share of clipped pairs."""
    max_agreement_share: float = 0.5
    """Alarm when log-probs of rollout and learner differ by more than this share of what stops the run."""
    min_effective_samples: float = 0.5
    """Alarm below this effective share of the pairs (of an older policy's groups)."""
    wandb: str | None = None
    """Project of Weights & Biases that the run is also logged to; needs the package wandb."""
    wandb_offline: bool = False
    """Log to output_dir/wandb only, for `wandb sync` later."""


@dataclass
class CheckpointConfig:
    path: str | None = None
    """Folder of the checkpoints, which all learner ranks see, or a URL that fsspec opens; of one run. Null is
    output_dir/checkpoints."""
    keep_last: int | None = None
    """Checkpoints that are kept, the newest ones; null keeps all."""
    keep_every: int | None = None
    """With keep_last: those of every keep_every-th iteration stay too."""


@dataclass
class Config:
    output_dir: str = "outputs/run"
    """Everything the run writes; must be new or empty unless the run is resumed."""
    resume: str | None = None
    """null starts anew, "auto" goes on from the run's newest complete checkpoint (anew where there is none), anything
    else is the folder or URL of the checkpoint to go on from."""
    seed: int = 42
    """Seed of prompts order and of all rollout noise."""
    num_iterations: int = 100
    """Iterations: rollout, reward, advantage, update, publish."""
    save_interval: int = 100
    """Iterations between checkpoints, which are written while the run goes on; the last iteration is always saved."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)


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


def axis_weights(reward: RewardConfig) -> tuple[float, float, float]:
    """Weights of VQ, MQ and TA: the setting's, where none is given."""
    given = (reward.weight_vq, reward.weight_mq, reward.weight_ta)
    named = SETTINGS[reward.setting]
    return tuple(n if g is None else g for g, n in zip(given, named, strict=True))  # type: ignore[return-value]


def total_optimizer_steps(config: Config) -> int:
    """Optimizer steps of the whole run when every iteration trains."""
    return config.num_iterations * config.loss.num_updates * config.loss.num_epochs
