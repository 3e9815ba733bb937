"""A rollout worker: one policy replica that turns a GroupRequest into a trajectory and frames."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from sage_ray.config import Config
from sage_ray.models.condition import condition_tensors
from sage_ray.models.graphed import GraphedForward
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.lora import adapt
from sage_ray.models.packed_velocity import TORCH_DTYPES, guided_velocity
from sage_ray.noise import EVALUATION, TRAINING, initial_noise, step_noise
from sage_ray.sampler import Generated, generate
from sage_ray.transition import coefficients
from sage_ray.types import Condition, GroupInfo, GroupRequest, Trajectory
from sage_ray.weights import WeightPart, combined_digest, unpack


class StaleWeightsError(RuntimeError):
    """The worker does not hold the policy version it was asked for."""


class RolloutWorker:
    """Holds transformer, VAE and prompt encoders. Serves only the version it was asked for; -1 means no weights yet."""

    def __init__(self, config: Config, device: str):
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        self.config, self.device = config, device
        self.model = HunyuanVideo.load(Path(config.model.path), TORCH_DTYPES[config.model.dtype], device)
        if config.lora.rank:
            adapt(self.model.velocity, config.lora, config.seed, dtype=self.model.velocity.dtype)
            self.model.velocity.requires_grad_(False)
        self.forward = GraphedForward(self.model.velocity) if config.rollout.cuda_graphs else self.model.velocity
        sampling = config.sampling
        self.latent_shape = self.model.latent_shape(sampling.num_frames, sampling.height, sampling.width)
        self.version, self.digest = -1, ""

    def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def load_weights(self, version: int, digest: str, *parts: WeightPart) -> dict:
        """Take one published version. Returns version, digest and seconds; raises when anything does not match."""
        start = time.monotonic()
        self.version = -1
        if combined_digest([part.digest for part in parts]) != digest or parts[0].version != version:
            raise ValueError(f"weights: version {version} with digest {digest} was announced, other parts arrived")
        unpack(self.model.velocity, parts, self.model.velocity.trainable_names)
        self.version, self.digest = version, digest
        return {"version": version, "digest": digest, "seconds": time.monotonic() - start}

    def generate(self, *requests: GroupRequest) -> tuple[Trajectory | np.ndarray | GroupInfo, ...]:
        """Groups of one policy version: for each in turn its trajectory, frames uint8 [G, T, H, W, 3] and info.

        Those with the same stochastic steps share their forwards. Raises StaleWeightsError on another version.
        """
        for request in requests:
            if request.policy_version != self.version:
                raise StaleWeightsError(
                    f"policy version {request.policy_version} was asked for, this worker holds {self.version}"
                )
        alike = groupby(requests, key=lambda r: (r.sigmas, r.sde_type, r.eta, r.sde_steps, r.evaluation))
        return tuple(part for _, some in alike for group in self._generate(list(some)) for part in group)

    def _generate(self, requests: Sequence[GroupRequest]) -> Iterator[tuple[Trajectory, np.ndarray, GroupInfo]]:
        """Groups with the same steps, in one forward per step."""
        start = time.monotonic()
        conditions = [self.model.encode_prompt(request.prompt.text) for request in requests]
        guided = self.config.sampling.guidance_scale != 1.0
        negative = self.model.encode_prompt(self.config.sampling.negative_prompt) if guided else None
        generated = self._denoise(requests, conditions, negative)
        finite = generated.latents.isfinite().flatten(1).all(1).tolist()
        denoise_s = (time.monotonic() - start) / len(requests)
        start = time.monotonic()
        frames = self.model.decode(generated.latents).numpy()
        decode_s, first = (time.monotonic() - start) / len(requests), 0
        for request, condition in zip(requests, conditions, strict=True):
            videos = slice(first, first + request.group_size)
            first = videos.stop
            info = GroupInfo(
                step=request.step,
                group=request.group,
                policy_version=self.version,
                weights_digest=self.digest,
                sigmas=tuple(request.sigmas),
                finite=tuple(finite[videos]),
                denoise_s=denoise_s,
                decode_s=decode_s,
            )
            yield _trajectory(request, generated.of(videos), condition, negative), frames[videos], info

    def _denoise(
        self, requests: Sequence[GroupRequest], conditions: Sequence[Condition], negative: Condition | None
    ) -> Generated:
        sampling, first = self.config.sampling, requests[0]
        coefs = coefficients(
            first.sde_type,
            np.asarray(first.sigmas, np.float64),
            first.eta,
            last_step=sampling.last_step,
            sde_steps=first.sde_steps,
        )
        domain = EVALUATION if first.evaluation else TRAINING
        keys = [(r.seed, r.step, r.group, sample) for r in requests for sample in range(r.group_size)]

        def stack(videos: Iterable[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack(list(videos))).to(self.device)

        def noise(step: int) -> torch.Tensor:
            return stack(step_noise(*key, step, self.latent_shape, domain=domain) for key in keys)

        same = sampling.same_noise_per_group and not first.evaluation
        shape = self.latent_shape
        latents = stack(initial_noise(*key, shape, same_noise_per_group=same, domain=domain) for key in keys)
        positive = condition_tensors(conditions, self.device)
        negatives = None if negative is None else condition_tensors([negative], self.device)

        def velocity(x: torch.Tensor, sigma: float | np.ndarray) -> torch.Tensor:
            sigmas = np.atleast_1d(sigma)
            return guided_velocity(self.forward, x, sigmas, positive, negatives, sampling.guidance_scale)

        published = self.config.loss.cps_log_prob == "published"
        return generate(velocity, latents, coefs, noise, published_cps=published)


def _trajectory(
    request: GroupRequest, generated: Generated, condition: Condition, negative: Condition | None
) -> Trajectory:
    """What the learner needs of a group, as numpy: the states around its trained steps, and their log-probs."""
    states = sorted({state for step in request.trained_steps for state in (step, step + 1)})
    columns = [generated.sde_steps.index(step) for step in request.trained_steps]
    shape = (len(generated.latents), 0, *generated.latents.shape[1:])
    stored = [generated.states[state] for state in states]
    return Trajectory(
        step=request.step,
        group=request.group,
        prompt=request.prompt,
        policy_version=request.policy_version,
        sde_type=request.sde_type,
        eta=request.eta,
        sigmas=np.asarray(request.sigmas, np.float64),
        sde_steps=np.asarray(generated.sde_steps, np.int64),
        trained_steps=np.asarray(request.trained_steps, np.int64),
        states=np.asarray(states, np.int64),
        latents=torch.stack(stored, 1).cpu().numpy() if stored else np.zeros(shape, np.float32),
        log_probs=generated.log_probs[:, columns].cpu().numpy(),
        condition=condition,
        negative=negative,
    )
