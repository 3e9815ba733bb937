"""Rollout and replay. Both score a step with the same function, so that replay equals rollout bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sage_ray.transition import Coefficients, Step, log_prob, step_latents

Velocity = Callable[[torch.Tensor, float | np.ndarray], torch.Tensor]
"""velocity(latents float32 [B, C, F, H, W], sigma or float64 [B] of them) -> float32, same shape."""


@dataclass(frozen=True)
class Generated:
    """latents: float32 [B, C, F, H, W] at sigma 0; states: state index -> latents, for k and k + 1 of every
    stochastic step k; log_probs: float32 [B, K]; sde_steps: K stochastic steps in order."""

    latents: torch.Tensor
    states: dict[int, torch.Tensor]
    log_probs: torch.Tensor
    sde_steps: tuple[int, ...]

    def of(self, videos: slice) -> Generated:
        """Some of the videos."""
        states = {state: latents[videos] for state, latents in self.states.items()}
        return Generated(self.latents[videos], states, self.log_probs[videos], self.sde_steps)


@torch.no_grad()
def generate(
    velocity: Velocity,
    latents: torch.Tensor,
    coefs: Coefficients,
    noise: Callable[[int], torch.Tensor],
    *,
    published_cps: bool = False,
) -> Generated:
    """Run every step of the grid from noise to video.

    Args:
        latents: float32 [B, C, F, H, W] at sigma = 1. noise: noise(step) -> float32 like latents, asked for at
            stochastic steps only.
    """
    states: dict[int, torch.Tensor] = {}
    log_probs = []
    for step in range(len(coefs.std)):
        v = velocity(latents, float(coefs.sigmas[step]))
        if coefs.stochastic[step]:
            following = step_latents(coefs, step, latents, v, noise(step))
            log_probs.append(log_prob(coefs, step, latents, v, following, published_cps=published_cps))
            states[step], states[step + 1] = latents, following
        else:
            following = step_latents(coefs, step, latents, v, None)
        latents = following
    scores = torch.stack(log_probs, 1) if log_probs else latents.new_zeros(len(latents), 0)
    return Generated(latents, states, scores, coefs.sde_steps)


def replay(
    velocity: Velocity,
    coefs: Coefficients,
    step: Step,
    latents: torch.Tensor,
    latents_next: torch.Tensor,
    *,
    published_cps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_prob [B], velocity) of a stored step under the present weights, with gradient."""
    v = velocity(latents, coefs.sigmas[step])
    return log_prob(coefs, step, latents, v, latents_next, published_cps=published_cps), v
