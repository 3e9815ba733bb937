"""One GPU for everybody, by turns (cluster.take_turns): while one side works, the other's weights wait on the host."""

from __future__ import annotations

import time

from actors.learner_group import LearnerGroup
from actors.scored_rollouts import ScoredRollouts


class Turns:
    """Whose turn it is: rollout and reward workers' at first, or the learner's. Does nothing when not enabled.

    seconds: spent on changing places so far.
    """

    def __init__(self, enabled: bool, rollouts: ScoredRollouts, learner: LearnerGroup):
        self.enabled, self.rollouts, self.learner = enabled, rollouts, learner
        self.seconds = 0.0
        self._learning, self._bytes = False, {}

    def learn(self) -> None:
        """The learner's turn begins, unless it is."""
        if self.enabled and not self._learning:
            start, self._learning = time.monotonic(), True
            self._bytes |= self.rollouts.leave()
            self.learner.enter()
            self.seconds += time.monotonic() - start

    def generate(self) -> None:
        """The rollout and reward workers' turn begins, unless it is."""
        if self.enabled and self._learning:
            start, self._learning = time.monotonic(), False
            self._bytes["learner"] = self.learner.leave()
            self.rollouts.enter()
            self.seconds += time.monotonic() - start

    def learner_is_new(self) -> None:
        """A learner has taken the old one's place, and begins on the device: the others leave."""
        if self.enabled and not self._learning:
            self._bytes |= self.rollouts.leave()
            self._learning = True

    def sizes(self) -> dict[str, float]:
        """Bytes that each role took off the GPU the last time it left, as metrics; {} when not enabled."""
        return {f"turns/{role}_bytes": float(size) for role, size in self._bytes.items()}
