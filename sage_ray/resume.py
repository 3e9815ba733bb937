"""Whether and where a run goes on: the checkpoint, what its settings must share with the run's, and the run's files.

A resumed run is the same run: settings that change its numbers must be equal. Paths may differ where the content does
not. Everything is checked before a file is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_ray.checkpoint_store import CONFIG, Checkpoint, CheckpointStore
from sage_ray.config import Config, ConfigError, dotted_keys, value_at
from sage_ray.config_check import num_prompts
from sage_ray.config_files import check_output_dir
from sage_ray.config_load import load_config
from sage_ray.data.prompts import PromptCursor
from sage_ray.fingerprint import fingerprint
from sage_ray.metrics import FILE_NAME as METRICS
from sage_ray.run_files import ACTORS, ALARMS
from sage_ray.types import Prompt

AUTO = "auto"
FREE = (
    *("output_dir", "resume", "save_interval", "checkpoint.", "cluster.", "evaluation.", "data.held_out_prompts"),
    *("learner.", "rollout.", "faults.", "lora.path", "loss.max_disagreement", "kl.share_interval"),
    *("model.gradient_checkpointing", "model.keep_attention", "model.compile", "model.stock_forward"),
    *("reward.num_workers", "reward.gpus_per_worker", "reward.runtime_env", "reward.max_batch_tokens"),
    *("reward.max_pending", "reward.timeout_s", "reward.max_failed_share", "watch."),
)
"""Keys, and sections, that a resumed run may have otherwise: they say where, how fast and how often, not what."""
BY_CONTENT = (
    *("model.path", "reward.path", "data.prompts", "data.num_prompts", "data.batch_size"),
    "data.gradient_accumulation_steps",
)
"""Keys that may read otherwise as long as `identity` is the same."""
LENGTH = "num_iterations"
"""May differ too, unless the learning rate depends on it."""


@dataclass(frozen=True)
class Resume:
    """Where a run goes on, from a checkpoint or (None) from its start. same_evaluation: its evaluations so far were
    made as the coming ones will be."""

    checkpoint: Checkpoint | None
    same_evaluation: bool = True

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.checkpoint.iteration if self.checkpoint else 0


def checkpoint_path(config: Config) -> str:
    """Folder or URL of the run's checkpoints."""
    return (config.checkpoint.path or str(Path(config.output_dir) / "checkpoints")).rstrip("/")


def identity(config: Config, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a run's files come to, wherever they lie; trainer.json holds it."""
    return {
        "model": fingerprint(Path(config.model.path)),
        "reward": fingerprint(Path(config.reward.path)) if config.reward.path else None,
        "prompts": PromptCursor(prompts, config.seed, num_prompts(config)).state,
    }


def find_resume(config: Config, prompts: Sequence[Prompt]) -> Resume | None:
    """Where the run goes on; None when it is a new one, whose output_dir must then be new or empty.

    Raises: ConfigError naming the checkpoint and every key that differs, with both values.
    """
    output = Path(config.output_dir)
    if config.resume is None:
        check_output_dir(output)
    complete = _complete(config)
    if config.resume is None:
        if complete:
            raise ConfigError(f"checkpoint.path={config.checkpoint.path!r}: holds another run's {complete[-1].path}")
        return None
    if config.resume == AUTO:
        found = complete[-1] if complete else None
        if found is None and not (output / CONFIG).exists():
            check_output_dir(output)
            return None
    else:
        found = _named(config.resume)
        _check_newest(config, found, complete)
    if found is None:
        return Resume(None, _compare(config, load_config([output / CONFIG], []), str(output)))
    same = _compare(config, _config_of(found), found.path)
    _check_identity(config, prompts, found)
    if config.num_iterations < found.iteration:
        raise ConfigError(
            f"num_iterations={config.num_iterations}: must be at least {found.iteration}, the finished iterations of "
            f"{found.path}"
        )
    return Resume(found, same)


def cut_files(output: Path, iteration: int) -> None:
    """Remove what a run that died wrote after `iteration`: lines about it, rollouts, evaluations, videos."""
    for file in (output / name for name in (METRICS, ACTORS, ALARMS)):
        if not file.exists():
            continue
        lines = file.read_text("utf-8").split("\n")[:-1]
        kept = [line for line in lines if json.loads(line)["step"] <= iteration]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        os.replace(partial, file)
    for path in (*(output / "rollouts").glob("*"), *(output / "evaluations").glob("*"), *(output / "videos").glob("*")):
        number = path.stem.removeprefix("iteration_")
        if path.suffix == ".partial" or (number.isdecimal() and int(number) > iteration):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _complete(config: Config) -> list[Checkpoint]:
    path = checkpoint_path(config)
    try:
        return CheckpointStore(path).all()
    except (ValueError, ImportError, OSError) as error:  # an unknown protocol, or one whose package is missing
        raise ConfigError(f"checkpoint.path={path!r}: cannot be read: {error}") from error


def _named(place: str) -> Checkpoint:
    folder, _, name = place.rstrip("/").rpartition("/")
    try:
        return CheckpointStore(folder or ".").read(name)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"resume={place!r}: {error}") from error


