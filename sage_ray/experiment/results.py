"""Numbers of stored runs: what each gained over the policy before training, on the same prompts and noise.

Measures: overall (VQ + MQ + TA), VQ, MQ, TA, reward and truth (weighted as the run trains), match, further judges by
their name (clip), hacking (reward gained minus truth gained, each in standard deviations over the base's videos) and
spread (standard deviation of the reward in a training group, mean of the last third of the iterations; no gain).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sage_ray.config import Config, axis_weights
from sage_ray.evaluation import EvaluatedSet, prompt_means
from sage_ray.evaluation_rows import evaluated_policy
from sage_ray.experiment.spec import BASE, Budget, Cell, Experiment, job_of
from sage_ray.experiment.stored import StoredRun, is_stored, read_run
from sage_ray.types import AXES

SET = "held_out"
HACKING, SPREAD, REWARD, TRUTH = "hacking", "spread", "reward", "truth"
SPREAD_METRIC = "reward/std_in_group"


@dataclass(frozen=True)
class Results:
    """An experiment's stored runs. base: of the policy before training; runs: cell -> seed -> run."""

    experiment: Experiment
    base: StoredRun
    runs: Mapping[str, Mapping[int, StoredRun]]
    _sets: dict[Path, EvaluatedSet] = field(default_factory=dict, compare=False)

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.experiment.cells if cell.name == name)

    def evaluated(self, run: StoredRun) -> EvaluatedSet:
        """The held-out videos of a run."""
        if run.path not in self._sets:
            self._sets[run.path] = evaluated_policy(run.path.name, run.rows).sets[SET]
        return self._sets[run.path]

    def judges(self) -> list[str]:
        """Scores beside VideoAlign's axes that the base's videos have."""
        named = (score.removeprefix("reward ") for score in self.evaluated(self.base).scores if " " in score)
        return [name for name in dict.fromkeys(named) if name not in AXES and not name.startswith("truth")]

    def values(self, run: StoredRun, measure: str, config: Config) -> np.ndarray:
        """[P * V] of a run's videos, weighted as `config` trains."""
        scores, weights = self.evaluated(run).scores, axis_weights(config.reward)
        if measure in (REWARD, TRUTH):
            return np.sum([w * scores[f"{measure} {axis}"] for w, axis in zip(weights, AXES, strict=True)], axis=0)
        if measure == "overall":
            return np.sum([scores[f"reward {axis}"] for axis in AXES], axis=0)
        return scores[measure if measure == "match" else f"reward {measure}"]

    def differences(self, run: StoredRun, measure: str) -> np.ndarray:
        """[P] gains of a run over the base, one a prompt. Raises: ValueError when other videos were evaluated."""
        if measure == HACKING:
            parts = [self.differences(run, part) / self.unit(part, run.config) for part in (REWARD, TRUTH)]
            return parts[0] - parts[1]
        before, after = self.evaluated(self.base), self.evaluated(run)
        if [p.text for p in before.prompts] != [p.text for p in after.prompts]:
            raise ValueError(f"{run.path}: was evaluated on other prompts than {self.base.path}")
        change = self.values(run, measure, run.config) - self.values(self.base, measure, run.config)
        return prompt_means(change, before.videos_per_prompt)

    def unit(self, measure: str, config: Config) -> float:
        """Standard deviation over the base's videos; of hacking 1, it is in such units."""
        if measure == HACKING:
            return 1.0
        values = self.values(self.base, measure, config)
        return float(np.std(values[np.isfinite(values)], ddof=1))

    def outcome(self, run: StoredRun, measure: str) -> float:
        """The run's gain over the base, or its spread."""
        if measure == SPREAD:
            curve = [line[SPREAD_METRIC] for line in run.metrics if line.get(SPREAD_METRIC) is not None]
            return float(np.mean(curve[-max(1, len(curve) // 3) :]))
        return float(self.differences(run, measure).mean())

    def outcomes(self, name: str, measure: str) -> dict[int, float]:
        """Seed -> outcome of a cell's runs."""
        return {seed: self.outcome(run, measure) for seed, run in self.runs[name].items()}


def read_results(experiment: Experiment, budget: Budget, folder: Path) -> Results:
    """Every stored run of an experiment, of whatever seeds. Raises: ValueError when the base is missing."""
    found: dict[str, dict[int, StoredRun]] = {}
    for cell in experiment.cells:
        if cell.name == BASE:
            continue
        place = folder / Path(job_of(cell, budget, 0).key).parent
        seeds = sorted(int(path.name.removeprefix("seed_")) for path in place.glob("seed_*"))
        found[cell.name] = {
            seed: read_run(place / f"seed_{seed}") for seed in seeds if is_stored(place, f"seed_{seed}")
        }
    key = job_of(next(cell for cell in experiment.cells if cell.name == BASE), budget, 0).key
    if not is_stored(folder, key):
        raise ValueError(f"{folder / key}: is not stored; launch.py experiment {experiment.name} makes it")
    return Results(experiment, read_run(folder / key), found)


def cost(runs: Sequence[StoredRun]) -> tuple[float, list[str]]:
    """(minutes that the runs took, added up, devices)."""
    return sum(run.note["seconds"] for run in runs) / 60, sorted({run.note["device"] for run in runs})
