"""Groups of an older policy, and groups that come bit by bit, in one plain process."""

import dataclasses

import numpy as np
import pytest
import torch

from sage_ray.config import Config
from sage_ray.group_batch import GroupBatch, split_groups
from sage_ray.group_chunks import chunks_of
from tests.learner.test_knobs import equal, learner, weights_of
from tests.learner.test_policy_update import batch, request, worker  # noqa: F401  (worker is a fixture)

PAIRS = 12.0
STEPWISE = {"mode": "stepwise", "share_interval": 0}


@pytest.fixture(scope="module")
def trajectory(worker):  # noqa: F811
    return worker.generate(request())[0]


@pytest.fixture(scope="module")
def pair(worker):  # noqa: F811
    """Two groups of the same prompt."""
    return [batch(worker.generate(request(group=group))[0], group) for group in (0, 1)]


def claims(group: GroupBatch, version: int) -> GroupBatch:
    """The same group with another policy version."""
    return dataclasses.replace(group, trajectory=dataclasses.replace(group.trajectory, policy_version=version))


def test_the_pass_of_the_previous_step_gives_old_log_probs_and_is_gated(trajectory) -> None:
    update = learner(kl=STEPWISE, loss={"max_disagreement": 1e-6})
    update.update([[batch(trajectory)]], [PAIRS])
    update.begin()
    (row, *_) = rows = update._passes([batch(trajectory, 1)])
    assert update._reference_passes(rows)
    torch.testing.assert_close(row.old_log_prob, row.rollout_log_prob, rtol=0, atol=1e-6)
    assert row.old_log_prob is row.behaviour_log_prob
    metrics = update.update([[batch(trajectory, 1)]], [PAIRS])
    assert metrics["agreement/max_abs"] < 1e-6
    assert metrics["loss/ratio_mean"] != 1.0
    assert metrics["kl/previous"] > 0


@pytest.mark.parametrize("kl", [{"mode": "none"}, {"mode": "fixed"}, {**STEPWISE, "previous": "iteration_start"}])
def test_without_the_sampling_weights_ratios_start_from_the_rollouts_log_probs(trajectory, kl) -> None:
    """Nothing can be compared then, and no agreement is claimed."""
    update = learner(kl=kl, loss={"max_disagreement": 1e-6})
    update.update([[batch(trajectory)]], [PAIRS])
    update.begin()
    (row, *_) = rows = update._passes([batch(trajectory, 1)])
    assert not update._reference_passes(rows)
    assert row.old_log_prob is row.rollout_log_prob
    metrics = update.update([[batch(trajectory, 1)]], [PAIRS])
    assert not any(name.startswith("agreement/") for name in metrics)
    assert metrics["loss/ratio_mean"] != 1.0


def test_two_publishes_old_is_not_the_previous_step(trajectory) -> None:
    update = learner(kl=STEPWISE)
    for seed in range(2):
        update.update([[claims(batch(trajectory, seed), update.version)]], [PAIRS])
    update.begin()
    assert not update._reference_passes(update._passes([batch(trajectory)]))


def test_effective_sample_size_by_hand(trajectory) -> None:
    """(sum w)^2 / (n sum w^2) with w = exp(policy - sampling policy)."""
    update = learner(kl={"mode": "none"}, optimizer={"name": "adamw", "learning_rate": 1e-2})
    assert update.update([[batch(trajectory)]], [PAIRS])["policy/effective_sample_size"] == pytest.approx(1.0)
    with torch.no_grad():
        rows = update._passes([batch(trajectory)])
        logs = torch.cat([update._replay(row)[0] - row.rollout_log_prob for row in rows]).double()
    w = logs.exp()
    assert w.std() > 1e-5
    measured = update.update([[batch(trajectory)]], [PAIRS])["policy/effective_sample_size"]
    assert measured == pytest.approx(float(w.sum() ** 2 / (len(w) * (w**2).sum())), abs=1e-6)


@pytest.mark.parametrize(("cap", "factor"), [(0.5, 0.5), (0.25, 0.25)])
def test_truncated_importance_weights(trajectory, cap: float, factor: float) -> None:
    """Probabilities are nearly those of the sampling policy, so a cap below 1 binds for every term: the gradient is
    that of a fresh group times the cap."""
    grads = []
    for settings in ({}, {"importance_cap": cap}):
        update = learner(kl={"mode": "none"}, loss=settings, optimizer={"name": "adamw", "max_grad_norm": 1e9})
        update.update([[batch(trajectory)]], [PAIRS])
        item = batch(trajectory, 1) if settings else claims(batch(trajectory, 1), 1)
        update.begin()
        update.accumulate([item], PAIRS)
        grads.append([p.grad.clone() for p in update.trainable])
    # The first update of both is fresh: the cap does not touch it.
    for fresh, capped in zip(*grads, strict=True):
        torch.testing.assert_close(capped, factor * fresh, rtol=1e-3, atol=1e-5 * float(fresh.abs().max()) + 1e-12)


