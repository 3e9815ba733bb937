"""A static page that shows policies side by side: their videos of the same prompt and noise, with scores.

One HTML file beside the folder videos/: relative links, no file from elsewhere, so it opens from any disk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from sage_ray.evaluation import EvaluatedPolicy, EvaluatedSet

STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
article > div { display: flex; gap: 1rem; overflow-x: auto; padding: .5rem 0 1.5rem; }
figure { margin: 0; flex: 0 0 auto; max-width: 30rem; }
video { display: block; max-width: 100%; min-width: 12rem; background: #eee; }
h3 { font-weight: 600; margin: .5rem 0 0; }
dl { display: grid; grid-template-columns: auto auto; gap: 0 1rem; margin: .3rem 0; width: max-content; }
dl { font-size: .85em; }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
.failed { color: #a00; }
button { font: inherit; }
"""
SCRIPT = """
document.addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON") return;
  for (const video of event.target.closest("article").querySelectorAll("video")) {
    video.currentTime = 0;
    video.play();
  }
});
"""
"""The button of a prompt starts its videos together."""


def gallery(path: Path, title: str, policies: Sequence[EvaluatedPolicy]) -> None:
    """Writes the page; it appears complete. Previews' files are relative to its folder.

    Args: policies: in the order of the columns, evaluated on the same sets and prompts.
    """
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>',
        f"<body><h1>{escape(title)}</h1>",
        "<p>The same prompt and noise in every row. Scores are those of the video above them.</p>",
    ]
    for name in policies[0].sets:
        lines += ["<section>", f"<h2>{escape(name.replace('_', ' '))} prompts</h2>"]
        lines += _prompts([(policy.name, policy.sets[name]) for policy in policies])
        lines.append("</section>")
    lines += [f"<script>{SCRIPT}</script>", "</body></html>"]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("\n".join(lines) + "\n", "utf-8")
    os.replace(partial, path)


def _prompts(columns: Sequence[tuple[str, EvaluatedSet]]) -> Iterator[str]:
    """An article for every prompt with previews."""
    first = columns[0][1]
    for place, preview in enumerate(first.previews):
        yield f"<article><h3>{escape(first.prompts[preview.prompt].text)}</h3>"
        yield "<button type='button'>play together</button><div>"
        for name, evaluated in columns:
            yield _figure(name, evaluated, place)
        yield "</div></article>"


def _figure(name: str, evaluated: EvaluatedSet, place: int) -> str:
    """One policy's video of one prompt, with its scores or why it has none."""
    preview = evaluated.previews[place]
    video = preview.prompt * evaluated.videos_per_prompt
    scores = "".join(
        f"<dt>{escape(score)}</dt><dd>{_number(float(values[video]))}</dd>"
        for score, values in evaluated.scores.items()
    )
    reason = evaluated.failures[video]
    failed = f'<p class="failed">{escape(reason)}</p>' if reason else ""
    return (
        f'<figure><video src="{quote(preview.file)}" controls loop muted playsinline preload="metadata"></video>'
        f"<figcaption><strong>{escape(name)}</strong>{failed}<dl>{scores}</dl></figcaption></figure>"
    )


def _number(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else "failed"
