"""Weights & Biases, where `watch.wandb` names a project. The package is imported only then."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sage_ray.config import Config, ConfigError
from sage_ray.config_load import to_yaml
from sage_ray.redact import redacted


def check_wandb(config: Config) -> None:
    """Raises: ConfigError when watch.wandb is set and the package is not there."""
    if config.watch.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"watch.wandb={config.watch.wandb!r}: needs the package wandb, which is not installed (pip install wandb)"
        )


class WandbLog:
    """A run in the project, under the name of its folder; its metrics by iteration. Secrets of the settings are
    hidden. A resumed run is a new one there."""

    def __init__(self, config: Config):
        """Raises: ConfigError without the package; wandb.Error without a login, unless watch.wandb_offline."""
        check_wandb(config)
        import wandb  # type: ignore[import-not-found]

        folder = Path(config.output_dir)
        self._run = wandb.init(
            project=config.watch.wandb,
            name=folder.name,
            dir=str(folder),
            mode="offline" if config.watch.wandb_offline else "online",
            config=redacted(yaml.safe_load(to_yaml(config))),
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),  # it holds the command line
        )
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Values that are missing or not finite have no point."""
        kept: dict[str, Any] = {k: v for k, v in metrics.items() if v is not None and math.isfinite(v)}
        self._run.log({"iteration": iteration, **kept})

    def close(self) -> None:
        """Ends the run there; what is left is sent first."""
        self._run.finish()
