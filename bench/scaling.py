"""Predicted step times of 8 to 1,024 GPUs: `python -m bench.scaling [--gpus 8 64 1024] [--write docs/scaling.md]`.

The official recipe (configs/official_8gpu.yaml: 20 steps, all trained, guidance, all weights) from the rates of
`cost.H100` by the simulation of `sage_ray/simulation.py`, every way at its best split. Nothing is run. --write puts the
tables between the two marks of a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.ring import RINGS
from bench.timeline import ROOT
from sage_ray.balance import (
    SIZES,
    Costs,
    Split,
    best_colocated,
    best_split,
    fits_memory,
    predicted_costs,
    present_split,
    simulate,
)
from sage_ray.config import Config
from sage_ray.config_load import load_config
from sage_ray.cost import H100, Dims
from sage_ray.simulation import Pools, Seconds, Simulated, Work, asynchronous, colocated, synchronous
from sage_ray.training_schedule import training_schedule

REAL = Dims(dim=2048, layers=54, refiner_layers=2, patch=(1, 1))
RATES = H100()
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
STEPS = 20
SHIPPED_FORWARD_S, SHIPPED_UPDATE_S = 4.36, 15.2
"""One video of 81 frames as diffusers ships the model: a forward, a forward and backward (an H100, 2026-11)."""
SPREADS, SEEDS = (0.0, 0.02, 0.05, 0.1, 0.2), 20
MARKS = "<!-- python -m bench.scaling -->", "<!-- end -->"
Row = tuple[str, ...]


def configured(prompts: int) -> Config:
    """The official recipe with so many prompts an iteration."""
    words = ["data.batch_size=null", f"data.num_prompts={prompts}"]
    return load_config([ROOT / "configs" / "official_8gpu.yaml"], words)


def official_way(prompts: int, gpus: int) -> Simulated:
    """All GPUs do each phase in turn, pairs of them share the tokens of two videos, the model is as shipped. Nothing is
    counted for collectives, the optimizer, and moving references."""
    pairs, videos = gpus // 2, 4 * prompts
    per_pair = -(-videos // pairs)
    velocities = per_pair * STEPS * 2
    pixels_s = 81 * 480 * 832 / RATES.decode_pixels_s
    work = Work(
        groups=pairs,
        videos=per_pair,
        rollout=Seconds(velocities * SHIPPED_FORWARD_S / 2 + per_pair * pixels_s / 2),
        reward=Seconds(1 / RATES.reward_rate(per_pair)),
        learn=Seconds(velocities * (SHIPPED_UPDATE_S + SHIPPED_FORWARD_S) / 2),
    )
    found = colocated(work, Pools(pairs, pairs, gpus, gpus), iterations=2)
    return dataclasses.replace(found, gpu_s_per_video=gpus * found.iteration_s / videos)


def row(prompts: int, gpus: int) -> Row:
    """One line of a table: seconds an iteration, GPU-seconds a video in brackets."""
    config = configured(prompts)
    costs, fits = predicted_costs(config, REAL, STEPS, RATES), fits_memory(config, REAL, STEPS, RATES)
    size, together = best_colocated(costs, gpus, SIZES)
    straight, overlapped = (best_split(costs, gpus, age, (SIZES, SIZES), fits) for age in (None, 1))
    official = official_way(prompts, gpus)
    cells = [f"{gpus:,}", f"{prompts} x 4", _cell(official), f"{_cell(together)}, sp {size}"]
    for found in (straight, overlapped):
        cells.append("no memory" if found is None else f"{_cell(found[1])}, {_short(found[0])}")
    if overlapped is not None:
        expected = overlapped[1]
        cells.append(f"{100 * expected.rollout_busy:.0f}, {100 * expected.learner_busy:.0f} %")
        cells.append(f"{official.iteration_s / expected.iteration_s:.1f}")
        cells.append(f"{together.iteration_s / expected.iteration_s:.2f}")
    return tuple(cells)


def rings() -> Iterator[Row]:
    """What bench/ring.py measures, predicted: its cuts of the recipe, one after the other and overlapped."""
    for (gpus, rollouts), ring in RINGS.items():
        words = [word for word in ring.words.split() if not word.startswith("cluster.")]
        config = load_config([ring.file], [*words, "sampling.shift=5.0", "kl.share_interval=0"])
        trained = training_schedule(config).rule.num_trained
        costs, split = predicted_costs(config, REAL, trained, RATES), present_split(config)
        if gpus == 1:
            yield f"{gpus}", "by turns", _part(costs.groups * costs.rollout_s(1)), _part(costs.learn_s), "", ""
            continue
        split = dataclasses.replace(split, reward_gpus=0)
        straight, overlapped = (simulate(costs, split, gpus, age) for age in (None, 1))
        made_s = -(-costs.groups // split.rollouts) * costs.rollout_s(1)
        update_s = -(-costs.groups // split.ranks) * costs.update_s(1)
        busy = f", busy {100 * overlapped.rollout_busy:.0f}, {100 * overlapped.learner_busy:.0f} %"
        named = f"{rollouts} + {split.ranks}"
        yield f"{gpus}", named, _part(made_s), _part(update_s), _cell(straight), _cell(overlapped) + busy


def spreads(gpus: int = 64) -> Iterator[Row]:
    """Medians over seeds with times that vary, at the splits that are best where they do not."""
    config = configured(gpus // 4)
    costs, fits = predicted_costs(config, REAL, STEPS, RATES), fits_memory(config, REAL, STEPS, RATES)
    best = {age: best_split(costs, gpus, age, (SIZES, SIZES), fits) for age in (None, 1)}
    for spread in SPREADS:
        cells = [f"{spread:g}"]
        for age, found in best.items():
            assert found is not None
            cells.append(f"{_varied(costs, found[0], gpus, age, spread):.0f}")
        yield tuple(cells)


def _varied(costs: Costs, split: Split, gpus: int, age: int | None, spread: float) -> float:
    work = Work(
        groups=costs.groups,
        videos=costs.videos,
        rollout=Seconds(costs.rollout_s(split.rollout_sp) + costs.videos * costs.reward_s, spread),
        reward=Seconds(0.0),
        learn=Seconds(costs.update_s(split.learner_sp), spread),
        publish=Seconds(costs.publish_s / (split.ranks * split.learner_sp)),
        load=Seconds(costs.load_s),
    )
    pools = Pools(split.rollouts, split.ranks, 1, gpus)
    run: Callable[[int], Simulated] = (
        (lambda seed: synchronous(work, pools, 8, seed))
        if age is None
        else (lambda seed: asynchronous(work, pools, age, 24, seed))
    )
    return statistics.median(run(seed).iteration_s for seed in range(SEEDS))


def tables(gpus: Sequence[int]) -> str:
    """All of them, as Markdown."""
    head = (
        "GPUs", "prompts x videos", "official way", "colocated, our kernels", "separate, synchronous",
        "separate, policy age 1", "busy: rollout, learner", "official / age 1", "colocated / age 1",
    )  # fmt: skip
    parts = [
        "Seconds an iteration (GPU-seconds a video), at the best split. As many videos as GPUs, as the official rule"
        " has it:",
        _table(head, [row(count // 4, count) for count in gpus]),
        "The 64 videos of the official 64 GPUs on any number of them:",
        _table(head, [row(16, count) for count in gpus]),
        "What `bench/ring.py` cuts of the recipe, on the GPUs that measure it:",
        _table(
            ("GPUs", "rollout + learner", "rollout", "update", "synchronous", "policy age 1"),
            list(rings()),
        ),
        "64 GPUs with rollouts and updates of groups that vary (lognormal; standard deviation of the logarithm), median"
        f" of {SEEDS} seeds:",
        _table(("spread", "separate, synchronous", "separate, policy age 1"), list(spreads())),
    ]
    return "\n\n".join(parts)


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(found: Simulated) -> str:
    return f"{found.iteration_s:.0f} s ({found.gpu_s_per_video:.0f})"


def _part(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _short(split: Split) -> str:
    sizes = f"sp {split.rollout_sp} + {split.learner_sp}"
    own = f" + {split.reward_gpus:g}" if split.reward_gpus else ""
    return f"{split.rollouts * split.rollout_sp} + {split.ranks * split.learner_sp}{own} ({sizes})"


def main(arguments: Sequence[str] | None = None) -> str:
    """Print the tables, or put them into a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS), help="multiples of 8")
    parser.add_argument("--write", type=Path, help="file whose tables are replaced")
    parsed = parser.parse_args(arguments)
    if bad := [count for count in parsed.gpus if count < 8 or count % 8]:
        parser.error(f"--gpus {bad[0]}: must be a multiple of 8")
    text = tables(parsed.gpus)
    if parsed.write is None:
        print(text)
        return text
    before, _, rest = parsed.write.read_text("utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        parser.error(f"--write {parsed.write}: must hold {MARKS[0]} and {MARKS[1]}")
    parsed.write.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}", "utf-8")
    return text


if __name__ == "__main__":
    main()
