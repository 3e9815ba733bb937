"""A group that the learner cuts into passes is denoised in parts of the same shape."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sage_ray.config import KLConfig, LearnerConfig, LossConfig, OptimizerConfig
from sage_ray.group_batch import GroupBatch, ReplayRules
from sage_ray.policy_update import PolicyUpdate
from tests.conftest import POLICY
from tests.rollout.small_rollout import equal, requests, worker
from tests.small import load_velocity

GUIDED = ("sampling.guidance_scale=3.0", "sampling.negative_prompt=a red square")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("guided", [(), GUIDED], ids=["", "guided"])
def test_the_learner_replays_the_bits_of_a_part(tmp_path, size: int, guided: tuple[str, ...]) -> None:
    made = worker(tmp_path, f"learner.videos_per_pass={size}", *guided)
    batches = []
    made.model.velocity.register_forward_hook(lambda module, inputs, out: batches.append(len(out)))
    trajectory, frames, info = made.generate(*requests(1))
    assert set(batches) == {size} and len(batches) == 4 * (4 // size) * (2 if guided else 1)
    assert trajectory.latents.shape[:2] == (4, 4) and len(frames) == len(info.finite) == 4
    learner = PolicyUpdate(
        load_velocity(POLICY, torch.float32, "cpu"),
        LossConfig(),
        KLConfig(mode="none"),
        OptimizerConfig(name="adamw"),
        ReplayRules(guidance_scale=3.0 if guided else 1.0),
        total_steps=1,
        learner=LearnerConfig(videos_per_pass=size),
    )
    passes = learner._passes([GroupBatch(trajectory, np.ones(4, np.float32), np.ones(4, np.float32))])
    assert len(passes) == 2 * 4 // size
    for one in passes:
        assert torch.equal(learner._replay(one)[0].detach(), one.rollout_log_prob)


def test_a_worker_replays_its_bits_and_tells_other_weights(tmp_path) -> None:
    """Whole groups and parts, guided; log-probs of its own noise would tell nothing, as they depend on nothing else."""
    for words in ((), ("learner.videos_per_pass=2", *GUIDED)):
        made = worker(tmp_path, *words)
        trajectory = made.generate(*requests(1))[0]
        assert made.disagreement(trajectory) == 0.0
        with torch.no_grad():
            made.model.velocity.transformer.proj_out.weight[0, 0] += 0.05
        assert np.allclose(made.generate(*requests(1))[0].log_probs, trajectory.log_probs, atol=1e-6)
        assert made.disagreement(trajectory) > 1e-4
        assert made.disagreement(replace(trajectory, log_probs=trajectory.log_probs * np.nan)) == np.inf
        with pytest.raises(RuntimeError, match="version 0 is to be replayed, 7 is here"):
            made.version = 7
            made.disagreement(trajectory)


def test_parts_change_nothing_but_rounding_and_groups_go_one_by_one(tmp_path) -> None:
    whole, parts = worker(tmp_path), worker(tmp_path, "learner.videos_per_pass=2")
    expected, answer = whole.generate(*requests()), parts.generate(*requests())
    assert equal(answer, tuple(part for request in requests() for part in parts.generate(request)))
    for i in range(0, 9, 3):
        assert np.array_equal(answer[i].latents[:, 0], expected[i].latents[:, 0])
        assert np.allclose(answer[i].latents, expected[i].latents, atol=1e-4)
        assert np.allclose(answer[i].log_probs, expected[i].log_probs, atol=1e-5)


def test_a_part_may_be_shorter_and_an_evaluation_keeps_no_states(tmp_path) -> None:
    made = worker(tmp_path, "learner.videos_per_pass=2")
    request = replace(requests(1, group_size=3)[0], sde_steps=(), trained_steps=(), evaluation=True, sde_type="ode")
    trajectory, frames, _ = made.generate(request)
    assert trajectory.latents.shape[:2] == (3, 0) and trajectory.log_probs.shape == (3, 0) and len(frames) == 3
    assert np.array_equal(frames[:2], made.generate(replace(request, group_size=2))[1])
