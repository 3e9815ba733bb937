"""The shipped checkpoints keep what the small world promises."""

import math

import pytest
import torch

from sage_ray.models.hunyuan_video import scheduler_shift
from sage_ray.rewards.videoalign import VideoAlign
from sage_ray.shapes.pretrain_policy import draw_clips, sample_ode
from sage_ray.shapes.pretrain_reward import Clips, rank_correlation, raw_scores, targets
from sage_ray.shapes.truth import judge
from sage_ray.shapes.world import SPECS, caption, is_held_out
from tests.conftest import POLICY, REWARD, ROOT

HELD_OUT = [spec for spec in SPECS if is_held_out(spec)]


@pytest.fixture(scope="module")
def reward() -> VideoAlign:
    return VideoAlign.load(REWARD, dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(policy) -> tuple[torch.Tensor, list[str]]:
    """96 samples of the base policy for held-out prompts."""
    generator, frames, prompts = torch.Generator().manual_seed(5), [], []
    for spec in HELD_OUT[::9]:
        noise = torch.randn(4, *policy.latent_shape(9, 32, 32), generator=generator)
        frames.append(sample_ode(policy, caption(spec), noise, 12, scheduler_shift(POLICY)))
        prompts += [caption(spec)] * 4
    return torch.cat(frames), prompts


def test_assets_are_small() -> None:
    total = sum(file.stat().st_size for file in (ROOT / "assets").rglob("*") if file.is_file())
    assert total < 30 * 2**20


def test_vae_keeps_28_db_and_readable_motion(policy) -> None:
    specs, video = draw_clips(96, torch.Generator().manual_seed(2))
    with torch.no_grad():
        latents = policy.vae.encode(video).latent_dist.mean
        error = (policy.vae.decode(latents).sample - video).square().mean()
    assert 10 * math.log10(4 / error) >= 28
    prompts = [caption(tuple(spec)) for spec in specs.tolist()]
    frames = policy.decode(latents * policy.vae.config.scaling_factor)
    rendered = ((video / 2 + 0.5) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    a, b = judge(rendered, prompts), judge(frames, prompts)
    assert torch.corrcoef(torch.stack([a.mq, b.mq]))[0, 1] > 0.9
    assert (latents * policy.vae.config.scaling_factor).std() == pytest.approx(1.0, abs=0.1)


def test_reward_ranks_held_out_renders_as_truth_does(reward) -> None:
    clips = Clips(None, None, HELD_OUT, torch.Generator().manual_seed(9))
    frames, prompts = clips.draw(200)
    correlation = rank_correlation(raw_scores(reward, frames, prompts, 25), targets(frames, prompts))
    assert all(value >= 0.8 for value in correlation), correlation


def test_reward_ranks_the_policys_own_samples_as_truth_does(reward, samples) -> None:
    frames, prompts = samples
    correlation = rank_correlation(raw_scores(reward, frames, prompts, 24), targets(frames, prompts))
    assert all(value >= 0.6 for value in correlation), correlation


def test_base_policy_is_recognisable_and_imperfect(samples) -> None:
    truth = judge(*samples)
    assert truth.ta.mean() > 0.6
    assert truth.matches.float().mean() < 0.85
    assert 0.5 < truth.vq.mean() < 0.9 and 0.5 < truth.mq.mean() < 0.95
