"""A rollout worker: one policy replica that turns a GroupRequest into a trajectory and frames."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from sage_ray.config import Config
from sage_ray.device_memory import forget_peak, peak_bytes
from sage_ray.group_rollout import FinishedGroup, GroupRollout
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.lora import adapt
from sage_ray.models.packed_velocity import TORCH_DTYPES
from sage_ray.models.stock_velocity import velocity_kind
from sage_ray.types import GroupInfo, GroupRequest, Trajectory
from sage_ray.weights import WeightPart, combined_digest, unpack


class StaleWeightsError(RuntimeError):
    """The worker does not hold the policy version it was asked for."""


class AwayError(RuntimeError):
    """The worker's weights are not on its device."""


class RolloutWorker:
    """Holds transformer, VAE and prompt encoders. Serves only the version it was asked for; -1 means no weights yet.

    Its methods may be called from several threads: one denoises, and meanwhile another decodes.
    """

    def __init__(self, config: Config, device: str, name: str = "rollout"):
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        self.config, self.name = config, f"{name} on {platform.node()}"
        self.model = HunyuanVideo.load(
            Path(config.model.path),
            TORCH_DTYPES[config.model.dtype],
            device,
            kind=velocity_kind(config.model),
            decode_frames=config.rollout.decode_frames,
            parks_encoders=config.cluster.take_turns or device == "cuda",
        )
        if config.lora.rank:
            adapt(self.model.velocity, config.lora, config.seed, dtype=self.model.velocity.dtype)
            self.model.velocity.requires_grad_(False)
        self.rollout = GroupRollout(config, self.model)
        self.version, self.digest = -1, ""
        self._denoising, self._decoding = Lock(), Lock()  # who needs both takes them in this order

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def leave(self) -> int:
        """Take all weights off the device, after what runs has ended; bytes freed, 0 when they are away already."""
        with self._denoising, self._decoding:
            return self.model.leave()

    def enter(self) -> None:
        """Bring all weights back to the device."""
        with self._denoising, self._decoding:
            self.model.enter()

    def load_weights(self, version: int, digest: str, *parts: WeightPart) -> dict:
        """Take one published version, after the denoising that runs. Returns version, digest and seconds; raises when
        anything does not match."""
        with self._denoising:
            start = time.monotonic()
            self._check_present()
            self.version = -1
            if combined_digest([part.digest for part in parts]) != digest or parts[0].version != version:
                raise ValueError(f"weights: version {version} with digest {digest} was announced, other parts arrived")
            unpack(self.model.velocity, parts, self.model.velocity.trainable_names)
            self.version, self.digest = version, digest
            forget_peak()
            return {"version": version, "digest": digest, "seconds": time.monotonic() - start}

    def generate(self, *requests: GroupRequest) -> tuple[Trajectory | np.ndarray | GroupInfo, ...]:
        """Groups of one policy version: for each in turn its trajectory, frames uint8 [G, T, H, W, 3] and info.

        Those with the same stochastic steps share their forwards. Raises StaleWeightsError on another version,
        AwayError between `leave` and `enter`.
        """
        with ExitStack() as decoding:
            with self._denoising:
                self._check_version(requests)
                digest, denoised = self.digest, self.rollout.denoise(requests)
                # Before the other turn ends: between the two, weights must not leave.
                decoding.enter_context(self._decoding)
            finished = [group for groups in denoised for group in self.rollout.decode(groups)]
        parts = ((replace(g.trajectory, worker=self.name), g.frames, _info(g, digest, self.name)) for g in finished)
        return tuple(part for group in parts for part in group)

    def _check_version(self, requests: Sequence[GroupRequest]) -> None:
        self._check_present()
        for request in requests:
            if request.policy_version != self.version:
                raise StaleWeightsError(
                    f"policy version {request.policy_version} was asked for, this worker holds {self.version}"
                )

    def _check_present(self) -> None:
        if self.model.is_away:
            raise AwayError("this worker's weights wait on the host (leave); enter brings them back")


def _info(group: FinishedGroup, digest: str, worker: str) -> GroupInfo:
    trajectory = group.trajectory
    return GroupInfo(
        step=trajectory.step,
        group=trajectory.group,
        policy_version=trajectory.policy_version,
        weights_digest=digest,
        sigmas=tuple(trajectory.sigmas.tolist()),
        finite=group.finite,
        denoise_s=group.denoise_s,
        decode_s=group.decode_s,
        peak_bytes=peak_bytes(),
        worker=worker,
    )
