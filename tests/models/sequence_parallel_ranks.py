"""Four processes on gloo that hold sequence parallelism against one process.

`python -m tests.models.sequence_parallel_ranks FILE`: they share the imports of one (fork), and rank 0 writes
name -> number; tests/models/test_sequence_parallel.py says what the numbers must be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from actors.rollout_worker import RolloutWorker
from sage_ray.config import Config, total_optimizer_steps
from sage_ray.group_batch import GroupBatch, ReplayRules
from sage_ray.models.condition import ConditionTensors
from sage_ray.models.packed_block import BlockPieces, compiled_pieces, use_pieces
from sage_ray.models.packed_velocity import PackedVelocity, guided_velocity
from sage_ray.parallel import free_port, gather_objects, local_shards, sequence_group, shard, start_process_group
from sage_ray.policy_update import PolicyUpdate
from sage_ray.weights import pack, unpack
from tests.conftest import POLICY
from tests.models.test_packed_block import inputs, model_with
from tests.rollout.small_rollout import publication, requests
from tests.small import load_velocity, small_config

RANKS = 4
ODD = (3, 3, 3)
"""27 video tokens."""
Group = dist.ProcessGroup | None
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]
WAYS = {
    "autograd": (BlockPieces(), False),
    "attention kept": (BlockPieces(keep_attention=True), True),
    "all recomputed": (BlockPieces(keep_attention=False), True),
}
RULE = ["kl.mode=dual_moving", "kl.coef=0.1", "kl.weight=0.1", "optimizer.learning_rate=1e-4"]


def outcome(model: PackedVelocity, group: Group, forward: Callable[[], torch.Tensor]) -> Outcome:
    """Velocity, and gradients of a scalar of it, summed over a group."""
    model.share_tokens(group)
    model.zero_grad()
    velocity = forward()
    velocity.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
    return velocity.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def apart(ours: Outcome, alone: Outcome) -> float:
    """Largest difference of a velocity or gradient, relative to the largest value of each; inf for another set."""
    if ours[1].keys() != alone[1].keys():
        return float("inf")
    pairs = [(ours[0], alone[0]), *((ours[1][name], gradient) for name, gradient in alone[1].items())]
    # The refiner's to_k.bias has no gradient, only rounding: a bias of all keys moves no softmax.
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in alone[1].values())
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in pairs)


def plain_models(pair: Group, quad: Group) -> Iterator[tuple[str, float]]:
    """Groups of 2 and 4 against one process, on 27 video tokens and texts of 7 and 5 tokens."""
    model = model_with(BlockPieces())
    for lengths in ((7,), (7, 5), (3,)):

        def forward(lengths=lengths) -> torch.Tensor:
            return model(*inputs(model, *lengths, size=ODD))

        alone = outcome(model, None, forward)
        for way, (pieces, recompute) in WAYS.items():
            for block in model.transformer.transformer_blocks:
                use_pieces(block, pieces)
            model.transformer.gradient_checkpointing = recompute
            for group in (pair, quad):
                ours = outcome(model, group, forward)
                yield f"sp {model.sp_size}, texts {lengths}, {way}", apart(ours, alone)


def other_models(pair: Group) -> Iterator[tuple[str, float]]:
    """Guidance, adapters and compiled pieces."""
    model = model_with(BlockPieces(), recompute=True)
    latents, times, *texts = inputs(model, 7, size=ODD)
    negative = inputs(model, 3, size=ODD)[2:]

    def guided() -> torch.Tensor:
        conditions = ConditionTensors(*texts, None), ConditionTensors(*negative, None)
        return guided_velocity(model, latents, [0.7], *conditions, 3.0)

    yield "guidance", apart(outcome(model, pair, guided), outcome(model, None, guided))
    adapted = model_with(BlockPieces(), recompute=True, lora=4)

    def forward(of: PackedVelocity = adapted) -> torch.Tensor:
        return of(*inputs(of, 7, 5, size=ODD))

    yield "adapters", apart(outcome(adapted, pair, forward), outcome(adapted, None, forward))
    if dist.get_rank() >= 2:  # compiling takes the other pair's time, and would show nothing else
        return
    alone = outcome(model, None, lambda: forward(model))
    pieces = compiled_pieces(True, backend="aot_eager")
    for block in model.transformer.transformer_blocks:
        use_pieces(block, pieces)
    yield "compiled", apart(outcome(model, pair, lambda: forward(model)), alone)


def rollout_and_learner(pair: Group) -> Iterator[tuple[str, float]]:
    """A plain frozen model without gradient against a sharded one that trains: bits."""
    for dtype in (torch.float32, torch.bfloat16):
        worker = load_velocity(POLICY, dtype, "cpu").to(dtype).requires_grad_(False)
        learner = load_velocity(POLICY, dtype, "cpu")
        learner.transformer.gradient_checkpointing = True
        shard(learner, RANKS, "cpu")
        for model in (worker, learner):
            model.share_tokens(pair)
        given = inputs(worker, 7, 5, size=ODD)
        with torch.no_grad():
            ours = worker(*given)
        theirs = learner(*given)
        theirs.square().mean().backward()
        yield f"rollout and learner, {dtype}", float((ours - theirs.detach()).abs().max())
        worker.share_tokens(None)
        with torch.no_grad():
            alone = worker(*given)
        yield f"sp 2, {dtype}", float((ours - alone).norm() / alone.norm())


def iteration(pair: Group, folder: Path) -> Iterator[tuple[str, float]]:
    """One iteration of learning on dp 2 x sp 2 against one process, on what a rollout group of two sampled."""
    config = small_config(folder, RULE)
    worker = RolloutWorker(config, "cpu")
    worker.load_weights(*publication(0, 1.0))
    worker.model.velocity.share_tokens(pair)
    trajectories = [worker.generate(request)[0] for request in requests(3)]
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    weights = np.ones((3, 4), np.float32)
    weights[1, 2] = 0
    values *= weights
    batches = [GroupBatch(t, a, w) for t, a, w in zip(trajectories, values, weights, strict=True)]
    idle = GroupBatch(trajectories[0], values[0], weights[0] * 0)
    mine = ([batches[0], batches[2]], [batches[1], idle])[dist.get_rank() // 2]
    pairs = [float(weights.sum() * len(trajectories[0].trained_steps))]
    model = shard(load_velocity(POLICY, torch.float32, "cpu"), RANKS, "cpu")
    model.share_tokens(pair)
    model.transformer.gradient_checkpointing = True
    ours, plain = learner_of(config, model), learner_of(config, load_velocity(POLICY, torch.float32, "cpu"))
    start = {name: tensor.clone() for name, tensor in local_shards(plain.model).items()}
    sharded, alone = ours.update([mine], pairs, RANKS), plain.update([batches], pairs)
    yield "agreement", sharded["agreement/max_abs"]
    assert sharded.keys() == alone.keys()
    alone["loss/total"] /= RANKS  # every rank's plain learner adds the whole of it
    for key in ("loss/total", "loss/ratio_mean", "loss/clip_share", "learner/grad_norm"):
        yield f"metric {key}", abs(sharded[key] - alone[key]) / max(abs(alone[key]), 1e-3)
    received = load_velocity(POLICY, torch.float32, "cpu")
    unpack(received, gather_objects(pack(model, 1, dist.get_rank(), torch.float32)))
    got, wanted = local_shards(received), local_shards(plain.model)
    distance = sum(float((got[name] - wanted[name]).square().sum()) for name in start)
    moved = sum(float((wanted[name] - start[name]).square().sum()) for name in start)
    yield "weights after a step", (distance / moved) ** 0.5
    yield "swapped reference", swapped(ours, batches[0], pair)


def learner_of(config: Config, model: PackedVelocity) -> PolicyUpdate:
    rules = ReplayRules()
    return PolicyUpdate(model, config.loss, config.kl, config.optimizer, rules, total_optimizer_steps(config))


@torch.no_grad()
def swapped(rule: PolicyUpdate, batch: GroupBatch, pair: Group) -> float:
    """The previous step's velocity from swapped shards against that of a module of its own."""
    one, model = rule._passes([batch])[0], rule.model
    with rule.bank.use("previous"):
        ours = rule._replay(one)[1]
    rule.model = load_velocity(POLICY, torch.float32, "cpu")
    rule.model.share_tokens(pair)
    theirs = rule._replay(one)[1]
    rule.model = model
    assert not torch.equal(rule._replay(one)[1], ours)  # the live weights have moved
    return float((ours - theirs).abs().max())


def main(rank: int, port: int, file: str) -> None:
    torch.set_num_threads(1)
    start_process_group(rank, RANKS, "127.0.0.1", port, device="cpu", timeout_s=100)
    pair, quad = (sequence_group(size, 100) for size in (2, 4))
    parts = plain_models(pair, quad), other_models(pair), rollout_and_learner(pair), iteration(pair, Path(file).parent)
    found = {name: value for part in parts for name, value in part}
    everywhere = gather_objects(found)
    if rank == 0:
        worst = {name: max(each.get(name, 0.0) for each in everywhere) for name in found}
        Path(file).write_text(json.dumps(worst, indent=2), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, (free_port(), sys.argv[1]), RANKS, start_method="fork")
