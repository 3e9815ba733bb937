"""Style and script of the run page, and the policy that lets a browser run these and nothing else."""

from __future__ import annotations

import base64
import hashlib

_COLOURS = (
    *("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2"),
    *("#ca8a04", "#db2777", "#64748b", "#65a30d", "#7f1d1d"),
)

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #6b7280; --line: #e5e7eb; --paper: #fff; --card: #f8fafc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --faint: #9aa2ad; --line: #30363d; --paper: #14171b; --card: #1c2127; }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1.5rem; max-width: 1180px;
  color: var(--ink); background: var(--paper); }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .6rem; font-size: 1.1rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
header p { margin: .25rem 0; color: var(--faint); overflow-wrap: anywhere; }
.state { display: inline-block; padding: 0 .6em; border-radius: 1em; color: #fff; background: #2563eb; }
.state.finished { background: #16a34a; } .state.stopped { background: #b91c1c; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem .8rem; }
.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--faint); font-size: .85rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: .8rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
figure.wide { margin-bottom: .8rem; }
figcaption { font-weight: 600; font-size: .9rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 10.5px system-ui, sans-serif; fill: var(--faint); } svg .left { text-anchor: end; }
svg .below { text-anchor: middle; } svg line.grid { stroke: var(--line); }
svg line.mark { stroke: #dc2626; stroke-width: 1.5; stroke-dasharray: 3 3; }
svg polyline { fill: none; stroke-width: 1.6; } svg line.error { stroke-width: 1.2; }
rect.idle { fill: var(--line); } .key.idle { border-left: .7em solid var(--line); }
.legend { margin: .2rem 0 0; font-size: .8rem; color: var(--faint); display: flex; flex-wrap: wrap; gap: 0 .9rem; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.key { padding-left: .35em; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--faint); white-space: nowrap; }
.alarm { color: #dc2626; font-weight: 600; white-space: nowrap; }
.prompts { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 1rem; align-items: start; }
article { border: 1px solid var(--line); border-radius: 8px; padding: .7rem; min-width: 0; }
.prompt { margin: 0 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere; font-weight: 600; }
details .prompt { max-height: 16em; overflow: auto; font-weight: 400; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem; margin: .5rem 0; }
video { display: block; width: 100%; image-rendering: pixelated; background: #888; margin-top: .3rem; cursor: pointer; }
.scores td { text-align: right; font-variant-numeric: tabular-nums; } .scores th { width: 40%; }
.failed { color: #dc2626; margin: 0; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; overflow: auto;
  max-height: 30rem; font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere; }
button, label { font: inherit; font-size: .88rem; }
""" + "".join(
    f"polyline.c{n}, line.error.c{n} {{ stroke: {colour}; }} circle.c{n}, rect.c{n} {{ fill: {colour}; }} "
    f".key.c{n} {{ border-left: .7em solid {colour}; }}\n"
    for n, colour in enumerate(_COLOURS)
)

SCRIPT = """
"use strict";
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) entry.target.play().catch(() => {});
    else entry.target.pause();
  }
});
for (const video of document.querySelectorAll("video")) {
  seen.observe(video);
  video.addEventListener("pointerenter", () => { video.controls = true; });
  video.addEventListener("pointerleave", () => { video.controls = false; });
}
document.addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON") return;
  for (const video of event.target.closest("article").querySelectorAll("video")) {
    video.currentTime = 0;
    video.play();
  }
});
const follow = document.getElementById("follow");
follow.checked = location.hash === "#follow";
follow.addEventListener("change", () => { history.replaceState(null, "", follow.checked ? "#follow" : "#"); again(); });
function again() { if (follow.checked) setTimeout(() => { if (follow.checked) location.reload(); }, 10000); }
again();
"""
"""Videos play while they are on the screen; a prompt's button starts its videos together; the page can follow a run."""


def policy() -> str:
    """Content security policy: this style, this script, and media from the page's own place."""
    return (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
        "media-src 'self' file:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
