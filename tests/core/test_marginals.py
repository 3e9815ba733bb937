"""Marginals of Gaussian chains: published numbers, closed forms, sampling, and the table of the docs."""

import math
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_ray.marginals import METHODS, exact_marginal, gaussian_chain, optimal_velocity, table
from sage_ray.schedule import sigma_grid
from sage_ray.transition import RULES, coefficients

DOCS = Path(__file__).parents[2] / "docs" / "marginals.md"


def final(sde_type: str, num_steps: int, variance: float, eta: float = 0.5, last_step: str = "ode") -> float:
    coefs = coefficients(sde_type, sigma_grid(num_steps, 5.0), eta, last_step=last_step)
    return float(gaussian_chain(coefs, 1.0, variance)[1][-1])


@pytest.mark.parametrize(
    ("sde_type", "expected"),
    [("ode", 0.774), ("sage_grpo", 0.810), ("dance_grpo", 0.788), ("flow_grpo", 0.813), ("cps", 0.658),
     ("sage_cp", 0.741)],
)  # fmt: skip
def test_final_variance_of_a_standard_normal_target(sde_type, expected):
    """algorithm.md, section 2, three decimals; the data's mean plays no part."""
    assert final(sde_type, 20, 1.0) == pytest.approx(expected, abs=5e-4)


def test_two_steps_by_hand():
    """ode, shift 1, N = 2, S^2 = 1, m = 2.

    At sigma 1: v = x - 2, so x_next = x - (x - 2) / 2 = x / 2 + 1: mean 1, variance 1/4.
    At sigma 1/2: V = 1/2, slope 0, v = -2, so x_next = x + 1: mean 2, variance 1/4.
    """
    means, variances = gaussian_chain(coefficients("ode", sigma_grid(2, 1.0), 0.0), 2.0, 1.0)
    np.testing.assert_allclose(means, [0, 1, 2], rtol=1e-15)
    np.testing.assert_allclose(variances, [1, 0.25, 0.25], rtol=1e-15)


@pytest.mark.parametrize("sde_type", ["cps", "sage_cp", "ode"])
@pytest.mark.parametrize(
    ("num_steps", "shift", "eta"), [(10, 5.0, 0.5), (20, 5.0, 1.0), (50, 1.0, 0.3), (90, 9.0, 0.5)]
)
def test_coefficient_preserving_chains_of_a_point_mass_are_exact(sde_type, num_steps, shift, eta):
    """S = 0: variance sigma_next^2 and mean (1 - sigma_next) m at every step, to 1e-12."""
    coefs = coefficients(sde_type, sigma_grid(num_steps, shift), eta)
    means, variances = gaussian_chain(coefs, 1.0, 0.0)
    np.testing.assert_allclose(variances, coefs.sigmas**2, rtol=0, atol=1e-12)
    np.testing.assert_allclose(means, 1 - coefs.sigmas, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "flow_grpo"])
def test_score_corrected_chains_of_a_point_mass_are_not(sde_type):
    """They err by more than .01 on the way; the deterministic last step still lands on the point."""
    coefs = coefficients(sde_type, sigma_grid(20, 5.0), 0.5)
    variances = gaussian_chain(coefs, 1.0, 0.0)[1]
    assert np.abs(variances - coefs.sigmas**2).max() > 0.01 and variances[-1] == pytest.approx(0, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(METHODS), st.integers(4, 80), st.floats(1, 12), st.floats(0.1, 1), st.floats(-3, 3),
    st.floats(0, 4), st.sampled_from(["ode", "sde"]),
)  # fmt: skip
def test_the_mean_is_exact_for_every_method(sde_type, num_steps, shift, eta, mean, variance, last_step):
    """x = (1 - sigma) m has v = -m, and every rule keeps the coefficient 1 - sigma_next of x0; rounding only.

    A step with |gain| > 1 (dance at small sigma and S) multiplies rounding, so the bound carries the product of gains.
    """
    coefs = coefficients(sde_type, sigma_grid(num_steps, shift), eta, last_step=last_step)
    means, variances = gaussian_chain(coefs, mean, variance)
    slopes = np.array([optimal_velocity(float(sigma), mean, variance)[0] for sigma in coefs.sigmas[:-1]])
    gains = np.maximum(np.abs(coefs.x_coef + coefs.v_coef * slopes), 1)
    bound = 1e-12 * np.concatenate([[1], np.cumprod(gains)]) * (1 + np.abs(slopes).max())
    assert (np.abs(means - exact_marginal(coefs.sigmas, mean, variance)[0]) <= bound).all()
    assert np.isfinite(variances).all() and (variances >= 0).all()


