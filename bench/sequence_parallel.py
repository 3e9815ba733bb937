"""One video on several GPUs of a host, at the real size: `python -m bench.sequence_parallel [--ranks 2] [--sp 2 1]`.

Starts a process for every GPU (NCCL; gloo without GPUs) and measures, for every sequence parallel size: a forward, an
update of adapters (blocks recomputed, attention kept, weights sharded over all ranks), and the log-probs of a
trajectory that a rollout group sampled, as a learner replays it: its own size's, which should agree bit for bit, and
those of the sizes before. `--full` measures instead forward, update and Muon step of all parameters, float32 masters
and gradients sharded over the ranks.

With size 1 every rank computes the same video. Every row is printed and written to --json as it comes.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers.utils import logging
from torch import distributed

from bench import agreement
from bench.agreement import PrintedAgreement, RandomPolicy
from bench.real_size import SIZES, Size, random_condition, random_latents
from bench.timing import GIB, Report, Row, free, measure
from bench.velocity import TIMESTEP
from sage_ray.config import Config
from sage_ray.cost import Dims, forward_flops
from sage_ray.group_batch import GroupBatch, ReplayRules, count_pairs
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.optim import build_optimizer
from sage_ray.parallel import free_port, sequence_group, start_process_group
from sage_ray.policy_update import PolicyUpdate
from sage_ray.training_schedule import training_schedule
from sage_ray.types import Trajectory

TIMEOUT_S = 240.0
"""Of one collective: ranks compile side by side, not in step."""


class Bench:
    """One rank's part of all measurements; rank 0 reports.

    trained: the learner's model, sharded. sampled: guidance -> trajectories of the sizes so far, the worker named
    "sp N".
    """

    def __init__(self, parsed: argparse.Namespace, device: torch.device):
        self.parsed, self.device, self.size, self.began = parsed, device, SIZES[parsed.size], time.monotonic()
        self.trained = agreement.learner(parsed, self.size, self.config(1.0), device)
        facts = {"card": card(device), "torch": torch.__version__, "size": parsed.size, "ranks": parsed.ranks}
        facts |= {"trained": f"adapters of rank {parsed.lora}" if parsed.lora else "all parameters"}
        first = distributed.get_rank() == 0
        self.report = Report(parsed.json if first else None, facts, quiet=not first)
        self.sampled: dict[float, list[Trajectory]] = {}
        self.say("the learner's weights are there")

    def say(self, words: str) -> None:
        """One line of rank 0, with the seconds since the start."""
        if not self.report.quiet:
            print(f"{time.monotonic() - self.began:6.1f} s  {words}", flush=True)

    def share(self, sp: int, *models: PackedVelocity) -> None:
        """Let models compute on groups of `sp` ranks from now on."""
        self.say(f"sp {sp}")
        group = sequence_group(sp, TIMEOUT_S)
        for model in models:
            model.share_tokens(group)

    def config(self, guidance: float) -> Config:
        """The settings of a comparison; the update that compares leaves all weights what they are."""
        config = agreement.configuration(self.parsed, guidance)
        config.optimizer.learning_rate, config.learner.shard_gradients = 0.0, True
        return config

    def forward(self, name: str, model: PackedVelocity) -> None:
        """A velocity without gradient."""
        with torch.no_grad():
            self._row(name, model, 1, lambda: self._velocity(model))

    def update(self, name: str) -> None:
        """Forward and backward of the learner's model, gradients summed over the ranks."""
        model = self.trained

        def run() -> None:
            model.zero_grad(set_to_none=True)
            self._velocity(model).square().mean().backward()

        self._row(name, model, 3, run)

    def step(self) -> None:
        """Muon's step on the gradients that are there; the first one makes its state."""
        optimizer = build_optimizer(self.trained.named_parameters(), self.config(1.0).optimizer)
        self._row("Muon step", self.trained, 0, optimizer.step)

    def compare(self, receiver: RandomPolicy, guidance: float) -> None:
        """Sample one trajectory, and replay it and those of the sizes before."""
        config, sp = self.config(guidance), self.trained.sp_size
        schedule, trajectories = training_schedule(config), self.sampled.setdefault(guidance, [])
        mine = agreement.sample(config, schedule, receiver)
        trajectories.append(dataclasses.replace(mine, worker=f"sp {sp}"))
        free()
        rules = ReplayRules(guidance, config.sampling.last_step, schedule.rule.candidates)
        rule = PolicyUpdate(self.trained, config.loss, config.kl, config.optimizer, rules, 1, config.learner)
        rule.agreement = pairs = PrintedAgreement(schedule, sp)
        ones = np.ones(config.data.group_size, np.float32)
        num_pairs = count_pairs(np.stack([ones] * len(trajectories)), 1, len(mine.trained_steps))
        rule.update([[GroupBatch(t, ones, ones) for t in trajectories]], num_pairs, self.parsed.ranks)
        for trajectory in trajectories:
            own = [abs(pair["difference"]) for pair in pairs.pairs if pair["by"] == trajectory.worker]
            name = f"guidance {guidance:g}, sampled by {trajectory.worker}, replayed by sp {sp}"
            values = {"max_abs": max(own), "bitwise": float(max(own) == 0), "pairs": float(len(own))}
            values["states_relative_l2"] = relative(trajectory.latents, mine.latents)
            self.report.add(Row("agree", name, self.parsed.frames, values=values))
        self.trained.zero_grad(set_to_none=True)
        free()

    def _velocity(self, model: PackedVelocity) -> torch.Tensor:
        latents = random_latents(self.size, self.parsed.frames, self.device)
        timestep = torch.tensor([TIMESTEP], device=self.device)
        return model(latents, timestep, *random_condition(self.size, self.device))

    def _row(self, name: str, model: PackedVelocity, times: int, run: Callable[[], object]) -> None:
        """times: the useful work in forwards of one video; the row has a GPU's share of it."""
        distributed.barrier()
        held = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        flops = times * work(self.size, model, self.parsed.frames) / model.sp_size
        part = Row(f"sp {model.sp_size}", name, self.parsed.frames, flops=flops or None)
        measure(part, run, self.device, self.parsed.repeats)
        if part.error is not None:  # the others wait in a collective, and a row alone would not end that
            raise RuntimeError(f"{name}: {part.error}")
        if part.peak_bytes is not None:
            part.values = {"held_GiB": held / GIB, "beside_GiB": (part.peak_bytes - held) / GIB}
        self.report.add(part)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2 distance of two trajectories' states."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def work(size: Size, model: PackedVelocity, frames: int) -> float:
    """Useful FLOPs of one forward of one video (docs/real_size.md)."""
    dims = Dims.of(model.transformer.config)
    return forward_flops(dims.dim, dims.layers, dims.tokens(size.latent_shape(frames)[1:]) + size.text)


