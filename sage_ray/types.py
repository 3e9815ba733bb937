"""Values that travel between rooms: requests, trajectories, scores. Plain data, numpy inside, no behaviour.

Axes: P prompts, G group, K trained steps, S stored states, C latent channels, F latent frames, H, W.
Arrays are numpy because Ray's object store shares numpy without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

AXES = ("VQ", "MQ", "TA")


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file."""

    index: int
    text: str
    seed: int | None = None


@dataclass(frozen=True)
class Condition:
    """Encoded prompt, valid tokens only (what the learner needs to replay, so it never loads a text encoder).

    text: float32 [L, text_dim], valid tokens of the language model; byt5: float32 [L2, byt5_dim], L2 may be 0.
    """

    text: np.ndarray
    byt5: np.ndarray


@dataclass(frozen=True)
class GroupRequest:
    """Asks a rollout worker for one group: the same prompt, `group_size` videos, at one policy version."""

    step: int
    group: int
    prompt: Prompt
    group_size: int
    policy_version: int
    seed: int
    sigmas: tuple[float, ...]
    sde_type: str
    eta: float
    sde_steps: tuple[int, ...]
    trained_steps: tuple[int, ...] = ()
    evaluation: bool = False


@dataclass(frozen=True)
class Trajectory:
    """What the learner replays of one group.

    latents: float32 [G, S, C, F, H, W], the stored states; states: int [S], their position on the sigma grid
    (0 is pure noise); sde_steps: every stochastic step; trained_steps: int [K], those that are trained, in order, each
    step k goes from state k to k + 1; log_probs: float32 [G, K], the rollout's own, per-dimension mean in nats;
    sigmas: float64 [N + 1], the grid the worker used; worker: its name.
    """

    step: int
    group: int
    prompt: Prompt
    policy_version: int
    sde_type: str
    eta: float
    sigmas: np.ndarray
    sde_steps: np.ndarray
    trained_steps: np.ndarray
    states: np.ndarray
    latents: np.ndarray
    log_probs: np.ndarray
    condition: Condition
    negative: Condition | None
    worker: str = ""


@dataclass(frozen=True)
class GroupInfo:
    """What the controller reads of a finished group; small. finite: [G], False where the latents are not finite (such
    a video decodes to black and must get no reward); peak_bytes: most GPU memory of the worker since it took the policy
    version; worker: name of the worker that made it; trajectory_bytes, frames_bytes: size of its latents and of its
    frames in the object store. Times in seconds."""

    step: int
    group: int
    policy_version: int
    weights_digest: str
    sigmas: tuple[float, ...]
    finite: tuple[bool, ...]
    denoise_s: float
    decode_s: float
    peak_bytes: int = 0
    worker: str = ""
    trajectory_bytes: int = 0
    frames_bytes: int = 0


@dataclass(frozen=True)
class VideoScore:
    """Scores of one video.

    parts: float64 [K], nan where scoring failed; reason: why the reward failed, else empty; note: why a measure that is
    only logged failed, else empty; truth: float64 [3] or None; match: 1.0 where the clip is what its caption says;
    frames: statistics of its pixels; seconds: its share of the wall time of scoring.
    """

    parts: np.ndarray
    reason: str
    note: str
    truth: np.ndarray | None
    match: float | None
    frames: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Scores:
    """Rewards of one group. axes: float64 [G, K], the run's reward parts (VQ, MQ, TA and further ones), nan where
    scoring failed; reasons: G texts, empty where it did not; truth: [G, 3] or None; matches: float64 [G] or None;
    frames: statistic -> [G]; seconds: wall time of scoring."""

    axes: np.ndarray
    truth: np.ndarray | None
    matches: np.ndarray | None
    seconds: float
    reasons: tuple[str, ...] = ()
    frames: dict[str, np.ndarray] = field(default_factory=dict)
