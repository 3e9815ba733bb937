"""Stored runs made up for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sage_ray.config_load import load_config, to_yaml
from sage_ray.evaluation import EvaluatedPolicy, EvaluatedSet, evaluated_set
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.experiment.spec import Budget, Cell, Experiment, job_of
from sage_ray.experiment.stored import CONFIG, METRICS, NOTE, ROWS
from sage_ray.row_file import write_rows
from sage_ray.types import Prompt
from tests.report.evaluated import PARTS, group

BUDGET = Budget("test", ("configs/shapes_cpu.yaml",), ("num_iterations=3",), (0, 1))
PROMPTS = ("a cat", "a dog", "a cow")


def evaluation(name: str, reward: float = 0.0, truth: float = 0.0) -> EvaluatedPolicy:
    """Two videos a prompt; every axis of video v of prompt p is p + v, plus `reward`; truth is half of p + v, plus
    `truth`."""
    base = [[[float(p + v)] * 3 for v in range(2)] for p in range(len(PROMPTS))]
    groups = [
        group([[x + reward for x in row] + [90.0] for row in axes], [[x / 2 + truth for x in row] for row in axes])
        for axes in base
    ]
    found: EvaluatedSet = evaluated_set([Prompt(i, text) for i, text in enumerate(PROMPTS)], groups, PARTS)
    return EvaluatedPolicy(name, 3, {"held_out": found})


def write_run(runs: Path, cell: Cell, seed: int, made: EvaluatedPolicy, spread: float = 1.0) -> Path:
    """A stored run of a cell; its spread falls to `spread` in the last third of nine iterations."""
    job = job_of(cell, BUDGET, seed)
    place = runs / job.key
    place.mkdir(parents=True)
    config = load_config([Path(file) for file in job.files], job.settings)
    (place / CONFIG).write_text(to_yaml(config))
    (place / NOTE).write_text(json.dumps({"seconds": 30.0, "device": "test"}))
    lines = [
        {"step": step, "time_s": 0.0, "reward/total": step / 9, "truth/total": 1.0,
         "reward/std_in_group": spread if step > 6 else 7.0, "kl/gradient_share": 0.25}
        for step in range(1, 10)
    ]  # fmt: skip
    (place / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_rows(place / ROWS, EvaluationRow, evaluation_rows([made]))
    return place


def fill(runs: Path, experiment: Experiment, gain: Callable[[str, int], float]) -> None:
    """Three seeds of every cell; `gain` of a cell and seed is added to every axis, half of it to truth."""
    for cell in experiment.cells:
        if cell.name == "base":
            write_run(runs, cell, 0, evaluation("base"))
            continue
        for seed in range(3):
            g = gain(cell.name, seed)
            write_run(runs, cell, seed, evaluation(cell.name, g, g / 2), spread=1 + g)


def half_width(values: list[float]) -> float:
    """Of the 95 % t interval of three values: 4.302653 standard errors."""
    return 4.302653 * float(np.std(values, ddof=1)) / np.sqrt(3)
