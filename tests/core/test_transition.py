"""Coefficients: closed forms, edges and properties. Densities and KL against torch.distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from sage_ray.schedule import sigma_grid
from sage_ray.transition import (
    RULES,
    SAGE_CLAMP,
    coefficients,
    gaussian_kl,
    log_prob,
    mean,
    sage_variance,
    step_latents,
)
from tests.core.published import STEPS

GRID = sigma_grid(20, 5.0)
NOISY = [name for name in RULES if name != "ode"]


def tensors(seed: int, num: int, shape=(3, 2, 2, 3, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(num)]


@pytest.mark.parametrize("eta", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("sde_type", STEPS)
def test_coefficients_are_the_derivatives_of_the_published_step(sde_type, eta):
    coefs = coefficients(sde_type, GRID, eta, last_step="sde")
    for i in range(20):
        x, v = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.3, -0.7))
        center, std = STEPS[sde_type](x, v, float(GRID[i]), float(GRID[i + 1]), float(GRID[1]), eta)
        x_grad, v_grad = torch.autograd.grad(center, (x, v))
        assert coefs.x_coef[i] == pytest.approx(float(x_grad), rel=1e-12, abs=1e-13)
        assert coefs.v_coef[i] == pytest.approx(float(v_grad), rel=1e-12, abs=1e-13)
        assert coefs.std[i] == pytest.approx(std, rel=1e-12)
        assert coefs.x_coef[i] * 0.3 - coefs.v_coef[i] * 0.7 == pytest.approx(center.item(), rel=1e-12)


def test_sage_variance_is_the_integral():
    """eta^2 times the integral of s / (1 - s) by 200-point Gauss-Legendre; the first step ends at the clamp."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    for i, variance in enumerate(sage_variance(GRID[:-1], GRID[1:], 0.7)):
        upper, lower = min(GRID[i], 1 - SAGE_CLAMP), GRID[i + 1]
        s = lower + (upper - lower) * (nodes + 1) / 2
        integral = (upper - lower) / 2 * (weights * s / (1 - s)).sum()
        # The clamp is in the logarithm only, so the step's full length is subtracted.
        assert variance == pytest.approx(0.7**2 * (integral - (GRID[i] - upper)), rel=1e-10)
    assert SAGE_CLAMP == 3e-3


def test_flow_at_sigma_one_uses_sigma_1():
    """shift 1, N = 4: sigma 1 -> .75, variance eta^2 * 1 / (1 - .75) * .25 = eta^2; then .25 * .75 / .25 * .25."""
    std = coefficients("flow_grpo", sigma_grid(4, 1.0), 0.5).std
    np.testing.assert_allclose(std[:2] ** 2, [0.25, 0.1875], rtol=1e-12)


def test_flow_is_the_one_point_rule_of_the_integral_and_meets_sage_on_fine_grids():
    fine = np.array([0.5, 0.4999, 0.0])
    sage, flow = (coefficients(name, fine, 0.5) for name in ("sage_grpo", "flow_grpo"))
    assert flow.std[0] ** 2 == pytest.approx(0.25 * 1.0 * 0.0001, rel=1e-9)
    assert sage.std[0] == pytest.approx(flow.std[0], rel=2e-4)


def test_last_step_by_hand():
    """At shift 5, N = 20 the last D is 0.2083: sage .0795, flow .1171, dance .2282 at eta .5; ode when asked."""
    expected = {"sage_grpo": 0.0795, "flow_grpo": 0.1171, "dance_grpo": 0.2282}
    for sde_type, std in expected.items():
        assert coefficients(sde_type, GRID, 0.5, last_step="sde").std[-1] == pytest.approx(std, abs=5e-5)
        quiet = coefficients(sde_type, GRID, 0.5)
        assert (quiet.x_coef[-1], quiet.v_coef[-1], quiet.std[-1]) == (1.0, -GRID[-2], 0.0)
        assert quiet.sde_steps == tuple(range(19))


