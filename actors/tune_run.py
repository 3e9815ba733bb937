"""A run as Ray Tune's trial. Its actor is a host (run_host.py) that Tune gives one trial after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial

from actors.run_host import Place, RunHost
from actors.stop import reason
from actors.sweep import said
from sage_ray.experiment.spec import Job


class TuneRun(tune.Trainable):
    """One step is one whole run."""

    def setup(self, config: dict[str, Any]) -> None:
        self.host = RunHost(Place(**config["place"]))
        self.job = self._job(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next run of this host."""
        self.job = self._job(new_config)
        return True

    @staticmethod
    def _job(config: dict[str, Any]) -> Job:
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in config["job"].items()}
        return Job(**given)

    def step(self) -> dict[str, Any]:
        return {**self.host.run(self.job), "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """A run is stored when it is complete; there is nothing to save of one that is not."""

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing was saved."""


class Teller(Callback):
    """Says a line for every run that ends, and keeps what became of it in `results`."""

    def __init__(self, total: int, tell: Callable[[str], None]):
        self.total, self.tell = total, tell
        self.results: list[dict[str, Any]] = []

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        names = ("key", "status", "seconds", "start_s")
        self._ended({name: trial.last_result[name] for name in names if name in trial.last_result})

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """After the last try."""
        error = trial.get_error()
        why = "no further word" if error is None else reason(error)
        self._ended({"key": trial.config["job"]["key"], "status": "failed", "seconds": 0.0, "reason": why})

    def _ended(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        self.tell(said(result, len(self.results), self.total))
