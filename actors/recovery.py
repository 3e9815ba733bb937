"""A learner that was lost is started again, and the run goes back to where its last checkpoint is.

What was made after that is made again: every number of it is the same, as prompts, noise and weights are. The rollouts
of the iteration in which it was lost are kept, and used when their weights are there again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.learner_group import LearnerLostError
from sage_ray.checkpoint_store import Checkpoint, CheckpointStore
from sage_ray.metrics import MetricsWriter
from sage_ray.resume import checkpoint_path, cut_files

if TYPE_CHECKING:
    from actors.controller import Controller


def recover(controller: Controller, error: LearnerLostError) -> None:
    """Returns when the rollout workers have the weights of the last checkpoint.

    Raises: RuntimeError when the learner was lost more than faults.max_rebuilds times in one iteration.
    """
    most = controller.config.faults.max_rebuilds
    while True:
        controller.rebuilds += 1
        if controller.rebuilds > most:
            raise RuntimeError(f"the learner was lost {most + 1} times in one iteration (faults.max_rebuilds); {error}")
        try:
            with controller.stop.held():
                _start_again(controller, error)
            return
        except LearnerLostError as another:
            error = another


def _start_again(controller: Controller, error: LearnerLostError) -> None:
    controller.learner.end()  # what is left of it may still write a checkpoint
    found = _newest(controller)
    place = found.path if found else "the start, nothing was saved yet"
    controller.progress.message(f"warning: {error}; it is started again from {place}")
    controller.turns.learner_is_new()
    controller.learner.remake()
    controller.version = controller.learner.load(found.path) if found else 0
    controller.checkpoint = controller.staged = found.path if found else ""
    _go_back(controller, found.iteration if found else 0)
    controller.publish()


def _newest(controller: Controller) -> Checkpoint | None:
    """The run's newest complete checkpoint, else the one that it was resumed from. A half-written one is removed."""
    store = CheckpointStore(checkpoint_path(controller.config))
    store.clean()
    complete = store.all()
    return complete[-1] if complete else controller.resume.checkpoint


def _go_back(controller: Controller, iteration: int) -> None:
    """Forget what was written after `iteration`."""
    if iteration == controller.finished:
        return
    controller.metrics.close()
    cut_files(controller.output, iteration)
    controller.metrics = MetricsWriter(controller.output, iteration + 1)
    controller.finished = controller.progress.finished = iteration
    controller.read_past()
    controller.progress.message(f"going on after iteration {iteration}")
