"""Which split of the GPUs is best, by hand and against trying all; what a run says of its pools at its end."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray.balance import (
    SIZES,
    Costs,
    Split,
    best_colocated,
    best_split,
    fits_memory,
    predicted_costs,
    present_split,
    simulate,
)
from sage_ray.balance_report import balance_lines, measured_costs, plan_lines
from sage_ray.config import Config
from sage_ray.config_load import load_config
from sage_ray.cost import H100, Dims, Way, forward_s, update_s
from sage_ray.training_schedule import training_schedule
from tests.small import ROOT

REAL = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
TOKENS = 32_760 + 200
RATES = H100()
EVEN = Costs(groups=12, videos=4, denoise_s=10, decode_s=0, reward_s=0, learn_s=30)
THREE = (
    "sampling.guidance_scale=1 sampling.last_step=ode data.batch_size=null data.num_prompts=3 kl.previous=last_step "
    "kl.share_interval=0 rollout.num_workers=1 learner.num_ranks=3 reward.gpus_per_worker=0.1"
).split()


def configured(*overrides: str) -> Config:
    return load_config([ROOT / "configs" / "official_8gpu.yaml"], list(overrides))


def test_three_times_the_work_wants_three_times_the_gpus() -> None:
    """12 groups, 10 s of rollout and 30 s of learning each: 2 + 6 GPUs take 60 s with both pools always busy."""
    found = best_split(EVEN, 8, age=1)
    assert found is not None
    split, expected = found
    assert (split.rollouts, split.ranks, split.gpus) == (2, 6, 8)
    assert expected.iteration_s == pytest.approx(60)
    assert expected.rollout_busy == pytest.approx(1) and expected.learner_busy == pytest.approx(1)
    assert expected.gpu_s_per_video == pytest.approx(8 * 60 / 48)


def test_one_after_the_other_by_hand() -> None:
    """4 + 4: 3 x 10 + 3 x 30 = 120 s; 2 + 6: 60 + 60 = 120; 5 + 3: 150; 4 + 4 and 2 + 6 are equally good."""
    found = best_split(EVEN, 8, age=None)
    assert found is not None and found[1].iteration_s == pytest.approx(120)
    assert (found[0].rollouts, found[0].ranks) in {(4, 4), (2, 6)}


def test_reward_workers_share_unless_they_need_a_gpu() -> None:
    """4 videos of .01 s lengthen a group by .04 s: nothing against one of 8 GPUs. A single group leaves 6 GPUs idle:
    there its 4 videos of 5 s are scored at once."""
    light = best_split(dataclasses.replace(EVEN, reward_s=0.01), 8, age=1)
    assert light is not None and light[0].reward_gpus == 0
    alone = best_split(dataclasses.replace(EVEN, groups=1, reward_s=5.0), 8, age=None)
    assert alone is not None and alone[0].reward_gpus == 4
    assert alone[1].iteration_s == pytest.approx(10 + 5 + 30)


def test_a_split_that_does_not_fit_is_not_taken() -> None:
    found = best_split(EVEN, 8, age=1, fits=lambda split: split.ranks >= 7)
    assert found is not None and (found[0].rollouts, found[0].ranks) == (1, 7)
    assert best_split(EVEN, 8, age=1, fits=lambda split: False) is None
    assert best_split(EVEN, 1, age=1) is None


small = st.floats(0.1, 20.0)


@settings(max_examples=25)
@given(
    st.builds(
        Costs, groups=st.integers(1, 6), videos=st.integers(1, 2), denoise_s=small, decode_s=small,
        reward_s=st.floats(0.0, 2.0), learn_s=small, publish_s=small, load_s=small,
    ),
    st.integers(2, 7),
    st.sampled_from([None, 0, 1]),
)  # fmt: skip
def test_no_split_that_shares_is_better_than_the_best(costs: Costs, gpus: int, age: int | None) -> None:
    """All of them are tried here; the search leaves out most."""
    found = best_split(costs, gpus, age)
    assert found is not None and found[0].gpus <= gpus
    for ranks in range(1, min(gpus - 1, costs.groups) + 1):
        for rollouts in range(1, gpus - ranks + 1):
            other = simulate(costs, Split(rollouts, ranks), gpus, age)
            assert found[1].iteration_s <= other.iteration_s * (1 + 1e-9)


def test_predicted_costs_are_those_of_one_group() -> None:
    """4 videos under guidance, 20 steps, all trained; the anchor's forward, the KL's share every tenth step."""
    costs = predicted_costs(configured(), REAL, 20, RATES)
    forward, training = forward_s(REAL, TOKENS, True, RATES), update_s(REAL, TOKENS, Way(True, True, True, True), RATES)
    assert (costs.groups, costs.videos) == (2, 4)
    assert costs.rollout_s(1) == pytest.approx(4 * 20 * 2 * forward + 4 * 81 * 480 * 832 / RATES.decode_pixels_s)
    assert costs.update_s(1) == pytest.approx(4 * 20 * 2 * (training * 1.1 + forward))
    assert 0.25 * costs.learn_s < costs.update_s(4) < 0.27 * costs.learn_s
    assert 2 * 4 * 32_960 * 2048 * 54 * 160 / 367e9 == pytest.approx(costs.denoise_exchange_s)


def test_sizes_share_the_tokens_of_few_groups() -> None:
    """The official 8 GPUs have 2 groups an iteration: without sharing most of them would have nothing to do."""
    config = configured()
    costs, fits = predicted_costs(config, REAL, 20, RATES), fits_memory(config, REAL, 20, RATES)
    alone, shared = best_split(costs, 8, 1), best_split(costs, 8, 1, (SIZES, SIZES), fits)
    assert alone is not None and shared is not None
    assert shared[1].iteration_s < 0.6 * alone[1].iteration_s
    size, found = best_colocated(costs, 8, SIZES)
    assert size == 4 and found.rollout_busy + found.learner_busy > 0.95


def test_a_learner_of_too_few_cards_does_not_fit() -> None:
    """Masters, momentum and gradients of 8.3 B weights take 100 GB."""
    fits = fits_memory(configured(), REAL, 20, RATES)
    assert not fits(Split(7, 1)) and fits(Split(4, 4))


def test_the_present_split_is_the_configurations() -> None:
    assert present_split(configured()) == Split(3, 4, reward_gpus=1)
    shared = present_split(configured("reward.gpus_per_worker=0.1", "sp_size=2", "rollout.gpus_per_group=2"))
    assert shared == Split(3, 2, 2, 2) and shared.gpus == 10


def test_plan_says_what_balances_one_to_three() -> None:
    """1 + 3 GPUs: 12 of 19 trained steps keep both pools busy, as a rollout costs 20 forwards and a decode, a trained
    step about 5.5 forwards."""
    config = configured(*THREE, "overlap.enabled=true")
    lines = dict(plan_lines(config, REAL, training_schedule(config).rule, RATES))
    assert lines["trained steps that balance the pools"].startswith("12 of 19 (loss.timestep_fraction=0.63)")
    assert "1 rollout + 3 learner, reward workers on the rollout GPUs" in lines["pools as configured"]
    assert lines["best split, policy age 1"].endswith("1.00 x as fast as configured")


@pytest.mark.parametrize("words", [["loss.num_updates=3"], ["advantage.global_std=true"]])
def test_plan_simulates_no_learner_that_waits_for_all_rewards(words: list[str]) -> None:
    config = configured(*THREE, *words)
    ((name, said),) = plan_lines(config, REAL, training_schedule(config).rule, RATES)
    assert name == "split" and "not simulated" in said


def row(update_s: float, rollout_busy: float) -> dict[str, float | None]:
    """Of an iteration of 3 groups of 4 videos: rollouts of 60 s a group."""
    return {
        "rollout/denoise_s": 150.0, "rollout/decode_s": 30.0, "reward/score_s": 2.4, "phase/update_s": update_s,
        "phase/publish_s": 0.0, "pool/rollout_busy": rollout_busy, "pool/reward_busy": 0.01, "pool/learner_busy": 0.9,
    }  # fmt: skip


def test_the_end_of_a_run_says_what_was_idle_and_which_split_is_better() -> None:
    """1 rollout worker (180 s an iteration) and 3 ranks (60 s a group): with 2 + 2 GPUs 120 s, as with 1 + 3 three
    of four cards wait."""
    config = configured(*THREE, "overlap.enabled=true")
    rows = [row(900.0, 0.1), row(60.0, 1.0), row(60.0, 1.0)]
    idle, work, split = balance_lines(rows, config, 4)
    assert idle.startswith("idle (median of 2 iterations): rollout 0 %, reward 99 %, learner 10 %")
    assert "180.0 s of one rollout group, 180.0 s of one data-parallel rank" in work
    assert split.startswith("best split of 4 GPUs: 2 rollout + 2 learner, reward workers on the rollout GPUs; 120.0 s")
    assert split.endswith("1.52 x as fast as 1 rollout + 3 learner, reward workers on the rollout GPUs with 182.4 s")


def test_a_balanced_run_is_left_alone() -> None:
    config = configured(*THREE, "overlap.enabled=true")
    assert balance_lines([row(180.0, 1.0)], config, 4)[-1].endswith("is within 5 % of the best")


def test_a_synchronous_run_is_told_what_overlap_gains() -> None:
    """180 s and 180 s, one after the other."""
    said = balance_lines([row(180.0, 0.5)], configured(*THREE), 4)[-1]
    assert said.startswith("best split of 4 GPUs with overlap.enabled=true overlap.max_policy_age=1: 1 rollout")
    assert "1.9" in said


def test_costs_that_were_measured() -> None:
    """3 groups on 3 ranks are one chunk, on 2 two of them."""
    three = measured_costs([row(60.0, 1.0)], configured(*THREE))
    assert (three.denoise_s, three.decode_s, three.reward_s, three.learn_s) == (50.0, 10.0, pytest.approx(0.2), 60.0)
    assert measured_costs([row(60.0, 1.0)], configured(*THREE, "learner.num_ranks=2")).learn_s == 30.0


def test_where_gpus_are_shared_only_idle_shares_are_said() -> None:
    config = configured(*THREE)
    assert len(balance_lines([row(60.0, 1.0)], config, 0)) == len(balance_lines([row(60.0, 1.0)], config, 2)) == 2
    assert balance_lines([], config, 4) == balance_lines([{"reward/total": 1.0}], config, 4) == []


def test_plan_prints_the_split_of_a_real_model(tmp_path: Path, capsys) -> None:
    import json

    from launch import main

    sizes = {"num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54, "num_refiner_layers": 2}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({**sizes, "patch_size": 1, "patch_size_t": 1}))
    words = [f"model.path={tmp_path}", f"output_dir={tmp_path / 'run'}"]
    main(["plan", "--config", str(ROOT / "configs" / "official_8gpu.yaml"), *words])
    lines = capsys.readouterr().out
    for name in ("pools as configured", "best split, synchronous", "best split, policy age 1", "trained steps that"):
        assert name in lines
