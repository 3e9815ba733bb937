"""The agreement gate: rollout and learner must give the same log-prob to every step that is trained.

Everything is compared, in the training forward itself, before anything is stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch

from sage_ray.group_batch import Pass, Place
from sage_ray.parallel import gather_objects, gather_over_ranks

BF16_DISAGREEMENT = 1e-5
"""loss.max_disagreement in bfloat16 where none is given, nats per dimension.

Measured at the real size (8.33 B parameters, 81 frames, blocks compiled and recomputed, guidance 1 and 6, one process
and two): 0, bit for bit. The room is for shapes that differ, not for weights that do."""


class NonFiniteError(FloatingPointError):
    """A log-prob, loss, gradient or weight is not finite; nothing was stepped."""


class DisagreementError(RuntimeError):
    """Rollout and learner score the same step differently by more than loss.max_disagreement."""


def allowed_disagreement(given: float | None, clip_range: float, dtype: torch.dtype) -> float:
    """loss.max_disagreement, or its default for the policy's compute dtype."""
    if given is not None:
        return given
    return clip_range / 10 if dtype == torch.float32 else BF16_DISAGREEMENT


class Agreement:
    """Compares the log-probs of rollout and learner, and remembers the differences until `metrics` is asked.

    Args: allowed: largest |learner - rollout|, nats per dimension. sp_size: ranks in turn that score the same pairs,
        which are compared once.
    """

    def __init__(self, allowed: float, sp_size: int = 1):
        self.allowed, self.sp_size = allowed, sp_size
        self._seen: list[np.ndarray] = []

    def check(self, passes: Sequence[Pass], replayed: Sequence[torch.Tensor]) -> None:
        """Compare the weighted pairs of one optimizer step, of all ranks, each of which brings equally many.

        Args: replayed: the learner's log-probs [B] of every pass under the weights that sampled.
        Raises: NonFiniteError, DisagreementError: the same on every rank, about the pair that is furthest off.
        """
        columns = (one.rollout_log_prob for one in passes), (one.weights for one in passes)
        table = torch.stack([torch.cat([*column]).float() for column in (replayed, *columns)])
        gathered = gather_over_ranks(table, self.sp_size).cpu().numpy().astype(np.float64)
        learner, rollout, weights = gathered.transpose(1, 0, 2)
        difference = np.subtract(learner, rollout, out=np.zeros_like(learner), where=weights > 0)
        wrong = ~(np.abs(difference) <= self.allowed)
        if wrong.any():
            self._fail(passes, wrong, np.stack([learner[wrong], rollout[wrong]], 1), int((weights > 0).sum()))
        self._seen.append(difference[weights > 0])

    def metrics(self) -> dict[str, float]:
        """Statistics of learner - rollout over all pairs since the last call, nats per dimension; {} without any.

        A difference per dimension that is noise averages out over many dimensions, a bias ("mean") does not.
        """
        if not self._seen:
            return {}
        difference, self._seen = np.concatenate(self._seen), []
        size = np.abs(difference)
        return {
            "agreement/max_abs": float(size.max()),
            "agreement/p99_abs": float(np.quantile(size, 0.99)),
            "agreement/mean_abs": float(size.mean()),
            "agreement/mean": float(difference.mean()),
        }

    def _fail(self, passes: Sequence[Pass], wrong: np.ndarray, values: np.ndarray, num_compared: int) -> NoReturn:
        """Name the worst pair. wrong: bool [ranks, pairs]; values: [num_wrong, 2], learner's and rollout's log-prob."""
        mine = [place for one in passes for place in one.places]
        every: list[Place] = [place for rank in gather_objects(mine, self.sp_size) for place in rank]
        places = [every[i] for i in np.flatnonzero(wrong)]
        differences = values[:, 0] - values[:, 1]
        worst = int(np.argmax(np.where(np.isfinite(differences), np.abs(differences), np.inf)))
        learner, rollout = values[worst]
        if not np.isfinite(differences[worst]):
            raise NonFiniteError(f"{places[worst]}: learner's log-prob is {learner:.9g}, the rollout's {rollout:.9g}")
        workers = ", ".join(f"{count} by {name}" for name, count in Counter(p.worker for p in places).most_common())
        raise DisagreementError(
            f"{places[worst]}: learner and rollout log-probs differ by {differences[worst]:+.3g} nats per dimension "
            f"({learner:.9g} and {rollout:.9g}), {self.allowed:.3g} is allowed (loss.max_disagreement); of "
            f"{num_compared} pairs {len(places)} are above it, {workers}; weights, conditions or sampling settings of "
            "rollout and learner are not the same"
        )
