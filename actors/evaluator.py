"""Evaluates the policy version that the rollout workers hold: always the same prompts and noise, ODE sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import ray

from actors.rollout_group import GroupRefs
from actors.scored_rollouts import TRIES, Rollout, ScoredRollouts
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
from sage_ray.evaluation_rows import EvaluationRow, evaluated_policy
from sage_ray.metrics import FILE_NAME, read_lines
from sage_ray.progress import Progress
from sage_ray.row_file import read_rows
from sage_ray.schedule import sigma_grid
from sage_ray.training_schedule import training_schedule
from sage_ray.types import Prompt
from sage_ray.video import read_video, write_video

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

    def read(self) -> dict[int, EvaluatedPolicy]:
        """What an earlier process of this run has evaluated, by iteration: where numbers, rows and videos are there.
        The first one's previews have frames, and those of the run's last iteration."""
        found: dict[int, EvaluatedPolicy] = {}
        for line in read_lines(self.output / FILE_NAME):
            name = f"iteration_{line['step']:06d}"
            file = self.output / "evaluations" / f"{name}.parquet"
            if any(key.startswith("evaluation/") for key in line) and file.exists():
                policy = evaluated_policy(f"iteration {line['step']}", read_rows(file, EvaluationRow))
                ends = not found or line["step"] == self.config.num_iterations
                sets = {
                    which: self._as_evaluated(which, name, policy.sets[which], ends)
                    for which in self.prompts
                    if which in policy.sets
                }
                if sets.keys() == self.prompts.keys() and all(one.previews for one in sets.values()):
                    found[line["step"]] = replace(policy, sets=sets)
        return found

    def _as_evaluated(self, which: str, folder: str, evaluated: EvaluatedSet, keep_frames: bool) -> EvaluatedSet:
        """With the previews that `_previews` wrote; with none when one is missing or the prompts were others."""
        previews, prompts = [], tuple(self.prompts[which])
        if [(p.index, p.text) for p in prompts] != [(p.index, p.text) for p in evaluated.prompts]:
            return evaluated
        for number, place in enumerate(preview_places(len(evaluated.prompts))):
            file = f"videos/{folder}/{which}_{number:02d}.mp4"
            if not (self.output / file).exists():
                return evaluated
            video = read_video(self.output / file) if keep_frames else None
            previews.append(Preview(place, file, None if video is None else _some_frames(video)))
        return replace(evaluated, prompts=prompts, previews=tuple(previews))

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
            video = self._first_video(rollout.groups[place])
            file = f"videos/{folder}/{which}_{number:02d}.mp4"
            write_video(self.output / file, video, self.config.sampling.fps, max(1, SMALL_WIDTH // video.shape[1]))
            previews.append(Preview(place, file, _some_frames(video) if keep_frames else None))
        return tuple(previews)

    def _first_video(self, refs: GroupRefs) -> np.ndarray:
        """Of a group, which is made again when its frames are lost."""
        for _ in range(TRIES):
            try:
                return wait_all([_first_video.remote(refs.frames)], "a preview", FETCH_S)[0]
            except ray.exceptions.ObjectLostError:
                (refs,) = self.source.make_again([refs])
        raise RuntimeError(f"frames of evaluated group {refs.request.group} were lost {TRIES} times")


def _some_frames(video: np.ndarray) -> np.ndarray:
    return video[np.linspace(0, len(video) - 1, NUM_FRAMES).round().astype(int)]


@ray.remote(num_cpus=0, max_retries=0)
def _first_video(frames: np.ndarray) -> np.ndarray:
    """The first video of a group, so that the driver fetches one video and not the group."""
    return np.array(frames[0])
