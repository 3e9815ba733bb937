"""The learner's other knobs in one plain process: KL estimators and share, epochs, LoRA, Muon, averages, schedules."""

import dataclasses

import numpy as np
import pytest
import torch

from sage_ray.config import KLConfig, LossConfig, OptimizerConfig
from sage_ray.equalizer import equalizer_scales
from sage_ray.group_batch import ReplayRules
from sage_ray.models.lora import add_lora
from sage_ray.policy_update import PolicyUpdate
from sage_ray.transition import coefficients, gaussian_kl
from tests.conftest import POLICY
from tests.learner.test_policy_update import SIGMAS, batch, request, worker  # noqa: F401  (worker is a fixture)
from tests.small import load_velocity

ADAMW = {"name": "adamw", "beta1": 0.9, "learning_rate": 1e-3}


def learner(
    kl: dict | None = None,
    loss: dict | None = None,
    optimizer: dict | None = None,
    lora_rank: int = 0,
    rules: ReplayRules = ReplayRules(),  # noqa: B008
) -> PolicyUpdate:
    model = load_velocity(POLICY, torch.float32, "cpu")
    if lora_rank:
        add_lora(model.transformer, rank=lora_rank, alpha=8.0, targets=None, seed=0)
    settings = OptimizerConfig(**(optimizer or ADAMW))
    return PolicyUpdate(
        model,
        LossConfig(**{"clip_range": 0.01, "max_disagreement": 10.0, **(loss or {})}),
        KLConfig(**(kl or {})),
        settings,
        rules,
        total_steps=8,
    )


def weights_of(update: PolicyUpdate) -> list[torch.Tensor]:
    return [p.detach().clone() for p in update.trainable]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def trajectory(worker):  # noqa: F811
    return worker.generate(request())[0]


def test_a_step_down_the_exact_previous_kl_undoes_part_of_the_last_step(trajectory) -> None:
    """The damping test: after one update, a small step along -grad of KL(policy || previous) shrinks |v - v_prev|."""
    update = learner(kl={"mode": "stepwise"})
    update.update([[batch(trajectory)]], [12.0])
    row = update._passes([batch(trajectory)])[1]
    with torch.no_grad(), update.bank.use("previous"):
        held = update._replay(row)[1]

    def distance() -> torch.Tensor:
        return gaussian_kl(row.coefs, row.step, update._replay(row)[1], held).sum()

    before = distance()
    assert before > 0
    gradients = torch.autograd.grad(before, update.trainable)
    norm = torch.sqrt(sum((g**2).sum() for g in gradients))
    with torch.no_grad():
        for p, g in zip(update.trainable, gradients, strict=True):
            p -= 1e-3 * g / norm
    assert distance() < before


def test_the_rollout_estimate_is_zero_on_policy_and_still_has_a_gradient(trajectory) -> None:
    """Eq. 15: mean(old - new) has value 0 at the sampling policy, and the gradient of a score: no brake."""
    update = learner(kl={"mode": "stepwise", "previous": "rollout"})
    assert update.held == []
    row = update._passes([batch(trajectory)])[0]
    _, kl_part, sums, _ = update._pass_loss(row, 12.0)
    assert kl_part.item() == 0.0 and sums[2] == 0.0
    kl_part.backward()
    log_prob, _ = update._replay(row)
    wanted = torch.autograd.grad(-log_prob.sum() / 12.0, update.trainable)
    scale = update.controller.value * update.kl.step_weight
    largest = max(float(g.abs().max()) for g in wanted)
    assert largest > 0
    for p, g in zip(update.trainable, wanted, strict=True):
        torch.testing.assert_close(p.grad, scale * g, rtol=1e-4, atol=1e-6 * scale * largest)


def test_the_kl_share_is_the_norm_of_its_own_gradient(trajectory) -> None:
    kl = {"mode": "fixed", "coef": 5.0, "weight": 5.0, "schedule": "fixed", "share_interval": 1}
    plain = learner(kl={**kl, "share_interval": 0})
    update = learner(kl=kl)
    for one in (plain, update):
        one.update([[batch(trajectory)]], [12.0])
    item = batch(trajectory, 1)
    rows = update._passes([item])
    update.begin()
    update._reference_passes(rows)
    kl_loss = sum(update._pass_loss(row, 12.0)[1] for row in rows)
    wanted = torch.sqrt(sum((g**2).sum() for g in torch.autograd.grad(kl_loss, update.trainable)))
    without, measured = plain.update([[item]], [12.0]), update.update([[item]], [12.0])
    assert "kl/gradient_share" not in without
    assert measured["kl/gradient_share"] * measured["learner/grad_norm"] == pytest.approx(float(wanted), rel=1e-4)
    assert measured["learner/grad_norm"] == pytest.approx(without["learner/grad_norm"], rel=1e-4)
    assert measured["kl/anchor"] == pytest.approx(without["kl/anchor"], rel=1e-6)


