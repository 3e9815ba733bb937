"""The gate between rollout and learner: its numbers by hand, on one rank and on two, and whom it names."""

import math
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sage_ray.agreement import (
    BF16_DISAGREEMENT,
    Agreement,
    DisagreementError,
    NonFiniteError,
    allowed_disagreement,
)
from sage_ray.group_batch import Pass, Place
from sage_ray.models.condition import ConditionTensors
from sage_ray.transition import coefficients

NUM_PASSES, NUM_VIDEOS = 5, 8


def one_pass(rank: int, number: int, rollout: torch.Tensor, weights: torch.Tensor) -> Pass:
    """A pass as far as the gate looks at it: denoising step `number` of group `rank`, made by worker `rank`."""
    count, nothing = len(rollout), torch.zeros(len(rollout))
    return Pass(
        conditions=ConditionTensors(*[torch.zeros(1)] * 4),
        negatives=None,
        coefs=coefficients("ode", np.array([1.0, 0.0]), 0.0, last_step="ode", sde_steps=()),
        step=number,
        latents=nothing,
        latents_next=nothing,
        places=[Place(f"rollout-{rank} on host", 3, rank, video, number, 7) for video in range(count)],
        advantages=nothing,
        weights=weights,
        scale=nothing,
        rollout_log_prob=rollout,
    )


def numbers(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rollout's log-probs, learner's, weights), each float32 [NUM_PASSES, NUM_VIDEOS]; weight 0 rows are far off."""
    random = np.random.default_rng(rank)
    rollout = random.standard_normal((NUM_PASSES, NUM_VIDEOS))
    learner = rollout + 1e-3 * random.standard_normal(rollout.shape) + 2e-4
    weights = (random.random(rollout.shape) > 0.3).astype(np.float32)
    learner[weights == 0] = random.choice([5.0, np.nan, np.inf], int((weights == 0).sum()))
    return tuple(torch.from_numpy(a.astype(np.float32)) for a in (rollout, learner, weights))


def check(agreement: Agreement, rank: int, learner: torch.Tensor | None = None) -> None:
    rollout, given, weights = numbers(rank)
    passes = [one_pass(rank, k, rollout[k], weights[k]) for k in range(NUM_PASSES)]
    agreement.check(passes, list(given if learner is None else learner))


def by_hand(ranks: int) -> dict[str, float]:
    """The statistics from sorted values, without the functions that the gate uses."""
    signed = []
    for rank in range(ranks):
        rollout, learner, weights = (a.double().flatten().tolist() for a in numbers(rank))
        signed += [b - a for a, b, w in zip(rollout, learner, weights, strict=True) if w > 0]
    size = sorted(abs(value) for value in signed)
    below, share = divmod(0.99 * (len(size) - 1), 1)
    return {
        "agreement/max_abs": size[-1],
        "agreement/p99_abs": size[int(below)] + share * (size[int(below) + 1] - size[int(below)]),
        "agreement/mean_abs": math.fsum(size) / len(size),
        "agreement/mean": math.fsum(signed) / len(signed),
    }


def test_statistics_by_hand() -> None:
    agreement = Agreement(1.0)
    check(agreement, 0)
    assert agreement.metrics() == pytest.approx(by_hand(1), rel=1e-12)
    assert agreement.metrics() == {}
    for rank in (0, 1):  # two optimizer steps of one iteration are one set of pairs
        check(agreement, rank)
    both = agreement.metrics()
    assert both == pytest.approx(by_hand(2), rel=1e-12) and both["agreement/mean"] > 1e-4


def test_equal_log_probs_differ_by_exactly_nothing() -> None:
    agreement = Agreement(0.0)
    check(agreement, 0, numbers(0)[0])
    assert set(agreement.metrics().values()) == {0.0}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (1.5, DisagreementError, ["differ by +1.5 nats", "1 is allowed (loss.max_disagreement)", "are not the same"]),
        (math.nan, NonFiniteError, ["log-prob is nan"]),
        (math.inf, NonFiniteError, ["log-prob is inf"]),
    ],
)
def test_the_worst_pair_is_named(value: float, error: type[Exception], words: list[str]) -> None:
    """A second one is off by less; the message tells how many are."""
    rollout, learner, weights = numbers(0)
    pairs = (weights > 0).nonzero()
    (step, video), (other, second) = pairs[5].tolist(), pairs[9].tolist()
    learner[step, video] = rollout[step, video] + value
    learner[other, second] = rollout[other, second] - 1.25
    with pytest.raises(error) as caught:
        check(Agreement(1.0), 0, learner)
    place = f"rollout-0 on host: iteration 3, group 0, video {video}, denoising step {step}, policy version 7: "
    assert str(caught.value).startswith(place)
    for word in words:
        assert word in str(caught.value)
    if error is DisagreementError:
        assert f"of {len(pairs)} pairs 2 are above it, 2 by rollout-0 on host;" in str(caught.value)


def test_the_default_limit_follows_the_dtype() -> None:
    assert allowed_disagreement(None, 1e-4, torch.float32) == pytest.approx(1e-5)
    assert allowed_disagreement(None, 1e-4, torch.bfloat16) == BF16_DISAGREEMENT
    assert allowed_disagreement(0.5, 1e-4, torch.bfloat16) == 0.5


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """The statistics of both ranks, then a fault that only rank 1 holds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    agreement = Agreement(1.0)
    check(agreement, rank)
    metrics = agreement.metrics()
    rollout, learner, weights = numbers(rank)
    if rank == 1:
        step, video = (weights > 0).nonzero()[3].tolist()
        learner[step, video] = rollout[step, video] + 2
    try:
        check(agreement, rank, learner)
    except DisagreementError as error:
        torch.save((metrics, "".join(traceback.format_exception_only(error))), f"{folder}/rank_{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_same_numbers_and_say_the_same(tmp_path: Path) -> None:
    mp.spawn(run_rank, (2, str(tmp_path)), nprocs=2)
    (metrics, message), (others, other) = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in (0, 1))
    assert metrics == others == pytest.approx(by_hand(2), rel=1e-12)
    step, video = (numbers(1)[2] > 0).nonzero()[3].tolist()
    assert message == other
    assert f"rollout-1 on host: iteration 3, group 1, video {video}, denoising step {step}, policy" in message
    assert "1 by rollout-1 on host" in message
