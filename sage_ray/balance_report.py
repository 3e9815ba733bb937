"""What the division of the GPUs costs and what another would gain, in lines: before a run and at its end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sage_ray.balance import (
    SIZES,
    Costs,
    Split,
    best_split,
    fits_memory,
    predicted_costs,
    present_split,
    simulate,
)
from sage_ray.config import Config
from sage_ray.config_check import dp_degree, num_prompts
from sage_ray.cost import H100, Dims
from sage_ray.group_chunks import chunks_of
from sage_ray.simulation import Simulated
from sage_ray.step_plan import StepRule

WORTH = 0.05
"""Gains below this share of an iteration are not worth a change: the simulation is no better."""
POOLS = ("rollout", "reward", "learner")
NEEDED = ("rollout/denoise_s", "rollout/decode_s", "reward/score_s", "phase/update_s", "pool/rollout_busy")


def plan_lines(config: Config, dims: Dims, rule: StepRule, rates: H100) -> Iterator[tuple[str, str]]:
    """(name, words) of the present split, of the best one, and of the number of trained steps that balances the
    present one; of a configuration with pools of its own."""
    if config.cluster.take_turns:
        return
    if chunks_of(config, rule.num_trained) is None:
        yield "split", "not simulated where the learner needs all rewards first or takes several optimizer steps"
        return
    costs, present = predicted_costs(config, dims, rule.num_trained, rates), present_split(config)
    gpus, age = max(1, round(present.gpus)), config.overlap.max_policy_age if config.overlap.enabled else None
    now = simulate(costs, present, present.gpus, age)
    yield "pools as configured", f"{present}: {_words(now)}"
    for name, other in (("best split, synchronous", None), (f"best split, policy age {age or 1}", age or 1)):
        found = best_split(costs, gpus, other, (SIZES, SIZES), fits_memory(config, dims, rule.num_trained, rates))
        if found is None:
            yield name, f"no split of {gpus} GPUs has memory enough"
        else:
            gain = now.iteration_s / found[1].iteration_s
            yield name, f"{found[0]}: {_words(found[1])}, {gain:.2f} x as fast as configured"
    yield "trained steps that balance the pools", _balanced_steps(costs, present, rule, age or 1)


def balance_lines(rows: Sequence[Mapping[str, float | None]], config: Config, gpus: float) -> list[str]:
    """How idle the pools of a run were, and which split of its GPUs would have been best.

    Args: rows: lines of its metrics.jsonl, by step. gpus: those that the run had; 0 on CPUs, and fewer than its actors
    where they shared them: then no other split is searched.
    """
    kept = [row for row in rows if all(row.get(name) is not None for name in NEEDED)]
    kept = kept[1:] if len(kept) > 1 else kept  # the first one compiles and warms up
    if not kept:
        return []
    busy = {pool: _median(kept, f"pool/{pool}_busy") for pool in POOLS}
    idle = ", ".join(f"{pool} {100 * (1 - share):.0f} %" for pool, share in busy.items())
    counts = f"{config.rollout.num_workers} rollout groups, {config.reward.num_workers} reward workers"
    lines = [f"idle (median of {len(kept)} iterations): {idle}; of {counts}, {config.learner.num_ranks} learner ranks"]
    costs, present = measured_costs(kept, config), present_split(config)
    rollout_s = costs.groups * costs.rollout_s(present.rollout_sp)
    update_s = costs.groups * costs.update_s(present.learner_sp)
    if min(rollout_s, update_s) > 0:
        lines.append(
            f"work of an iteration: {rollout_s:.1f} s of one rollout group, {update_s:.1f} s of one data-parallel "
            f"rank; the pools are balanced at {_ratio(rollout_s, update_s)}"
        )
    if gpus >= present.gpus - 1e-6 and not config.cluster.take_turns and chunks_of(config, 1) is not None:
        lines.append(_measured_split(costs, present, int(gpus), config))
    return lines


def measured_costs(rows: Sequence[Mapping[str, float | None]], config: Config) -> Costs:
    """From the medians of a run's phase times: what a group took, and all groups of an iteration the learner."""
    groups, videos = num_prompts(config), config.data.group_size
    chunks = -(-groups // dp_degree(config))
    publish_s = statistics.median([row.get("phase/publish_s") or 0.0 for row in rows])
    return Costs(
        groups=groups,
        videos=videos,
        denoise_s=_median(rows, "rollout/denoise_s") / groups * config.rollout.sp_size,
        decode_s=_median(rows, "rollout/decode_s") / groups,
        reward_s=_median(rows, "reward/score_s") / (groups * videos),
        learn_s=_median(rows, "phase/update_s") / chunks * config.learner.sp_size,
        publish_s=publish_s * config.learner.num_ranks,
    )


def _measured_split(costs: Costs, present: Split, gpus: int, config: Config) -> str:
    """With the sizes of the groups as they are: what others would take was not measured."""
    age = config.overlap.max_policy_age if config.overlap.enabled else None
    now, sizes = simulate(costs, present, gpus, age), ((present.rollout_sp,), (present.learner_sp,))
    found = [(one, best_split(costs, gpus, one, sizes)) for one in dict.fromkeys((age, age or 1))]
    usable = [(one, best) for one, best in found if best is not None]
    if not usable:
        return f"no other split of {gpus} GPUs is possible"
    best_age, (split, best) = min(usable, key=lambda pair: pair[1][1].iteration_s)
    how = "" if best_age == age else f" with overlap.enabled=true overlap.max_policy_age={best_age}"
    if best.iteration_s > (1 - WORTH) * now.iteration_s:
        return f"split of {gpus} GPUs: {present} is within {100 * WORTH:.0f} % of the best"
    gain = now.iteration_s / best.iteration_s
    return (
        f"best split of {gpus} GPUs{how}: {split}; {best.iteration_s:.1f} s an iteration are expected, "
        f"{gain:.2f} x as fast as {present} with {now.iteration_s:.1f} s"
    )


def _balanced_steps(costs: Costs, split: Split, rule: StepRule, age: int) -> str:
    """The learner's seconds are proportional to the trained steps."""
    most = replace(rule, trained_fraction=1.0).num_trained
    each_s = costs.learn_s / rule.num_trained
    found = {
        count: simulate(replace(costs, learn_s=each_s * count), split, split.gpus, age) for count in range(1, most + 1)
    }
    count = max(found, key=lambda one: min(found[one].rollout_busy, found[one].learner_busy))
    return f"{count} of {most} (loss.timestep_fraction={count / most:.2g}), policy age {age}: {_words(found[count])}"


def _words(found: Simulated) -> str:
    return (
        f"{found.iteration_s:.0f} s an iteration, {found.gpu_s_per_video:.0f} GPU-seconds a video, busy: "
        f"rollout {100 * found.rollout_busy:.0f} %, learner {100 * found.learner_busy:.0f} %"
    )


def _ratio(rollout_s: float, update_s: float) -> str:
    if rollout_s >= update_s:
        return f"{rollout_s / update_s:.1f} rollout groups to a rank"
    return f"{update_s / rollout_s:.1f} ranks to a rollout group"


def _median(rows: Sequence[Mapping[str, float | None]], name: str) -> float:
    return float(statistics.median([value for row in rows if (value := row.get(name)) is not None]))
