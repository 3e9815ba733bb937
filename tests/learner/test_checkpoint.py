"""Checkpoints of the training state: what is whole, what is kept, and what happens when one cannot be written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sage_ray.checkpoint import Checkpointer, CheckpointError
from sage_ray.checkpoint_store import CheckpointStore
from sage_ray.config import CheckpointConfig
from sage_ray.parallel import free_port, start_process_group
from sage_ray.policy_update import PolicyUpdate
from tests.learner.checkpointed import largest_difference, read_state
from tests.learner.tiny_rule import begin_save, step, tiny_rule
from tests.small import ROOT


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    start_process_group(0, 1, "127.0.0.1", free_port(), device="cpu", timeout_s=60)
    yield
    dist.destroy_process_group()


def checkpointer(keep_last: int | None = None, keep_every: int | None = None) -> Checkpointer:
    return Checkpointer(60, CheckpointConfig(keep_last=keep_last, keep_every=keep_every))


def save(rule: PolicyUpdate, writer: Checkpointer, store: CheckpointStore) -> str:
    begin_save(rule, writer, store)
    place = writer.finished(wait=True)
    assert place is not None
    return place


def everything(rule: PolicyUpdate) -> list[torch.Tensor]:
    states = [value for p in rule.trainable for value in rule.optimizer.state[p].values()]
    banks = [t for bank in (rule.bank, rule.averages) for name in bank.names() for t in bank.copies(name).values()]
    return [t.detach().clone() for t in (*rule.trainable, *states, *banks)]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("url", ["{}", "file://{}/there", "memory://checkpoints/{}"])
def test_what_was_saved_comes_back_to_the_bit_while_training_goes_on(tmp_path: Path, url: str, optimizer: str) -> None:
    """On every kind of file system; the copy is of the moment of the call, not of when it is written."""
    store, rule, writer = CheckpointStore(url.format(tmp_path)), tiny_rule(optimizer=optimizer), checkpointer()
    for _ in range(4):
        step(rule)
    then, controller = everything(rule), rule.controller.state_dict()
    begin_save(rule, writer, store)
    step(rule)
    assert not torch.equal(then[0], everything(rule)[0])
    place = writer.finished(wait=True)
    assert place == f"{store.path}/version_000004" and writer.finished() is None
    (found,) = store.all()
    assert (found.path, found.iteration, found.version) == (place, 4, 4)
    other = tiny_rule(optimizer=optimizer)
    checkpointer().load(other, found)
    assert all(torch.equal(a, b) for a, b in zip(then, everything(other), strict=True))
    assert other.version == 4 and other.controller.state_dict() == controller
    step(other)
    assert all(torch.equal(a, b) for a, b in zip(everything(rule), everything(other), strict=True))


def test_a_checkpoint_before_the_first_step_has_no_optimizer_state(tmp_path: Path) -> None:
    store, rule = CheckpointStore(tmp_path), tiny_rule()
    save(rule, checkpointer(), store)
    other = tiny_rule()
    step(other)
    checkpointer().load(other, store.all()[0])
    assert other.version == 0 and not other.optimizer.state


def test_the_newest_and_every_third_are_kept(tmp_path: Path) -> None:
    store, rule, writer = CheckpointStore(tmp_path), tiny_rule(), checkpointer(2, 3)
    for _ in range(8):
        step(rule)
        save(rule, writer, store)
    assert [one.version for one in store.all()] == [3, 6, 7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"version_00000{n}" for n in (3, 6, 7, 8)]


@pytest.mark.parametrize("url", ["{}", "file://{}"])
def test_what_is_not_whole_is_no_checkpoint(tmp_path: Path, url: str) -> None:
    store, rule, writer = CheckpointStore(url.format(tmp_path)), tiny_rule(), checkpointer()
    for _ in range(5):
        step(rule)
        save(rule, writer, store)
    (tmp_path / "version_000005" / "trainer.json").unlink()
    (tmp_path / "version_000004" / "state" / "__0_0.distcp").open("ab").write(b"more")
    (tmp_path / "version_000003" / "transformer" / "weights").unlink()
    (tmp_path / "version_000002" / "trainer.json").write_text("{")
    (tmp_path / "version_000006.partial").mkdir()
    (tmp_path / "mine").mkdir()
    assert [one.version for one in store.all()] == [1]
    with pytest.raises(ValueError, match="version_000004: state/__0_0.distcp must have .* bytes"):
        store.read("version_000004")
    with pytest.raises(ValueError, match="version_000005: is no complete checkpoint, trainer.json cannot be read"):
        store.read("version_000005")
    store.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", *(f"version_00000{n}" for n in (1, 2, 3, 4))]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the disk: a write beyond it fails as one on a full disk does."""
    store, rule, writer = CheckpointStore(tmp_path), tiny_rule(), checkpointer()
    step(rule)
    save(rule, writer, store)
    step(rule)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        begin_save(rule, writer, store)
        with pytest.raises(CheckpointError, match=r"version_000002: learner rank 0: \w*Error: .*too large"):
            writer.finished(wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["version_000001"] and len(store.all()) == 1
    step(rule)
    save(rule, writer, store)
    assert [one.version for one in store.all()] == [1, 3]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rule, writer = tiny_rule(), checkpointer()
    begin_save(rule, writer, CheckpointStore(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="file/version_000000: learner rank 0: .*[Nn]ot a directory"):
        writer.finished(wait=True)
    with pytest.raises(OSError):
        CheckpointStore("/sys/checkpoints").prepare()


def test_six_kills_around_writes() -> None:
    """The short version of `make chaos`."""
    command = [sys.executable, "-m", "tests.chaos", "--kills", "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kills" in done.stdout and "every one is whole and right" in done.stdout


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    store, rule = CheckpointStore(tmp_path), tiny_rule()
    step(rule)
    save(rule, checkpointer(), store)
    other = tiny_rule(128)
    before = [p.detach().clone() for p in other.trainable]
    with pytest.raises(CheckpointError, match="policy/wide is .256, 64., the model has .128, 64"):
        checkpointer().load(other, store.all()[0])
    assert all(torch.equal(a, b) for a, b in zip(before, other.trainable, strict=True)) and other.version == 0
    missing = tiny_rule()
    missing.held.remove("anchor")
    with pytest.raises(CheckpointError, match="anchor/tall is only in the checkpoint"):
        checkpointer().load(missing, store.all()[0])


KINDS = ("adamw", "muon", "lora")


def test_ranks_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """FSDP2 ranks on the small world's policy: two steps and two more are four, to the bit on the same number of ranks,
    within 1e-6 on the other. One test, as tests in two processes would train twice."""
    command = [sys.executable, "-m", "tests.learner.checkpoint_ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ})
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        for num_ranks in (1, 2):
            check_same(tmp_path / f"{kind}_{num_ranks}", tmp_path / f"{kind}_{num_ranks}_from_{num_ranks}", kind)
            if kind == "adamw":  # lora has AdamW too
                continue
            straight = read_state(tmp_path / f"{kind}_{num_ranks}" / "version_000004")
            other = read_state(tmp_path / f"{kind}_{3 - num_ranks}_from_{num_ranks}" / "version_000004")
            assert largest_difference(straight, other) <= 1e-6, (kind, num_ranks)


def check_same(straight: Path, resumed: Path, kind: str) -> None:
    states = [read_state(folder / "version_000004") for folder in (straight, resumed)]
    assert largest_difference(*states) == 0.0, resumed
    assert {key.partition("/")[0] for key in states[0]} == {"policy", "optimizer", "anchor", "previous", "average"}
    assert all((".lora_" in key) == (kind == "lora") for key in states[0])
    trainers = [json.loads((folder / "version_000004" / "trainer.json").read_text()) for folder in (straight, resumed)]
    controllers = [trainer["kl_controller"] for trainer in trainers]
    assert controllers[0] == controllers[1] and controllers[0]["num_steps"] == 4
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (straight, resumed)]
    assert metrics[0][2:] == metrics[1] and len(metrics[1]) == 2
    assert largest_difference(read_state(straight / "version_000002"), states[0]) > 0
