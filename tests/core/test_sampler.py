"""Rollout and replay: closed forms, what is stored, and replay == rollout bit for bit."""

import numpy as np
import pytest
import torch
from torch import nn

from sage_ray.noise import initial_noise, step_noise
from sage_ray.sampler import generate, replay
from sage_ray.schedule import sigma_grid
from sage_ray.transition import RULES, coefficients

SHAPE = (2, 3, 4, 4)
GRID = sigma_grid(8, 5.0)
NOISY = [name for name in RULES if name != "ode"]


class TinyVelocity(nn.Module):
    """A nonlinear velocity field that depends on sigma; computes in `dtype`."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(2, 2, 3, padding=1).to(dtype)
        self.dtype = dtype

    def forward(self, latents: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.tanh(self.conv(latents.to(self.dtype)) * (0.5 + sigma))


def start(group_size: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([initial_noise(42, 0, 0, g, SHAPE) for g in range(group_size)]))


def noise_of(group_size: int):
    return lambda k: torch.from_numpy(np.stack([step_noise(42, 0, 0, g, k, SHAPE) for g in range(group_size)]))


def no_noise(step: int) -> torch.Tensor:
    raise AssertionError(f"noise was asked for at deterministic step {step}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("sde_type", NOISY)
def test_replay_equals_rollout_bitwise(sde_type, published, dtype):
    velocity, coefs = TinyVelocity(dtype), coefficients(sde_type, GRID, 0.5, last_step="sde")
    rollout = generate(velocity, start(3), coefs, noise_of(3), published_cps=published)
    assert len(rollout.sde_steps) >= 7 and rollout.log_probs.shape == (3, len(rollout.sde_steps))
    for k, step in enumerate(rollout.sde_steps):
        # Through numpy, as a trajectory travels.
        before, after = (torch.from_numpy(rollout.states[s].numpy().copy()) for s in (step, step + 1))
        score, v = replay(velocity, coefs, step, before, after, published_cps=published)
        assert torch.equal(score.detach(), rollout.log_probs[:, k])
        assert torch.equal(v.detach(), velocity(before, float(GRID[step])).detach())
        assert score.requires_grad and v.requires_grad


def test_replay_at_other_batch_sizes_agrees_within_a_tenth_of_the_clip_range():
    velocity, coefs = TinyVelocity(), coefficients("sage_grpo", GRID, 0.5)
    rollout = generate(velocity, start(4), coefs, noise_of(4))
    for k, step in enumerate(rollout.sde_steps):
        before, after = rollout.states[step], rollout.states[step + 1]
        for size in (1, 2, 4):
            parts = [replay(velocity, coefs, step, before[i : i + size], after[i : i + size])[0]
                     for i in range(0, 4, size)]  # fmt: skip
            assert (torch.cat(parts) - rollout.log_probs[:, k]).abs().max() < 1e-5


def test_replay_under_other_weights_differs():
    velocity, coefs = TinyVelocity(), coefficients("sage_grpo", GRID, 0.5)
    rollout = generate(velocity, start(2), coefs, noise_of(2))
    with torch.no_grad():
        velocity.conv.weight[0, 0, 1, 1, 1] += 0.01
    score, _ = replay(velocity, coefs, 3, rollout.states[3], rollout.states[4])
    assert (score - rollout.log_probs[:, 3]).abs().min() > 1e-7


def test_a_member_does_not_depend_on_its_group():
    velocity, coefs = TinyVelocity(), coefficients("sage_grpo", GRID, 0.5)
    four = generate(velocity, start(4), coefs, noise_of(4))
    two = generate(velocity, start(2), coefs, noise_of(2))
    torch.testing.assert_close(four.latents[:2], two.latents, rtol=0, atol=1e-5)


def test_only_the_states_of_stochastic_steps_are_kept():
    coefs = coefficients("flow_grpo", GRID, 0.5, sde_steps=(2, 3, 6))
    asked, sigmas = [], []

    def noise(step: int) -> torch.Tensor:
        asked.append(step)
        return noise_of(2)(step)

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        sigmas.append(sigma)
        return torch.zeros_like(latents)

    rollout = generate(velocity, start(2), coefs, noise)
    assert asked == [2, 3, 6] and rollout.sde_steps == (2, 3, 6)
    assert sorted(rollout.states) == [2, 3, 4, 6, 7]
    assert sigmas == GRID[:-1].tolist() and all(type(s) is float for s in sigmas)
    # v = 0 and ode steps leave the latents alone: states 0, 1, 2 are the start.
    assert torch.equal(rollout.states[2], start(2))
    assert torch.equal(rollout.latents, rollout.states[7])
    expected = coefs.x_coef[2] * start(2) + coefs.std[2] * noise_of(2)(2)
    torch.testing.assert_close(rollout.states[3], expected.float(), rtol=0, atol=1e-6)


def test_ode_by_hand():
    """Constant velocity c: the steps sum to -1, so x_final = x - c. Nothing is stored, no noise is drawn."""
    coefs = coefficients("ode", GRID, 0.5)
    rollout = generate(lambda x, sigma: torch.full_like(x, 0.25), start(2), coefs, no_noise)
    torch.testing.assert_close(rollout.latents, start(2) - 0.25, rtol=0, atol=1e-6)
    assert rollout.states == {} and rollout.sde_steps == () and rollout.log_probs.shape == (2, 0)


@pytest.mark.parametrize("sde_type", RULES)
def test_a_point_mass_is_reached_by_every_method(sde_type):
    """Exact velocity (x - m) / sigma of x0 = m: the last (ode) step lands on m whatever noise came before."""
    coefs = coefficients(sde_type, GRID, 0.5)
    rollout = generate(lambda x, sigma: (x - 1.5) / sigma, start(2), coefs, noise_of(2))
    torch.testing.assert_close(rollout.latents, torch.full((2, *SHAPE), 1.5), rtol=0, atol=1e-5)


def test_log_prob_of_the_drawn_noise_by_hand():
    """x_next - mean = std noise, so log_prob = -mean(noise^2) / 2 - ln std - 0.5 ln 2 pi."""
    coefs = coefficients("cps", GRID, 0.5)
    rollout = generate(TinyVelocity(), start(2), coefs, noise_of(2))
    for k, step in enumerate(rollout.sde_steps):
        squared = noise_of(2)(step).double().square().mean(dim=(1, 2, 3, 4))
        expected = -squared / 2 - np.log(coefs.std[step]) - 0.5 * np.log(2 * np.pi)
        torch.testing.assert_close(rollout.log_probs[:, k].double(), expected, rtol=0, atol=1e-5)


def test_rollout_builds_no_graph_and_leaves_its_input_alone():
    latents = start(2)
    rollout = generate(TinyVelocity(), latents, coefficients("sage_grpo", GRID, 0.5), noise_of(2))
    assert not rollout.latents.requires_grad and not rollout.log_probs.requires_grad
    assert torch.equal(latents, start(2)) and rollout.log_probs.dtype == torch.float32
