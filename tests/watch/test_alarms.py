"""Alarms: said when a value leaves its range, again only after it came back, and counted by kind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sage_ray.alarms import Alarms, Range, ranges
from tests.small import small_config


def one(*values: float | None, low: float = 0.0, high: float = 0.5) -> tuple[list[int], Alarms]:
    """How many alarms each value gives."""
    alarms = Alarms((Range("share", "kl/gradient_share", low, high, "advice"),))
    return [len(alarms.update({"kl/gradient_share": value, "other": 9.0})) for value in values], alarms


def test_an_alarm_is_told_once_until_the_value_came_back() -> None:
    told, alarms = one(0.4, 0.6, 0.7, 0.5, 0.51, 0.2)
    assert told == [0, 1, 0, 0, 1, 0] and alarms.counts == {"divergence": 0, "share": 2}


def test_a_missing_value_changes_nothing() -> None:
    told, alarms = one(0.6, None, math.nan, 0.6, 0.1, math.inf)
    assert told == [1, 0, 0, 0, 0, 0]
    assert alarms.update({}) == []


def test_both_ends_of_a_range() -> None:
    alarms = Alarms((Range("samples", "policy/effective_sample_size", 0.5, math.inf, "smaller steps"),))
    (alarm,) = alarms.update({"policy/effective_sample_size": 0.25})
    assert alarm == ("samples", "policy/effective_sample_size is 0.25, below 0.5: smaller steps")


def test_a_divergence_is_counted_too() -> None:
    _, alarms = one(0.1)
    assert alarms.diverged("reward rose, but truth fell").kind == "divergence" and alarms.counts["divergence"] == 1


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        ("kl_share", {"kl/gradient_share": 0.61}),
        ("clip_share", {"loss/clip_share": 0.51}),
        ("agreement", {"agreement/max_abs": 0.6e-3}),
        ("policy_age", {"policy/age": 1.0}),
        ("effective_sample_size", {"policy/effective_sample_size": 0.4}),
    ],
)
def test_a_run_s_own_ranges(tmp_path: Path, kind: str, metrics: dict[str, float]) -> None:
    """The small world: clip_range 0.01, so 1e-3 nats stop the run, and half of that alarms; strictly on-policy."""
    config = small_config(tmp_path, ["watch.max_kl_share=0.6"])
    assert [alarm.kind for alarm in Alarms(ranges(config)).update(metrics)] == [kind]
    small = {name: 0.5 * value if name != "policy/effective_sample_size" else 0.9 for name, value in metrics.items()}
    small = {name: 0.0 if name == "policy/age" else value for name, value in small.items()}
    assert Alarms(ranges(config)).update(small) == []


def test_the_allowed_age_is_the_overlap_s(tmp_path: Path) -> None:
    config = small_config(tmp_path, ["overlap.enabled=true", "overlap.max_policy_age=2"])
    alarms = Alarms(ranges(config))
    assert alarms.update({"policy/age": 2.0}) == [] and len(alarms.update({"policy/age": 3.0})) == 1
