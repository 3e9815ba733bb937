"""The run page: made from a run's files, complete while they grow, and text stays text."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sage_ray.alarms import Alarm
from sage_ray.evaluation import EvaluatedPolicy
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.metrics import MetricsWriter
from sage_ray.row_file import write_rows
from sage_ray.run_page.chart import Series, bar_chart, line_chart, number_text, ticks
from sage_ray.run_page.look import SCRIPT, STYLE, policy
from sage_ray.run_page.page import RunPage
from sage_ray.run_page.run_data import MAX_POINTS, RunData, append_alarm
from sage_ray.video import write_video
from tests.report.evaluated import policy as evaluated

HOSTILE = (
    "<script>alert('x')</script> & <img src=x onerror=alert(1)> \"quoted\"",
    "line one\nline two\r\n</p></article>",
    "long & <b>" * 1000 + "end",
    "\N{GRINNING FACE}\N{ZERO WIDTH JOINER} \N{RIGHT-TO-LEFT OVERRIDE} \x00 \ud83d ${x} {y} %s",
)


class Tags(HTMLParser):
    """The page as a browser reads it."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def files(self) -> list[str]:
        return [str(attributes["src"]) for tag, attributes in self.tags if tag == "video"]


def make_run(folder: Path, prompts: tuple[str, ...] = ("a cat", "a dog"), iterations: int = 2) -> RunPage:
    """A folder as a run leaves it: metrics, two evaluations with videos, actors, alarms, settings, environment."""
    folder.mkdir(parents=True)
    with MetricsWriter(folder) as writer:
        for step in range(1, iterations + 1):
            writer.write(
                step, {"reward/total": step / 7, "reward/VQ": -step, "phase/rollout_s": 2.0, "phase/update_s": 1}
            )
    for step, gain in ((0, 0.0), (iterations, 0.5)):
        name = f"iteration_{step:06d}"
        found: EvaluatedPolicy = evaluated(name, gain, prompts)
        rows = [
            EvaluationRow(**vars(row) | {"prompt": row.prompt.encode("utf-8", "replace").decode()})
            for row in evaluation_rows([found])
        ]
        write_rows(folder / "evaluations" / f"{name}.parquet", EvaluationRow, rows)
        for number in range(len(prompts)):
            write_video(folder / "videos" / name / f"held_out_{number:02d}.mp4", np.zeros((3, 16, 16, 3), np.uint8), 8)
    line = {"step": 1, "actor": "rollout-0", "role": "rollout", "wall_s": 3.0, "phases": {"denoise": 2.0, "idle": 1.0}}
    (folder / "actors.jsonl").write_text(json.dumps(line) + "\n")
    append_alarm(folder, 2, Alarm("kl_share", "kl/gradient_share is 0.7, above 0.5: <i>advice</i>"))
    (folder / "config.yaml").write_text("output_dir: x\nreward:\n  extra: {mine: {options: {api_key: hunter2}}}\n")
    (folder / "environment.json").write_text(json.dumps({"command": "launch.py <train>"}))
    return RunPage(folder, iterations, interval_s=0.0)


def read(page: RunPage, state: str = "running") -> tuple[str, Tags]:
    page.write(state, force=True)
    text = (page.folder / "run.html").read_text("utf-8")
    return text, Tags(text)


