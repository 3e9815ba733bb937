"""The ring on one device by turns, and the gate: real Ray, the whole controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.numpy import load_file

from actors.cluster import Layout, start_actor
from actors.controller import Controller
from actors.rollout_group import RolloutGroup
from actors.rollout_worker import RolloutWorker
from actors.seat import Seat
from actors.stop import StopRequest
from sage_ray.checks import CheckedRun
from sage_ray.data.prompts import read_prompts
from sage_ray.metrics import read_metrics
from sage_ray.progress import Progress
from sage_ray.rollout_log import read_rollouts
from tests.cluster.made import end_controller
from tests.small import small_config, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
WORDS = """data.num_prompts=2 num_iterations=2 sampling.num_steps=5 reward.max_batch_tokens=1 kl.anchor_interval=1
optimizer.ema_decay=0.5""".split()
KINDS = {"full": [], "lora": ["lora.rank=3", "optimizer.name=muon", "optimizer.muon_dtype=float32"]}


class DriftingWorker(RolloutWorker):
    """Its weights change silently after it has confirmed a version above 0."""

    def load_weights(self, version, digest, *parts):
        answer = super().load_weights(version, digest, *parts)
        if version > 0:
            with torch.no_grad():
                self.model.velocity.transformer.proj_out.weight[0, 0] += 0.05
        return answer


def make(folder: Path, *overrides: str) -> Controller:
    config = small_config(folder, [*WORDS, *overrides])
    prompts = read_prompts([Path(file) for file in config.data.prompts])
    run = CheckedRun(config, prompts, [])
    return Controller(run, Layout("cpu", 0, 0, 0), Progress(config.num_iterations), StopRequest())


def run(controller: Controller) -> None:
    """Two iterations of the ring, with what an evaluation of the moving average does to the weights at its end."""
    controller.start()
    controller.run_sync(lambda iteration: controller.publish(average=True) if iteration == 2 else None)
    controller.publish()


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> Iterator[tuple[Controller, Controller]]:
    """(without turns, with turns and decoding beside denoising)."""
    words = [], ["cluster.take_turns=true", "rollout.overlap_decode=true"]
    made = [make(tmp_path_factory.mktemp(request.param), *KINDS[request.param], *some) for some in words]
    for controller in made:
        run(controller)
    yield made[0], made[1]
    for controller in made:
        end_controller(controller)


def numbers(controller: Controller) -> list[dict[str, float]]:
    """Metrics that are no times."""
    lines = read_metrics(controller.output / "metrics.jsonl")
    assert len(lines) == 2
    return [without_times(line) for line in lines]


def test_turns_change_no_bit(pair) -> None:
    apart, turns = pair
    assert numbers(apart) == numbers(turns)
    assert apart.rollouts.digest == turns.rollouts.digest and apart.version == turns.version == 2
    rows = [
        [{**vars(row), "generate_s": None, "score_s": None} for row in read_rollouts(one.output / "rollouts")]
        for one in pair
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 16
    files = [sorted((one.output / "checkpoints" / "version_000002").rglob("*.safetensors")) for one in pair]
    assert len(files[0]) == len(files[1]) == 2  # the weights and their average
    for ours, theirs in zip(*files, strict=True):
        tensors, others = load_file(ours), load_file(theirs)
        assert tensors.keys() == others.keys()
        assert all(np.array_equal(tensors[name], others[name]) for name in tensors)


def test_turns_are_measured(pair) -> None:
    (first, second), *_ = (read_metrics(one.output / "metrics.jsonl") for one in pair[::-1])
    assert not any("turn" in key for key in read_metrics(pair[0].output / "metrics.jsonl")[1])
    roles = ("rollout", "reward", "learner")
    for line in (first, second):
        assert line["phase/turn_s"] > 0 and all(line[f"turns/{role}_bytes"] > 0 for role in roles)
    # the optimizer's state came with the first step
    assert second["turns/learner_bytes"] >= first["turns/learner_bytes"]


def test_agreement_is_in_every_iteration(pair) -> None:
    names = [f"agreement/{name}" for name in ("max_abs", "p99_abs", "mean_abs", "mean")]
    assert all([line[name] for name in names] == [0.0] * 4 for one in pair for line in numbers(one))


@pytest.mark.parametrize("pair", ["full"], indirect=True)
def test_a_worker_that_drifts_stops_the_run_and_is_named(pair) -> None:
    """It joins a finished run; its weights are not what it confirmed. Nothing is stepped, nothing is written."""
    controller = pair[0]
    pool, digest = controller.rollouts.rollouts, controller.rollouts.digest
    drifting = start_actor(DriftingWorker, 0, controller.config, "cpu", "rollout-1")
    seat = Seat(1, RolloutGroup((drifting,)), pool.clock, pool.staff.busy)
    pool.staff.seats.append(seat)
    pool.loop.call(pool.staff.admitted, seat)
    controller.publish()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        controller.step(2)
    message = str(caught.value.cause)
    assert type(caught.value.cause).__name__ == "DisagreementError"
    assert message.startswith("rollout-1 on ") and ": iteration 3, group " in message
    assert "denoising step" in message and "policy version 2" in message
    assert "of 32 pairs" in message and "by rollout-1" in message and "rollout-0" not in message
    assert controller.learner.publish(2).digest == digest
    assert len(read_rollouts(controller.output / "rollouts")) == 16
