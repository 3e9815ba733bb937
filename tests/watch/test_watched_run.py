"""What people see of a real run: Prometheus, Ray's own pages, clocks, trace, log and page."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from sage_ray.metrics import read_lines
from sage_ray.structured_log import read_log
from tests.cluster.test_launch import launch
from tests.watch.test_grafana import named_metrics
from tests.watch.test_run_page import HOSTILE, Tags
from tests.watch.test_trace import check
from tests.watch.watched_run import WatchedRun, prometheus_program

pytestmark = pytest.mark.cluster
ACTORS = {"learner-0", "reward-0", "rollout-0"}
WORDS = """data.num_prompts=3 data.group_size=4 num_iterations=5 rollout.num_workers=1 sampling.num_steps=5
kl.share_interval=1 evaluation.num_prompts=2 evaluation.videos_per_prompt=1 evaluation.num_steps=4
watch.page_interval_s=0 watch.max_kl_share=0""".split()
"""A KL share above 0 is an alarm here: it comes once the anchor is left behind."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> WatchedRun:
    watched = WatchedRun(tmp_path_factory.mktemp("watched") / "run")
    watched.run(*WORDS)
    assert watched.code == 0, "".join(watched.lines)
    return watched


def values(run: WatchedRun, name: str, label: str) -> dict[str, float]:
    """Newest values by a label."""
    return {dict(labels)[label]: value for labels, value in run.samples[name].items()}


def test_every_metric_of_the_dashboard_is_exported(run: WatchedRun) -> None:
    assert run.samples.keys() >= named_metrics()
    assert run.complete_s > 0  # and all of them at once


def test_what_is_exported_is_what_the_run_wrote(run: WatchedRun) -> None:
    lines = [line for line in read_lines(run.output / "metrics.jsonl") if "loss/total" in line]
    means = values(run, "ray_sage_reward_mean", "part")
    assert means["total"] in [line["reward/total"] for line in lines] and means.keys() == {"total", "VQ", "MQ", "TA"}
    assert values(run, "ray_sage_failures", "kind")["deaths"] == 0
    assert set(values(run, "ray_sage_pool_busy", "pool")) == {"rollout", "reward", "learner"}
    moved = values(run, "ray_sage_bytes_moved_total", "what")
    assert moved["trajectories"] % lines[0]["bytes/trajectories"] == 0 and moved["frames"] > 0
    states = {(dict(labels)["role"], dict(labels)["state"]) for labels in run.samples["ray_sage_workers"]}
    assert {("learner", "ALIVE"), ("rollout", "ALIVE"), ("reward", "ALIVE")} <= states
    assert all(0 < line["throughput/mfu"] < 1 for line in lines)


def test_phases_and_idle_time_of_every_actor_are_its_wall_time(run: WatchedRun) -> None:
    spans = defaultdict(list)
    for line in map(json.loads, (run.output / "actors.jsonl").read_text().splitlines()):
        assert sum(line["phases"].values()) == pytest.approx(line["wall_s"], abs=1e-4)
        spans[line["actor"]].append(line)
    assert spans.keys() == ACTORS | {"controller"}
    for lines in spans.values():
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        for line, later in zip(lines, lines[1:]):
            assert line["start_s"] + line["wall_s"] == pytest.approx(later["start_s"], abs=0.01)
    work = {name: {phase for line in lines for phase in line["phases"]} for name, lines in spans.items()}
    assert {"load", "denoise", "decode", "weights"} <= work["rollout-0"] and {"load", "score"} <= work["reward-0"]
    assert {"load", "update", "fetch", "publish", "save"} <= work["learner-0"]
    wall = values(run, "ray_sage_actor_seconds_total", "actor")
    assert wall.keys() == ACTORS
    for actor, seconds in wall.items():
        phases = run.samples["ray_sage_actor_phase_seconds_total"]
        total = sum(value for labels, value in phases.items() if dict(labels)["actor"] == actor)
        assert total == pytest.approx(seconds, abs=2.5)  # a scrape may fall between two of their rises


def test_the_trace_holds_the_second_iteration(run: WatchedRun) -> None:
    content = json.loads((run.output / "trace.json").read_text("utf-8"))
    events = check(content)
    actors = {
        event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"
    }
    assert set(actors.values()) == ACTORS | {"controller"}
    rollout = next(one for one in events if one["name"] == "rollout")
    update = next(one for one in events if one["name"] == "update" and actors[one["pid"]] == "controller")
    assert rollout["ts"] + rollout["dur"] <= update["ts"]
    for one in events:  # workers of one machine: their phases lie in the controller's
        if one["name"] in ("denoise", "decode", "score") and actors[one["pid"]] != "controller":
            assert rollout["ts"] - 1e4 <= one["ts"] and one["ts"] + one["dur"] <= rollout["ts"] + rollout["dur"] + 1e4