def test_everything_is_on_it(tmp_path: Path) -> None:
    text, tags = read(make_run(tmp_path / "my run"), "finished")
    words = "\n".join(tags.text)
    for expected in ("my run", "finished", "iteration 2 of 2", "reward VQ", "rollout-0", "a cat", "a dog", "kl_share"):
        assert expected in words
    assert "kl/gradient_share is 0.7, above 0.5: <i>advice</i>" in words and "launch.py <train>" in words
    assert "before (iteration 0)" in words and "after (iteration 2)" in words
    assert len(tags.files()) == 4 and all((tmp_path / "my run" / file).stat().st_size > 0 for file in tags.files())
    assert "hunter2" not in text and "api_key: '***'" in words
    assert len([1 for tag, attributes in tags.tags if attributes.get("class") == "mark"]) >= 2  # the alarm, in curves


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    text, tags = read(make_run(tmp_path / "run"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not {tag for tag, _ in tags.tags} & {"link", "iframe", "img", "object", "embed", "base", "form"}
    assert [name for tag, attributes in tags.tags if tag == "script" for name in attributes] == []
    assert policy() in text.replace("&#x27;", "'") and f"<script>{SCRIPT}</script>" in text and STYLE in text
    assert "'unsafe-inline'" not in text and not any("style" in attributes for _, attributes in tags.tags)
    assert not any(name.startswith("on") for _, attributes in tags.tags for name in attributes)


def test_a_hostile_prompt_is_text(tmp_path: Path) -> None:
    """And the page has the tags that it has with kind ones."""
    _, tags = read(make_run(tmp_path / "hostile", HOSTILE))
    _, kind = read(make_run(tmp_path / "kind", ("a",) * len(HOSTILE)))
    words = "".join(tags.text)
    assert HOSTILE[0] in words and "line one\nline two\n</p></article>" in words and HOSTILE[2] in words
    assert "\N{GRINNING FACE}" in words and "${x} {y} %s" in words and "\x00" not in words
    folded = ("details", "summary")
    assert [tag for tag, _ in tags.tags if tag not in (*folded, "bdi")] == [t for t, _ in kind.tags if t != "bdi"]
    assert sum(tag == "details" for tag, _ in tags.tags) == 1


def test_a_growing_run(tmp_path: Path) -> None:
    """It is read on, a half-written line waits, and a file that was cut is read anew."""
    folder = tmp_path / "run"
    page = make_run(folder)
    read(page)
    assert page.data.step == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time_s": 9.0, "reward/total": 4.5}\n{"step": 4, "ti')
    _, tags = read(page)
    assert page.data.step == 3 and "iteration 3 of 2" in "".join(tags.text)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('me_s": 9.5, "reward/total": null}\n')
    page.data.refresh()
    assert page.data.step == 4 and page.data.points("reward/total")[-1] == (3, 4.5)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    page.data.refresh()
    assert page.data.step == 1 and page.data.points("reward/VQ") == [(1, -1.0)]


def test_it_is_not_written_more_often_than_asked(tmp_path: Path) -> None:
    page = make_run(tmp_path / "run")
    page.interval_s = 3600.0
    page.write("running")
    first = (tmp_path / "run" / "run.html").stat().st_mtime_ns
    page.write("running")
    assert (tmp_path / "run" / "run.html").stat().st_mtime_ns == first
    page.write("stopped: RuntimeError: no space", force=True)
    assert "stopped: RuntimeError: no space" in (tmp_path / "run" / "run.html").read_text("utf-8")


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    _, tags = read(RunPage(tmp_path / "run", 5, 0.0), "starting")
    assert "iteration 0 of 5" in "".join(tags.text) and tags.files() == []


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    data = RunData(tmp_path)
    data.curves["x"] = {step: float(step) for step in range(10 * MAX_POINTS + 7)}
    points = data.points("x")
    assert len(points) <= MAX_POINTS + 1 and points[0] == (0, 0.0) and points[-1][0] == 10 * MAX_POINTS + 6
    assert data.points("missing") == []


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-12, -1e-12], [1e30, -1e30], [-5.0, 7.0, 0.1]])
def test_charts_stay_inside_their_box(values: list[float]) -> None:
    series = Series("a <b>", list(enumerate(values)), {0: 1e-3})
    text = line_chart("t & t", [series, Series("none", [])], [(0, "why <i>")])
    assert "nan" not in text and "inf" not in text and "a &lt;b&gt;" in text and "<i>" not in text
    for x, y in re.findall(r"c[xy]=\"([-0-9.]+)\" cy=\"([-0-9.]+)\"", text):
        assert 0 <= float(x) <= 360 and 0 <= float(y) <= 190


def test_bars_are_as_long_as_their_parts() -> None:
    text = bar_chart("t", [("a", {"idle": 1.0, "x": 3.0}), ("b", {"x": 2.0})], "s")
    widths = [float(width) for width in re.findall(r'width="([0-9.]+)"><title>', text)]
    assert widths == [742.5, 247.5, 495.0]  # idle comes last
    assert bar_chart("t", [], "s") and "idle" in text


@pytest.mark.parametrize(
    ("low", "high", "count", "found"),
    [(0, 10, 2, [0, 5, 10]), (-0.1, 0.31, 5, [-0.1, 0, 0.1, 0.2, 0.3]), (3e6, 5e6, 2, [3e6, 4e6, 5e6])],
)
def test_ticks(low: float, high: float, count: int, found: list[float]) -> None:
    assert ticks(low, high, count) == pytest.approx(found)


def test_numbers_are_short() -> None:
    words = [number_text(x) for x in (0, 0.12345, 12345, 3.4e-6, -2.5e9)]
    assert words == ["0", "0.1235", "12.3k", "3.4e-06", "-2.5G"]


def test_the_page_appears_whole(tmp_path: Path) -> None:
    """Nothing but the page is left, and a page that cannot be written raises for the one who guards it."""
    page = make_run(tmp_path / "run")
    read(page)
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".partial")]
    (tmp_path / "run" / "metrics.jsonl").write_text("no json\n" * 100)
    with pytest.raises(ValueError):
        page.write("running", force=True)
