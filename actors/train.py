"""`launch.py train`: start the pools, evaluate, run the ring, evaluate again, report."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import ray

from actors.cluster import plan_layout, start_ray
from actors.controller import Controller
from actors.evaluator import Evaluator
from actors.stop import ENDS, RunStoppedError, reason
from sage_ray.checks import CheckedRun
from sage_ray.config import ConfigError
from sage_ray.config_load import open_output
from sage_ray.evaluation import EvaluatedPolicy, evaluation_metrics
from sage_ray.evaluation_report import training_report
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.progress import Progress
from sage_ray.report import reward_curve
from sage_ray.row_file import write_rows


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
        except ENDS as error:
            raise RunStoppedError(_explain(run, controller, error)) from error


def _place(run: CheckedRun, progress: Progress) -> Controller:
    """Place all actors; the output folder appears once the layout is known to fit."""
    config = run.config
    layout = plan_layout(config, ray.cluster_resources().get("GPU", 0))
    open_output(config)
    progress.message(
        f"starting {config.rollout.num_workers} rollout, {config.reward.num_workers} reward and "
        f"{config.learner.num_ranks} learner actors on {layout.device}"
    )
    return Controller(config, layout, run.prompts, progress)


def _explain(run: CheckedRun, controller: Controller | None, error: BaseException) -> str:
    """One line: where the run stood, what happened, and which checkpoint is good."""
    if controller is None:
        return f"before the first iteration: {reason(error)}"
    saved = controller.checkpoint or f"{run.config.model.path} (none was saved yet)"
    return f"after policy version {controller.version}: {reason(error)}; the last good checkpoint is {saved}"


def _run(run: CheckedRun, controller: Controller, progress: Progress) -> None:
    """Evaluation, ring, evaluation, report."""
    config, output = run.config, Path(run.config.output_dir)
    evaluator, evaluated = Evaluator(run, controller.rollouts, progress), []
    last, interval = config.num_iterations, config.evaluation.interval

    def evaluate(iteration: int) -> None:
        ends = iteration in (0, last)  # the contact sheet shows these two
        if config.evaluation.num_prompts and (ends or (interval > 0 and iteration % interval == 0)):
            evaluated.append(_evaluate(controller, evaluator, iteration, keep_frames=ends))

    evaluate(0)
    controller.run_sync(after_iteration=evaluate)
    reward_curve(output / "reward_curve.png", output / "metrics.jsonl", controller.rollouts.parts.names)
    if evaluated:
        for table in training_report(output, evaluated):
            progress.console.print(table)
    progress.message(f"everything is in {config.output_dir}")


def _evaluate(controller: Controller, evaluator: Evaluator, iteration: int, keep_frames: bool) -> EvaluatedPolicy:
    """Evaluate the policy, or the moving average of its weights where one is kept; write every number."""
    averaged, file = controller.config.optimizer.ema_decay is not None, f"iteration_{iteration:06d}"
    if averaged:
        controller.publish(average=True)
    policy = evaluator.evaluate(f"iteration {iteration}", file, keep_frames)
    if averaged:
        controller.publish()
    write_rows(controller.output / "evaluations" / f"{file}.parquet", EvaluationRow, evaluation_rows([policy]))
    metrics = evaluation_metrics(policy)
    controller.metrics.write(iteration, metrics)
    controller.note(metrics)
    return policy
