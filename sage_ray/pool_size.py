"""How many rollout groups a run should have: a pure function of what its last iterations took."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROOM = 1.25
"""A pool shrinks only to so many times what is needed, so that it does not swing."""
FULL_QUEUE = 0.5
"""Share of reward.max_pending videos above which the reward service is what is waited for."""


@dataclass(frozen=True)
class Load:
    """Of one iteration. rollout_s: work of all rollout groups together; update_s: of the learner; queue: videos without
    a score, as a share of reward.max_pending."""

    rollout_s: float
    update_s: float
    queue: float


def needed_groups(load: Load) -> float:
    """Groups by which an iteration's rollouts take as long as its update: more make the learner wait no less when the
    two overlap, and gain less and less when they follow each other."""
    return load.rollout_s / load.update_s if load.update_s > 0 else math.inf


def wanted_groups(load: Load, now: int, least: int, most: int, since_change_s: float, cooldown_s: float) -> int:
    """The number of rollout groups that there should be, in [least, most].

    Args: now: groups there are. since_change_s: time since the number was last changed; nothing changes before
    `cooldown_s`.
    """
    inside = min(max(now, least), most)
    needed = needed_groups(load)
    if since_change_s < cooldown_s:
        return inside
    if needed > now and load.queue < FULL_QUEUE:
        return min(most, math.ceil(needed) if math.isfinite(needed) else most)
    with_room = math.ceil(needed * ROOM) if math.isfinite(needed) else most
    return max(least, min(inside, with_room))