@pytest.mark.parametrize(("shift", "first"), [(5.0, 68), (7.0, 49), (9.0, 38)])
def test_the_clamp_makes_the_first_step_deterministic_on_fine_grids(shift, first):
    before = coefficients("sage_grpo", sigma_grid(first - 1, shift), 0.5)
    after = coefficients("sage_grpo", sigma_grid(first, shift), 0.5)
    assert before.stochastic[0] and not after.stochastic[0] and after.stochastic[1]
    assert after.x_coef[0] == 1 and np.isnan(after.gradient_scale()[0])


@pytest.mark.parametrize("sde_type", NOISY)
def test_window(sde_type):
    """Steps inside the window equal the full schedule's, all others are ode."""
    full = coefficients(sde_type, GRID, 0.5)
    window = coefficients(sde_type, GRID, 0.5, sde_steps=(7, 4, 5))
    assert window.sde_steps == (4, 5, 7)
    for key in ("x_coef", "v_coef", "std"):
        assert (getattr(window, key)[[4, 5, 7]] == getattr(full, key)[[4, 5, 7]]).all()
    others = np.setdiff1d(np.arange(20), [4, 5, 7])
    assert (window.x_coef[others] == 1).all() and (window.std[others] == 0).all()
    assert (window.v_coef[others] == np.diff(GRID)[others]).all()
    assert coefficients(sde_type, GRID, 0.5, sde_steps=()).sde_steps == ()
    assert coefficients(sde_type, GRID, 0.5, sde_steps=(19,)).sde_steps == ()


@pytest.mark.parametrize("sde_type", RULES)
def test_eta_zero_is_the_ode(sde_type):
    coefs = coefficients(sde_type, GRID, 0.0, last_step="sde")
    assert coefs.sde_steps == ()
    assert (coefs.x_coef == 1).all() and (coefs.v_coef == np.diff(GRID)).all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("sage", GRID, 0.5), {}, "sde_type: 'sage' must be one of sage_grpo"),
        (("sage_grpo", GRID, -0.1), {}, "eta: -0.1 must be"),
        (("sage_grpo", GRID, math.nan), {}, "eta: nan must be"),
        (("cps", GRID, 1.01), {}, "eta: 1.01 must be at most 1"),
        (("cps", GRID, 0.5), {"last_step": "none"}, "last_step: 'none' must be ode or sde"),
        (("cps", GRID, 0.5), {"sde_steps": [20]}, r"sde_steps: \[20\] must lie in \[0, 20\)"),
        (("cps", GRID, 0.5), {"sde_steps": [-1]}, r"sde_steps: \[-1\]"),
        (("sage_grpo", GRID[::-1], 0.5), {}, "sigmas: .* strictly falling"),
        (("sage_grpo", np.array([1.0, 0.5, 0.5, 0.0]), 0.5), {}, "sigmas"),
        (("sage_grpo", np.array([1.0, math.nan, 0.0]), 0.5), {}, "sigmas"),
        (("sage_grpo", 1000 * GRID, 0.5), {}, "sigmas"),
        (("sage_grpo", np.array([1.0]), 0.5), {}, "sigmas"),
    ],
)
def test_refusals_name_key_value_and_rule(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        coefficients(*arguments, **options)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(RULES)), st.integers(4, 200), st.floats(1, 12), st.floats(0, 2), st.sampled_from("os"))
def test_every_step_is_finite_or_deterministic(sde_type, num_steps, shift, eta, last):
    grid = sigma_grid(num_steps, shift)
    last_step = {"o": "ode", "s": "sde"}[last]
    if sde_type == "cps" and eta > 1:
        with pytest.raises(ValueError, match="eta"):
            coefficients(sde_type, grid, eta, last_step=last_step)
        return
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        coefs = coefficients(sde_type, grid, eta, last_step=last_step)
        scale = coefs.gradient_scale()
    on = coefs.stochastic
    for values in (coefs.x_coef, coefs.v_coef, coefs.std):
        assert np.isfinite(values).all() and values.shape == (num_steps,) and values.dtype == np.float64
    assert (coefs.std >= 0).all() and (np.isfinite(scale) == on).all() and (scale[on] > 0).all()
    assert (coefs.x_coef[~on] == 1).all() and (coefs.v_coef[~on] == np.diff(grid)[~on]).all()
    assert not (last_step == "ode" and on[-1])
    # Below the clamp the integrand is positive, so with noise every inner step is stochastic.
    if eta > 1e-3 and sde_type != "ode":
        assert on[:-1][grid[1:-1] < 1 - 2 * SAGE_CLAMP].all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["cps", "sage_cp"]), st.integers(4, 200), st.floats(1, 12), st.floats(0, 1))
