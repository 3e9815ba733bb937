"""The Grafana dashboard: generated, current, valid, and about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from sage_ray.watched import ACTOR_PHASES, ACTOR_WALL, FAMILIES, RULES, samples
from tests.small import ROOT

FILE = ROOT / "deploy" / "grafana" / "sage_ray.json"
MUST = """
reward_mean reward_std truth_mean kl kl_lambda ratio_mean clip_share gradient_norm kl_gradient_share
policy_age phase_seconds pool_busy videos_per_second tokens_per_second mfu bytes_moved queue_depth workers failures
""".split()


def named_metrics() -> set[str]:
    """Every metric in the dashboard's queries."""
    panels = json.loads(FILE.read_text("utf-8"))["panels"]
    nested = [inner for panel in panels for inner in (panel, *panel.get("panels", ()))]
    queries = [target["expr"] for panel in nested for target in panel.get("targets", ())]
    return {name for query in queries for name in re.findall(r"\bray_sage_\w+", query)}


def test_it_is_what_the_generator_writes() -> None:
    done = subprocess.run(
        [sys.executable, "deploy/grafana/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_valid() -> None:
    """What Grafana needs to open it: a uid, rows and panels with own ids and places that do not overlap, queries."""
    content = json.loads(FILE.read_text("utf-8"))
    assert content["uid"] == "sageRayDashboard" and content["title"] == "sage-ray" and content["schemaVersion"] >= 27
    ids, cells = set(), set()
    for panel in content["panels"]:
        assert panel["id"] not in ids
        ids.add(panel["id"])
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells and max(x for x, _ in mine) < 24
        cells |= mine
        if panel["type"] != "row":
            assert panel["title"] and panel["datasource"] == "${datasource}" and panel["targets"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            for target in panel["targets"]:
                expression = target["expr"]
                assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]"))
                used = set(re.findall(r"\$(\w+)", expression))
                assert used <= {one["name"] for one in content["templating"]["list"]}
    assert any(panel["type"] == "row" for panel in content["panels"])


def test_it_shows_every_family_but_gpu_memory_and_no_other() -> None:
    assert named_metrics() == {one.exported for one in FAMILIES.values()} - {"ray_sage_device_bytes"}
    assert {f"sage_{name}" for name in MUST} <= FAMILIES.keys()


def test_every_family_is_fed_by_a_rule_or_by_hand() -> None:
    by_hand = {"sage_iteration", "sage_videos", "sage_workers", "sage_alarms", ACTOR_PHASES, ACTOR_WALL}
    assert {family for _, family in RULES if family} | by_hand == FAMILIES.keys()


@pytest.mark.parametrize(
    ("name", "family", "labels"),
    [
        ("reward/total", "sage_reward_mean", {"part": "total"}),
        ("reward/mine.part", "sage_reward_mean", {"part": "mine.part"}),
        ("reward/failed", None, {}),
        ("reward/std_in_group", "sage_reward_std_in_group", {}),
        ("reward_std/VQ", "sage_reward_std", {"part": "VQ"}),
        ("evaluation/held_out/truth/TA", "sage_evaluation", {"set": "held_out", "measure": "truth", "part": "TA"}),
        ("evaluation/held_out/truth/TA_error", None, {}),
        ("phase/publish_s", "sage_phase_seconds", {"phase": "publish"}),
        ("pool/learner_busy", "sage_pool_busy", {"pool": "learner"}),
        ("queue/trajectories", "sage_queue_depth", {"queue": "trajectories"}),
        ("publish/bytes", "sage_bytes_moved", {"what": "publish"}),
        ("bytes/frames", "sage_bytes_moved", {"what": "frames"}),
        ("reward_service/deaths", "sage_failures", {"kind": "deaths"}),
        ("failures/rollout_hung", "sage_failures", {"kind": "rollout_hung"}),
        ("rollout_pool/serving", "sage_rollout_groups", {"state": "serving"}),
        ("rollout_pool/joined", None, {}),
        ("frames/brightness", None, {}),
    ],
)
def test_metrics_become_samples(name: str, family: str | None, labels: dict[str, str]) -> None:
    found = list(samples({name: 2.0, "loss/total": None, "kl/anchor": float("nan")}))
    assert found == ([] if family is None else [(family, labels, 2.0)])
    for sample in found:
        assert set(sample.labels) == set(FAMILIES[sample.family].labels)
