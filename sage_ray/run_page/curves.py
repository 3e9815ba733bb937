"""Which curves the run page shows, from the metrics that a run has."""

from __future__ import annotations

from collections.abc import Iterator

from sage_ray.run_page.chart import Series, line_chart
from sage_ray.run_page.run_data import RunData

EVALUATED = {"training": "training prompts", "held_out": "held-out prompts"}
RESERVED = ("failed", "small_groups", "flat_groups", "score_s", "std_in_group")
"""Names under reward/ that are no parts."""
PLAIN = (
    ("spread of the reward", {"in a group": "reward/std_in_group", "over all videos": "reward_std/total"}),
    ("KL, nats per dimension", {"to the anchor": "kl/anchor", "to the previous step": "kl/previous"}),
    ("lambda", {"lambda": "kl/lambda"}),
    ("KL's share of the gradient", {"share": "kl/gradient_share"}),
    ("ratio", {"mean": "loss/ratio_mean"}),
    ("clipped pairs", {"share": "loss/clip_share"}),
    ("gradient norm", {"before clipping": "learner/grad_norm"}),
    ("learning rate", {"learning rate": "learner/learning_rate"}),
    ("rollout and learner log-prob, nats", {"largest difference": "agreement/max_abs"}),
    ("policy age, publishes", {"age": "policy/age"}),
    ("effective share of the pairs", {"share": "policy/effective_sample_size"}),
    ("busy share", {
        "rollout": "pool/rollout_busy", "reward": "pool/reward_busy", "learner": "pool/learner_busy",
    }),
    ("videos a second", {"videos": "throughput/videos_per_s"}),
    ("tokens a second", {"tokens": "throughput/tokens_per_s"}),
    ("share of the devices' peak (MFU)", {"MFU": "throughput/mfu"}),
    ("bytes an iteration", {
        "trajectories": "bytes/trajectories", "frames": "bytes/frames", "publish": "publish/bytes",
    }),
    ("failures so far", {
        "videos without a score": "reward_service/failed", "retries": "reward_service/retries",
        "deaths": "reward_service/deaths", "timeouts": "reward_service/timeouts",
    }),
)  # fmt: skip
"""(title, legend -> metric) of charts of one iteration's metrics."""


def rewards(data: RunData) -> Iterator[str]:
    """Charts of reward and truth, in total and per part, with evaluations as points."""
    for measure in ("reward", "truth"):
        for part in _parts(data, measure):
            series = [Series("training rollouts", data.points(f"{measure}/{part}"))]
            series += [_evaluated(data, which, measure, part) for which in EVALUATED]
            if any(one.points for one in series):
                yield line_chart(f"{measure} {part}", series, _marks(data))


def others(data: RunData) -> Iterator[str]:
    """The other charts that have data."""
    for title, lines in PLAIN:
        series = [Series(name, data.points(metric)) for name, metric in lines.items()]
        if any(one.points for one in series):
            yield line_chart(title, series, _marks(data))
    frames = [Series(name.partition("/")[2], data.points(name)) for name in data.curves if name.startswith("frames/")]
    for one in frames:
        yield line_chart(f"frames: {one.name.replace('_', ' ')}", [one], _marks(data))


def _parts(data: RunData, measure: str) -> list[str]:
    """total first, then the parts in the order of the metrics."""
    names = [name.partition("/")[2] for name in data.curves if name.startswith(f"{measure}/")]
    names += [name.split("/", 3)[3] for name in data.curves if _is_evaluation(name, measure)]
    parts = [name for name in dict.fromkeys(names) if name not in RESERVED and name != "total"]
    return ["total", *parts] if names else []


def _is_evaluation(name: str, measure: str) -> bool:
    words = name.split("/", 3)
    return len(words) == 4 and words[0] == "evaluation" and words[2] == measure and not name.endswith("_error")


def _evaluated(data: RunData, which: str, measure: str, part: str) -> Series:
    name = f"evaluation/{which}/{measure}/{part}"
    return Series(f"evaluated: {EVALUATED[which]}", data.points(name), data.curves.get(f"{name}_error", {}), dots=True)


def _marks(data: RunData) -> list[tuple[int, str]]:
    return [(alarm["step"], f"{alarm['kind']}: {alarm['message']}") for alarm in data.alarms]
