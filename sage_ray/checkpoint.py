"""The learner's training state, written and read by torch.distributed.checkpoint while training goes on.

It holds everything that an update changes: the policy's trained float32 weights, the optimizer's state, anchor and
previous step, the moving average, and (in trainer.json) the KL controller, the number of optimizer steps, of which the
learning rate is a function, and of iterations, of which prompts, steps and all noise are functions. No random generator
has a state: noise is keyed. Frozen weights stay in model.path.

Every rank copies its shards to host memory; a thread writes the copies over a gloo group of its own, because
collectives of two threads in one group would meet. Shards are written with their place in the whole tensor, so another
number of ranks can read them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from sage_ray.checkpoint_store import CONFIG, STATE, Checkpoint, CheckpointStore
from sage_ray.config import CheckpointConfig
from sage_ray.parallel import reshard
from sage_ray.policy_update import AVERAGE, PolicyUpdate

POLICY, OPTIMIZER = "policy", "optimizer"
COUNTER = "step"
"""AdamW's count of steps: whole on every rank, unlike the rest of an optimizer's state."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and the first reason."""


class _NamesCause:
    """torch tells a full disk as "unexpected pos 704 vs 598"; this raises the error of the file system behind it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)  # pyright: ignore[reportAttributeAccessIssue]
        except RuntimeError as error:
            cause = error.__context__
            raise (cause if isinstance(cause, OSError) else error) from None


class _LocalWriter(_NamesCause, FileSystemWriter):
    pass


class _UrlWriter(_NamesCause, FsspecWriter):
    pass


class Checkpointer:
    """Saves and loads the state of one learner rank; every rank has one and takes part.

    Args: timeout_s: bound of every collective. settings: which checkpoints are kept.
    """

    def __init__(self, timeout_s: float, settings: CheckpointConfig):
        self.settings, self.timeout_s = settings, timeout_s
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self._mesh = DeviceMesh.from_group(self.group, "cpu")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[str, Future[None]] | None = None

    def save(
        self,
        rule: PolicyUpdate,
        store: CheckpointStore,
        name: str,
        config: str,
        note: dict[str, Any],
        write_policy: Callable[[Path], None],
    ) -> None:
        """Copy the present state and begin to write it; `finished` says what became of it.

        Args: config: the resolved configuration, as YAML. note: what trainer.json holds beside the rule's own numbers.
            write_policy: writes the weights for people into a folder; called on rank 0, in the thread.
        """
        self.finished(wait=True)
        state = self._staged(rule)
        trainer = {
            "policy_version": rule.version,
            "kl_controller": rule.controller.state_dict(),
            "num_ranks": dist.get_world_size(),
            **note,
        }

        def write() -> None:
            _write_state(store, name, state, self.group)
            if self.rank == 0:
                with store.folder_to_fill(name) as folder:
                    write_policy(folder)
                    (folder / CONFIG).write_text(config, "utf-8")
                store.complete(name, trainer)

        self._writing = store.place(name), self._thread.submit(self._write, write, store, name)

    def finished(self, wait: bool = False) -> str | None:
        """Place of the checkpoint that has been written since the last call, None when there is none (yet).

        Raises: CheckpointError when it could not be written; nothing of it is left then.
        """
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        place, future = self._writing
        try:
            error = future.exception(self.timeout_s)
        except NotDone:
            raise CheckpointError(f"{place}: was not written within {self.timeout_s:.0f} s") from None
        self._writing = None
        if error is not None:
            raise CheckpointError(f"{place}: {_first_reason(error)}") from error
        return place

    def load(self, rule: PolicyUpdate, checkpoint: Checkpoint) -> None:
        """Put a checkpoint's state into a rule that was built from the same settings.

        Raises: CheckpointError when tensors are missing or of another shape; nothing is changed then.
        """
        place, trainer = checkpoint.path, checkpoint.trainer
        reader = _reader(f"{place}/{STATE}")
        stored = reader.read_metadata().state_dict_metadata
        wanted = self._targets(rule, stored, place)
        state = {key: self._empty(parameter, live) for key, (parameter, live) in wanted.items()}
        try:
            dcp.load(state, storage_reader=reader, process_group=self.group)
        except CheckpointException as error:
            raise CheckpointError(f"{place}: {_first_reason(error)}") from error
        reshard(rule.model)
        with torch.no_grad():
            for key, (_, live) in wanted.items():
                _local(live).copy_(_local(state[key]))
        self._fill_optimizer(rule, wanted)
        rule.version = trainer["policy_version"]
        rule.controller.load_state_dict(trainer["kl_controller"])

    def _write(self, write: Callable[[], None], store: CheckpointStore, name: str) -> None:
        """Leave nothing of a checkpoint that could not be written, and no more than wanted after one that was."""
        done = False
        try:
            write()
            done = True
        finally:
            if not done and self.rank == 0:
                store.discard(name)
        if self.rank == 0:
            store.prune(self.settings.keep_last, self.settings.keep_every)

    def _staged(self, rule: PolicyUpdate) -> dict[str, torch.Tensor]:
        """Copies on the host of everything that changes, each with its place in the whole tensor."""
        reshard(rule.model)
        if rule.device.type == "cuda":
            torch.cuda.synchronize()  # references in host memory may still be on their way
        state: dict[str, torch.Tensor] = {}
        for name, parameter in _trained(rule).items():
            state[f"{POLICY}/{name}"] = self._placed(parameter, parameter)
            for slot, value in rule.optimizer.state.get(parameter, {}).items():
                whole = slot == COUNTER
                state[f"{OPTIMIZER}/{name}/{slot}"] = value.cpu().clone() if whole else self._placed(parameter, value)
            for reference, copies in _references(rule).items():
                state[f"{reference}/{name}"] = self._placed(parameter, copies[name])
        return state

    def _placed(self, parameter: torch.Tensor, value: torch.Tensor) -> DTensor:
        """A copy on the host of this rank's shard of `value`, which is sharded as `parameter` is."""
        shard = _local(value).detach().to("cpu", copy=True)
        return DTensor.from_local(
            shard, self._mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def _empty(self, parameter: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        return self._placed(parameter, live) if live.ndim else live.clone()

    def _targets(
        self, rule: PolicyUpdate, stored: dict[str, Any], place: str
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Key -> (parameter, tensor to fill) of everything in the checkpoint; CheckpointError when it does not fit."""
        targets: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        slots = dict.fromkeys(key.rpartition("/")[2] for key in stored if key.startswith(f"{OPTIMIZER}/"))
        for name, parameter in _trained(rule).items():
            targets[f"{POLICY}/{name}"] = parameter, parameter
            for reference, copies in _references(rule).items():
                targets[f"{reference}/{name}"] = parameter, copies[name]
            for slot in (slot for slot in slots if f"{OPTIMIZER}/{name}/{slot}" in stored):
                live = torch.tensor(0.0) if slot == COUNTER else torch.zeros_like(parameter)
                targets[f"{OPTIMIZER}/{name}/{slot}"] = parameter, live
        for key in sorted(targets.keys() ^ stored.keys()):
            where = "the checkpoint" if key in stored else "the model"
            raise CheckpointError(f"{place}: {key} is only in {where}; it is of another model or other settings")
        for key, (parameter, live) in targets.items():
            shape, found = parameter.shape if live.ndim else live.shape, stored[key].size
            if tuple(found) != tuple(shape):
                raise CheckpointError(f"{place}: {key} is {tuple(found)}, the model has {tuple(shape)}")
        return targets

    @staticmethod
    def _fill_optimizer(rule: PolicyUpdate, wanted: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        rule.optimizer.state.clear()
        for key, (parameter, live) in wanted.items():
            if key.startswith(f"{OPTIMIZER}/"):
                rule.optimizer.state[parameter][key.rpartition("/")[2]] = live


def _write_state(store: CheckpointStore, name: str, state: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Every rank its own shards; when one fails all do."""
    place = f"{store.place_to_write(name)}/{STATE}"
    writer = _LocalWriter(place) if store.is_local else _UrlWriter(place, sync_files=False)
    dcp.save(state, storage_writer=writer, process_group=group)


def _trained(rule: PolicyUpdate) -> dict[str, torch.Tensor]:
    return {name: p for name, p in rule.model.named_parameters() if p.requires_grad}


def _references(rule: PolicyUpdate) -> dict[str, dict[str, torch.Tensor]]:
    """Local shards of every reference that outlives an iteration, and of the moving average, by parameter name."""
    found = {name: rule.bank.copies(name) for name in rule.held}
    return found | ({} if rule.settings.ema_decay is None else {AVERAGE: rule.averages.copies(AVERAGE)})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reader(place: str) -> FileSystemReader:
    return FsspecReader(place) if "://" in place else FileSystemReader(place)


def _first_reason(error: BaseException) -> str:
    """One line. A CheckpointException (no Exception) names the errors of every rank."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"learner rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
