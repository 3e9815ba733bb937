"""Transitions over the whole range of settings: N 4..200, shift 1..12, eta 0..2, both last steps, random sde_steps.

test_transition.py holds closed forms on the default grid; here every property is asked of drawn schedules. Densities
are asked for eta >= 1e-3 only: float32 latents cannot hold noise far below their own rounding (6e-8 of |x|).
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from sage_ray.equalizer import equalizer_scales
from sage_ray.schedule import sigma_grid
from sage_ray.transition import (
    RULES,
    SAGE_CLAMP,
    Coefficients,
    coefficients,
    gaussian_kl,
    log_prob,
    mean,
    step_latents,
)

SCORE_CORRECTED = ("sage_grpo", "dance_grpo", "flow_grpo")
NOISY = [name for name in RULES if name != "ode"]
FLOAT32_ROUNDING = 2.0**-24
GAUSS_LEGENDRE = np.polynomial.legendre.leggauss(200)


@dataclass(frozen=True)
class Schedule:
    """Arguments of one call of `coefficients`; sde_steps None allows every step."""

    sde_type: str
    num_steps: int
    shift: float
    eta: float
    last_step: str
    sde_steps: tuple[int, ...] | None

    @property
    def refused(self) -> bool:
        return self.sde_type == "cps" and self.eta > 1

    @property
    def sigmas(self) -> np.ndarray:
        return sigma_grid(self.num_steps, self.shift)

    def build(self) -> Coefficients:
        return coefficients(self.sde_type, self.sigmas, self.eta, last_step=self.last_step, sde_steps=self.sde_steps)


@st.composite
def schedules(draw, methods=tuple(RULES), least_eta=0.0, most_steps=200) -> Schedule:
    num_steps = draw(st.integers(4, most_steps))
    window = st.frozensets(st.integers(0, num_steps - 1), max_size=num_steps)
    return Schedule(
        sde_type=draw(st.sampled_from(methods)),
        num_steps=num_steps,
        shift=draw(st.floats(1, 12)),
        eta=draw(st.floats(least_eta, 2)),
        last_step=draw(st.sampled_from(["ode", "sde"])),
        sde_steps=draw(st.one_of(st.none(), window.map(tuple))),
    )


def drawn(seed: int, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((2, 1, 1, 4, 4), generator=generator) for _ in range(num)]


@settings(max_examples=400, deadline=None)
@given(schedules())
def test_a_step_is_finite_and_stochastic_or_the_exact_euler_step_or_the_call_raises(schedule):
    if schedule.refused:
        with pytest.raises(ValueError, match=r"eta: .* must be at most 1 for sde_type=cps"):
            schedule.build()
        return
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        coefs = schedule.build()
    table = np.stack([coefs.x_coef, coefs.v_coef, coefs.std])
    assert table.shape == (3, schedule.num_steps) and np.isfinite(table).all()
    euler = np.stack([np.ones(schedule.num_steps), np.diff(schedule.sigmas), np.zeros(schedule.num_steps)])
    on = coefs.std > 0
    assert (table[:, ~on] == euler[:, ~on]).all()
    assert set(coefs.sde_steps) == set(np.flatnonzero(on))
    allowed = range(schedule.num_steps) if schedule.sde_steps is None else schedule.sde_steps
    assert set(coefs.sde_steps) <= set(allowed) - ({schedule.num_steps - 1} if schedule.last_step == "ode" else set())


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_a_window_only_switches_steps_off(schedule):
    """Order and repetition do not matter, and inside the window nothing depends on the rest of it."""
    assume(not schedule.refused and schedule.sde_steps is not None)
    coefs = schedule.build()
    options = {"last_step": schedule.last_step}
    full = coefficients(schedule.sde_type, schedule.sigmas, schedule.eta, **options)
    assert set(coefs.sde_steps) == set(full.sde_steps) & set(schedule.sde_steps)
    again = coefficients(
        schedule.sde_type, schedule.sigmas, schedule.eta, sde_steps=[*schedule.sde_steps[::-1]] * 2, **options
    )
    on = list(coefs.sde_steps)
    for key in ("x_coef", "v_coef", "std"):
        np.testing.assert_array_equal(getattr(coefs, key), getattr(again, key))
        np.testing.assert_array_equal(getattr(coefs, key)[on], getattr(full, key)[on])


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_the_mean_recombines_x0_and_z(schedule):
    """mean = a x0_hat + b z_hat with x0_hat = x - sigma v, z_hat = x + (1 - sigma) v, so x_coef = a + b and
    v_coef = (1 - sigma) b - sigma a. a = 1 - sigma_next always; the score is -z_hat / sigma, so a score correction
    makes b = sigma_next - std^2 / (2 sigma), cps's rule keeps b^2 + std^2 = sigma_next^2, and without noise
    b = sigma_next."""
    assume(not schedule.refused)
    coefs = schedule.build()
    sigma, following = coefs.sigmas[:-1], coefs.sigmas[1:]
    a = (1 - sigma) * coefs.x_coef - coefs.v_coef
    b = sigma * coefs.x_coef + coefs.v_coef
    tolerance = 1e-13 * (1 + np.abs(coefs.x_coef))
    assert (np.abs(a - (1 - following)) <= tolerance).all()
    if schedule.sde_type in SCORE_CORRECTED:
        assert (np.abs(b - (following - coefs.std**2 / (2 * sigma))) <= tolerance).all()
    else:
        assert (np.abs(b**2 + coefs.std**2 - following**2) <= 1e-13).all() and (b >= -1e-15).all()


def sage_integral(sigma: float, sigma_next: float) -> float:
    """Integral of s / (1 - s) from sigma_next to min(sigma, 1 - clamp), 200-point Gauss-Legendre, minus the length
    of grid above the clamp, which the published formula subtracts too."""
    nodes, weights = GAUSS_LEGENDRE
    upper = min(sigma, 1 - SAGE_CLAMP)
    s = sigma_next + (upper - sigma_next) * (nodes + 1) / 2
    return (upper - sigma_next) / 2 * float((weights * s / (1 - s)).sum()) - (sigma - upper)


@settings(max_examples=60, deadline=None)
@given(schedules(methods=("sage_grpo", "sage_cp"), least_eta=0.01))
def test_sage_std_is_the_square_root_of_the_integral(schedule):
    """Below the clamp it is the integral alone. A step is deterministic where this is not positive. The logarithm is
    taken of numbers near 1, so the error is 1e-13 in absolute terms, not relative."""
    coefs = schedule.build()
    allowed = np.full(schedule.num_steps, schedule.sde_steps is None)
    allowed[list(schedule.sde_steps or ())] = True
    allowed[-1] &= schedule.last_step == "sde"
    for i, (sigma, following) in enumerate(zip(coefs.sigmas[:-1], coefs.sigmas[1:], strict=True)):
        variance = max(schedule.eta**2 * sage_integral(sigma, following), 0.0)
        if schedule.sde_type == "sage_cp":
            variance = min(variance, following**2)
        expected = variance if allowed[i] else 0.0
        assert coefs.std[i] ** 2 == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(schedules(methods=("dance_grpo", "flow_grpo", "cps")))
def test_std_of_the_other_methods(schedule):
    """dance eta sqrt(D); flow eta sqrt(D sigma / (1 - sigma)), at sigma 1 with 1 - sigma_1; cps sigma_next sin(.)."""
    assume(not schedule.refused)
    coefs = schedule.build()
    for i in coefs.sde_steps:
        sigma, following = float(coefs.sigmas[i]), float(coefs.sigmas[i + 1])
        denominator = 1 - sigma if i else 1 - following
        expected = {
            "dance_grpo": schedule.eta * math.sqrt(sigma - following),
            "flow_grpo": schedule.eta * math.sqrt(sigma / denominator * (sigma - following)),
            "cps": following * math.sin(schedule.eta * math.pi / 2),
        }[schedule.sde_type]
        # Squares of etas below 1e-154 are denormal: 1e-140 is the absolute floor.
        assert coefs.std[i] == pytest.approx(expected, rel=1e-12, abs=1e-140)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 2**31))
def test_coefficients_are_the_autograd_derivatives_of_the_mean(schedule, seed):
    """Exactly, once rounded to float32, at every step."""
    assume(not schedule.refused)
    coefs = schedule.build()
    x, v = (tensor.requires_grad_() for tensor in drawn(seed, 2))
    for i in {0, schedule.num_steps // 2, schedule.num_steps - 2, schedule.num_steps - 1}:
        x_grad, v_grad = torch.autograd.grad(mean(coefs, i, x, v).sum(), (x, v))
        assert (x_grad == float(np.float32(coefs.x_coef[i]))).all()
        assert (v_grad == float(np.float32(coefs.v_coef[i]))).all()


@settings(max_examples=100, deadline=None)
@given(schedules(methods=NOISY, least_eta=1e-3, most_steps=60), st.integers(0, 2**31))
def test_log_prob_is_the_normal_density_at_every_stochastic_step(schedule, seed):
    """Against torch.distributions.Normal in float64 on the same float32 latents, last step included.

    e bounds the rounding of mean and latents (4 operations on terms of size |x_coef x| + |v_coef v| + std |noise|); the
    density then errs by |noise| e / std + e^2 / (2 std^2), plus the rounding of the result itself.
    """
    assume(not schedule.refused)
    coefs = schedule.build()
    x, v, noise = drawn(seed, 3)
    top = max(float(tensor.abs().max()) for tensor in (x, v, noise))
    for i in coefs.sde_steps:
        x_coef, v_coef, std = (float(getattr(coefs, key)[i]) for key in ("x_coef", "v_coef", "std"))
        following = step_latents(coefs, i, x, v, noise)
        expected = Normal(x_coef * x.double() + v_coef * v.double(), std).log_prob(following.double())
        got = log_prob(coefs, i, x, v, following)
        ratio = 4 * FLOAT32_ROUNDING * top * (abs(x_coef) + abs(v_coef) + std) / std
        tolerance = ratio * top + ratio**2 / 2 + 1e-6 * (1 + abs(math.log(std)))
        assert got.shape == (2,) and torch.isfinite(got).all()
        assert float((got.double() - expected.mean(dim=(1, 2, 3, 4))).abs().max()) <= tolerance


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("sde_type", NOISY)
def test_the_last_step_is_scored_only_where_it_injects_noise(sde_type, eta):
    """last_step sde: sage, dance and flow score the step to sigma 0; the std of cps and sage_cp is 0 there."""
    coefs = coefficients(sde_type, sigma_grid(12, 3.0), eta, last_step="sde")
    x, v, noise = drawn(3, 3)
    if sde_type not in SCORE_CORRECTED:
        with pytest.raises(ValueError, match="step 11: a deterministic step has no log-prob"):
            log_prob(coefs, 11, x, v, x)
        return
    following = step_latents(coefs, 11, x, v, noise)
    center = float(coefs.x_coef[11]) * x.double() + float(coefs.v_coef[11]) * v.double()
    expected = Normal(center, float(coefs.std[11])).log_prob(following.double()).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(log_prob(coefs, 11, x, v, following).double(), expected, rtol=0, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(schedules(methods=NOISY, least_eta=1e-3, most_steps=60), st.integers(0, 2**31), st.floats(1e-4, 10))
def test_kl_is_the_divergence_and_zero_at_equality(schedule, seed, distance):
    """Both orders agree with torch.distributions.kl_divergence in float64 on the same float32 velocities.

    kl_divergence adds and takes away 1, which leaves an error of some 1e-16 per element.
    """
    assume(not schedule.refused)
    coefs = schedule.build()
    x, v, direction = drawn(seed, 3)
    reference = v + distance * direction
    for i in coefs.sde_steps:
        centers = [coefs.x_coef[i] * x.double() + coefs.v_coef[i] * u.double() for u in (v, reference)]
        ours, theirs = (Normal(center, float(coefs.std[i])) for center in centers)
        expected = kl_divergence(ours, theirs).mean(dim=(1, 2, 3, 4))
        got = gaussian_kl(coefs, i, v, reference)
        assert torch.isfinite(got).all() and (got >= 0).all()
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-15)
        assert torch.equal(gaussian_kl(coefs, i, reference, v), got)
        assert torch.equal(gaussian_kl(coefs, i, v, v.clone()), torch.zeros(2))


@settings(max_examples=300, deadline=None)
@given(schedules(methods=NOISY, least_eta=1e-3), st.booleans())
def test_equalizer_is_one_at_the_step_of_the_lower_median(schedule, published_cps):
    """Exactly 1 at the step whose n_t is torch.median's, the lower of two middle values, among stochastic steps."""
    assume(not schedule.refused)
    coefs = schedule.build()
    scale = coefs.gradient_scale(published_cps=published_cps)
    if not coefs.sde_steps:
        with pytest.raises(ValueError, match="no stochastic step"):
            equalizer_scales(scale)
        return
    on = list(coefs.sde_steps)
    median, position = torch.median(torch.tensor(scale[on], dtype=torch.float64), dim=0)
    scales = equalizer_scales(scale)
    assert scales[on[int(position)]] == 1.0
    assert (scales[on][scale[on] <= float(median)] >= 1).all() and (scales[on][scale[on] >= float(median)] <= 1).all()
    assert (np.isnan(scales) == ~coefs.stochastic).all() and (scales[on] > 0).all() and np.isfinite(scales[on]).all()
