#!/usr/bin/env python
"""Writes deploy/grafana/sage_ray.json: the Grafana dashboard of a run, made by Ray's own dashboard factory.

`python deploy/grafana/generate.py` writes it, `--check` only says whether it is current. Put the file where Grafana's
provisioning looks, such as SESSION/metrics/grafana/dashboards of a Ray head (docs/watch.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ray.dashboard.modules.metrics.dashboards.common import DashboardConfig, Panel, Row, Target
from ray.dashboard.modules.metrics.grafana_dashboard_factory import _generate_grafana_dashboard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from sage_ray.watched import ACTOR_PHASES, ACTOR_WALL, FAMILIES  # noqa: E402

FILE = Path(__file__).with_name("sage_ray.json")
UID = "sageRayDashboard"
WINDOW = "1m"
ROWS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Reward": (
        ("reward, mean", ("sage_reward_mean",)),
        ("reward, standard deviation", ("sage_reward_std", "sage_reward_std_in_group")),
        ("truth", ("sage_truth_mean",)),
        ("evaluation", ("sage_evaluation",)),
    ),
    "Policy update": (
        ("KL", ("sage_kl",)),
        ("lambda", ("sage_kl_lambda",)),
        ("KL's share of the gradient", ("sage_kl_gradient_share",)),
        ("ratio", ("sage_ratio_mean",)),
        ("clipped pairs", ("sage_clip_share",)),
        ("gradient norm", ("sage_gradient_norm",)),
        ("loss", ("sage_loss",)),
        ("learning rate", ("sage_learning_rate",)),
        ("agreement of rollout and learner", ("sage_agreement",)),
        ("policy age", ("sage_policy_age",)),
        ("effective share of the pairs", ("sage_effective_sample_size",)),
        ("iteration and policy version", ("sage_iteration", "sage_policy_version")),
    ),
    "Speed": (
        ("seconds of a phase", ("sage_phase_seconds",)),
        ("busy share of a pool", ("sage_pool_busy",)),
        ("what actors do", (ACTOR_PHASES,)),
        ("clocks that run", (ACTOR_WALL,)),
        ("videos a second", ("sage_videos_per_second", "sage_videos")),
        ("tokens a second", ("sage_tokens_per_second",)),
        ("floating-point operations", ("sage_flops_per_second",)),
        ("share of the devices' peak (MFU)", ("sage_mfu",)),
        ("bytes moved a second", ("sage_bytes_moved",)),
        ("queue depth", ("sage_queue_depth",)),
    ),
    "Health": (
        ("workers by state", ("sage_workers",)),
        ("rollout groups", ("sage_rollout_groups",)),
        ("failures by kind", ("sage_failures",)),
        ("alarms by kind", ("sage_alarms",)),
    ),
}
"""Row -> (panel, families). GPU memory is on Ray's own dashboard."""
STACKED = ("sage_phase_seconds", "sage_workers", ACTOR_PHASES)


def expression(name: str) -> Target:
    """The query of a family: its values, or its counter's rise per second."""
    family = FAMILIES[name]
    series = family.exported + "{{{global_filters}}}"  # the factory formats it
    labels = ", ".join(family.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in family.labels) or family.name.removeprefix("sage_")
    inner = f"rate({series}[{WINDOW}])" if family.kind == "counter" else series
    how = "sum" if family.kind == "counter" or name == "sage_workers" else "max"
    by = f" by ({labels})" if labels else ""
    return Target(expr=f"{how}({inner}){by}", legend=legend)


def panels(rows: tuple[tuple[str, tuple[str, ...]], ...], ids: Iterator[int]) -> Iterator[Panel]:
    """Panels of a row."""
    for title, names in rows:
        stacked = names[0] in STACKED
        yield Panel(
            id=next(ids),
            title=title,
            description=" ".join(FAMILIES[name].description for name in names),
            unit=FAMILIES[names[0]].unit,
            targets=[expression(name) for name in names],
            fill=10 if stacked else 0,
            stack=stacked,
        )


def dashboard() -> str:
    """The dashboard as JSON text."""
    ids = count(1)
    rows = [
        Row(title=title, id=next(ids), panels=list(panels(contents, ids)), collapsed=False)
        for title, contents in ROWS.items()
    ]
    config = DashboardConfig(
        name="SAGE",
        default_uid=UID,
        standard_global_filters=['SessionName=~"$SessionName"', 'ray_io_cluster=~"$Cluster"'],
        base_json_file_name="default_grafana_dashboard_base.json",
        rows=rows,
    )
    content = json.loads(_generate_grafana_dashboard(config)[0]) | {"title": "sage-ray"}
    variables = content["templating"]["list"]
    content["templating"]["list"] = [
        one for one in variables if one["name"] in ("datasource", "SessionName", "Cluster")
    ]
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """0 when the file is, or now is, current."""
    text = dashboard()
    if arguments == ["--check"]:
        current = FILE.exists() and FILE.read_text("utf-8") == text
        print(f"{FILE.name} is {'current' if current else 'not current: run deploy/grafana/generate.py'}")
        return 0 if current else 1
    FILE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