@pytest.mark.parametrize("share_interval", [0, 1])
def test_bit_by_bit_is_at_once(pair, share_interval: int) -> None:
    """Also at a step that measures the KL's share, whose passes wait for the last group."""
    kl = {"mode": "dual_moving", "share_interval": share_interval}
    whole, bits = learner(kl=kl), learner(kl=kl)
    for version in range(2):
        groups = [claims(group, version) for group in pair]
        at_once = whole.update([groups], [2 * PAIRS])
        bits.begin()
        for number, group in enumerate(groups):
            bits.accumulate([group], 2 * PAIRS, last=number == 1)
        bits.step(2 * PAIRS)
        assert bits.metrics() == at_once
        assert ("kl/gradient_share" in at_once) == bool(share_interval)
        assert equal(weights_of(whole), weights_of(bits))


def test_pairs_that_turn_out_to_count_for_nothing_leave_the_mean(pair) -> None:
    """One of two groups has no weight: as if the other had been alone."""
    empty = GroupBatch(pair[1].trajectory, pair[1].advantages * 0, np.zeros_like(pair[1].weights))
    alone, both = learner(kl={"mode": "fixed"}), learner(kl={"mode": "fixed"})
    expected = alone.update([[pair[0]]], [PAIRS])
    metrics = both.update([[pair[0], empty]], [PAIRS], all_pairs=[2 * PAIRS])
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
    both.begin()
    both.accumulate([empty], 2 * PAIRS)
    before = weights_of(both)
    both.step(0.0)
    assert both.metrics()["learner/stepped"] == 0.0 and equal(before, weights_of(both))
    assert all(p.grad is None for p in both.trainable)


def config(prompts: int, ranks: int = 1, sp: int = 1, per_pass: int | None = None, **loss) -> Config:
    made = Config()
    made.data.num_prompts, made.data.group_size = prompts, 4
    made.learner.num_ranks, made.learner.sp_size, made.learner.videos_per_pass = ranks, sp, per_pass
    for name, value in loss.items():
        setattr(made.loss, name, value)
    return made


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"prompts": 3}, [[(0,)], [(1,)], [(2,)]]),
        ({"prompts": 3, "per_pass": 2}, [[(0,)], [(1,)], [(2,)]]),
        ({"prompts": 3, "ranks": 2}, [[(0,), (1,)], [(2,), (-1,)]]),
        ({"prompts": 4, "ranks": 4, "sp": 2}, [[(0,), (1,)], [(2,), (3,)]]),
        ({"prompts": 5, "per_pass": 8}, [[(0, 1)], [(2, 3)], [(4,)]]),  # 3 rows of a group, 2 in a pass
        ({"prompts": 5, "per_pass": 12}, [[(0,)], [(1,)], [(2,)], [(3,)], [(4,)]]),
        ({"prompts": 3, "per_pass": 4000}, [[(0, 1, 2)]]),
    ],
)
def test_chunks_hold_whole_passes_of_every_rank(settings: dict, shares: list) -> None:
    chunks = chunks_of(config(**settings), num_trained=3)
    assert [list(chunk.shares) for chunk in chunks] == shares
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    groups = [group for chunk in chunks for group in chunk.groups]
    assert groups == list(range(settings["prompts"]))
    (plan,) = split_groups(settings["prompts"], 1, settings.get("ranks", 1) // settings.get("sp", 1))
    assert [[g for c in chunks for g in c.shares[r]] for r in range(len(plan))] == plan
    weights = np.ones((settings["prompts"], 4), np.float32)
    weights[0, :2] = 0
    assert chunks[-1].weighted_pairs(weights) == chunks[-1].all_pairs - 2 * 3


@pytest.mark.parametrize("loss", [{"num_updates": 2}, {"num_epochs": 2}])
def test_several_optimizer_steps_wait_for_all_groups(loss: dict) -> None:
    assert chunks_of(config(4, **loss), num_trained=3) is None


def test_a_global_std_waits_for_all_groups() -> None:
    made = config(4)
    made.advantage.global_std = True
    assert chunks_of(made, num_trained=3) is None
