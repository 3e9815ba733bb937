"""The sigma grid and the steps of training rollouts, from a configuration and its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sage_ray.config import Config
from sage_ray.models.hunyuan_video import scheduler_shift
from sage_ray.schedule import sigma_grid
from sage_ray.step_plan import StepRule
from sage_ray.transition import Coefficients, coefficients


@dataclass(frozen=True)
class TrainingSchedule:
    """shift: of the grid; coefs: with every step stochastic that may be at some time; rule: which are, and when."""

    shift: float
    coefs: Coefficients
    rule: StepRule

    def describe(self) -> str:
        """One line for people: "steps 0 to 3 of 8 are stochastic, all are trained"."""
        rule, steps = self.rule, self.rule.candidates
        total = len(self.coefs.std)
        words = [f"of {total} steps {min(steps)} to {max(steps)} may be stochastic"]
        if rule.window_size is not None:
            words.append(f"a window of {rule.window_size} moves by {rule.move}")
        if rule.sde_fraction < 1:
            words.append(f"{rule.sde_fraction:g} of them are, drawn per group")
        return ", ".join([*words, f"{rule.num_trained} are trained"])


def training_schedule(config: Config) -> TrainingSchedule:
    """Raises ValueError naming file or key, and rule."""
    sampling = config.sampling
    shift = scheduler_shift(Path(config.model.path)) if sampling.shift is None else sampling.shift
    first, size = sampling.sde_window_start, sampling.sde_window_size
    fixed = size is not None and sampling.sde_window_move == "none"
    end = sampling.num_steps if size is None or not fixed else first + size
    coefs = coefficients(
        sampling.sde_type,
        sigma_grid(sampling.num_steps, shift),
        sampling.eta,
        last_step=sampling.last_step,
        sde_steps=tuple(range(first, end)),
    )
    candidates = tuple(int(step) for step in np.flatnonzero(coefs.stochastic))
    if not candidates:
        raise ValueError("sampling: no step of the grid is stochastic, nothing can be trained")
    if size is not None and not fixed and size > len(candidates):
        raise ValueError(
            f"sampling.sde_window_size={size}: must be at most {len(candidates)}, the steps from "
            f"sde_window_start={first} on that can be stochastic"
        )
    rule = StepRule(
        candidates=candidates,
        window_size=None if fixed else size,
        move=sampling.sde_window_move,
        stride=sampling.sde_window_stride,
        interval=sampling.sde_window_interval,
        sde_fraction=sampling.sde_fraction,
        trained_fraction=config.loss.timestep_fraction,
        permute=config.loss.timestep_permutation,
    )
    return TrainingSchedule(shift, coefs, rule)
