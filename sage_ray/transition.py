"""One transition serves every method: x_next ~ N(x_coef x + v_coef v, std^2 I).

The methods differ in their variance (sage, dance, flow) or in how they recombine x0 and z (cps, sage_cp, ode).
Coefficients are computed in float64 from a float64 grid and rounded once; tensors stay float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SAGE_CLAMP = 3e-3
"""The sage logarithm is taken at min(sigma, 1 - SAGE_CLAMP); without it the first step's variance is infinite."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of every step of a grid.

    sigmas: float64 [N + 1]; x_coef, v_coef, std: float64 [N]; std 0 marks a deterministic, untrained step.
    """

    sde_type: str
    eta: float
    sigmas: np.ndarray
    x_coef: np.ndarray
    v_coef: np.ndarray
    std: np.ndarray

    @property
    def stochastic(self) -> np.ndarray:
        """bool [N]: steps that inject noise and can be trained."""
        return self.std > 0

    @property
    def sde_steps(self) -> tuple[int, ...]:
        """Indices of the stochastic steps."""
        return tuple(int(i) for i in np.flatnonzero(self.stochastic))

    def gradient_scale(self, *, published_cps: bool = False) -> np.ndarray:
        """n_t = |v_coef| / std (lambda_t of eq. 38 over std), float64 [N], nan at deterministic steps.

        With cps's published log-prob, -(x_next - mean)^2, it is 2 std |v_coef|.
        """
        scale = np.full(len(self.std), np.nan)
        on = self.stochastic
        published = published_cps and self.sde_type == "cps"
        scale[on] = np.abs(self.v_coef[on]) * (2 * self.std[on] if published else 1 / self.std[on])
        return scale


def coefficients(
    sde_type: str,
    sigmas: np.ndarray,
    eta: float,
    *,
    last_step: str = "ode",
    sde_steps: Sequence[int] | None = None,
) -> Coefficients:
    """Coefficients of `sde_type` on a sigma grid (eq. 5, 6, 21 for sage; algorithm table for the others).

    Args:
        sde_type: a key of RULES. sigmas: float64 [N + 1], strictly falling in [0, 1]. eta: >= 0, scale of noise.
        last_step: "ode" makes the step to sigma = 0 deterministic, "sde" lets the method decide.
        sde_steps: steps that may be stochastic, the others are ode; None allows all.
    Returns: Coefficients; a step whose variance is not positive is deterministic.
    Raises: ValueError naming key, value and rule.
    """
    if sde_type not in RULES:
        raise ValueError(f"sde_type: {sde_type!r} must be one of {', '.join(RULES)}")
    if not (math.isfinite(eta) and eta >= 0):
        raise ValueError(f"eta: {eta} must be a finite number >= 0")
    if last_step not in ("ode", "sde"):
        raise ValueError(f"last_step: {last_step!r} must be ode or sde")
    sigmas = np.array(sigmas, np.float64)
    inside = sigmas.ndim == 1 and len(sigmas) > 1 and sigmas[0] <= 1 and sigmas[-1] >= 0
    if not (inside and (np.diff(sigmas) < 0).all()):
        raise ValueError(f"sigmas: {sigmas.tolist()} must be at least two numbers in [0, 1], strictly falling")
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    allowed = np.ones(len(sigma), bool)
    if sde_steps is not None:
        if any(not 0 <= step < len(sigma) for step in sde_steps):
            raise ValueError(f"sde_steps: {list(sde_steps)} must lie in [0, {len(sigma)})")
        allowed[:] = False
        allowed[list(sde_steps)] = True
    if last_step == "ode":
        allowed &= sigma_next > 0
    x_coef, v_coef, variance = RULES[sde_type](sigma, sigma_next, eta)
    on = allowed & (variance > 0)
    return Coefficients(
        sde_type=sde_type,
        eta=eta,
        sigmas=sigmas,
        x_coef=np.where(on, x_coef, 1.0),
        v_coef=np.where(on, v_coef, sigma_next - sigma),
        std=np.where(on, np.sqrt(np.maximum(variance, 0)), 0.0),
    )


Rule = Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _score_corrected(sigma: np.ndarray, sigma_next: np.ndarray, variance: np.ndarray):
    """Euler step plus the score correction of a noise of this variance: the mean of sage, dance and flow."""
    return 1 - variance / (2 * sigma), sigma_next - sigma - variance * (1 - sigma) / (2 * sigma), variance


def _recombined(sigma: np.ndarray, sigma_next: np.ndarray, std: np.ndarray):
    """x0 and z recombined with q = sqrt(sigma_next^2 - std^2), which preserves the coefficients (FlowCPS)."""
    q = np.sqrt(np.maximum(sigma_next**2 - std**2, 0))
    return (1 - sigma_next) + q, -sigma * (1 - sigma_next) + (1 - sigma) * q, std**2


def sage_variance(sigma: np.ndarray, sigma_next: np.ndarray, eta: float) -> np.ndarray:
    """eta^2 times the exact integral of s / (1 - s) from sigma_next to sigma (eq. 21), clamped at sigma = 1."""
    clamped = np.minimum(sigma, 1 - SAGE_CLAMP)
    return eta**2 * (np.log((1 - sigma_next) / (1 - clamped)) - (sigma - sigma_next))


def _sage(sigma, sigma_next, eta):
    return _score_corrected(sigma, sigma_next, sage_variance(sigma, sigma_next, eta))


def _dance(sigma, sigma_next, eta):
    return _score_corrected(sigma, sigma_next, eta**2 * (sigma - sigma_next))


def _flow(sigma, sigma_next, eta):
    one = np.where(sigma == 1, sigma_next[0], sigma)
    return _score_corrected(sigma, sigma_next, eta**2 * sigma / (1 - one) * (sigma - sigma_next))


def _cps(sigma, sigma_next, eta):
    if eta > 1:
        raise ValueError(f"eta: {eta} must be at most 1 for sde_type=cps (its sine folds back above)")
    return _recombined(sigma, sigma_next, sigma_next * math.sin(eta * math.pi / 2))


def _sage_cp(sigma, sigma_next, eta):
    std = np.sqrt(np.maximum(sage_variance(sigma, sigma_next, eta), 0))
    return _recombined(sigma, sigma_next, np.minimum(std, sigma_next))


def _ode(sigma, sigma_next, eta):
    return np.ones_like(sigma), sigma_next - sigma, np.zeros_like(sigma)


RULES: dict[str, Rule] = {
    "sage_grpo": _sage,
    "dance_grpo": _dance,
    "flow_grpo": _flow,
    "cps": _cps,
    "ode": _ode,
    "sage_cp": _sage_cp,
}


Step = int | np.ndarray
"""A step of the grid for the whole batch, or int [B]: one for every video."""


def _at(values: np.ndarray, step: Step, like: torch.Tensor) -> Any:
    """The step's number; for int [B] float32 [B, 1, ...] against `like` [B, ...]."""
    picked = values[step]
    if np.ndim(picked) == 0:
        return float(picked)
    return torch.from_numpy(picked).float().to(like.device).reshape(-1, *[1] * (like.ndim - 1))


