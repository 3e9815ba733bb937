"""A group of videos on its way from the rollout worker to the learner: what was made, and what it scored."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from actors.rollout_group import GroupRefs
from sage_ray.types import GroupInfo, GroupRequest, Scores


@dataclass(frozen=True)
class ScoredGroup:
    """A group that the learner can take."""

    refs: GroupRefs
    info: GroupInfo
    scores: Scores


def check_made(info: GroupInfo, request: GroupRequest, digest: str) -> None:
    """Raises: RuntimeError when a group was made with other weights or steps than asked for."""
    made, asked = (info.policy_version, info.weights_digest, info.sigmas), (request.policy_version, digest)
    if made != (*asked, request.sigmas):
        raise RuntimeError(f"{info.worker}: made group {info.group} with {made}, not what was asked for")


def without_broken(scores: Scores, info: GroupInfo) -> Scores:
    """A video of latents that are not finite decodes to black, which has a score but deserves none."""
    kept = np.where(np.asarray(info.finite)[:, None], scores.axes, np.nan)
    reasons = tuple(
        why if ok else "its latents are not finite" for why, ok in zip(scores.reasons, info.finite, strict=True)
    )
    return dataclasses.replace(scores, axes=kept, reasons=reasons)
