"""Mean and variance of every method's chain on Gaussian data, exact in float64; no network, no sampling.

For data N(m, S^2 I) the exact velocity v(x) = E[z - x0 | x_sigma = x] is affine in x, so each step of
`sage_ray.transition` is affine as well, and mean and variance follow by a recursion, dimension by dimension. What is
left is the method's own discretisation bias. Left out: data that are not Gaussian, and guidance.

`python -m sage_ray.marginals` prints the table of docs/marginals.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sage_ray.schedule import sigma_grid
from sage_ray.transition import Coefficients, coefficients

METHODS = ("ode", "sage_grpo", "dance_grpo", "flow_grpo", "cps", "sage_cp")
MEAN = 1.0
VARIANCES = (0.0, 0.25, 1.0)
SHIFT = 5.0
ETA = 0.5
BLOCKS: tuple[tuple[str, tuple[int, ...]], ...] = (("ode", (10, 20, 50)), ("sde", (20,)))
"""last_step and the step counts N of each block of the table."""


def optimal_velocity(sigma: float, mean: float, variance: float) -> tuple[float, float]:
    """E[z - x0 | x_sigma = x] = slope x + intercept, where x_sigma = (1 - sigma) x0 + sigma z and x0 ~ N(m, S^2).

    With V = (1 - sigma)^2 S^2 + sigma^2: slope = (sigma - (1 - sigma) S^2) / V and v((1 - sigma) m) = -m, by Gaussian
    conditioning: E[z | x] = sigma (x - (1 - sigma) m) / V and E[x0 | x] = m + (1 - sigma) S^2 (x - (1 - sigma) m) / V.

    Args: sigma: in [0, 1]. mean: m. variance: S^2 >= 0, in squared units of x.
    Returns: slope, intercept (units of x). Raises: ValueError naming key, value and rule; so at sigma = 0 with S = 0.
    """
    if not 0 <= sigma <= 1:
        raise ValueError(f"sigma: {sigma} must lie in [0, 1]")
    if not math.isfinite(mean):
        raise ValueError(f"mean: {mean} must be finite")
    if not (math.isfinite(variance) and variance >= 0):
        raise ValueError(f"variance: {variance} must be a finite number >= 0")
    total = (1 - sigma) ** 2 * variance + sigma**2
    if not total > 0:
        raise ValueError(f"sigma: {sigma} must be above 0 where variance is 0, the velocity is undefined there")
    slope = (sigma - (1 - sigma) * variance) / total
    return slope, -mean - slope * (1 - sigma) * mean


def exact_marginal(sigmas: np.ndarray, mean: float, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean (1 - sigma) m and variance (1 - sigma)^2 S^2 + sigma^2 of x_sigma; float64, both shaped as `sigmas`."""
    return (1 - sigmas) * mean, (1 - sigmas) ** 2 * variance + sigmas**2


def gaussian_chain(coefs: Coefficients, mean: float, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of x at every sigma of the grid when each step is fed the exact velocity of N(mean, variance).

    x_next = (x_coef + v_coef slope) x + v_coef intercept + std noise, from x ~ N(0, 1) at sigma = 1.

    Args: coefs: N steps on a grid that begins at 1. mean, variance: of the data, per dimension.
    Returns: means, variances, float64 [N + 1]; entry i belongs to coefs.sigmas[i].
    Raises: ValueError naming key, value and rule.
    """
    if coefs.sigmas[0] != 1:
        raise ValueError(f"sigmas: {coefs.sigmas[0]} must be 1 at the start, where x is N(0, 1)")
    means, variances = np.zeros(len(coefs.sigmas)), np.ones(len(coefs.sigmas))
    for i, sigma in enumerate(coefs.sigmas[:-1]):
        slope, intercept = optimal_velocity(float(sigma), mean, variance)
        gain = coefs.x_coef[i] + coefs.v_coef[i] * slope
        means[i + 1] = gain * means[i] + coefs.v_coef[i] * intercept
        variances[i + 1] = gain**2 * variances[i] + coefs.std[i] ** 2
    return means, variances


def _signed(value: float) -> str:
    """Three decimals with a sign, rounding noise as 0."""
    return f"{value:+.3f}" if abs(value) >= 5e-4 else "0"


def _row(method: str, variance: float, steps: Sequence[int], last_step: str) -> str:
    """One line of the table: final variance, worst variance bias with its sigma, and mean bias, each for every N."""
    finals, worsts, mean_biases = [], [], []
    for num_steps in steps:
        coefs = coefficients(method, sigma_grid(num_steps, SHIFT), ETA, last_step=last_step)
        means, variances = gaussian_chain(coefs, MEAN, variance)
        exact_means, exact_variances = exact_marginal(coefs.sigmas, MEAN, variance)
        bias = variances - exact_variances
        at = int(np.abs(bias).argmax())
        where = "" if _signed(bias[at]) == "0" else f" at {coefs.sigmas[at]:.2f}"
        finals.append(f"{variances[-1]:.3f}")
        worsts.append(_signed(bias[at]) + where)
        mean_biases.append(means[-1] - exact_means[-1])
    cells = (f"{variance:g}", method, *finals, *worsts, _signed(max(mean_biases, key=abs)))
    return f"| {' | '.join(cells)} |"


def _block(last_step: str, steps: Sequence[int], methods: Sequence[str], variances: Sequence[float]) -> str:
    """A heading, a header and one line per variance and method."""
    finals = [f"final variance, N = {num_steps}" for num_steps in steps]
    worsts = [f"worst variance bias, N = {num_steps}" for num_steps in steps]
    header = ("S^2", "method", *finals, *worsts, "final mean bias")
    lines = [
        f"Last step {last_step}, shift {SHIFT:g}, eta {ETA:g}, data N({MEAN:g}, S^2):",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
    ]
    return "\n".join(lines + [_row(method, value, steps, last_step) for value in variances for method in methods])


def table(methods: Sequence[str] = METHODS, variances: Sequence[float] = VARIANCES) -> str:
    """The Markdown of docs/marginals.md: one block per entry of BLOCKS, one line per data variance S^2 and method.

    The worst bias is the signed one of largest size against `exact_marginal` over the whole grid, end included, "at"
    its sigma; the mean bias is the largest over the block's N. Biases below 5e-4 print as 0.
    """
    return "\n\n".join(_block(last_step, steps, methods, variances) for last_step, steps in BLOCKS)


if __name__ == "__main__":
    print(table())