def test_order_of_the_trained_steps_changes_nothing_but_rounding(trajectory) -> None:
    order = [2, 0, 1]
    permuted = dataclasses.replace(
        trajectory, trained_steps=trajectory.trained_steps[order], log_probs=trajectory.log_probs[:, order]
    )
    results = []
    for one in (trajectory, permuted):
        update = learner(optimizer={**ADAMW, "eps": 1e-3})
        metrics = update.update([[batch(one)]], [12.0])
        assert metrics["agreement/max_abs"] == 0.0
        results.append((weights_of(update), metrics["loss/total"]))
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-6)
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_worker_sends_the_trained_states_only(worker) -> None:  # noqa: F811
    whole = worker.generate(request())[0]
    part = worker.generate(dataclasses.replace(request(), trained_steps=(2, 0)))[0]
    assert part.states.tolist() == [0, 1, 2, 3] and part.sde_steps.tolist() == [0, 1, 2]
    assert part.trained_steps.tolist() == [2, 0]
    np.testing.assert_array_equal(part.log_probs, whole.log_probs[:, [2, 0]])
    one = worker.generate(dataclasses.replace(request(), trained_steps=(1,)))[0]
    assert one.latents.shape[1] == 2 and one.log_probs.shape == (4, 1)
    np.testing.assert_array_equal(one.latents, whole.latents[:, 1:3])
    metrics = learner().update([[batch(one)]], [4.0])
    assert metrics["agreement/max_abs"] == 0.0


def test_the_equalizer_takes_its_median_over_the_whole_schedule(trajectory) -> None:
    """A window of steps 0 to 2 in a run whose window moves over 0 to 4: the median is that of all five."""
    item = batch(trajectory)
    whole = coefficients("sage_grpo", np.array(SIGMAS), 0.5, sde_steps=(0, 1, 2, 3, 4))
    wanted = equalizer_scales(whole.gradient_scale())
    moving, alone = learner(rules=ReplayRules(schedule_steps=(0, 1, 2, 3, 4))), learner()
    for one in moving._passes([item]):
        assert one.scale.tolist() == [np.float32(wanted[one.step])] * 4
    assert alone._passes([item])[1].scale[0] == 1.0 != moving._passes([item])[1].scale[0]
    true = learner(loss={"equalizer_median": "true", "equalizer_eps": 0.5})
    own = coefficients("sage_grpo", np.array(SIGMAS), 0.5, sde_steps=(0, 1, 2))
    expected = equalizer_scales(own.gradient_scale(), median="true", eps=0.5)
    assert true._passes([item])[0].scale[0] == np.float32(expected[0])
    assert learner(loss={"equalizer": False})._passes([item])[0].scale[0] == 1.0


def test_epochs_stay_relative_to_the_sampling_policy(trajectory) -> None:
    """Two epochs over one group: the second starts with the ratio that the first step made."""
    update = learner(kl={"mode": "none"}, loss={"clip_range": 0.5})
    item = batch(trajectory)
    rows = update._passes([item])
    with torch.no_grad():
        old = [update._replay(row)[0] for row in rows]
    once = learner(kl={"mode": "none"}, loss={"clip_range": 0.5})
    once.update([[item]], [12.0])
    with torch.no_grad():
        ratios = [torch.exp(once._replay(row)[0] - o) for row, o in zip(rows, old, strict=True)]
    metrics = update.update([[item], [item]], [12.0, 12.0])
    mean = float(torch.stack(ratios).mean())
    assert update.version == 2 and mean != 1.0
    assert metrics["loss/ratio_mean"] == pytest.approx((1.0 + mean) / 2, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_lora_trains_adapters_only_and_references_are_adapters(trajectory, name: str) -> None:
    update = learner(
        kl={"mode": "dual_moving", "anchor_interval": 2},
        optimizer={**ADAMW, "name": name, "muon_dtype": "float32"},
        lora_rank=2,
    )
    base = {n: p.detach().clone() for n, p in update.model.named_parameters() if not p.requires_grad}
    names = {n for n, p in update.model.named_parameters() if p.requires_grad}
    assert names and all(".lora_" in n for n in names)
    assert set(update.bank._copies["anchor"]) == set(update.bank._copies["previous"]) == names
    start = weights_of(update)
    first = update.update([[batch(trajectory)]], [12.0])
    assert first["agreement/max_abs"] == 0.0 and first["learner/grad_norm"] > 0
    assert equal(start, list(update.bank._copies["anchor"].values()))
    second = update.update([[batch(trajectory, 1)]], [12.0])
    assert second["kl/anchor"] == pytest.approx(second["kl/previous"], rel=1e-4) and second["kl/anchor"] > 0
    assert equal(weights_of(update), list(update.bank._copies["anchor"].values()))  # version 2: the anchor moved
    assert not equal(weights_of(update), start)
    for n, p in update.model.named_parameters():
        if n in base:
            assert torch.equal(p, base[n]), n


def test_the_moving_average_by_hand(trajectory) -> None:
    update = learner(optimizer={**ADAMW, "ema_decay": 0.75})
    steps = [weights_of(update)]
    for seed in range(2):
        update.update([[batch(trajectory, seed)]], [12.0])
        steps.append(weights_of(update))
    with update.averaged_weights():
        inside = weights_of(update)
    assert equal(weights_of(update), steps[2])
    for w0, w1, w2, average in zip(*steps, inside, strict=True):
        torch.testing.assert_close(average, 0.75 * (0.75 * w0 + 0.25 * w1) + 0.25 * w2, rtol=0, atol=1e-6)
    with pytest.raises(KeyError), learner().averaged_weights():
        pass


def test_the_learning_rate_follows_its_schedule(trajectory) -> None:
    """Warm-up of 2 steps to 1e-3, then cosine to a tenth over 8 steps in all."""
    update = learner(optimizer={**ADAMW, "schedule": "cosine", "warmup_steps": 2, "min_factor": 0.1})
    rates = [update.update([[batch(trajectory, k)]], [12.0])["learner/learning_rate"] for k in range(3)]
    third = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 7)))
    assert rates == pytest.approx([0.5e-3, 1e-3, third], rel=1e-12)
