"""Evaluates the policy version that the rollout workers hold: always the same prompts and noise, ODE sampling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ray

from actors.scored_rollouts import Rollout, ScoredRollouts
from actors.wait import wait_all
from sage_ray.checks import CheckedRun
from sage_ray.contact_sheet import NUM_FRAMES
from sage_ray.evaluation import (
    FIRST_GROUP,
    EvaluatedPolicy,
    EvaluatedSet,
    Preview,
    choose_prompts,
    evaluated_set,
    evaluation_requests,
    preview_places,
)
from sage_ray.progress import Progress
from sage_ray.schedule import sigma_grid
from sage_ray.training_schedule import training_schedule
from sage_ray.types import Prompt
from sage_ray.video import write_video

SMALL_WIDTH = 256
"""Pixels; smaller videos are enlarged by a whole factor for a player."""
FETCH_S = 600.0


class Evaluator:
    """The evaluation that a checked run asks for."""

    def __init__(self, run: CheckedRun, source: ScoredRollouts, progress: Progress):
        self.config, self.source, self.progress = run.config, source, progress
        self.output, settings = Path(run.config.output_dir), run.config.evaluation
        both = {"training": run.prompts, "held_out": run.held_out}
        self.prompts = {
            name: choose_prompts(both[name], settings.num_prompts) for name in both if name in settings.sets
        }
        self.sigmas = tuple(map(float, sigma_grid(settings.num_steps, training_schedule(run.config).shift)))

    def evaluate(self, name: str, folder: str, keep_frames: bool) -> EvaluatedPolicy:
        """Every score of every video under the present weights. Preview videos go to videos/<folder>; `keep_frames`
        also keeps some of their frames in memory, for the contact sheet."""
        sets = {}
        for which, prompts in self.prompts.items():
            with self.progress.phase(f"evaluate {which} prompts"):
                sets[which] = self._evaluate(which, prompts, folder, keep_frames)
        return EvaluatedPolicy(name, self.source.version, sets)

    def _evaluate(self, which: str, prompts: list[Prompt], folder: str, keep_frames: bool) -> EvaluatedSet:
        settings, version = self.config.evaluation, self.source.version
        requests = evaluation_requests(settings, self.sigmas, prompts, FIRST_GROUP[which], version)
        rollout = self.source.roll_out(requests)
        found = evaluated_set(prompts, rollout.scores, self.source.parts)
        previews = self._previews(which, folder, rollout, keep_frames)
        return EvaluatedSet(found.prompts, found.scores, found.failures, previews)

    def _previews(self, which: str, folder: str, rollout: Rollout, keep_frames: bool) -> tuple[Preview, ...]:
        """Write the previews, one video in memory at a time."""
        previews = []
        for number, place in enumerate(preview_places(len(rollout.groups))):
            (video,) = wait_all([_first_video.remote(rollout.groups[place].frames)], "a preview", FETCH_S)
            file = f"videos/{folder}/{which}_{number:02d}.mp4"
            write_video(self.output / file, video, self.config.sampling.fps, max(1, SMALL_WIDTH // video.shape[1]))
            some = video[np.linspace(0, len(video) - 1, NUM_FRAMES).round().astype(int)] if keep_frames else None
            previews.append(Preview(place, file, some))
        return tuple(previews)


@ray.remote(num_cpus=0)
def _first_video(frames: np.ndarray) -> np.ndarray:
    """The first video of a group, so that the driver fetches one video and not the group."""
    return np.array(frames[0])