def test_ray_s_own_pages_name_things(run: WatchedRun) -> None:
    assert {actor["name"].partition("@")[0] for actor in run.actors.values()} == ACTORS
    assert {actor["reprName"] for actor in run.actors.values()} >= ACTORS
    assert [job["driver_info"] is not None for job in run.jobs] == [True]
    assert run.jobs[0]["metadata"]["job_name"] == "run"


def test_actors_logs_say_who_speaks(run: WatchedRun) -> None:
    assert {line["actor"] for line in run.actor_lines} == ACTORS and {line["run"] for line in run.actor_lines} == {
        "run"
    }
    for actor, message in (("learner-0", "update: "), ("rollout-0", "weights: "), ("reward-0", "score: ")):
        mine = [line for line in run.actor_lines if line["actor"] == actor and line["message"].startswith(message)]
        assert len(mine) >= 5 and {line["role"] for line in mine} == {actor.partition("-")[0]}
    versions = [line["version"] for line in run.actor_lines if line["message"].startswith("publish: ")]
    assert versions == [None, 1, 2, 3, 4, 5]


def test_log_alarms_and_page(run: WatchedRun) -> None:
    lines = read_log(run.output)
    assert all(line["run"] == "run" and line["role"] == "controller" for line in lines)
    assert {line["step"] for line in lines} == {None, 1, 2, 3, 4, 5} and lines[-1]["message"] == "finished"
    assert lines[-1]["version"] == 5
    assert not [line for line in lines if "could not be written" in line["message"]]
    (alarm,) = map(json.loads, (run.output / "alarms.jsonl").read_text().splitlines())
    assert alarm["kind"] == "kl_share" and alarm["step"] > 1
    told = [line for line in lines if line["level"] == "WARNING" and alarm["message"] in line["message"]]
    assert len(told) == 1 and any(alarm["message"] in line for line in run.lines)
    metrics = [line for line in read_lines(run.output / "metrics.jsonl") if "loss/total" in line]
    assert [line["alarms/kl_share"] for line in metrics].index(1.0) + 1 == alarm["step"]
    assert values(run, "ray_sage_alarms", "kind")["kl_share"] == 1
    tags = Tags((run.output / "run.html").read_text("utf-8"))
    words = "\n".join(tags.text)
    assert "finished" in words and alarm["message"] in words and "learner-0" in words and "peak of the devices" in words
    assert len(tags.files()) == 8 and all((run.output / file).exists() for file in tags.files())


@pytest.mark.skipif(
    prometheus_program() is None, reason="no Prometheus on the path: `make watch` unpacks Debian's and runs this test"
)
def test_prometheus_answers_every_query_of_the_dashboard(run: WatchedRun) -> None:
    empty = [query for query, series in run.answers.items() if not series]
    assert run.answers and not empty
    assert all(float(one["value"][1]) >= 0 for q, s in run.answers.items() if q.startswith("sum(rate(") for one in s)


def test_hostile_prompts_train_and_stay_text(tmp_path: Path) -> None:
    """Script tags, line ends, thousands of characters, emoji: no page, log or table is broken by them."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "run"
    texts = [text.replace("\ud83d", "") for text in HOSTILE[:3]] + ["\N{GRINNING FACE} [bold]markup[/] {x} %s"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = f"""data.prompts=[{prompts}] data.held_out_prompts=[{prompts}] data.num_prompts=4 data.group_size=2
    num_iterations=1 rollout.num_workers=1 sampling.num_steps=3 sampling.sde_window_size=2 evaluation.num_prompts=4
    evaluation.videos_per_prompt=1 evaluation.num_steps=2 evaluation.sets=[held_out] reward.truth=null"""
    done = launch("train", f"output_dir={output}", *words.split())
    assert done.returncode == 0, done.stderr
    for page in ("run.html", "gallery.html"):
        text = (output / page).read_text("utf-8")
        assert "<script>alert" not in text and "<img" not in text and "&lt;script&gt;alert" in text
        assert text.count("<script>") == 1
    shown = "".join(Tags((output / "run.html").read_text("utf-8")).text)
    assert texts[0] in shown and texts[2] in shown and texts[3] in shown and "line one\nline two\n" in shown
    assert len(read_log(output)) > 5
