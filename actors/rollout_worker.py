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

from actors.clocked import Clocked, phase
from actors.stored_weights import stored_bucket
from actors.weight_ends import WeightReceiver
from sage_ray.checksum import Content, merge
from sage_ray.config import Config
from sage_ray.device_memory import forget_peak, peak_bytes
from sage_ray.group_rollout import FinishedGroup, GroupRollout
from sage_ray.memory_report import MemoryPart, rollout_memory
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.lora import adapt
from sage_ray.models.packed_velocity import TORCH_DTYPES
from sage_ray.models.stock_velocity import velocity_kind
from sage_ray.structured_log import note
from sage_ray.types import GroupInfo, GroupRequest, Trajectory
from sage_ray.weights import WeightPart, unpack


class StaleWeightsError(RuntimeError):
    """The worker does not hold the policy version it was asked for."""


class AwayError(RuntimeError):
    """The worker's weights are not on its device."""


class RolloutWorker(Clocked, WeightReceiver):
    """Holds transformer, VAE and prompt encoders. Serves only the version it was asked for; -1 means no weights yet.

    Its methods may be called from several threads: one denoises, and meanwhile another decodes.
    """

    @phase("load")
    def __init__(self, config: Config, device: str, name: str = "rollout"):
        self.speaks_for(config)
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
        self.version, self.digest, self._sent = -1, "", (-1, "")
        self._denoising, self._decoding = Lock(), Lock()  # who needs both takes them in this order

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def memory(self) -> list[MemoryPart]:
        """What this worker keeps, part by part."""
        return rollout_memory(self.model)

    def holds(self) -> tuple[int, str]:
        """Version and digest of the weights; -1 when there are none."""
        return self.version, self.digest

    @phase("turn")
    def leave(self) -> int:
        """Take all weights off the device, after what runs has ended; bytes freed, 0 when they are away already."""
        with self._denoising, self._decoding:
            return self.model.leave()

    @phase("turn")
    def enter(self) -> None:
        """Bring all weights back to the device."""
        with self._denoising, self._decoding:
            self.model.enter()

    @phase("weights")
    def load_weights(self, version: int, digest: str, *parts: WeightPart) -> dict:
        """Take one published version, after the denoising that runs: from its parts, or, without any, what was last
        sent (`receive_weights`). Returns version, digest and seconds; raises when anything does not match."""
        with self._denoising:
            start = time.monotonic()
            self._check_present()
            if not parts:
                self._take_sent(version, digest)
                return {"version": version, "digest": digest, "seconds": time.monotonic() - start}
            self.version, self._sent = -1, (-1, "")
            if merge([part.content for part in parts]).digest != digest or parts[0].version != version:
                raise ValueError(f"weights: version {version} with digest {digest} was announced, other parts arrived")
            unpack(self.model.velocity, parts, self.model.velocity.trainable_names, stored_bucket)
            self.version, self.digest = version, digest
            forget_peak()
            return {"version": version, "digest": digest, "seconds": time.monotonic() - start}

    @phase("weights")
    def receive_weights(self, version: int) -> tuple[Content, dict[str, float]]:
        """Take what the learner sends, after the denoising that runs, into the weights themselves; what they contain,
        and seconds. `load_weights` then says which content it had to be; until then, and after an error, this worker
        has no version."""
        with self._denoising:
            self._check_present()
            self.version, self._sent = -1, (-1, "")
            content, seconds = self.receive_into_parameters()
            self._sent = version, content.digest
            forget_peak()
            return content, seconds

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.model.velocity.named_parameters()}

    def expected_names(self) -> frozenset[str]:
        return self.model.velocity.trainable_names

    def _take_sent(self, version: int, digest: str) -> None:
        if self._sent != (version, digest):
            raise StaleWeightsError(f"version {version} with digest {digest} was announced, {self._sent} was sent here")
        self.version, self.digest = version, digest

    def generate(self, *requests: GroupRequest) -> tuple[Trajectory | np.ndarray | GroupInfo, ...]:
        """Groups of one policy version: for each in turn its trajectory, frames uint8 [G, T, H, W, 3] and info.

        Those with the same stochastic steps share their forwards. Raises StaleWeightsError on another version,
        AwayError between `leave` and `enter`.
        """
        with ExitStack() as decoding:
            with self._denoising, self.clock.phase("denoise"):
                self._check_version(requests)
                digest, denoised = self.digest, self.rollout.denoise(requests)
                # Before the other turn ends: between the two, weights must not leave.
                decoding.enter_context(self._decoding)
            with self.clock.phase("decode"):
                finished = [group for groups in denoised for group in self.rollout.decode(groups)]
        parts = ((replace(g.trajectory, worker=self.name), g.frames, _info(g, digest, self.name)) for g in finished)
        return tuple(part for group in parts for part in group)

    @phase("replay")
    def disagreement(self, trajectory: Trajectory) -> float:
        """Largest difference of a trajectory's log-probs and those that this worker's weights, which must be of its
        version, give to it, nats per dimension; infinite where one is no number."""
        with self._denoising:
            self._check_present()
            if trajectory.policy_version != self.version:
                raise StaleWeightsError(
                    f"version {trajectory.policy_version} is to be replayed, {self.version} is here"
                )
            difference = np.abs(self.rollout.replay(trajectory) - trajectory.log_probs)
        return float(np.where(np.isfinite(difference), difference, np.inf).max())

    def _check_version(self, requests: Sequence[GroupRequest]) -> None:
        note(step=requests[0].step, version=self.version)
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
        trajectory_bytes=trajectory.latents.nbytes,
        frames_bytes=group.frames.nbytes,
    )
