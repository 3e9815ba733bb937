"""`launch.py train`: start the pools, evaluate, run the ring, evaluate again, report; or go on with a run."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path

import ray

from actors.cluster import start_ray
from actors.controller import Controller
from actors.evaluator import Evaluator
from actors.places import place_everything
from actors.stop import ENDS, RunStoppedError, StopRequest, reason
from sage_ray.balance_report import balance_lines
from sage_ray.checkpoint_store import CheckpointStore
from sage_ray.checks import CheckedRun
from sage_ray.config import Config, ConfigError
from sage_ray.config_load import open_output
from sage_ray.evaluation import EvaluatedPolicy, evaluation_metrics
from sage_ray.evaluation_report import training_report
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.metrics import read_metrics
from sage_ray.progress import Progress
from sage_ray.report import reward_curve
from sage_ray.resume import Resume, checkpoint_path, cut_files
from sage_ray.row_file import write_rows

LAST_WRITE_S = 60.0
"""A run that failed waits so long for a checkpoint that is being written: its learner may not answer."""


def train(run: CheckedRun) -> None:
    """Run a checked configuration to its end. Raises RunStoppedError when the run cannot start or go on, or is told to
    stop; then its last finished iteration is saved."""
    resume = run.resume or Resume(None)
    progress, controller, stop = Progress(run.config.num_iterations, resume.iteration), None, StopRequest()
    with ExitStack() as closing:
        try:
            start_ray(run.config)
            closing.callback(ray.shutdown)
            closing.enter_context(stop.listening())
            start, controller = time.monotonic(), _place(run, progress, stop)
            closing.callback(controller.close)
            controller.start()
            progress.message(f"ready after {time.monotonic() - start:.0f} s")
            _run(run, controller, progress)
        except ConfigError:
            raise
        except KeyboardInterrupt:
            raise RunStoppedError(_save_and_explain(run, controller, stop), stop.code) from None
        except ENDS as error:
            raise RunStoppedError(_explain(run, controller, error)) from error


def _place(run: CheckedRun, progress: Progress, stop: StopRequest) -> Controller:
    """Place all actors; the output folder is made, or cut to where the run goes on, once the layout is known to fit."""
    config = run.config
    layout = place_everything(config)
    output = open_output(config)
    _open_checkpoints(config)
    if run.resume:
        cut_files(output, run.resume.iteration)
        place = run.resume.checkpoint.path if run.resume.checkpoint else "the start, nothing was saved"
        progress.message(f"resuming after iteration {run.resume.iteration} from {place}")
    progress.message(
        f"starting {config.rollout.num_workers} rollout, {config.reward.num_workers} reward and "
        f"{config.learner.num_ranks} learner actors on {layout.device}"
    )
    return Controller(run, layout, progress, stop)


def _open_checkpoints(config: Config) -> None:
    """The folder of the checkpoints can be written, and holds nothing half-written."""
    path = checkpoint_path(config)
    try:
        store = CheckpointStore(path)
        store.prepare()
        store.clean()
    except OSError as error:
        raise ConfigError(f"checkpoint.path={path!r}: cannot be written: {error}") from error


def _explain(run: CheckedRun, controller: Controller | None, error: BaseException) -> str:
    """One line: where the run stood, what happened, and which checkpoint is good."""
    if controller is None:
        return f"before the first iteration: {reason(error)}"
    with suppress(*ENDS):
        controller.look_at_save(LAST_WRITE_S)  # one that is being written may still become whole
    return f"after policy version {controller.version}: {reason(error)}; {_last_good(run, controller)}"


def _last_good(run: CheckedRun, controller: Controller) -> str:
    saved = controller.checkpoint or f"{run.config.model.path} (none was saved yet)"
    return f"the last good checkpoint is {saved}"


def _save_and_explain(run: CheckedRun, controller: Controller | None, stop: StopRequest) -> str:
    """Save the last finished iteration of a run that was told to stop; one line. Raises: RunStoppedError."""
    name = stop.requested.name if stop.requested else "interrupt"
    if controller is None:
        return f"by {name} before the first iteration"
    try:
        if controller.finished > controller.resume.iteration:
            controller.save()
            controller.look_at_save(run.config.learner.timeout_s, must=True)
    except ENDS as error:
        words = f"by {name} after iteration {controller.finished}, which could not be saved: {reason(error)}"
        raise RunStoppedError(f"{words}; {_last_good(run, controller)}") from error
    return f"by {name} after iteration {controller.finished}; {_last_good(run, controller)}; resume=auto goes on"


def _run(run: CheckedRun, controller: Controller, progress: Progress) -> None:
    """Evaluation, ring, evaluation, report; what a resumed run has evaluated before is read."""
    config, output = run.config, Path(run.config.output_dir)
    evaluator = Evaluator(run, controller.rollouts, progress)
    evaluated = evaluator.read() if run.resume and run.resume.same_evaluation else {}
    last, interval = config.num_iterations, config.evaluation.interval

    def is_end(iteration: int) -> bool:
        return iteration in (min(evaluated, default=iteration), last)  # the contact sheet shows these two

    def is_due(iteration: int) -> bool:
        settings = config.evaluation
        return settings.num_prompts > 0 and (is_end(iteration) or (interval > 0 and iteration % interval == 0))

    def evaluate(iteration: int) -> None:
        if is_due(iteration):
            evaluated[iteration] = _evaluate(controller, evaluator, iteration, keep_frames=is_end(iteration))

    if controller.finished not in evaluated:
        evaluate(controller.finished)
    if config.overlap.enabled:
        controller.run_async(after_iteration=evaluate, is_due=is_due)
    else:
        controller.run_sync(after_iteration=evaluate)
    reward_curve(output / "reward_curve.png", output / "metrics.jsonl", controller.rollouts.parts.names)
    if evaluated:
        for table in training_report(output, list(evaluated.values())):
            progress.console.print(table)
    gpus = 0 if controller.layout.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    for line in balance_lines(read_metrics(output / "metrics.jsonl"), config, gpus):
        progress.message(line)
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
