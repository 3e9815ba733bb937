"""FSDP2 ranks that train, save after two of four steps while they go on, and resume on the same and the other number.

They share the imports of one process (fork); tests/learner/test_checkpoint.py says what must come out.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from actors.learner import LearnerRank
from actors.rollout_worker import RolloutWorker
from sage_ray.parallel import free_port
from tests.learner.test_policy_update import batch, request
from tests.small import small_config

NUM_PAIRS = 4
"""Two groups of two videos at one step."""
KINDS = {
    "adamw": ["optimizer.name=adamw", "optimizer.learning_rate=1e-5"],
    "muon": ["optimizer.name=muon", "optimizer.muon_dtype=float32", "optimizer.learning_rate=1e-4"],
    "lora": ["lora.rank=3", "optimizer.name=adamw", "optimizer.learning_rate=1e-5"],
}
COMMON = """optimizer.ema_decay=0.5 kl.mode=dual_moving kl.anchor_interval=3 kl.weight=0.1 kl.coef=0.01
kl.warmup_steps=3 kl.share_interval=0 loss.max_disagreement=10 num_iterations=4""".split()


def train(folder: Path, kind: str, rank: int, world: int, port: int, trajectories: list, start: Path | None) -> None:
    """Four steps on two groups, the second checkpoint written meanwhile; or two, from `start`."""
    overrides = [*KINDS[kind], *COMMON, f"learner.num_ranks={world}"]
    learner = LearnerRank(small_config(folder, overrides), rank, "cpu")
    learner.setup("127.0.0.1", port)
    if start is not None:
        assert learner.load(str(start)) == 2
    metrics = []
    for version in range(learner.update_rule.version, 4):
        groups = [batch(trajectory, 2 * version + g) for g, trajectory in enumerate(trajectories)]
        metrics.append(learner.update_rule.update([groups[rank::world]], [float(NUM_PAIRS)], world))
        if version + 1 in (2, 4) and start is None or version == 3:
            learner.save(f"{folder}/version_{version + 1:06d}", {"iteration": version + 1})
    learner.saved(wait=True)
    if rank == 0:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


def main(rank: int, folder: str, world: int, ports: list[int], trajectories: list, froms: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    jobs = [(kind, start) for kind in KINDS for start in froms if kind != "adamw" or start in (0, world)]
    for port, (kind, start) in zip(ports, jobs):
        name = f"{kind}_{world}" + (f"_from_{start}" if start else "")
        target = Path(folder, name)
        target.mkdir(parents=True, exist_ok=True)
        origin = Path(folder, f"{kind}_{start}", "version_000002") if start else None
        train(target, kind, rank, world, port, trajectories, origin)


def made_trajectories(folder: str) -> list:
    """Two groups of two videos under the base policy: version 0 is all that the steps need."""
    worker = RolloutWorker(small_config(Path(folder)), "cpu")
    worker.version = 0
    requests = [dataclasses.replace(request(group=g, group_size=2), trained_steps=(1,)) for g in range(2)]
    return [worker.generate(one)[0] for one in requests]


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    with context.Pool(1) as pool:  # nothing of torch may have run where ranks are forked
        found = pool.apply(made_trajectories, (sys.argv[1],))
    for froms in ((0,), (1, 2)):
        ports = [free_port() for _ in range(2 * len(KINDS) * len(froms))]
        half = len(ports) // 2
        running = [
            mp.start_processes(main, (sys.argv[1], world, some, found, froms), world, join=False, start_method="fork")
            for world, some in ((1, ports[:half]), (2, ports[half:]))
        ]
        for processes in running:
            while not processes.join():
                pass
