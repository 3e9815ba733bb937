"""What an experiment is: cells (settings) x seeds, each cell with its importance; and the order in which runs are made.

A file configs/experiment/NAME.yaml states title, cells and claims; configs/experiment/budget/*.yaml states what every
cell of every experiment shares (recipe, settings, seeds). Two experiments whose cells come to the same configuration
share its runs: a run is found by what its configuration comes to, not by a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sage_ray.config import Config, dotted_keys, value_at
from sage_ray.config_check import validate
from sage_ray.config_load import load_config
from sage_ray.resume import FREE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "experiment"
COUNTED = "evaluation."
"""Settings that a resumed run may change, but that make another result here."""
BASE = "base"
"""Name of the cell that trains nothing: the policy before training."""


@dataclass(frozen=True)
class Cell:
    """One row of a table. settings: key=value beyond the budget's; tier: 1 is made first; note: the paper's word."""

    name: str
    label: str
    settings: tuple[str, ...] = ()
    tier: int = 1
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """What the paper says of two cells: `better` is above `worse` in `measure` (see results.py). source: where."""

    text: str
    source: str
    measure: str
    better: str
    worse: str


@dataclass(frozen=True)
class Experiment:
    """A file of configs/experiment/."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    figure: str | None = None
    about: str = ""


@dataclass(frozen=True)
class Budget:
    """What all cells share. files: recipes in order; judges: further recipes for the evaluation only; seeds: to report
    on; evaluation: settings of it."""

    name: str
    files: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    judges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run to be made: plain data that travels to where it is made. key: its folder among the stored runs; trains:
    False evaluates the policy as it is."""

    key: str
    files: tuple[str, ...]
    settings: tuple[str, ...]
    judges: tuple[str, ...] = ()
    trains: bool = True
    keep_videos: bool = False
    wanted_by: tuple[str, ...] = field(default=(), compare=False)


def _checked(file: Path, kind: type, content: Any, **more: Any) -> Any:
    """`kind` from a mapping of its fields. Raises: ValueError naming file, key and rule."""
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a mapping where a {kind.__name__.lower()} stands, holds {content!r}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()} | more
    known = kind.__dataclass_fields__
    for key in given.keys() - known.keys():
        raise ValueError(f"{file}: unknown key {key!r} in a {kind.__name__.lower()}, known are {', '.join(known)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{file}: {kind.__name__.lower()} {content}: {error}") from error


def _content(file: Path, what: str) -> Any:
    if not file.is_file():
        others = ", ".join(sorted(other.stem for other in file.parent.glob("*.yaml")))
        raise ValueError(f"{what} {file.stem!r}: must be one of {others}")
    try:
        return yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML: {error}") from error


def read_experiment(name: str, folder: Path = FOLDER) -> Experiment:
    """Raises: ValueError naming file, key and rule."""
    file = folder / f"{name}.yaml"
    content = _content(file, "experiment")
    if not isinstance(content, dict) or not content.get("cells"):
        raise ValueError(f"{file}: must hold title and cells")
    cells = tuple(_checked(file, Cell, cell) for cell in content["cells"])
    claims = tuple(_checked(file, Claim, claim) for claim in content.get("claims", []))
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: cells {names}: names must differ")
    for claim in claims:
        for cell in (claim.better, claim.worse):
            if cell not in names:
                raise ValueError(f"{file}: claim {claim.text!r}: cell {cell!r} must be one of {', '.join(names)}")
    return _checked(file, Experiment, content, name=name, cells=cells, claims=claims)


def read_budget(name: str, folder: Path = FOLDER / "budget") -> Budget:
    """Raises: ValueError naming file, key and rule."""
    file = folder / f"{name}.yaml"
    budget = _checked(file, Budget, _content(file, "budget"), name=name)
    if not budget.seeds:
        raise ValueError(f"{file}: seeds must not be empty")
    return budget


def job_of(cell: Cell, budget: Budget, seed: int) -> Job:
    """The run of a cell with a seed; of the base there is one for all seeds. Raises: ConfigError."""
    trains = cell.name != BASE
    settings = (*budget.settings, *cell.settings, *((f"seed={seed}",) if trains else ()))
    files = tuple(str(ROOT / file) for file in budget.files)
    config = load_config([Path(file) for file in files], settings)
    validate(config)
    key = f"{_slug(config)}/seed_{seed}" if trains else f"base_{digest(config, _is_of_base)}"
    return Job(key, files, settings, tuple(str(ROOT / file) for file in budget.judges), trains)


def _slug(config: Config) -> str:
    """Readable, and different for different configurations; the seed apart."""
    kl = config.kl.mode
    return f"{config.sampling.sde_type}_{kl}_{config.reward.setting}_{digest(config, _counts)}"


def digest(config: Config, counts: Any) -> str:
    """Eight hexadecimal digits of all settings that count and are not the default, so that a setting that is new to the
    program leaves a stored run's name as it is. Paths count as they are written."""
    usual = Config()
    given = {key: str(value_at(config, key)) for key in dotted_keys() if counts(key)}
    text = yaml.safe_dump({key: value for key, value in given.items() if value != str(value_at(usual, key))})
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _counts(key: str) -> bool:
    """Whether a setting changes a run's result; the seed is counted apart."""
    return key != "seed" and (key.startswith(COUNTED) or not key.startswith(FREE))


def _is_of_base(key: str) -> bool:
    """Whether a setting changes the evaluation of the policy before training."""
    sampling = ("sampling.height", "sampling.width", "sampling.num_frames", "sampling.fps", "sampling.shift")
    models = ("model.path", "model.dtype", "reward.path", "reward.dtype", "data.held_out_prompts", "data.prompts")
    return key.startswith(COUNTED) or key in (*sampling, "sampling.guidance_scale", *models)


def queue(
    experiments: Sequence[Experiment],
    budget: Budget,
    seeds: Sequence[int] | None = None,
    max_tier: int | None = None,
) -> list[Job]:
    """Every run of the experiments once, in order of importance: tier by tier; in a tier seed by seed, so that a sweep
    that ends early has the same n in every cell; then in the files' order. Videos are kept of the first seed."""
    seeds = tuple(budget.seeds if seeds is None else seeds)
    found: dict[str, Job] = {}
    wanted: dict[str, list[str]] = {}
    tiers = sorted({cell.tier for experiment in experiments for cell in experiment.cells})
    for tier in [tier for tier in tiers if max_tier is None or tier <= max_tier]:
        for seed in seeds:
            for experiment in experiments:
                for cell in experiment.cells:
                    if cell.tier != tier:
                        continue
                    job = job_of(cell, budget, seed)
                    found.setdefault(job.key, job)
                    wanted.setdefault(job.key, []).append(f"{experiment.name}/{cell.name}")
    first = f"/seed_{seeds[0]}"
    return [
        Job(
            job.key,
            job.files,
            job.settings,
            job.judges,
            job.trains,
            not job.trains or job.key.endswith(first),
            tuple(dict.fromkeys(wanted[key])),
        )
        for key, job in found.items()
    ]