@pytest.mark.parametrize("last_step", ["ode", "sde"])
@pytest.mark.parametrize("sde_type", METHODS)
def test_chain_against_sampling(sde_type, last_step):
    """200,000 scalars, N = 10, N(1.5, 0.49): every mean within 5 standard errors sqrt(V / n), every variance within 5
    of V sqrt(2 / n). The velocity is E[z | x] - E[x0 | x] by the regression of z and of x0 on x."""
    count, m, variance = 200_000, 1.5, 0.49
    coefs = coefficients(sde_type, sigma_grid(10, 5.0), 0.5, last_step=last_step)
    means, variances = gaussian_chain(coefs, m, variance)
    generator = np.random.default_rng(METHODS.index(sde_type))
    x = generator.standard_normal(count)
    for i, sigma in enumerate(coefs.sigmas[:-1]):
        centered = (x - (1 - sigma) * m) / ((1 - sigma) ** 2 * variance + sigma**2)
        velocity = sigma * centered - (m + (1 - sigma) * variance * centered)
        x = coefs.x_coef[i] * x + coefs.v_coef[i] * velocity + coefs.std[i] * generator.standard_normal(count)
        assert abs(x.mean() - means[i + 1]) < 5 * math.sqrt(variances[i + 1] / count)
        assert abs(x.var() - variances[i + 1]) < 5 * variances[i + 1] * math.sqrt(2 / count)


@pytest.mark.parametrize("sigma", [0.1, 0.4, 0.8, 1.0])
@pytest.mark.parametrize(("m", "variance"), [(0.0, 1.0), (1.0, 0.25), (-2.0, 3.0)])
def test_optimal_velocity_against_quadrature(sigma, m, variance):
    """E[(x - x0) / sigma | x] by a trapezoid rule over x0 in m +- 12 S with 40,001 points, at five x."""
    slope, intercept = optimal_velocity(sigma, m, variance)
    x0 = m + math.sqrt(variance) * np.linspace(-12, 12, 40_001)
    for x in np.linspace(-2, 2, 5):
        log_weight = -((x0 - m) ** 2) / (2 * variance) - (x - (1 - sigma) * x0) ** 2 / (2 * sigma**2)
        weight = np.exp(log_weight - log_weight.max())
        expected = (weight * (x - x0) / sigma).sum() / weight.sum()
        assert slope * x + intercept == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("sigma", [0.2, 0.7])
def test_optimal_velocity_is_the_regression_of_z_minus_x0_on_x(sigma):
    """Least squares on 200,000 pairs: residual r is independent of x, so both coefficients are within 5 errors."""
    count, m, variance = 200_000, 1.0, 0.5
    generator = np.random.default_rng(7)
    x0 = m + math.sqrt(variance) * generator.standard_normal(count)
    z = generator.standard_normal(count)
    x = (1 - sigma) * x0 + sigma * z
    slope, intercept = optimal_velocity(sigma, m, variance)
    fitted, offset = np.polyfit(x, z - x0, 1)
    error = (z - x0 - slope * x - intercept).std() / (x.std() * math.sqrt(count))
    assert abs(fitted - slope) < 5 * error
    assert abs(offset - intercept) < 5 * error * math.sqrt((x**2).mean())


