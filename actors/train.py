"""`launch.py train`: start the pools, evaluate, run the ring, evaluate again, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import ray

from actors.cluster import plan_layout, start_ray
from actors.controller import HELD_OUT_GROUP, Controller, EvaluatedSet
from sage_ray.checks import CheckedRun
from sage_ray.config import Config, ConfigError
from sage_ray.config_load import to_yaml
from sage_ray.contact_sheet import SheetRow, contact_sheet
from sage_ray.progress import Progress
from sage_ray.report import mean_error, reward_curve, summary_table
from sage_ray.types import AXES, Prompt
from sage_ray.video import write_video

NUM_PREVIEWS = 12
SETS = ("training", "held_out")


class RunStoppedError(RuntimeError):
    """A run that had to stop; the message names the step and the last good checkpoint."""


def train(run: CheckedRun) -> None:
    """Run a checked configuration to its end. Raises RunStoppedError when the run cannot start or go on."""
    progress, controller = Progress(run.config.num_iterations), None
    with ExitStack() as closing:
        try:
            start_ray(run.config)
            closing.callback(ray.shutdown)
            start, controller = time.monotonic(), _place(run, progress)
            closing.callback(controller.close)
            controller.start()
            progress.message(f"ready after {time.monotonic() - start:.0f} s")
            _run(run, controller, progress)
        except ConfigError:
            raise
        except (ray.exceptions.RayError, TimeoutError, RuntimeError, OSError, ValueError) as error:
            raise RunStoppedError(_explain(run, controller, error)) from error


def _place(run: CheckedRun, progress: Progress) -> Controller:
    """Place all actors; the output folder appears once the layout is known to fit."""
    config = run.config
    layout = plan_layout(config, ray.cluster_resources().get("GPU", 0))
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.yaml").write_text(to_yaml(config), "utf-8")
    progress.message(
        f"starting {config.rollout.num_workers} rollout, {config.reward.num_workers} reward and "
        f"{config.learner.num_ranks} learner actors on {layout.device}"
    )
    return Controller(config, layout, run.prompts, progress)


def _explain(run: CheckedRun, controller: Controller | None, error: BaseException) -> str:
    """One line: where the run stood, what happened, and which checkpoint is good."""
    reason = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    words = [line.strip() for line in str(reason).splitlines() if line.strip()]
    what = f"{type(reason).__name__}: {words[-1] if words else 'no further word'}"
    if controller is None:
        return f"before the first iteration: {what}"
    saved = controller.checkpoint or f"{run.config.model.path} (none was saved yet)"
    return f"after policy version {controller.version}: {what}; the last good checkpoint is {saved}"


def _run(run: CheckedRun, controller: Controller, progress: Progress) -> None:
    """Evaluation, ring, evaluation, report."""
    config, evaluated = run.config, {}
    last, interval = config.num_iterations, config.evaluation.interval

    def evaluate(iteration: int) -> None:
        due = iteration in (0, last) or (interval > 0 and iteration % interval == 0)
        if config.evaluation.num_prompts and due:
            evaluated[iteration] = _evaluate(run, controller, progress, iteration)

    evaluate(0)
    controller.run_sync(after_iteration=evaluate)
    reward_curve(Path(config.output_dir) / "reward_curve.png", Path(config.output_dir) / "metrics.jsonl")
    if evaluated:
        _report(config, evaluated[0], evaluated[last], progress)
    progress.message(f"everything is in {config.output_dir}")


def _evaluate(run: CheckedRun, controller: Controller, progress: Progress, step: int) -> dict[str, EvaluatedSet]:
    """Evaluate both prompt sets and write the numbers under `step`."""
    result, metrics, averaged = {}, {}, run.config.optimizer.ema_decay is not None
    if averaged:
        controller.publish(average=True)
    for name, prompts, first in zip(SETS, (run.prompts, run.held_out), (0, HELD_OUT_GROUP), strict=True):
        with progress.phase(f"evaluate {name} prompts"):
            chosen = spread(prompts, run.config.evaluation.num_prompts)
            result[name] = controller.evaluate(chosen, first, NUM_PREVIEWS)
        for measure, total, names, axes in _measures(result[name]):
            for label, values in (("total", total), *((axis, axes[:, k]) for k, axis in enumerate(names))):
                metrics[f"evaluation/{name}/{measure}/{label}"] = float(np.nanmean(values))
                by_prompt = values.reshape(-1, run.config.evaluation.videos_per_prompt)
                means = np.array([row[np.isfinite(row)].mean() for row in by_prompt if np.isfinite(row).any()])
                metrics[f"evaluation/{name}/{measure}/{label}_error"] = mean_error(means)
    if averaged:
        controller.publish()
    controller.metrics.write(step, metrics)
    controller.note(metrics)
    return result


def _measures(evaluated: EvaluatedSet) -> list[tuple[str, np.ndarray, tuple[str, ...], np.ndarray]]:
    """(measure, totals [N], names of the parts, parts [N, K])."""
    measures = [("reward", evaluated.reward, evaluated.parts, evaluated.axes)]
    if evaluated.truth is not None and evaluated.truth_total is not None:
        measures.append(("truth", evaluated.truth_total, AXES, evaluated.truth))
    return measures


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts in a fixed pseudo-random order (all of them when there are fewer)."""
    order = np.random.Generator(np.random.Philox(0)).permutation(len(prompts))
    return [prompts[i] for i in sorted(order[:count])]


def _report(
    config: Config, before: dict[str, EvaluatedSet], after: dict[str, EvaluatedSet], progress: Progress
) -> None:
    """Summary table, contact sheet and videos of before and after."""
    scores: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for name in SETS:
        first, last = before[name], after[name]
        table = scores[name] = {"reward": (first.reward, last.reward)}
        table |= {f"reward {part}": (first.axes[:, k], last.axes[:, k]) for k, part in enumerate(first.parts)}
        if first.truth is not None and last.truth is not None:
            table["truth"] = (first.truth_total, last.truth_total)
            table |= {f"truth {axis}": (first.truth[:, k], last.truth[:, k]) for k, axis in enumerate(AXES)}
            table["match"] = (first.matches, last.matches)
    progress.console.print(summary_table(scores, config.evaluation.videos_per_prompt))
    output = Path(config.output_dir)
    first, last = before["held_out"], after["held_out"]
    per_prompt = config.evaluation.videos_per_prompt
    step = max(1, len(first.reward) // per_prompt // NUM_PREVIEWS) * per_prompt
    rows = []
    for i, ((prompt, old), (_, new)) in enumerate(zip(first.previews, last.previews, strict=True)):
        numbers = [{"reward": float(s.reward[i * step])} for s in (first, last)]
        for numbers_of, s in zip(numbers, (first, last), strict=True):
            if s.truth_total is not None:
                numbers_of["truth"] = float(s.truth_total[i * step])
        rows.append(SheetRow(prompt, old, new, *numbers))
        scale = max(1, 256 // old.shape[1])
        for label, video in (("before", old), ("after", new)):
            write_video(output / "videos" / f"{i:02d}_{label}.mp4", video, config.sampling.fps, scale)
    contact_sheet(output / "contact_sheet.png", rows)
