"""The learner's update in one plain process: on-policy values, references, KL modes, failures."""

import dataclasses

import numpy as np
import pytest
import torch

from sage_ray.agreement import DisagreementError, NonFiniteError
from sage_ray.config import KLConfig, LossConfig, OptimizerConfig
from sage_ray.group_batch import GroupBatch, ReplayRules, count_pairs, split_groups
from sage_ray.policy_update import PolicyUpdate
from sage_ray.references import ReferenceBank
from sage_ray.schedule import sigma_grid
from sage_ray.types import GroupRequest, Prompt, Trajectory
from tests.conftest import POLICY
from tests.small import load_velocity, small_config

PROMPT = Prompt(0, "a small red circle moves left slowly on a gray background")
SIGMAS = tuple(map(float, sigma_grid(6, 3.0)))


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A plain rollout worker that claims to hold version 0 of the shipped policy."""
    from actors.rollout_worker import RolloutWorker

    made = RolloutWorker(small_config(tmp_path_factory.mktemp("worker")), "cpu")
    made.version = 0
    return made


def request(sde_type: str = "sage_grpo", group: int = 0, group_size: int = 4) -> GroupRequest:
    return GroupRequest(
        step=0,
        group=group,
        prompt=PROMPT,
        group_size=group_size,
        policy_version=0,
        seed=7,
        sigmas=SIGMAS,
        sde_type=sde_type,
        eta=0.5,
        sde_steps=(0, 1, 2),
        trained_steps=(0, 1, 2),
    )


def batch(trajectory: Trajectory, seed: int = 0) -> GroupBatch:
    advantages = np.random.default_rng(seed).standard_normal(len(trajectory.latents)).astype(np.float32)
    return GroupBatch(trajectory, advantages, np.ones_like(advantages))


def rule(loss: dict | None = None, kl: dict | None = None, lr: float = 1e-4, last_step: str = "ode") -> PolicyUpdate:
    model = load_velocity(POLICY, torch.float32, "cpu")
    loss = {"clip_range": 0.01, **(loss or {})}
    optimizer = OptimizerConfig(name="adamw", beta1=0.9, learning_rate=lr)
    return PolicyUpdate(
        model, LossConfig(**loss), KLConfig(**(kl or {})), optimizer, ReplayRules(last_step=last_step), 100
    )


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "flow_grpo", "cps"])
def test_first_step_is_on_policy_and_agrees_with_the_rollout_bitwise(worker, sde_type: str) -> None:
    trajectory, _, _ = worker.generate(request(sde_type))
    metrics = rule().update([[batch(trajectory)]], [12.0])
    assert metrics["agreement/max_abs"] == 0.0
    assert metrics["loss/ratio_mean"] == 1.0
    assert metrics["loss/clip_share"] == 0.0
    assert metrics["kl/anchor"] == metrics["kl/previous"] == 0.0
    assert metrics["learner/grad_norm"] > 0


def test_stored_latents_in_bfloat16_are_noticed(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    rounded = torch.from_numpy(trajectory.latents).bfloat16().float().numpy()
    with pytest.raises(DisagreementError, match="loss.max_disagreement"):
        rule({"max_disagreement": 1e-6}).update([[batch(dataclasses.replace(trajectory, latents=rounded))]], [12.0])


def test_a_wrong_sigma_grid_is_noticed(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    shifted = dataclasses.replace(trajectory, sigmas=sigma_grid(6, 3.3))
    with pytest.raises(DisagreementError):
        rule().update([[batch(shifted)]], [12.0])


def test_the_update_makes_good_samples_more_likely(worker) -> None:
    """After one small step the log-prob of rows with positive advantage has risen relative to the others."""
    trajectory, _, _ = worker.generate(request(group_size=8))
    item, update = batch(trajectory), rule(kl={"mode": "none"}, lr=3e-5)
    rows = update._passes([item])
    before = [update._replay(row)[0].detach() for row in rows]
    update.update([[item]], [24.0])
    after = [update._replay(row)[0].detach() for row in rows]
    advantages = torch.from_numpy(item.advantages)
    gains = [float(((b - a) * advantages).mean()) for a, b in zip(before, after, strict=True)]
    assert sum(gains) > 0


def test_previous_is_the_policy_before_the_last_step(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    update = rule(kl={"mode": "dual_moving", "anchor_interval": 2})
    start = [p.detach().clone() for p in update.trainable]
    first = update.update([[batch(trajectory)]], [12.0])
    assert all(torch.equal(a, b) for a, b in zip(start, update.bank._copies["previous"].values(), strict=True))
    update.agreement.allowed = 1.0
    second = update.update([[batch(trajectory)]], [12.0])
    assert first["kl/previous"] == 0.0 and second["kl/previous"] > 0.0
    assert second["kl/anchor"] == pytest.approx(second["kl/previous"], rel=1e-4)
    moved = update.bank._copies["anchor"].values()
    assert all(torch.equal(a, b.detach()) for a, b in zip(moved, update.trainable, strict=True))


def test_iteration_start_is_inert_at_the_first_inner_step(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    update = rule(kl={"mode": "stepwise", "previous": "iteration_start"}, loss={"max_disagreement": 1.0})
    update.update([[batch(trajectory)]], [12.0])
    assert update.update([[batch(trajectory)]], [12.0])["kl/previous"] == 0.0
    both = update.update([[batch(trajectory)], [batch(trajectory)]], [12.0, 12.0])
    assert both["kl/previous"] > 0.0


def test_later_mini_batches_use_the_sampling_policy(worker) -> None:
    """At the second optimizer step of an iteration the ratio is against the sampling weights, not against itself."""
    trajectory, _, _ = worker.generate(request())
    update = rule(kl={"mode": "none"}, lr=1e-3)
    metrics = update.update([[batch(trajectory)], [batch(trajectory, 1)]], [12.0, 12.0])
    assert metrics["agreement/max_abs"] == 0.0
    assert metrics["loss/ratio_mean"] != 1.0


def test_kl_coefficient_changes_the_gradient(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    norms = []
    for coefficient in (1e-7, 10.0):
        update = rule(
            kl={"mode": "fixed", "coef": coefficient, "weight": coefficient},
            loss={"max_disagreement": 10.0, "clip_range": 0.5},
        )
        update.update([[batch(trajectory)]], [12.0])
        norms.append(update.update([[batch(trajectory)]], [12.0])["learner/grad_norm"])
    assert abs(norms[0] - norms[1]) > 1e-3 * norms[0]


def test_rows_of_weight_zero_change_nothing(worker) -> None:
    """A failed row and a padded group leave the same policy as their absence."""
    trajectory, _, _ = worker.generate(request())
    other, _, _ = worker.generate(request(group=1))
    item = batch(trajectory)
    results = []
    for extra in ([], [GroupBatch(other, np.zeros(4, np.float32), np.zeros(4, np.float32))]):
        update = rule()
        update.update([[item, *extra]], [12.0])
        results.append([p.detach() for p in update.trainable])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_broken_video_that_left_its_group_spreads_nothing(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    latents = trajectory.latents.copy()
    latents[2] = np.nan
    item = batch(dataclasses.replace(trajectory, latents=latents))
    weights = np.array([1, 1, 0, 1], np.float32)
    update = rule()
    metrics = update.update([[GroupBatch(item.trajectory, item.advantages * weights, weights)]], [9.0])
    assert update.version == 1 and np.isfinite(list(metrics.values())).all()
    assert all(torch.isfinite(p).all() for p in update.trainable)


def test_an_iteration_without_valid_rows_takes_no_step(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    update = rule()
    empty = GroupBatch(trajectory, np.zeros(4, np.float32), np.zeros(4, np.float32))
    metrics = update.update([[empty]], [0.0])
    assert update.version == 0 and metrics["learner/stepped"] == 0.0


def test_non_finite_advantage_stops_before_stepping(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    update = rule()
    start = [p.detach().clone() for p in update.trainable]
    bad = GroupBatch(trajectory, np.full(4, np.inf, np.float32), np.ones(4, np.float32))
    with pytest.raises(NonFiniteError, match="policy version 0"):
        update.update([[bad]], [12.0])
    assert all(torch.equal(a, b) for a, b in zip(start, update.trainable, strict=True))


def test_swapped_reference_equals_a_separate_module_and_comes_back(worker) -> None:
    trajectory, _, _ = worker.generate(request())
    update = rule(kl={"mode": "none"}, lr=1e-3)
    separate = load_velocity(POLICY, torch.float32, "cpu")
    bank = ReferenceBank(update.model, torch.float32)
    bank.snapshot("anchor")
    update.update([[batch(trajectory)]], [12.0])
    live = [p.detach().clone() for p in update.trainable]
    row = update._passes([batch(trajectory)])[1]
    with torch.no_grad(), bank.use("anchor"):
        swapped = update._replay(row)[1]
    update_live = update.model
    update.model = separate
    with torch.no_grad():
        expected = update._replay(row)[1]
    update.model = update_live
    assert torch.equal(swapped, expected)
    assert all(torch.equal(a, b) for a, b in zip(live, update.trainable, strict=True))


@pytest.mark.parametrize(("batch_size", "exact"), [(4, True), (2, False), (1, False)])
def test_replay_across_batch_shapes(worker, batch_size: int, exact: bool) -> None:
    """The rollout's log-prob against the learner's at the same and at smaller batch shapes."""
    trajectory, _, _ = worker.generate(request())
    update = rule()
    for start in range(0, 4, batch_size):
        part = dataclasses.replace(
            trajectory,
            latents=trajectory.latents[start : start + batch_size],
            log_probs=trajectory.log_probs[start : start + batch_size],
        )
        for row in update._passes([batch(part)]):
            delta = (update._replay(row)[0] - row.rollout_log_prob).abs().max().item()
            assert delta == 0.0 if exact else delta <= 1e-6


def test_count_pairs_by_hand() -> None:
    weights = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]], np.float32)
    assert count_pairs(weights, 2, 4) == [20.0, 8.0]
    assert count_pairs(weights, 1, 1) == [7.0]


def test_split_groups_by_hand() -> None:
    assert split_groups(4, 1, 1) == [[[0, 1, 2, 3]]]
    assert split_groups(4, 2, 2) == [[[0], [1]], [[2], [3]]]
    assert split_groups(3, 1, 2) == [[[0, 2], [1, -1]]]