def card(device: torch.device) -> str:
    """Its name."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def adapters(bench: Bench) -> None:
    """Rollout's and learner's model side by side, by every size in turn."""
    parsed = bench.parsed
    receiver = agreement.policy(parsed, bench.size, bench.config(1.0), bench.trained, bench.device)
    free()
    for sp in parsed.sp:
        bench.share(sp, receiver.velocity, bench.trained)
        bench.forward("forward", receiver.velocity)
        bench.update("update of adapters")
        for guidance in parsed.guidance:
            bench.compare(receiver, guidance)


def everything(bench: Bench) -> None:
    """All parameters, sharded over the ranks."""
    for sp in bench.parsed.sp:
        bench.share(sp, bench.trained)
        bench.forward("forward, sharded weights", bench.trained)
        bench.update("update of all parameters")
    bench.step()


def table(report: Report, sizes: Sequence[int]) -> None:
    """Every size's seconds beside the last one's, and what agrees."""
    last = f"sp {sizes[-1]}"
    for row in report.rows:
        of_last = report.seconds(last, row.name, row.frames)
        if row.seconds and of_last and row.part != last:
            print(f"{row.part}: {row.name} {of_last / row.seconds:.2f} x as fast as {last}", flush=True)
    for row in report.rows:
        if row.part == "agree":
            equal = "bitwise equal" if row.values["bitwise"] else f"max |difference| {row.values['max_abs']:.3g}"
            print(f"{row.name}: {equal}", flush=True)


def run(rank: int, port: int, parsed: argparse.Namespace) -> None:
    """One rank, from joining to leaving."""
    logging.set_verbosity_error()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    start_process_group(rank, parsed.ranks, "127.0.0.1", port, device=device.type, timeout_s=TIMEOUT_S)
    bench = Bench(parsed, device)
    (everything if parsed.full else adapters)(bench)
    bench.say("done")
    if rank == 0:
        table(bench.report, parsed.sp)
    distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Every row is printed, and written to --json, as it comes."""
    parser = agreement.options()
    parser.description = (__doc__ or "").split("\n")[0]
    parser.add_argument("--ranks", type=int, default=2, help="processes, one on every GPU")
    parser.add_argument("--sp", type=int, nargs="+", default=[2, 1], help="sequence parallel sizes, in this order")
    parser.add_argument("--full", action="store_true", help="all parameters instead of adapters; no rollout")
    parser.add_argument("--repeats", type=int, default=2)
    parser.set_defaults(steps=3)
    parsed = parser.parse_args(arguments)
    if wrong := [sp for sp in parsed.sp if parsed.ranks % sp]:
        parser.error(f"--sp {wrong[0]}: must divide --ranks {parsed.ranks}")
    if parsed.full:
        parsed.lora = 0
    way = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(run, (free_port(), parsed), parsed.ranks, start_method=way)


if __name__ == "__main__":
    main()
