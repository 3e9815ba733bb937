"""Groups of videos from requests, in two halves: denoise, then decode. The second of one task may run beside the first
of the next."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from sage_ray.config import Config
from sage_ray.host_copy import HostCopy
from sage_ray.models.condition import condition_tensors
from sage_ray.models.graphed import GraphedForward
from sage_ray.models.hunyuan_video import HunyuanVideo
from sage_ray.models.packed_velocity import guided_velocity
from sage_ray.noise import EVALUATION, TRAINING, initial_noise, step_noise
from sage_ray.sampler import Generated, Velocity, generate, replay
from sage_ray.transition import Coefficients, coefficients
from sage_ray.types import Condition, GroupRequest, Trajectory


@dataclass(frozen=True)
class _Stored:
    """What a group's trajectory keeps. positions: S places on the sigma grid; states: float32 [G, S, C, F, H, W], on
    their way to the host; log_probs: float32 [G, K] in parts; sde_steps: every stochastic step."""

    positions: list[int]
    states: HostCopy
    log_probs: list[np.ndarray]
    sde_steps: tuple[int, ...]


@dataclass(frozen=True)
class Denoised:
    """Groups whose videos are decoded together.

    latents: float32 [sum of G, C, F, H, W] at sigma 0, on the device; finite: for each video whether they are;
    seconds: per group.
    """

    requests: Sequence[GroupRequest]
    conditions: Sequence[Condition]
    negative: Condition | None
    stored: Sequence[_Stored]
    latents: torch.Tensor
    finite: tuple[bool, ...]
    seconds: float


@dataclass(frozen=True)
class FinishedGroup:
    """frames: uint8 [G, T, H, W, 3]; finite: [G]; seconds of the two halves."""

    trajectory: Trajectory
    frames: np.ndarray
    finite: tuple[bool, ...]
    denoise_s: float
    decode_s: float


class GroupRollout:
    """Samples groups with a model, as a configuration says. Each half may run in any thread, one call at a time."""

    def __init__(self, config: Config, model: HunyuanVideo):
        self.config, self.model = config, model
        self.forward = GraphedForward(model.velocity) if config.rollout.cuda_graphs else model.velocity
        sampling = config.sampling
        self.latent_shape = model.latent_shape(sampling.num_frames, sampling.height, sampling.width)
        beside = config.rollout.overlap_decode and model.device.type == "cuda"
        self._decode_stream = torch.cuda.Stream(model.device) if beside else None

    def denoise(self, requests: Sequence[GroupRequest]) -> list[Denoised]:
        """All requests under the weights that the model holds now. Every prompt that is new is encoded first."""
        start, sampling = time.monotonic(), self.config.sampling
        texts = [request.prompt.text for request in requests]
        guided = [sampling.negative_prompt] if sampling.guidance_scale != 1.0 else []
        conditions = self.model.encode_prompts([*texts, *guided])
        negative = conditions[-1] if guided else None
        encode_s, first, denoised = (time.monotonic() - start) / len(requests), 0, []
        for together in self._together(requests):
            own = conditions[first : first + len(together)]
            first += len(together)
            denoised.append(self._denoise(together, own, negative, encode_s))
        return denoised

    def decode(self, groups: Denoised) -> Iterator[FinishedGroup]:
        """Frames and trajectories of groups that `denoise` gave."""
        start = time.monotonic()
        # `finite` was read on the host, so the latents are there for any stream.
        with nullcontext() if self._decode_stream is None else torch.cuda.stream(self._decode_stream):
            frames = self.model.decode(groups.latents).numpy()
        decode_s, first = (time.monotonic() - start) / len(groups.requests), 0
        for request, condition, stored in zip(groups.requests, groups.conditions, groups.stored, strict=True):
            videos = slice(first, first + request.group_size)
            first = videos.stop
            trajectory = _trajectory(request, stored, condition, groups.negative)
            yield FinishedGroup(trajectory, frames[videos], groups.finite[videos], groups.seconds, decode_s)

    @torch.no_grad()
    def replay(self, trajectory: Trajectory) -> np.ndarray:
        """Log-probs float32 [G, K] of a trajectory's trained steps under the present weights."""
        t, sampling = trajectory, self.config.sampling
        steps = tuple(map(int, t.sde_steps))
        coefs = coefficients(t.sde_type, t.sigmas, t.eta, last_step=sampling.last_step, sde_steps=steps)
        velocity, published = self._velocity([t.condition], t.negative), self.config.loss.cps_log_prob == "published"
        places = {int(position): place for place, position in enumerate(t.states)}
        size, found = self.config.learner.videos_per_pass or len(t.latents), np.empty_like(t.log_probs)
        for first in range(0, len(t.latents), size):
            videos = slice(first, first + size)
            latents = torch.tensor(t.latents[videos], device=self.model.device)
            for column, step in enumerate(map(int, t.trained_steps)):
                pair = latents[:, places[step]], latents[:, places[step + 1]]
                log_prob, _ = replay(velocity, coefs, step, *pair, published_cps=published)
                found[videos, column] = log_prob.cpu().numpy()
        return found

    def _together(self, requests: Sequence[GroupRequest]) -> Iterator[list[GroupRequest]]:
        """Requests whose steps are the same share forwards, unless the learner cuts groups into smaller passes."""
        most = self.config.learner.videos_per_pass
        for _, alike in groupby(requests, key=lambda r: (r.sigmas, r.sde_type, r.eta, r.sde_steps, r.evaluation)):
            some = list(alike)
            if most is not None and any(request.group_size > most for request in some):
                yield from ([request] for request in some)
            else:
                yield some

    def _denoise(
        self,
        requests: Sequence[GroupRequest],
        conditions: Sequence[Condition],
        negative: Condition | None,
        encode_s: float,
    ) -> Denoised:
        """Some groups whole in one forward per step, or one group in parts of the shape of the learner's passes."""
        start, last = time.monotonic(), []
        coefs, velocity = self._coefficients(requests[0]), self._velocity(conditions, negative)
        stored = [self._stored(request, coefs) for request in requests]
        size = max(request.group_size for request in requests)
        part_size = min(self.config.learner.videos_per_pass or size, size)
        for first in range(0, size, part_size):
            parts = [range(first, min(first + part_size, request.group_size)) for request in requests]
            generated, row = self._sample(requests, parts, coefs, velocity), 0
            last.append(generated.latents)
            for request, samples, kept in zip(requests, parts, stored, strict=True):
                _store(kept, request, samples, generated.of(slice(row, row + len(samples))))
                row += len(samples)
        latents = torch.cat(last)
        finite = tuple(latents.isfinite().flatten(1).all(1).tolist())
        seconds = (time.monotonic() - start) / len(requests) + encode_s
        return Denoised(requests, conditions, negative, stored, latents, finite, seconds)

    def _sample(
        self, requests: Sequence[GroupRequest], parts: Sequence[range], coefs: Coefficients, velocity: Velocity
    ) -> Generated:
        """Some videos of every request from noise to latents; parts: which."""
        sampling, shape, evaluation = self.config.sampling, self.latent_shape, requests[0].evaluation
        domain = EVALUATION if evaluation else TRAINING
        keys = [(r.seed, r.step, r.group, sample) for r, part in zip(requests, parts, strict=True) for sample in part]

        def stack(videos: Iterable[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack(list(videos))).to(self.model.device)

        def noise(step: int) -> torch.Tensor:
            return stack(step_noise(*key, step, shape, domain=domain) for key in keys)

        same = sampling.same_noise_per_group and not evaluation
        latents = stack(initial_noise(*key, shape, same_noise_per_group=same, domain=domain) for key in keys)
        published = self.config.loss.cps_log_prob == "published"
        return generate(velocity, latents, coefs, noise, published_cps=published)

    def _velocity(self, conditions: Sequence[Condition], negative: Condition | None) -> Velocity:
        """The guided velocity of videos whose rows are these conditions."""
        device, scale = self.model.device, self.config.sampling.guidance_scale
        positive = condition_tensors(conditions, device)
        negatives = None if negative is None else condition_tensors([negative], device)

        def velocity(latents: torch.Tensor, sigma: float | np.ndarray) -> torch.Tensor:
            return guided_velocity(self.forward, latents, np.atleast_1d(sigma), positive, negatives, scale)

        return velocity

    def _coefficients(self, request: GroupRequest) -> Coefficients:
        sigmas, last_step = np.asarray(request.sigmas, np.float64), self.config.sampling.last_step
        return coefficients(request.sde_type, sigmas, request.eta, last_step=last_step, sde_steps=request.sde_steps)

    def _stored(self, request: GroupRequest, coefs: Coefficients) -> _Stored:
        positions = sorted({position for step in request.trained_steps for position in (step, step + 1)})
        shape = (request.group_size, len(positions), *self.latent_shape)
        return _Stored(positions, HostCopy(shape, torch.float32, self.model.device), [], coefs.sde_steps)


def _store(stored: _Stored, request: GroupRequest, samples: range, generated: Generated) -> None:
    """Start the states around the trained steps on their way, and keep the log-probs."""
    if stored.positions:
        states = torch.stack([generated.states[position] for position in stored.positions], 1)
        stored.states.write(slice(samples.start, samples.stop), states)
    columns = [generated.sde_steps.index(step) for step in request.trained_steps]
    stored.log_probs.append(generated.log_probs[:, columns].cpu().numpy())


def _trajectory(request: GroupRequest, stored: _Stored, condition: Condition, negative: Condition | None) -> Trajectory:
    """What the learner needs of a group, as numpy: the states around its trained steps, and their log-probs."""
    return Trajectory(
        step=request.step,
        group=request.group,
        prompt=request.prompt,
        policy_version=request.policy_version,
        sde_type=request.sde_type,
        eta=request.eta,
        sigmas=np.asarray(request.sigmas, np.float64),
        sde_steps=np.asarray(stored.sde_steps, np.int64),
        trained_steps=np.asarray(request.trained_steps, np.int64),
        states=np.asarray(stored.positions, np.int64),
        latents=stored.states.numpy(),
        log_probs=np.concatenate(stored.log_probs),
        condition=condition,
        negative=negative,
    )
