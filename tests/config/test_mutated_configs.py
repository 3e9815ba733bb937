"""Damaged configurations: each resolves, with a layout or a clear misfit, or is refused by one clear error.

200 by default; `SAGE_CONFIGS=10000 pytest tests/config/test_mutated_configs.py` makes more. Files of recipes are
changed in one to three places (values, keys, sections, letters of the text), overrides are added, and what passes is
planned on a cluster of random nodes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.layout import Node, describe, plan
from sage_ray.config import Config, ConfigError, dotted_keys, type_words
from sage_ray.config_check import validate
from sage_ray.config_load import load_config, to_yaml
from sage_ray.plan import plan as plan_lines
from sage_ray.training_schedule import training_schedule
from tests.small import ROOT

NUM = int(os.environ.get("SAGE_CONFIGS", "200"))
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 8, 64, 1e-30, 0.5, 1.5, 1e30, 2**31, 2**70, 10**400, float("nan"), float("inf"), -0.0),
    *(True, False, None, "", " ", "auto", "cuda", "null", "1e-3", "0x10", "true", "\u00e9\u4e2d", "a\nb", "x" * 5000),
    *([], [1], ["a", "b"], [[1]], {}, {"a": 1}, {"learner": "in(a"}, {"rollout": "gpu"}, "${seed}", "${nowhere}", "${"),
)
SIZES = [
    *("rollout.num_workers", "rollout.sp_size", "rollout.gpus_per_group", "reward.num_workers", "learner.num_ranks"),
    *("learner.sp_size", "reward.gpus_per_worker", "cluster.share_gpu", "cluster.grows"),
]
LIKELY = {"int": (1, 1, 2, 3, 4, 8), "float": (0.1, 0.5, 1.0, 2.0), "bool": (True, False)}
WORDS = (
    "sampling",
    "steps",
    "eta",
    "learner",
    "x",
    "",
    " ",
    "_target_",
    "num_iterations",
    "rollout.num_worker",
    "\u00e9",
)
LETTERS = ":{}[]\"'#&*!|>%@`-\t\n\x00 \u00ff1e.~?,"


class Damage:
    """Seeded changes of a recipe. parts: what the message may name."""

    def __init__(self, seed: int):
        self.random, self.parts = random.Random(seed), []
        self.text = self.random.choice(RECIPES).read_text("utf-8")
        self.content = yaml.safe_load(self.text)
        kinds: list[Callable[[], None]] = [self.value, self.key, self.drop, self.section, *[self.likely] * 12]
        for _ in range(self.random.randint(1, 3)):
            self.random.choice(kinds)()
        self.text = yaml.safe_dump(self.content, allow_unicode=True)
        if self.random.random() < 0.1:
            self.letters()
        self.overrides = [self.override() for _ in range(self.random.choice((0, 0, 0, 0, 0, 0, 1, 2)))]

    def _parent(self, dotted: str) -> dict | None:
        node = self.content
        for name in dotted.split(".")[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                return None
        return node

    def value(self) -> None:
        key = self.random.choice(list(dotted_keys()))
        if (parent := self._parent(key)) is not None:
            parent[key.rpartition(".")[2]] = self.random.choice(VALUES)

    def likely(self) -> None:
        """A value of the right type, or one of the pools' sizes."""
        key = self.random.choice([*dotted_keys(), *SIZES * 8])
        values = LIKELY.get(type_words(dotted_keys()[key]).removesuffix(" or null"), (None,))
        if (parent := self._parent(key)) is not None:
            parent[key.rpartition(".")[2]] = self.random.choice(values)

    def key(self) -> None:
        section = self.random.choice([self.content, *(v for v in self.content.values() if isinstance(v, dict))])
        section[self.random.choice([*WORDS, 3, None, True])] = self.random.choice(VALUES)

    def drop(self) -> None:
        self.content.pop(self.random.choice(list(self.content)) if self.content else "", None)

    def section(self) -> None:
        names = [name for name in self.content if isinstance(self.content[name], dict)]
        if names:
            self.content[self.random.choice(names)] = self.random.choice(VALUES)

    def letters(self) -> None:
        place = self.random.randrange(len(self.text) + 1)
        self.text = self.text[:place] + self.random.choice(LETTERS) + self.text[place + self.random.randint(0, 2) :]

    def override(self) -> str:
        key = self.random.choice([*dotted_keys(), *WORDS, "--sde_type", "--num_generations"])
        return self.random.choice(["{}={}", "{}={}", "{}", "{} = {}", "--{}={}"]).format(
            key, self.random.choice(VALUES)
        )

    def nodes(self) -> list[Node]:
        roles = ("", "", "learner", "rollout", "gpu")
        count = self.random.randint(0, 4)
        return [Node(self.random.choice((0, 1, 2, 8)), self.random.choice(roles)) for _ in range(count)]


def outcome(damage: Damage, file: Path) -> str:
    """ "refused", "misfit" or "placed"; anything but a ConfigError is raised."""
    file.write_text(damage.text, "utf-8")
    try:
        config = load_config([file], damage.overrides)
        validate(config)
    except ConfigError as error:
        check_message(str(error), file)
        return "refused"
    again = file.with_suffix(".resolved.yaml")
    again.write_text(to_yaml(config), "utf-8")
    assert load_config([again], []) == config
    return placed(config, damage.nodes(), file)


def placed(config: Config, nodes: list[Node], file: Path) -> str:
    """Derived numbers and places of a configuration that keeps every rule."""
    try:
        schedule = training_schedule(config)
    except (ValueError, OSError):  # the recipe's checkpoint is not on this machine
        schedule = None
    assert all(line.name and line.value for line in plan_lines(config, schedule))
    try:
        planned = plan(config, nodes)
    except ConfigError as error:
        check_message(str(error), file)
        return "misfit"
    assert describe(planned, nodes)
    names = [name for group in planned.groups for name in group.names]
    assert len(set(names)) == len(names)
    return "placed"


def check_message(message: str, file: Path) -> None:
    """One error of a readable length that names a key, an official flag, a word of the command line or the file."""
    assert 10 < len(message) and "Traceback" not in message, message
    named = [*dotted_keys(), file.name, "unknown key", "on the command line"]
    assert any(name in message for name in named), message


@pytest.mark.timeout(1800)
def test_each_damaged_configuration_resolves_or_gives_one_clear_error(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(NUM):
        damage = Damage(seed)
        try:
            found[outcome(damage, tmp_path / "run.yaml")] += 1
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {type(error).__name__}: {error}\n{damage.text}\n{damage.overrides}"
            ) from error
    print(dict(found))
    assert min(found["refused"], found["placed"], found["misfit"]) > NUM / 50, found
