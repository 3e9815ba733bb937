"""The pretraining commands run: a step or two of each stage on the CPU, every weight finite."""

from __future__ import annotations

import copy

import torch

from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.shapes import pretrain_policy, pretrain_reward
from sage_ray.shapes.pipeline import Sizes, build_pipeline
from sage_ray.shapes.reward_folder import new_model

MOMENT = 1e-4
"""Minutes: over after the first step."""


def test_vae_then_policy_take_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    model = HunyuanVideo(build_pipeline(Sizes(), 0), torch.float32, "cpu")
    model.vae.requires_grad_(True)
    before = copy.deepcopy(model.vae.state_dict())
    assert pretrain_policy.train_vae(model.vae, MOMENT, 2, generator, scale_clips=4) > 0
    assert model.vae.config.scaling_factor not in (0.0, 1.0)
    assert any(not torch.equal(before[name], value) for name, value in model.vae.state_dict().items())
    model.vae.requires_grad_(False)
    policy = copy.deepcopy(model.velocity.state_dict())
    pretrain_policy.train_policy(model, MOMENT, batch=4, num_clips=8, generator=generator)
    after = model.velocity.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(policy[name], value) for name, value in after.items())
    assert not any(p.requires_grad for p in model.velocity.parameters())


def test_reward_takes_a_step(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    model = new_model(tmp_path / "VideoReward", "cpu", 0)
    before = copy.deepcopy(model.state_dict())
    clips = pretrain_reward.Clips(None, None, pretrain_policy.TRAIN_SPECS, generator)
    pretrain_reward.train(model, clips, MOMENT, batch=6)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
