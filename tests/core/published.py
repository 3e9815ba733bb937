"""The published step formulas, written from the sources and not from sage_ray: mean and std of one step.

Scalars or float64 tensors; sigma_1 is the second entry of the grid (flow_grpo's denominator at sigma = 1).
"""

import math


def _score_step(x, v, sigma, sigma_next, variance):
    """DanceGRPO: Euler step minus half the variance times the score, with score = -(x - (1 - sigma) x0) / sigma^2."""
    x0 = x - sigma * v
    score = -(x - (1 - sigma) * x0) / sigma**2
    return x + (sigma_next - sigma) * v + 0.5 * variance * score, math.sqrt(variance)


def sage_grpo(x, v, sigma, sigma_next, sigma_1, eta):
    clamped = min(sigma, 1 - 3e-3)
    variance = eta**2 * (math.log((1 - sigma_next) / (1 - clamped)) - (sigma - sigma_next))
    return _score_step(x, v, sigma, sigma_next, variance)


def dance_grpo(x, v, sigma, sigma_next, sigma_1, eta):
    return _score_step(x, v, sigma, sigma_next, eta**2 * (sigma - sigma_next))


def flow_grpo(x, v, sigma, sigma_next, sigma_1, eta):
    dt = sigma_next - sigma
    std_dev_t = math.sqrt(sigma / (1 - (sigma_1 if sigma == 1 else sigma))) * eta
    mean = x * (1 + std_dev_t**2 / (2 * sigma) * dt) + v * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std_dev_t * math.sqrt(-dt)


def cps(x, v, sigma, sigma_next, sigma_1, eta):
    std = sigma_next * math.sin(eta * math.pi / 2)
    x0, z = x - sigma * v, x + (1 - sigma) * v
    return x0 * (1 - sigma_next) + z * math.sqrt(sigma_next**2 - std**2), std


STEPS = {"sage_grpo": sage_grpo, "dance_grpo": dance_grpo, "flow_grpo": flow_grpo, "cps": cps}