def test_coefficient_preserving_steps_keep_the_marginal_of_a_point_mass(sde_type, num_steps, shift, eta):
    """x0 = m: v = (x - m) / sigma, so mean and variance follow by recursion: (1 - sigma) m and sigma^2 everywhere."""
    grid, m = sigma_grid(num_steps, shift), 1.7
    coefs = coefficients(sde_type, grid, eta, last_step="sde")
    center, variance = 0.0, 1.0
    for i in range(num_steps):
        gain = coefs.x_coef[i] + coefs.v_coef[i] / grid[i]
        center = gain * center - coefs.v_coef[i] / grid[i] * m
        variance = gain**2 * variance + coefs.std[i] ** 2
        assert center == pytest.approx((1 - grid[i + 1]) * m, abs=1e-12)
        assert variance == pytest.approx(grid[i + 1] ** 2, abs=1e-12)


def test_sage_cp_caps_the_sage_std():
    sage, capped = (coefficients(name, GRID, 2.0, last_step="sde") for name in ("sage_grpo", "sage_cp"))
    np.testing.assert_allclose(capped.std, np.minimum(sage.std, GRID[1:]), rtol=1e-12)
    assert (sage.std[1:] > GRID[2:]).any() and (capped.std < sage.std).any() and capped.std[-1] == 0


@pytest.mark.parametrize("sde_type", NOISY)
def test_log_prob_is_the_normal_density(sde_type):
    """Every stochastic step, the last one included, against torch.distributions.Normal in float64."""
    coefs = coefficients(sde_type, GRID, 0.5, last_step="sde")
    x, v, noise = tensors(0, 3)
    assert len(coefs.sde_steps) == (19 if sde_type in ("cps", "sage_cp") else 20)
    for i in coefs.sde_steps:
        following = step_latents(coefs, i, x, v, noise)
        center = coefs.x_coef[i] * x.double() + coefs.v_coef[i] * v.double()
        expected = Normal(center, coefs.std[i]).log_prob(following.double()).mean(dim=(1, 2, 3, 4))
        got = log_prob(coefs, i, x, v, following)
        assert got.shape == (3,) and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(following.double(), center + coefs.std[i] * noise.double(), rtol=0, atol=1e-6)


def test_published_cps_log_prob_is_minus_the_squared_distance():
    x, v, noise = tensors(1, 3)
    coefs = coefficients("cps", GRID, 0.5)
    following = step_latents(coefs, 5, x, v, noise)
    expected = -(coefs.std[5] ** 2) * noise.square().mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(log_prob(coefs, 5, x, v, following, published_cps=True), expected, rtol=1e-5, atol=0)
    np.testing.assert_allclose(
        coefs.gradient_scale(published_cps=True)[:19], 2 * coefs.std[:19] * np.abs(coefs.v_coef[:19]), rtol=1e-15
    )
    # The choice belongs to cps alone.
    sage = coefficients("sage_grpo", GRID, 0.5)
    assert torch.equal(log_prob(sage, 5, x, v, x, published_cps=True), log_prob(sage, 5, x, v, x))
    np.testing.assert_array_equal(sage.gradient_scale(published_cps=True), sage.gradient_scale())


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("sde_type", NOISY)
def test_gradient_scale_predicts_the_gradient(sde_type, published):
    """d log_prob / d v = n_t * noise / num_dims in size, which is what the equalizer balances (eq. 38)."""
    coefs = coefficients(sde_type, GRID, 0.5)
    for i in coefs.sde_steps:
        x, v, noise = tensors(i, 3)
        v.requires_grad_()
        following = step_latents(coefs, i, x, v.detach(), noise)
        (grad,) = torch.autograd.grad(log_prob(coefs, i, x, v, following, published_cps=published).sum(), v)
        scale = coefs.gradient_scale(published_cps=published)[i]
        expected = math.copysign(scale, coefs.v_coef[i]) * noise / noise[0].numel()
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-5 * scale)


