"""How GPUs are best divided between rollouts and learner: every division that can matter, by simulation.

Costs come from predicted rates (`predicted_costs`) or from a run's phase times (`balance_report`). Reward workers have
GPUs of their own, or share the rollout workers': then their seconds lengthen the rollouts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sage_ray.config import Config
from sage_ray.config_check import dp_degree, num_prompts
from sage_ray.cost import H100, Dims
from sage_ray.prediction import forward_tokens, predict, published_bytes
from sage_ray.simulation import Pools, Seconds, Simulated, Work, asynchronous, colocated, synchronous

EXCHANGE_BYTES_S = 367e9
"""Tokens for heads between the GPUs of a node: the rate of an NCCL broadcast of two H100s, which an exchange will not
exceed."""
SIZES = (1, 2, 4, 8)
"""GPUs for one video: what divides the real model's 16 heads and is on one node."""
ALL = 64
"""GPUs up to which every split is considered."""
SHARED_REWARD = 0.0
"""Reward workers on the rollout workers' GPUs."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one group on one GPU; of P groups of G videos an iteration.

    denoise_s, learn_s: divided by the GPUs that share its tokens; denoise_exchange_s, learn_exchange_s: what two to all
    of them exchange, times (n - 1) / n^2. decode_s: by one of them. reward_s: one video. publish_s: all weights from
    one learner GPU, divided by their number; load_s: into a rollout worker.
    """

    groups: int
    videos: int
    denoise_s: float
    decode_s: float
    reward_s: float
    learn_s: float
    publish_s: float = 0.0
    load_s: float = 0.0
    denoise_exchange_s: float = 0.0
    learn_exchange_s: float = 0.0

    def rollout_s(self, sp_size: int) -> float:
        return self.denoise_s / sp_size + self.denoise_exchange_s * (sp_size - 1) / sp_size**2 + self.decode_s

    def update_s(self, sp_size: int) -> float:
        return self.learn_s / sp_size + self.learn_exchange_s * (sp_size - 1) / sp_size**2


@dataclass(frozen=True)
class Split:
    """rollouts: groups of rollout_sp GPUs; ranks: data-parallel ranks of learner_sp GPUs; reward_gpus: of reward
    workers with GPUs of their own, SHARED_REWARD where they share the rollout workers'."""

    rollouts: int
    ranks: int
    rollout_sp: int = 1
    learner_sp: int = 1
    reward_gpus: float = SHARED_REWARD

    @property
    def gpus(self) -> float:
        return self.rollouts * self.rollout_sp + self.ranks * self.learner_sp + self.reward_gpus

    def __str__(self) -> str:
        rollout = f"{self.rollouts * self.rollout_sp} rollout" + _shared(self.rollout_sp)
        learner = f"{self.ranks * self.learner_sp} learner" + _shared(self.learner_sp)
        reward = f" + {self.reward_gpus:g} reward" if self.reward_gpus else ", reward workers on the rollout GPUs"
        return f"{rollout} + {learner}{reward}"


def simulate(costs: Costs, split: Split, gpus: float, age: int | None) -> Simulated:
    """Args: gpus: at hand, of which the split may leave some unused. age: of the policy in the asynchronous ring; None
    is the synchronous one."""
    work, pools = _work(costs, split), Pools(split.rollouts, split.ranks, max(1, int(split.reward_gpus)), gpus)
    if age is None:
        return synchronous(work, pools, iterations=2)
    return asynchronous(work, pools, age, iterations=4 * (age + 1) + 8)


def best_split(
    costs: Costs,
    gpus: int,
    age: int | None,
    sizes: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    fits: Callable[[Split], bool] = lambda split: True,
) -> tuple[Split, Simulated] | None:
    """The fastest split of `gpus` GPUs; of equals the one with the fewest GPUs for one video. None where none fits.

    Args: sizes: rollout_sp and learner_sp that are allowed. fits: whether a split has memory enough.
    """
    bounds = [(_bound(costs, split, age), split) for split in _candidates(costs, gpus, age, sizes, fits)]
    best: tuple[Split, Simulated] | None = None
    for bound, split in sorted(bounds, key=lambda pair: (pair[0], pair[1].rollout_sp + pair[1].learner_sp)):
        if best is not None and bound >= best[1].iteration_s:
            break  # none of the others can be faster
        found = simulate(costs, split, gpus, age)
        if best is None or found.iteration_s < best[1].iteration_s:
            best = split, found
    return best