def test_optimal_velocity_at_the_ends():
    """sigma 1: x is all noise, v = x - m. S = 0: v = (x - m) / sigma. sigma 0: x is the data, v = -x."""
    assert optimal_velocity(1.0, 0.7, 2.0) == (1.0, -0.7)
    assert optimal_velocity(0.25, 0.5, 0.0) == (4.0, -2.0)
    assert optimal_velocity(0.0, 0.5, 2.0) == (-1.0, 0.0)


def test_the_ode_converges_to_the_target():
    """Euler is of first order: the bias falls about tenfold per ten times more steps, to below 1e-3 of S^2."""
    for variance in (0.25, 1.0, 4.0):
        biases = [final("ode", num_steps, variance) - variance for num_steps in (10, 100, 1_000, 10_000)]
        assert biases == sorted(biases) and biases[-1] < 0
        assert abs(biases[-1]) < 1e-3 * variance
        np.testing.assert_allclose(np.divide(biases[1:3], biases[2:]), 10, rtol=0.05)


def test_cps_does_not_converge():
    """N to infinity: at a small step the stationary variance is S^2 (1 + cos(eta pi / 2)) / 2 at sigma = 0."""
    for eta in (0.3, 0.5, 1.0):
        limit = (1 + math.cos(eta * math.pi / 2)) / 2
        assert final("cps", 20_000, 1.0, eta) == pytest.approx(limit, abs=3e-3)
    assert final("sage_cp", 20_000, 1.0) == pytest.approx(1, abs=3e-3)


def test_last_step_sde_by_hand():
    """S = 0: the step to 0 forgets x but for its score correction, and its own noise stays in the sample."""
    for sde_type in METHODS:
        coefs = coefficients(sde_type, sigma_grid(20, 5.0), 0.5, last_step="sde")
        before = gaussian_chain(coefs, 1.0, 0.0)[1][-2]
        noise, sigma = coefs.std[-1] ** 2, coefs.sigmas[-2]
        # x - sigma v = m exactly; the correction is -noise z_hat / (2 sigma), with z_hat = (x - (1 - sigma) m) / sigma.
        correction = noise / (2 * sigma**2) if sde_type in ("sage_grpo", "dance_grpo", "flow_grpo") else 0.0
        expected = correction**2 * before + noise
        assert final(sde_type, 20, 0.0, last_step="sde") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 0.0, 1.0), "sigma: 1.5 must lie in"),
        ((math.nan, 0.0, 1.0), "sigma: nan"),
        ((0.5, math.inf, 1.0), "mean: inf must be finite"),
        ((0.5, 0.0, -1.0), "variance: -1.0 must be"),
        ((0.5, 0.0, math.nan), "variance: nan"),
        ((0.0, 1.0, 0.0), "sigma: 0.0 must be above 0"),
    ],
)
def test_refusals_name_key_value_and_rule(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimal_velocity(*arguments)


def test_a_chain_must_start_at_sigma_one():
    with pytest.raises(ValueError, match="sigmas: 0.9 must be 1"):
        gaussian_chain(coefficients("ode", np.array([0.9, 0.5, 0.0]), 0.0), 1.0, 1.0)


def test_the_docs_show_what_the_command_prints(capsys):
    """The page has the printed text, whole and once, and no other table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
        runpy.run_module("sage_ray.marginals", run_name="__main__")
    printed = capsys.readouterr().out.strip()
    page = DOCS.read_text("utf-8")
    assert printed == table() and page.count(printed) == 1
    assert [line for line in page.splitlines() if line.startswith("|")] == [
        line for line in printed.splitlines() if line.startswith("|")
    ]
    assert "\n    python -m sage_ray.marginals\n" in page


def test_the_table_has_every_method():
    assert set(METHODS) == set(RULES)
    rows = [line for line in table().splitlines() if line.startswith(("| 0", "| 1"))]
    assert len(rows) == 2 * 3 * len(METHODS)
