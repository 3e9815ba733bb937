"""config_check: a valid configuration passes, and every rule is broken once with its message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_ray.config import Config, ConfigError, dotted_keys, value_at
from sage_ray.config_check import AT_LEAST, CHOICES, POSITIVE, num_prompts, validate
from sage_ray.config_load import load_config

VALID = ["data.num_prompts=4"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(load_config([], [*VALID, *overrides]))
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sde_type=cps", "eta=1"],
        ["kl.mode=none", "kl.weight=0", "kl.coef=0", "kl.min_coef=0"],
        ["sampling.sde_window_start=16", "sampling.sde_window_size=4"],
        ["sampling.sde_window_start=19", "sampling.sde_window_size=1", "sampling.last_step=sde"],
        ["sampling.num_steps=1", "sampling.last_step=sde"],
        ["loss.num_updates=4"],
        ["data.num_prompts=null", "batch_size=2", "learner.num_ranks=4", "num_generations=4"],
    ],
)
def test_valid(overrides):
    validate(load_config([], [*VALID, *overrides]))


def test_the_tables_name_known_keys_only():
    assert {*CHOICES, *AT_LEAST, *POSITIVE} <= set(dotted_keys())


@pytest.mark.parametrize("key", [key for key in CHOICES if key != "reward.truth"])
def test_choice(key):
    assert refusal(f"{key}=nonsense").startswith(f"{key}='nonsense': must be one of ")


def test_choice_lists_what_is_allowed():
    assert refusal("model.dtype=bf16") == "model.dtype='bf16': must be one of float32, bfloat16"
    assert refusal("reward.truth=x") == "reward.truth='x': must be one of null, shapes"


@pytest.mark.parametrize("key", [*AT_LEAST])
def test_lower_bound(key):
    override = f"{key}={AT_LEAST[key] - 1}"
    value = value_at(load_config([], [override]), key)
    assert refusal(override) == f"{key}={value!r}: must be at least {AT_LEAST[key]}"


@pytest.mark.parametrize("key", POSITIVE)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_positive(key, value):
    assert refusal(f"{key}={value}") == f"{key}={float(value)}: must be greater than 0"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_every_number_must_be_finite(value):
    for key, kind in dotted_keys().items():
        if kind in (float, float | None):
            assert refusal(f"{key}={value}") == f"{key}={value}: must be finite"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.clip_range=1"], "loss.clip_range=1.0: must be in [0, 1)"),
        (
            ["cluster.node_roles={reward: in(a}"],
            "cluster.node_roles={'reward': 'in(a'}: must give learner, rollout or reward one of a, !a, in(a,b), "
            "!in(a,b)",
        ),
        (
            ["cluster.node_roles={driver: head}"],
            "cluster.node_roles={'driver': 'head'}: must give learner, rollout or reward one of a, !a, in(a,b), "
            "!in(a,b)",
        ),
        (["video_fps=1001"], "sampling.fps=1001.0: must be in [0.1, 1000], what a video file can hold"),
        (["optimizer.beta1=1"], "optimizer.beta1=1.0: must be in [0, 1)"),
        (["data.prompts=[]"], "data.prompts=[]: must not be empty"),
        (["output_dir="], "output_dir='': must not be empty"),
        (["seed=2147483648"], "seed=2147483648: must be less than 2**31"),
        (
            ["sde_type=ode"],
            (
                "sampling.sde_type='ode': training needs noise (eta > 0 and an sde_type other than ode); "
                "ode only serves evaluation"
            ),
        ),
        (
            ["eta=0"],
            "sampling.eta=0.0: training with sde_type=sage_grpo needs eta > 0: without noise a step has no log-prob",
        ),
        (["sde_type=cps", "eta=1.1"], "sampling.eta=1.1: sde_type=cps needs eta <= 1: its sine folds back above 1"),
        (
            ["sampling.sde_window_start=3"],
            "sampling.sde_window_start=3: needs sde_window_size; without it every step is stochastic",
        ),
        (
            ["sampling.sde_window_start=17", "sampling.sde_window_size=4"],
            "sampling.sde_window_size=4: sde_window_start=17 + sde_window_size must be at most num_steps=20",
        ),
        (
            ["sampling.sde_window_start=19", "sampling.sde_window_size=1"],
            (
                "sampling.sde_window_start=19: no step is left to train: with last_step=ode only the steps 0 to 18 of "
                "num_steps=20 can be stochastic"
            ),
        ),
        (
            ["kl_weight=0"],
            "kl.weight=0.0: must be greater than 0 with kl.mode=dual_moving; kl.mode=none turns KL off",
        ),
        (["kl_coef=1"], "kl.coef=1.0: must be at most kl.weight=1e-05, the largest lambda"),
        (["kl_min_coef=1"], "kl.min_coef=1.0: must be at most kl.weight=1e-05, the largest lambda"),
        (
            ["reward.weight_vq=0", "reward.weight_mq=0", "reward.weight_ta=0"],
            "reward.weight_ta=0.0: weight_vq, weight_mq and weight_ta must not all be 0",
        ),
        (
            ["evaluation.num_prompts=2", "data.held_out_prompts=[]"],
            (
                "data.held_out_prompts=[]: must not be empty while evaluation.num_prompts is greater than 0 and "
                "evaluation.sets holds held_out"
            ),
        ),
        (
            ["evaluation.sets=[held_out,test]"],
            (
                "evaluation.sets=['held_out', 'test']: must hold one or both of training, held_out; num_prompts=0 "
                "evaluates nothing"
            ),
        ),
        (
            ["learner.videos_per_pass=3", "data.group_size=4"],
            "learner.videos_per_pass=3: must divide data.group_size=4 or be at least as large",
        ),
        (
            ["model.dtype=bfloat16", "rollout.groups_per_task=2"],
            "rollout.groups_per_task=2: must be 1 in bfloat16 without loss.max_disagreement: rollout and learner must "
            "run the same batch shapes",
        ),
        (
            ["model.dtype=bfloat16", "learner.videos_per_pass=8", "data.group_size=4"],
            "learner.videos_per_pass=8: must be at most data.group_size=4 in bfloat16 without loss.max_disagreement: "
            "rollout and learner must run the same batch shapes",
        ),
        (
            ["model.compile=true"],
            "model.compile=True: needs model.gradient_checkpointing=true: else the learner runs other code",
        ),
        (["rollout.sp_size=2"], "rollout.sp_size=2: must divide rollout.gpus_per_group=1"),
        (["learner.sp_size=3", "learner.num_ranks=8"], "learner.sp_size=3: must divide learner.num_ranks=8"),
        (["rollout.gpus_per_group=2"], "rollout.gpus_per_group=2: must be rollout.sp_size=1, others would idle"),
        (
            ["learner.sp_size=2", "learner.num_ranks=2", "model.stock_forward=true"],
            "learner.sp_size=2: must be 1 with model.stock_forward=true: diffusers' forward runs on one device",
        ),
        (
            ["sp_size=2", "learner.num_ranks=4", "rollout.cuda_graphs=true"],
            "rollout.cuda_graphs=True: must be false with rollout.sp_size=2: a graph does not record what the GPUs "
            "of a group exchange",
        ),
        (
            ["sp_size=2", "learner.num_ranks=2", "rollout.overlap_decode=true"],
            "rollout.overlap_decode=True: must be false with rollout.sp_size=2: threads would let the actors of a "
            "group denoise its tasks in different orders",
        ),
        (
            ["batch_size=4"],
            (
                "data.num_prompts=4: with data.batch_size=4: exactly one of data.num_prompts and data.batch_size must "
                "be set"
            ),
        ),
        (
            ["data.num_prompts=null"],
            (
                "data.num_prompts=None: with data.batch_size=None: exactly one of data.num_prompts and data.batch_size "
                "must be set"
            ),
        ),
        (
            ["data.num_prompts=null", "batch_size=2", "learner.num_ranks=3"],
            (
                "data.batch_size=2: (batch_size * dp) % num_generations must be 0: batch_size=2 videos on each of dp=3 "
                "data-parallel ranks do not fill groups of data.group_size (num_generations) = 4"
            ),
        ),
        (["loss.num_updates=3"], "loss.num_updates=3: must divide the 4 prompts of an iteration"),
    ],
)
def test_broken_rule(overrides, message):
    assert refusal(*overrides) == message


def test_the_defaults_alone_leave_the_number_of_prompts_open():
    with pytest.raises(ConfigError, match="exactly one of data.num_prompts and data.batch_size must be set"):
        validate(Config())
    with pytest.raises(ConfigError, match="exactly one of"):
        num_prompts(Config())


@given(st.integers(1, 64), st.integers(1, 64), st.integers(2, 16))
def test_batch_size_is_refused_or_fills_whole_groups(batch_size, num_ranks, group_size):
    """The videos of an iteration are the same whether counted by ranks or by groups."""
    config = Config()
    config.data.batch_size, config.learner.num_ranks, config.data.group_size = batch_size, num_ranks, group_size
    if batch_size * num_ranks % group_size:
        with pytest.raises(ConfigError, match=r"\(batch_size \* dp\) % num_generations must be 0"):
            validate(config)
    else:
        validate(config)
        assert num_prompts(config) * group_size == batch_size * num_ranks