def mean(coefs: Coefficients, step: Step, latents: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """x_coef x + v_coef v of a step, float32, same shape as `latents`."""
    latents, velocity = latents.float(), velocity.float()
    return _at(coefs.x_coef, step, latents) * latents + _at(coefs.v_coef, step, latents) * velocity


def step_latents(
    coefs: Coefficients, step: int, latents: torch.Tensor, velocity: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """x_next = mean + std noise; noise is needed exactly when the step is stochastic (else ValueError)."""
    if (noise is None) == bool(coefs.stochastic[step]):
        raise ValueError(f"step {step}: noise must be given exactly for stochastic steps")
    center = mean(coefs, step, latents, velocity)
    return center if noise is None else center + float(coefs.std[step]) * noise.float()


def log_prob(
    coefs: Coefficients,
    step: Step,
    latents: torch.Tensor,
    velocity: torch.Tensor,
    latents_next: torch.Tensor,
    *,
    published_cps: bool = False,
) -> torch.Tensor:
    """Per-dimension mean log density of a stochastic step, in nats.

    mean over C, F, H, W of -(x_next - mean)^2 / (2 std^2) - ln std - 0.5 ln(2 pi). With `published_cps` and sde_type
    cps it is -(x_next - mean)^2, as FlowCPS prints it: no normaliser, no 1 / (2 std^2).

    Args: latents, velocity, latents_next: [B, ...]; latents_next carries no gradient.
    Returns: float32 [B]. Raises: ValueError at a deterministic step.
    """
    if not np.all(coefs.std[step] > 0):
        raise ValueError(f"step {step}: a deterministic step has no log-prob")
    squared = (latents_next.detach().float() - mean(coefs, step, latents, velocity)).square()
    per_row = squared.mean(dim=tuple(range(1, squared.ndim)))
    if published_cps and coefs.sde_type == "cps":
        return -per_row
    with np.errstate(divide="ignore"):
        twice_variance, log_std = 2 * coefs.std**2, np.log(coefs.std)
    return -per_row / _at(twice_variance, step, per_row) - _at(log_std, step, per_row) - 0.5 * math.log(2 * math.pi)


def gaussian_kl(
    coefs: Coefficients, step: Step, velocity: torch.Tensor, reference_velocity: torch.Tensor
) -> torch.Tensor:
    """KL between the step's Gaussians under two velocities: mean (v - v_ref)^2 n_t^2 / 2, nats per dimension.

    Equal stds leave the means' distance over 2 std^2 (eq. 11 and 13 print std^4). n_t is always |v_coef| / std, also
    for cps with its published log-prob.

    Args: velocity, reference_velocity: [B, ...]. Returns: float32 [B], >= 0.
    Raises: ValueError at a deterministic step.
    """
    if not np.all(coefs.std[step] > 0):
        raise ValueError(f"step {step}: a deterministic step has no KL")
    squared = (velocity.float() - reference_velocity.float()).square()
    per_row = squared.mean(dim=tuple(range(1, squared.ndim)))
    return per_row * _at(coefs.gradient_scale() ** 2 / 2, step, per_row)
