"""`launch.py evaluate`: the base and trained policies on the same prompts and noise, without a learner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import ray

from actors.cluster import start_ray
from actors.evaluator import Evaluator
from actors.places import place_everything
from actors.publisher import Publication
from actors.scored_rollouts import ScoredRollouts
from actors.stop import ENDS, RunStoppedError, reason
from sage_ray.checks import CheckedRun
from sage_ray.config import Config, ConfigError, LoraConfig
from sage_ray.config_load import open_output
from sage_ray.evaluation import EvaluatedPolicy
from sage_ray.evaluation_report import comparison_report
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.models.packed_velocity import TORCH_DTYPES, PackedVelocity
from sage_ray.models.policy_folder import load_policy
from sage_ray.policies import NamedPolicy, folder_name
from sage_ray.progress import Progress
from sage_ray.row_file import write_rows
from sage_ray.weights import pack


def evaluate(run: CheckedRun, policies: Sequence[NamedPolicy]) -> None:
    """Evaluate policies (the base first, see `check_evaluation`) and write the comparison.

    Raises: RunStoppedError when it cannot start or go on; the policies that were finished are in evaluation.parquet.
    """
    progress, evaluated = Progress(0), []
    with ExitStack() as closing:
        try:
            start_ray(run.config)
            closing.callback(ray.shutdown)
            start, source = time.monotonic(), _place(run.config, progress)
            closing.callback(source.close)
            source.start()
            progress.message(f"ready after {time.monotonic() - start:.0f} s")
            _run(run, policies, source, progress, evaluated)
        except ConfigError:
            raise
        except ENDS as error:
            raise RunStoppedError(f"after {len(evaluated)} of {len(policies)} policies: {reason(error)}") from error


def _place(config: Config, progress: Progress) -> ScoredRollouts:
    """Place the actors. Workers take whole weights: adapters are merged before they are published."""
    layout = place_everything(config, num_ranks=0)
    open_output(config)
    progress.message(
        f"starting {config.rollout.num_workers} rollout and {config.reward.num_workers} reward actors "
        f"on {layout.device}"
    )
    return ScoredRollouts(dataclasses.replace(config, lora=LoraConfig()), layout)


def _run(
    run: CheckedRun,
    policies: Sequence[NamedPolicy],
    source: ScoredRollouts,
    progress: Progress,
    evaluated: list[EvaluatedPolicy],
) -> None:
    """Every policy in turn, each appended to `evaluated` when its rows are written; then the comparison."""
    output, evaluator = Path(run.config.output_dir), Evaluator(run, source, progress)
    for number, policy in enumerate(policies):
        with progress.phase(f"load {policy.name}"):
            source.load(_publication(run.config, policy, number))
        ends = number in (0, len(policies) - 1)  # the contact sheet shows these two
        evaluated.append(evaluator.evaluate(policy.name, folder_name(number, policy.name), keep_frames=ends))
        write_rows(output / "evaluation.parquet", EvaluationRow, evaluation_rows(evaluated))
    groups: dict[str, list[str]] = {}
    for policy in policies[1:]:
        groups.setdefault(policy.group, []).append(policy.name)
    for table in comparison_report(output, evaluated, groups):
        progress.console.print(table)
        progress.message("")
    progress.message(f"everything is in {run.config.output_dir}")


def _publication(config: Config, policy: NamedPolicy, number: int) -> Publication:
    """A policy's weights in the object store, as a learner of one rank would publish version `number`."""
    dtype = TORCH_DTYPES[config.model.dtype]
    model = PackedVelocity(load_policy(policy.folder, Path(config.model.path), dtype), dtype)
    part = pack(model, number, 0, dtype)
    return Publication(number, part.content.digest, (ray.put(part),))