def _check_newest(config: Config, found: Checkpoint, complete: Sequence[Checkpoint]) -> None:
    """A checkpoint of this output_dir must be its newest; of another one, this output_dir must be new or empty."""
    newest = complete[-1] if complete else None
    if newest is not None and _same_place(newest.path, found.path):
        return
    if newest is not None:
        raise ConfigError(
            f"resume={config.resume!r}: {newest.path} is there too, and might be overwritten; go on from that, or in "
            "another output_dir (and checkpoint.path)"
        )
    check_output_dir(Path(config.output_dir))


def _same_place(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and Path(one).resolve() == Path(other).resolve())


def _config_of(checkpoint: Checkpoint) -> Config:
    """The resolved configuration beside a checkpoint."""
    folder, _, name = checkpoint.path.rpartition("/")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / CONFIG
        file.write_text(CheckpointStore(folder).text(name, CONFIG), "utf-8")
        try:
            return load_config([file], [])
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.path}/{CONFIG}: {str(error).replace(str(file), CONFIG)}") from error


def _compare(config: Config, made: Config, place: str) -> bool:
    """Refuse settings that make another run than `made`; whether evaluations are made in the same way."""
    free = (*FREE, *BY_CONTENT, *(() if config.optimizer.schedule == "cosine" else (LENGTH,)))
    differing = [key for key in dotted_keys() if value_at(config, key) != value_at(made, key)]
    wrong = [key for key in differing if not any(key == f or (f[-1] == "." and key.startswith(f)) for f in free)]
    if wrong:
        values = ", ".join(f"{key}={value_at(config, key)!r} (was {value_at(made, key)!r})" for key in wrong)
        hint = "; the cosine schedule depends on num_iterations" if LENGTH in wrong else ""
        raise ConfigError(f"resume={config.resume!r}: {place} was made with other settings: {values}{hint}")
    judged = [key for key in differing if key.startswith("evaluation.") or key == "data.held_out_prompts"]
    return not set(judged) - {"evaluation.interval"}


def _check_identity(config: Config, prompts: Sequence[Prompt], found: Checkpoint) -> None:
    made, now = found.trainer.get("identity", {}), identity(config, prompts)
    values = {"model": config.model.path, "reward": config.reward.path, "prompts": config.data.prompts}
    for name, key in (("model", "model.path"), ("reward", "reward.path")):
        if made.get(name) != now[name]:
            raise ConfigError(f"{key}={values[name]!r}: is another model than the one that {found.path} was made with")
    for key, value in now["prompts"].items():
        was = made.get("prompts", {}).get(key)
        if was != value:
            raise ConfigError(
                f"data.prompts={config.data.prompts!r}: {key} is {value}, {found.path} was made with {was}"
            )
