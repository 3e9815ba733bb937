"""Noise as a pure function of (seed, step, group, sample, sde step): the same on whichever worker draws it.

A counter-based generator (Philox 4x64) is keyed by the seed and a domain; the other numbers are its counter, so no
two keys share a stream and a re-assigned group is the same group.
"""

from __future__ import annotations

import operator

import numpy as np

TRAINING, EVALUATION = 0, 1
"""Domains: evaluation noise never repeats training noise."""
_LIMIT = 2**31


def step_noise(
    seed: int, step: int, group: int, sample: int, sde_step: int, shape: tuple[int, ...], *, domain: int = TRAINING
) -> np.ndarray:
    """Standard normal noise of one stochastic step, float32 [*shape].

    Raises: ValueError for a part outside [0, 2**31), TypeError for one that is not an integer.
    """
    return _draw(seed, (step, group, sample, sde_step), shape, domain)


def initial_noise(
    seed: int,
    step: int,
    group: int,
    sample: int,
    shape: tuple[int, ...],
    *,
    same_noise_per_group: bool = False,
    domain: int = TRAINING,
) -> np.ndarray:
    """Initial latents at sigma = 1, float32 [*shape]; equal within a group when `same_noise_per_group`.

    Raises: as `step_noise`.
    """
    return _draw(seed, (step, group, 0 if same_noise_per_group else sample, None), shape, domain)


def _draw(seed: int, parts: tuple[int, int, int, int | None], shape: tuple[int, ...], domain: int) -> np.ndarray:
    """Noise of one key; sde_step None is the initial noise."""
    step, group, sample, sde_step = parts
    named = {"seed": seed, "step": step, "group": group, "sample": sample, "domain": domain}
    if sde_step is not None:
        named["sde_step"] = sde_step
    # Plain ints: a numpy int32 would lose its group in the shift below, a float its fraction.
    key = {name: operator.index(value) for name, value in named.items()}
    for name, value in key.items():
        if not 0 <= value < _LIMIT:
            raise ValueError(f"{name}: {value} must lie in [0, 2**31) to key the noise")
    # The lowest counter word is the generator's own; the other three hold the key without overlap.
    counter = [0, key["step"], (key["group"] << 32) | key["sample"], key.get("sde_step", -1) + 1]
    bits = np.random.Philox(
        key=np.array([key["seed"], key["domain"]], dtype=np.uint64), counter=np.array(counter, dtype=np.uint64)
    )
    return np.random.Generator(bits).standard_normal(shape, dtype=np.float32)
