"""The clipped policy loss of one trained step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PolicyLoss:
    """sum: scalar, sum over rows of weight * scale * loss; ratio: [B], detached; num_clipped: weighted rows whose
    gradient the clip removed."""

    sum: torch.Tensor
    ratio: torch.Tensor
    num_clipped: torch.Tensor


def policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip_range: float,
    scale: torch.Tensor | float,
) -> PolicyLoss:
    """L = S_t max(-A ratio, -A clip(ratio, 1 - c, 1 + c)), ratio = exp(log_prob - old_log_prob).

    A row of weight 0 adds exactly 0 to value and gradient, whatever its log-probs are; its ratio is reported as 1.

    Args: log_prob, old_log_prob, advantages, weights: [B]; clip_range: c > 0; scale: S_t, one or [B].
    Returns: sums over rows; the caller divides by the global number of weighted (row, step) pairs.
    """
    # Masked before exp: an infinite ratio times weight 0 would be nan.
    delta = torch.where(weights > 0, log_prob - old_log_prob.detach(), 0.0)
    ratio = torch.exp(delta)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    free, bound = -advantages * ratio, -advantages * clipped
    loss = torch.maximum(free, bound) * weights * scale
    num_clipped = (bound > free).sum()
    return PolicyLoss(loss.sum(), ratio.detach(), num_clipped)
