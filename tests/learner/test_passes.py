"""Passes of another size: the same numbers from fewer or more forwards, on both sides of the ring."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from sage_ray.config import KLConfig, LearnerConfig, LossConfig, OptimizerConfig
from sage_ray.group_batch import GroupBatch, ReplayRules
from sage_ray.policy_update import PolicyUpdate
from sage_ray.transition import RULES
from sage_ray.types import Condition, GroupRequest, Prompt
from tests.conftest import POLICY
from tests.learner.test_policy_update import request, worker  # noqa: F401  (worker is a fixture)
from tests.small import load_velocity

TEXTS = ("a small red circle moves left slowly on a gray background", "a red circle", "a blue square moves up")


def requests(sde_type: str = "sage_grpo") -> list[GroupRequest]:
    """Three groups of four videos whose prompts have unequal lengths and whose stochastic steps differ."""
    windows = ((0, 1, 2), (0, 1, 2), (1, 2, 4))
    return [
        dataclasses.replace(
            request(sde_type, group), prompt=Prompt(group, text), sde_steps=steps, trained_steps=steps[::-1]
        )
        for group, (text, steps) in enumerate(zip(TEXTS, windows, strict=True))
    ]


@pytest.fixture(scope="module")
def groups(worker):  # noqa: F811
    random = np.random.default_rng(0)
    made = [worker.generate(one)[0] for one in requests()]
    rows = [random.standard_normal(4).astype(np.float32) for _ in made]
    weights = np.ones((3, 4), np.float32)
    weights[1, 2] = 0
    return [GroupBatch(t, a, w) for t, a, w in zip(made, rows, weights, strict=True)]


def learner(videos_per_pass: int | None, guidance_scale: float = 1.0, **loss) -> PolicyUpdate:
    return PolicyUpdate(
        load_velocity(POLICY, torch.float32, "cpu"),
        LossConfig(clip_range=0.01, max_disagreement=10.0, **loss),
        KLConfig(weight=1.0, coef=0.5, schedule="fixed"),
        OptimizerConfig(name="adamw", learning_rate=1e-3, eps=1e-3),
        ReplayRules(guidance_scale=guidance_scale),
        total_steps=8,
        learner=LearnerConfig(videos_per_pass=videos_per_pass),
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("videos_per_pass", [1, 2, 4, 8, 12, 100])
def test_the_size_of_a_pass_changes_nothing_but_rounding(groups, videos_per_pass: int, guidance_scale: float) -> None:
    """Two updates, so that ratios, anchor and previous step are off their starting values."""
    negative = Condition(groups[1].trajectory.condition.text[:5], groups[1].trajectory.condition.byt5)
    groups = [
        dataclasses.replace(group, trajectory=dataclasses.replace(group.trajectory, negative=negative))
        for group in groups
    ]
    results = []
    for size in (None, videos_per_pass):
        update = learner(size, guidance_scale)
        metrics = [update.update([groups], [33.0]) for _ in range(2)]
        results.append((metrics, [p.detach() for p in update.trainable]))
    (wanted, weights), (found, others) = results
    assert all(math.isfinite(v) for m in wanted for v in m.values()) and wanted[1]["kl/anchor"] > 0
    for a, b in zip(wanted, found, strict=True):
        for key in a:
            assert b[key] == pytest.approx(a[key], rel=2e-4, abs=2e-6), key
    for a, b in zip(weights, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_the_number_of_passes_depends_on_no_prompt(groups) -> None:
    """FSDP ranks with other prompts must make the same number of forwards. Three groups of four, three steps each."""
    same = [groups[0]] * 3
    for size, wanted in ((None, 9), (1, 36), (2, 18), (4, 9), (8, 5), (11, 5), (12, 3), (100, 1)):
        assert len(learner(size)._passes(groups)) == len(learner(size)._passes(same)) == wanted


def test_every_video_and_step_is_in_exactly_one_pass(groups) -> None:
    found = []
    for one in learner(8)._passes(groups):
        steps = np.broadcast_to(one.step, len(one.latents))
        found += [(int(step), tuple(x.flatten()[:2].tolist())) for step, x in zip(steps, one.latents, strict=True)]
    wanted = []
    for group in groups:
        t = group.trajectory
        for step in t.trained_steps:
            latents = t.latents[:, list(t.states).index(step)] * group.weights[:, None, None, None, None]
            wanted += [(int(step), tuple(float(v) for v in x.flatten()[:2])) for x in latents]
    assert sorted(found) == sorted(wanted) and len(wanted) == 36


def test_groups_sampled_differently_do_not_share_a_pass(groups, worker) -> None:  # noqa: F811
    other = worker.generate(request("dance_grpo"))[0]
    with pytest.raises(ValueError, match="sampled differently"):
        learner(100)._passes([groups[0], GroupBatch(other, groups[0].advantages, groups[0].weights)])


@pytest.mark.parametrize("sde_type", [name for name in RULES if name != "ode"])
def test_groups_made_together_are_the_groups_made_alone(worker, sde_type: str) -> None:  # noqa: F811
    together = worker.generate(*requests(sde_type))
    assert len(together) == 9
    for number, one in enumerate(requests(sde_type)):
        trajectory, frames, info = together[3 * number : 3 * number + 3]
        alone, alone_frames, alone_info = worker.generate(one)
        assert trajectory.prompt == one.prompt and info.group == alone_info.group == number
        np.testing.assert_array_equal(trajectory.states, alone.states)
        np.testing.assert_array_equal(trajectory.condition.text, alone.condition.text)
        np.testing.assert_allclose(trajectory.latents, alone.latents, rtol=0, atol=2e-4)
        np.testing.assert_allclose(trajectory.log_probs, alone.log_probs, rtol=0, atol=1e-6)
        assert np.abs(frames.astype(int) - alone_frames).max() <= 1
