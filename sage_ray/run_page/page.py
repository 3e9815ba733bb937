"""Writes run.html: curves, alarms, phases, videos before and after, settings. It opens from disk, without a server.

Nothing in it comes from elsewhere, every text is escaped, and a browser runs no script but the page's own.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

import yaml

from sage_ray.environment import FILE_NAME as ENVIRONMENT
from sage_ray.progress import duration
from sage_ray.redact import redact, redacted
from sage_ray.run_page.chart import bar_chart, number_text
from sage_ray.run_page.curves import others, rewards
from sage_ray.run_page.look import SCRIPT, STYLE, policy
from sage_ray.run_page.run_data import Clip, Comparison, RunData

FILE_NAME = "run.html"
MAX_BARS, MAX_ACTORS, MAX_ALARMS = 24, 80, 200
LONG = 300
"""Characters of a prompt above which the rest is folded."""
PHASES = ("rollout", "wait", "update", "turn", "publish", "save")
"""Phases of an iteration in the order of their bars; others follow."""


class RunPage:
    """Keeps folder/run.html current.

    Args: num_iterations: of the whole run. interval_s: fewest seconds between two writes.
    """

    def __init__(self, folder: Path, num_iterations: int, interval_s: float):
        self.folder, self.num_iterations, self.interval_s = folder, num_iterations, interval_s
        self.data = RunData(folder)
        self._written_s = -math.inf

    def write(self, state: str, force: bool = False) -> None:
        """Write the page unless it was just written. Raises: OSError, ValueError for a damaged file.

        Args: state: starting, running, finished, or why it stopped.
        """
        if not force and time.monotonic() - self._written_s < self.interval_s:
            return
        self.data.refresh()
        text = page(self.data, self.num_iterations, state)
        partial = self.folder / f".{FILE_NAME}.partial"
        partial.write_bytes(text.encode("utf-8", errors="replace"))
        os.replace(partial, self.folder / FILE_NAME)
        self._written_s = time.monotonic()


def page(data: RunData, num_iterations: int, state: str) -> str:
    """The whole page of what has been read."""
    title = data.folder.resolve().name
    sections = [
        ("Reward and truth", f'<div class="grid">{"".join(rewards(data))}</div>' if data.curves else "nothing yet"),
        ("Alarms", "".join(_alarms(data))),
        ("Before and after", "".join(_videos(data))),
        ("Phases", "".join(_phases(data))),
        ("Training", f'<div class="grid">{"".join(others(data))}</div>'),
        ("Settings", f"<pre>{plain(_settings(data.folder))}</pre>"),
        ("Environment", _table(_environment(data.folder))),
    ]
    body = "".join(f"<section><h2>{name}</h2>{content}</section>\n" for name, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{plain(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{_header(data, title, num_iterations, state)}\n{body}<script>{SCRIPT}</script></body></html>\n"
    )


def plain(text: str) -> str:
    """Text for HTML, in which nothing is markup; secrets and control characters are replaced."""
    text = redact(text).replace("\r\n", "\n")
    kept = "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape(kept)


def _header(data: RunData, title: str, num_iterations: int, state: str) -> str:
    kind = state.partition(":")[0]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    follow = '<label><input type="checkbox" id="follow"> reload every 10 s</label>'
    tiles = "".join(f"<li><b>{plain(value)}</b><span>{plain(name)}</span></li>" for name, value in _tiles(data))
    return (
        f'<header><h1>{plain(title)}</h1><p><span class="state {kind if kind.isalpha() else ""}">{plain(state)}</span> '
        f"iteration {data.step} of {num_iterations}, written {now} {follow}</p></header>"
        f'<ul class="tiles">{tiles}</ul>'
    )


def _tiles(data: RunData) -> Iterator[tuple[str, str]]:
    for name, label in (("reward/total", "reward, training rollouts"), ("truth/total", "truth, training rollouts")):
        if ends := data.ends(name):
            yield f"{label} (start {ends[0]:+.3f})", f"{ends[1]:+.3f}"
    if ends := data.ends("policy_version"):
        yield "policy version", f"{ends[1]:.0f}"
    if ends := data.ends("throughput/videos_per_s"):
        yield "videos a second", number_text(ends[1])
    if ends := data.ends("throughput/mfu"):
        yield "of the devices' peak", f"{100 * ends[1]:.2g} %"
    if data.start_s is not None and data.end_s is not None:
        yield "from the first to the last line", duration(data.end_s - data.start_s)
    yield "alarms", str(len(data.alarms))


def _alarms(data: RunData) -> Iterator[str]:
    if not data.alarms:
        yield "<p>None.</p>"
        return
    yield "<table><tr><th>iteration</th><th>kind</th><th>what</th></tr>"
    for alarm in data.alarms[-MAX_ALARMS:]:
        kind, message = plain(alarm["kind"]), plain(alarm["message"])
        yield f'<tr><td>{int(alarm["step"])}</td><td class="alarm">{kind}</td><td>{message}</td></tr>'
    yield "</table>"


def _phases(data: RunData) -> Iterator[str]:
    names = [name for name in data.curves if name.startswith("phase/")]
    order = {f"phase/{name}_s": place for place, name in enumerate(PHASES)}
    names.sort(key=lambda name: order.get(name, len(order)))
    steps = sorted({step for name in names for step in data.curves[name]})[-MAX_BARS:]
    if steps:
        rows = [
            (f"iteration {step}", {n[6:-2]: data.curves[n][step] for n in names if step in data.curves[n]})
            for step in steps
        ]
        yield bar_chart("seconds of an iteration's phases", rows, "s")
    if data.actors:
        rows = [(name, line["phases"]) for name, line in sorted(data.actors.items())][:MAX_ACTORS]
        yield bar_chart("actors, in the span of their newest report: phases and idle time", rows, "s", share=True)


def _videos(data: RunData) -> Iterator[str]:
    if not data.comparisons:
        yield "<p>No evaluated videos yet (evaluation.num_prompts, evaluation.interval).</p>"
    previous = ""
    for one in data.comparisons:
        if one.prompts != previous:
            end = "</div>" if previous else ""
            yield f"{end}<h3>{plain(one.prompts.replace('_', ' '))} prompts</h3><div class='prompts'>"
            previous = one.prompts
        yield _comparison(one)
    if previous:
        yield "</div>"


def _comparison(one: Comparison) -> str:
    clips = [("before", one.before)] + ([("after", one.after)] if one.after else [])
    prompt = f'<p class="prompt"><bdi>{plain(one.prompt)}</bdi></p>'
    if len(one.prompt) > LONG:
        words = f"<bdi>{plain(one.prompt[:LONG])}</bdi> ... {len(one.prompt):,} characters"
        prompt = f"<details><summary>{words}</summary>{prompt}</details>"
    figures = "".join(_clip(word, clip) for word, clip in clips)
    rows = "".join(_row(name, [clip for _, clip in clips]) for name in one.before.scores)
    button = '<button type="button">play together</button>'
    return f'<article>{prompt}{button}<div class="pair">{figures}</div><table class="scores">{rows}</table></article>\n'


def _row(score: str, clips: list[Clip]) -> str:
    cells = "".join(f"<td>{_score(clip.scores.get(score, math.nan))}</td>" for clip in clips)
    return f"<tr><th>{plain(score)}</th>{cells}</tr>"


def _clip(word: str, clip: Clip) -> str:
    failure = f'<p class="failed">{plain(clip.failure)}</p>' if clip.failure else ""
    return (
        f"<figure><figcaption>{word} ({plain(clip.name)})</figcaption>"
        f'<video src="{quote(clip.file)}" loop muted playsinline preload="metadata"></video>'
        f"{failure}</figure>"
    )


def _score(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else "failed"


def _settings(folder: Path) -> str:
    file = folder / "config.yaml"
    if not file.exists():
        return "config.yaml is missing"
    return yaml.safe_dump(redacted(yaml.safe_load(file.read_text("utf-8"))), sort_keys=False, allow_unicode=True)


def _environment(folder: Path) -> dict[str, str]:
    file = folder / ENVIRONMENT
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def _table(rows: dict[str, str]) -> str:
    cells = "".join(f"<tr><th>{plain(name)}</th><td>{plain(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"
