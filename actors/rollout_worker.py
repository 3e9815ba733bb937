"""A rollout worker: one policy replica that turns a GroupRequest into a trajectory and frames."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sage_ray.config import Config
from sage_ray.models.hunyuan_video import TORCH_DTYPES, HunyuanVideo, condition_tensors, guided_velocity
from sage_ray.models.lora import adapt
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

    def generate(self, request: GroupRequest) -> tuple[Trajectory, np.ndarray, GroupInfo]:
        """One group: (trajectory, frames uint8 [G, T, H, W, 3], info). Raises StaleWeightsError on another version."""
        if request.policy_version != self.version:
            raise StaleWeightsError(
                f"policy version {request.policy_version} was asked for, this worker holds {self.version}"
            )
        start = time.monotonic()
        condition = self.model.encode_prompt(request.prompt.text)
        guided = self.config.sampling.guidance_scale != 1.0
        negative = self.model.encode_prompt(self.config.sampling.negative_prompt) if guided else None
        generated = self._denoise(request, condition, negative)
        denoise_s = time.monotonic() - start
        frames = self.model.decode(generated.latents).numpy()
        info = GroupInfo(
            step=request.step,
            group=request.group,
            policy_version=self.version,
            weights_digest=self.digest,
            sigmas=tuple(request.sigmas),
            finite=tuple(generated.latents.isfinite().flatten(1).all(1).tolist()),
            denoise_s=denoise_s,
            decode_s=time.monotonic() - start - denoise_s,
        )
        return _trajectory(request, generated, condition, negative), frames, info

    def _denoise(self, request: GroupRequest, condition: Condition, negative: Condition | None) -> Generated:
        sampling = self.config.sampling
        coefs = coefficients(
            request.sde_type,
            np.asarray(request.sigmas, np.float64),
            request.eta,
            last_step=sampling.last_step,
            sde_steps=request.sde_steps,
        )
        domain = EVALUATION if request.evaluation else TRAINING
        key = (request.seed, request.step, request.group)

        def stack(samples: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack(samples)).to(self.device)

        def noise(step: int) -> torch.Tensor:
            members = range(request.group_size)
            return stack([step_noise(*key, g, step, self.latent_shape, domain=domain) for g in members])

        latents = stack(
            [
                initial_noise(
                    *key,
                    sample,
                    self.latent_shape,
                    same_noise_per_group=sampling.same_noise_per_group and not request.evaluation,
                    domain=domain,
                )
                for sample in range(request.group_size)
            ]
        )
        conditions = condition_tensors(condition, self.device)
        negatives = None if negative is None else condition_tensors(negative, self.device)

        def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            return guided_velocity(self.model.velocity, x, sigma, conditions, negatives, sampling.guidance_scale)

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
