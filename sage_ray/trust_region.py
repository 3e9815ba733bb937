"""Dual moving KL trust region: which references a mode holds, when the anchor moves, and lambda_KL."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class KLTerms:
    """References a kl mode needs. anchor: KL to an anchor; moves: it follows the policy; previous: KL to the
    previous step."""

    anchor: bool
    moves: bool
    previous: bool


KL_TERMS = {
    "none": KLTerms(anchor=False, moves=False, previous=False),
    "fixed": KLTerms(anchor=True, moves=False, previous=False),
    "stepwise": KLTerms(anchor=False, moves=False, previous=True),
    "moving": KLTerms(anchor=True, moves=True, previous=False),
    "dual_moving": KLTerms(anchor=True, moves=True, previous=True),
}
"""kl.mode -> terms (eq. 14, 40)."""

WINDOW = 10
"""KL values averaged by the feedback (eq. 42)."""


def anchor_moves_at(version: int, interval: int) -> bool:
    """Whether the anchor is copied from the policy at this version (optimizer steps taken)."""
    return version > 0 and version % interval == 0


SCHEDULES = ("fixed", "two_stage", "feedback")
"""The lambda schedules that Figure 7 compares."""


class KLController:
    """lambda_KL over optimizer steps.

    "fixed" is `largest` throughout; "two_stage" rises linearly from `start` to `largest` in `warmup_steps` and stays;
    "feedback" does the same and then follows the mean of the last KL values (eq. 41, 42): above 1.5 target and below
    0.5 target, target = `largest`, it moves by a tenth. Direction "paper": more KL weakens lambda (as paper and
    official code say); "ppo" is the reverse.
    """

    def __init__(
        self,
        *,
        start: float,
        largest: float,
        smallest: float,
        warmup_steps: int,
        direction: str,
        schedule: str = "feedback",
    ):
        if direction not in ("paper", "ppo"):
            raise ValueError(f"direction: {direction!r} must be paper or ppo")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: {schedule!r} must be one of {', '.join(SCHEDULES)}")
        self.start, self.largest, self.smallest = start, largest, smallest
        self.warmup_steps, self.direction, self.schedule = warmup_steps, direction, schedule
        self.value, self.num_steps = largest if schedule == "fixed" or warmup_steps == 0 else start, 0
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def tick(self, kl: float) -> float:
        """Count one optimizer step with its weighted L_KL (nats per dimension, mean over all ranks); new lambda."""
        self.num_steps += 1
        self._recent.append(kl)
        if self.schedule == "fixed":
            self.value = self.largest
            return self.value
        if self.num_steps <= self.warmup_steps:
            self.value = self.start + (self.largest - self.start) * self.num_steps / self.warmup_steps
            return self.value
        if self.schedule == "two_stage":
            self.value = self.largest
            return self.value
        average = sum(self._recent) / len(self._recent)
        weaker, stronger = (0.9, 1.1) if self.direction == "paper" else (1.1, 0.9)
        if average > 1.5 * self.largest:
            self.value *= weaker
        elif average < 0.5 * self.largest:
            self.value *= stronger
        self.value = min(max(self.value, self.smallest), self.largest)
        return self.value

    def state_dict(self) -> dict:
        """Everything a resumed run needs."""
        return {"value": self.value, "num_steps": self.num_steps, "recent": list(self._recent)}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`."""
        self.value, self.num_steps = state["value"], state["num_steps"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
