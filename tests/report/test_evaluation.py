"""What an evaluation keeps: scores under their names, metrics, rows in a file, and a page that is safe to open."""

import dataclasses
import math
from html.parser import HTMLParser

import numpy as np
import pytest

from sage_ray.config import EvaluationConfig
from sage_ray.evaluation import (
    NUM_PREVIEWS,
    EvaluatedPolicy,
    choose_prompts,
    evaluated_set,
    evaluation_metrics,
    evaluation_requests,
    preview_places,
    prompt_means,
)
from sage_ray.evaluation_rows import EvaluationRow, evaluation_rows
from sage_ray.gallery import gallery
from sage_ray.row_file import read_rows, write_rows
from sage_ray.types import Prompt
from tests.report.evaluated import PARTS, group, policy


def test_scores_of_a_failed_video_and_of_a_lost_group():
    prompts = [Prompt(0, "a"), Prompt(1, "b")]
    whole = group([[1, 2, 3, 90], [math.nan, 1, 1, 80]], [[1, 1, 2], [0, 0, 0]], "too dark")
    lost = group([[math.nan] * 4] * 2, None, "no worker")
    found = evaluated_set(prompts, [whole, lost], PARTS)
    assert found.scores["reward"][0] == 4.5 and found.scores["overall"][0] == 6 and found.scores["truth"][0] == 3
    assert np.isnan(found.scores["reward"][1:]).all() and found.scores["reward clip"][1] == 80
    assert np.isnan(found.scores["truth"][2:]).all() and found.scores["match"][1] == 1
    assert found.failures == ("", "too dark", "no worker", "no worker") and found.videos_per_prompt == 2


def test_metrics_are_means_over_prompts():
    metrics = evaluation_metrics(policy("base", 0))
    assert metrics["evaluation/held_out/reward/total"] == 3 and metrics["evaluation/held_out/reward/VQ"] == 1.5
    assert metrics["evaluation/held_out/reward/VQ_error"] == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert metrics["evaluation/held_out/reward/clip"] == 91 and metrics["evaluation/held_out/match/total"] == 1
    assert prompt_means(np.array([1, np.nan, np.nan, np.nan, 3, 5]), 2).tolist() == [1, 4]


def test_rows_are_read_back_as_they_were_written(tmp_path):
    policies = [policy("base", 0), policy("new", 1)]
    policies[1].sets["held_out"].scores["reward"][1] = math.nan
    rows = evaluation_rows(policies)
    file = write_rows(tmp_path / "new" / "evaluation.parquet", EvaluationRow, rows)
    assert read_rows(file, EvaluationRow) == rows and len(rows) == 12
    first = rows[0]
    assert (first.policy, first.prompts, first.prompt, first.prompt_index) == ("base", "held_out", "a cat", 7)
    assert (rows[3].prompt, rows[3].sample, rows[3].VQ, rows[3].reward, rows[3].overall) == ("a dog", 1, 2, 4, 6)
    assert rows[3].parts == {"clip": 91} and rows[3].truth_TA == 1 and rows[3].match == 1 and rows[7].reward is None


def test_without_videoalign_there_is_no_overall_and_no_axis():
    parts = type(PARTS)(("clip",), (1.0,))
    found = evaluated_set([Prompt(0, "a")], [group([[90.0]])], parts)
    assert list(found.scores) == ["reward", "reward clip"]
    (row,) = evaluation_rows([EvaluatedPolicy("base", 0, {"training": found})])
    assert row.VQ is None and row.overall is None and row.truth is None and row.parts == {"clip": 90}


def test_prompts_previews_and_noise_are_fixed():
    prompts = [Prompt(i, str(i)) for i in range(100)]
    chosen = choose_prompts(prompts, 10)
    assert (
        chosen == choose_prompts(prompts, 10) and len(chosen) == 10 and chosen == sorted(chosen, key=lambda p: p.index)
    )
    assert set(chosen) < set(choose_prompts(prompts, 50)) and choose_prompts(prompts, 500) == prompts
    assert preview_places(3) == [0, 1, 2] and len(preview_places(23)) == NUM_PREVIEWS and preview_places(48)[-1] == 47
    requests = evaluation_requests(EvaluationConfig(videos_per_prompt=2, seed=5), (1.0, 0.0), chosen, 100, 7)
    assert [request.group for request in requests] == list(range(100, 110))
    assert {(r.seed, r.policy_version, r.sde_type, r.evaluation, r.step) for r in requests} == {(5, 7, "ode", True, 0)}


class Page(HTMLParser):
    """Tags of a page, and where its files lie."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def test_a_prompt_cannot_break_into_the_page(tmp_path):
    bad = ['<script>alert("a")</script>', "</h3><img src=x onerror=alert(1)>", "quotes \" and ' & ampersands"]
    named = dataclasses.replace(policy("base", 0, bad), name="<b>base</b>")
    failed = policy("new one", 0, bad)
    kept = failed.sets["held_out"]
    failed.sets["held_out"] = dataclasses.replace(kept, failures=("<i>why</i>", *kept.failures[1:]))
    gallery(tmp_path / "gallery.html", "a < b", [named, failed])
    text = (tmp_path / "gallery.html").read_text("utf-8")
    page = Page()
    page.feed(text)
    assert page.tags.count("script") == 1 and not {"img", "b", "i"} & set(page.tags)
    assert "&lt;script&gt;alert(&quot;a&quot;)&lt;/script&gt;" in text and "&lt;i&gt;why&lt;/i&gt;" in text
    assert len(page.sources) == 6 and page.sources[1] == "videos/new%20one/held_out_00.mp4"
    assert not any("://" in source or source.startswith("/") for source in page.sources)