def test_latents_next_carries_no_gradient():
    x, v, following = tensors(2, 3)
    following.requires_grad_()
    v.requires_grad_()
    log_prob(coefficients("sage_grpo", GRID, 0.5), 3, x, v, following).sum().backward()
    assert following.grad is None and v.grad.abs().sum() > 0


def test_bf16_velocity_is_cast_before_any_arithmetic():
    x, v, noise = tensors(3, 3)
    half = v.bfloat16()
    coefs = coefficients("sage_grpo", GRID, 0.5)
    following = step_latents(coefs, 4, x, half, noise)
    assert following.dtype == torch.float32
    assert torch.equal(following, step_latents(coefs, 4, x, half.float(), noise))
    assert torch.equal(log_prob(coefs, 4, x, half, following), log_prob(coefs, 4, x, half.float(), following))


def test_a_bf16_store_would_be_seen():
    """Latents rounded to bf16 after scoring move the log-prob far beyond the clip range of 1e-4 (pitfall 2)."""
    x, v, noise = tensors(4, 3)
    coefs = coefficients("sage_grpo", GRID, 0.5)
    following = step_latents(coefs, 10, x, v, noise)
    exact = log_prob(coefs, 10, x, v, following)
    rounded = log_prob(coefs, 10, x.bfloat16(), v, following.bfloat16())
    assert (rounded - exact).abs().max() > 1e-4


def test_noise_is_required_exactly_at_stochastic_steps():
    x, v, noise = tensors(5, 3)
    coefs = coefficients("sage_grpo", GRID, 0.5)
    with pytest.raises(ValueError, match="step 3"):
        step_latents(coefs, 3, x, v, None)
    with pytest.raises(ValueError, match="step 19"):
        step_latents(coefs, 19, x, v, noise)
    with pytest.raises(ValueError, match="step 19"):
        log_prob(coefs, 19, x, v, x)
    with pytest.raises(ValueError, match="step 19"):
        gaussian_kl(coefs, 19, v, v)
    assert torch.equal(step_latents(coefs, 19, x, v, None), mean(coefs, 19, x, v))


@pytest.mark.parametrize("sde_type", NOISY)
def test_kl_is_the_divergence_of_the_two_steps(sde_type):
    coefs = coefficients(sde_type, GRID, 0.5, last_step="sde")
    x, v, reference = tensors(6, 3)
    for i in coefs.sde_steps:
        centers = [coefs.x_coef[i] * x.double() + coefs.v_coef[i] * u.double() for u in (v, reference)]
        ours, theirs = (Normal(center, coefs.std[i]) for center in centers)
        expected = kl_divergence(ours, theirs).mean(dim=(1, 2, 3, 4))
        got = gaussian_kl(coefs, i, v, reference)
        assert (got > 0).all() and got.shape == (3,)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
        assert torch.equal(gaussian_kl(coefs, i, v, v), torch.zeros(3))


def test_kl_gradient_pulls_towards_the_reference():
    """d KL / d v = n_t^2 (v - v_ref) / num_dims: not a no-op, and scaled by its coefficient (pitfall 26)."""
    coefs = coefficients("sage_grpo", GRID, 0.5)
    x, v, reference, noise = tensors(7, 4)
    v.requires_grad_()
    following = step_latents(coefs, 8, x, v.detach(), noise)

    def gradient(coefficient: float) -> torch.Tensor:
        loss = -log_prob(coefs, 8, x, v, following).sum() + coefficient * gaussian_kl(coefs, 8, v, reference).sum()
        return torch.autograd.grad(loss, v)[0]

    pull = float(coefs.gradient_scale()[8]) ** 2 * (v.detach() - reference) / v[0].numel()
    torch.testing.assert_close(gradient(1.0) - gradient(0.0), pull, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(gradient(3.0) - gradient(0.0), 3 * pull, rtol=1e-4, atol=1e-7)
    assert pull.abs().max() > 1e-4