def best_colocated(costs: Costs, gpus: int, sizes: Sequence[int], switch_s: float = 0.0) -> tuple[int, Simulated]:
    """(sp_size of both sides, what it takes) where all GPUs do each phase in turn."""

    def run(size: int) -> Simulated:
        workers = max(1, gpus // size)
        ranks = min(workers, costs.groups)
        split = Split(workers, ranks, size, size, reward_gpus=gpus)
        return colocated(_work(costs, split), Pools(workers, ranks, gpus, gpus), switch_s, iterations=2)

    found = {size: run(size) for size in sizes if size <= gpus}
    return min(found.items(), key=lambda pair: pair[1].iteration_s)


def predicted_costs(config: Config, dims: Dims, num_trained: int, rates: H100) -> Costs:
    """Args: num_trained: trained steps of a group."""
    alone = one_gpu(config)
    found, videos = predict(alone, dims, num_trained, rates), config.data.group_size
    forwards = videos * config.sampling.num_steps * (1 if config.sampling.guidance_scale == 1.0 else 2)
    velocities = videos * num_trained * (1 if config.sampling.guidance_scale == 1.0 else 2)
    # Of a forward: queries, keys, values and what attention gave, 2 bytes each.
    exchange = 4 * 2 * dims.layers * dims.dim * forward_tokens(config, dims) / EXCHANGE_BYTES_S
    again = 0 if config.model.keep_attention or not config.model.gradient_checkpointing else 1
    size = published_bytes(config, dims)
    return Costs(
        groups=num_prompts(config),
        videos=videos,
        denoise_s=found.rollout_s["denoise"],
        decode_s=found.rollout_s["decode"],
        reward_s=found.rollout_s.get("reward", 0.0) / videos,
        learn_s=sum(found.update_s.values()),
        publish_s=size / rates.pack_bytes_s,
        load_s=size / rates.unpack_bytes_s,
        denoise_exchange_s=forwards * exchange,
        learn_exchange_s=velocities * exchange * (2 + again),
    )


def one_gpu(config: Config, **learner: int) -> Config:
    """The same iteration with a rollout worker and a learner rank for every group, nothing shared; or other settings
    of the learner."""
    groups = num_prompts(config)
    settings = {"num_ranks": groups, "sp_size": 1} | learner
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, num_prompts=groups, batch_size=None, gradient_accumulation_steps=1),
        rollout=dataclasses.replace(config.rollout, num_workers=groups, sp_size=1, gpus_per_group=1),
        reward=dataclasses.replace(config.reward, num_workers=groups),
        learner=dataclasses.replace(config.learner, **settings),
        loss=dataclasses.replace(config.loss, num_updates=1),
    )


def present_split(config: Config) -> Split:
    """The split that a configuration asks for."""
    reward = config.reward
    own = reward.num_workers if reward.gpus_per_worker is None else reward.num_workers * reward.gpus_per_worker
    shares = reward.gpus_per_worker is not None and reward.gpus_per_worker < 1
    return Split(
        rollouts=config.rollout.num_workers,
        ranks=dp_degree(config),
        rollout_sp=config.rollout.gpus_per_group,
        learner_sp=config.learner.sp_size,
        reward_gpus=SHARED_REWARD if shares else own,
    )


def fits_memory(config: Config, dims: Dims, num_trained: int, rates: H100) -> Callable[[Split], bool]:
    """Whether a learner rank of a split is predicted to fit a card."""
    known: dict[tuple[int, int], bool] = {}

    def fits(split: Split) -> bool:
        key = split.ranks * split.learner_sp, split.learner_sp
        if key not in known:
            mine = one_gpu(config, num_ranks=key[0], sp_size=key[1])
            known[key] = sum(predict(mine, dims, num_trained, rates).learner_bytes.values()) <= rates.card_bytes
        return known[key]

    return fits


def _work(costs: Costs, split: Split) -> Work:
    shared = split.reward_gpus == SHARED_REWARD
    rollout_s = costs.rollout_s(split.rollout_sp) + (costs.videos * costs.reward_s if shared else 0.0)
    return Work(
        groups=costs.groups,
        videos=costs.videos,
        rollout=Seconds(rollout_s),
        reward=Seconds(0.0 if shared else costs.reward_s),
        learn=Seconds(costs.update_s(split.learner_sp)),
        publish=Seconds(costs.publish_s / (split.ranks * split.learner_sp)),
        load=Seconds(costs.load_s),
    )


def _candidates(
    costs: Costs,
    gpus: int,
    age: int | None,
    sizes: tuple[Sequence[int], Sequence[int]],
    fits: Callable[[Split], bool],
) -> Iterator[Split]:
    """Every number of ranks; of more than `ALL` GPUs the fewest that give a number of the learner's chunks. All other
    GPUs go to the rollouts, as far as they can be of use. Reward workers share, or have some."""
    most = costs.groups * (1 if age is None else age + 1)
    for rollout_sp in sizes[0]:
        for learner_sp in sizes[1]:
            chunks = None
            for ranks in range(1, min(costs.groups, (gpus - rollout_sp) // learner_sp) + 1):
                left = gpus - ranks * learner_sp
                rollouts = min(left // rollout_sp, most)
                split = Split(rollouts, ranks, rollout_sp, learner_sp)
                if (gpus > ALL and math.ceil(costs.groups / ranks) == chunks) or not fits(split):
                    continue
                chunks = math.ceil(costs.groups / ranks)
                yield split
                for own in _reward_gpus(costs, split, age, left - most * rollout_sp):
                    rollouts = min((left - own) // rollout_sp, most)
                    if rollouts >= 1:
                        yield dataclasses.replace(split, rollouts=rollouts, reward_gpus=float(own))


def _reward_gpus(costs: Costs, split: Split, age: int | None, spare: int) -> set[int]:
    """So many that they are half idle, or all that the rollouts can not use."""
    load = costs.groups * costs.videos * costs.reward_s / max(1e-9, _bound(costs, split, age))
    return {max(1, math.ceil(2 * load)), max(1, min(spare, costs.groups * costs.videos))}


def _bound(costs: Costs, split: Split, age: int | None) -> float:
    """Seconds below which no iteration is."""
    work = _work(costs, split)
    update_s = math.ceil(work.groups / split.ranks) * work.learn.mean + work.publish.mean
    if age is None:
        return math.ceil(work.groups / split.rollouts) * work.rollout.mean + update_s + work.load.mean
    if age == 0:
        made_s = math.ceil(work.groups / split.rollouts) * work.rollout.mean + work.load.mean
        return max(made_s + work.learn.mean + work.publish.mean, work.rollout.mean + update_s)
    return max(work.groups * work.rollout.mean / split.rollouts, update_s)


def _shared(size: int) -> str:
    return f" (sp {size})" if size > 1 else ""
