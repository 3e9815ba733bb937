"""A static page for blind pairwise votes on two policies' videos of the same prompts and noise.

The page shows two videos, A and B, in an order that a seed decides and the page does not say; the voter answers for
visual quality, motion quality and text alignment (A, B or no difference). Votes stay in the browser until they are
downloaded as votes.json; `launch.py report` is not needed to count them (votes.py does).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import numpy as np

from sage_ray.types import AXES

KEY, PAGE, VOTES = "key.json", "index.html", "votes.json"
QUESTIONS = {"VQ": "Which looks better?", "MQ": "Which moves better?", "TA": "Which fits the text better?"}


@dataclass(frozen=True)
class Pair:
    """Two videos of one prompt. first, second: which policy is shown as A and as B; only key.json says so."""

    number: int
    prompt: str
    first: str
    second: str


def blind_pairs(prompts: Sequence[str], policies: tuple[str, str], seed: int) -> list[Pair]:
    """One pair a prompt, in random order, each policy first in half of them (in one more where they are odd)."""
    random = np.random.Generator(np.random.Philox(seed))
    order = random.permutation(len(prompts))
    swapped = random.permutation(np.arange(len(prompts)) % 2 == 1)
    return [
        Pair(number, prompts[place], *(policies[::-1] if swapped[number] else policies))
        for number, place in enumerate(order)
    ]


def write_kit(folder: Path, policies: dict[str, Sequence[Path]], prompts: Sequence[str], seed: int = 0) -> list[Pair]:
    """Writes folder/index.html with copies of the videos under names that tell nothing, and folder/../NAME_key.json.

    Args: policies: two names -> one video a prompt, in the prompts' order. The key, which says who was A, is written
        beside the folder and not in it: the folder is what voters get.
    Raises: ValueError when there are not two policies with one video a prompt, or the folder is there already.
    """
    if len(policies) != 2 or any(len(videos) != len(prompts) for videos in policies.values()) or not prompts:
        counts = {name: len(videos) for name, videos in policies.items()}
        raise ValueError(f"policies {counts}: must be two with one video for each of {len(prompts)} prompts")
    if folder.exists():
        raise ValueError(f"{folder}: must not exist yet")
    names = tuple(policies)
    pairs = blind_pairs(prompts, names, seed)  # type: ignore[arg-type]
    places = {prompt: place for place, prompt in enumerate(prompts)}
    (folder / "videos").mkdir(parents=True)
    for pair in pairs:
        for letter, policy in (("A", pair.first), ("B", pair.second)):
            source = policies[policy][places[pair.prompt]]
            shutil.copyfile(source, folder / "videos" / f"{pair.number:03d}_{letter}{source.suffix}")
    suffix = policies[names[0]][0].suffix
    partial = folder / f".{PAGE}.partial"
    partial.write_text(_page(pairs, suffix, f"{folder.name}-{seed}"), "utf-8")
    os.replace(partial, folder / PAGE)
    key = {"policies": names, "seed": seed, "pairs": [asdict(pair) for pair in pairs]}
    key_path(folder).write_text(json.dumps(key, indent=1) + "\n", "utf-8")
    return pairs


def key_path(folder: Path) -> Path:
    """Where the key of a kit is."""
    return folder.with_name(f"{folder.name}_{KEY}")


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; color: #222; }
article { border-top: 1px solid #ccc; padding: 1rem 0; }
.videos { display: flex; gap: 2rem; }
figure { margin: 0; flex: 1; } video { width: 100%; background: #eee; image-rendering: pixelated; }
fieldset { border: 0; padding: .2rem 0; } legend { float: left; width: 16rem; }
label { margin-right: 1.2rem; } footer { position: sticky; bottom: 0; background: #fff; padding: 1rem 0; }
button { font: inherit; padding: .3rem 1rem; }
"""
SCRIPT = """
const kit = document.body.dataset.kit, form = document.forms[0];
const votes = JSON.parse(localStorage.getItem(kit) || "{}");
const total = form.querySelectorAll("fieldset").length;
function show() {
  document.getElementById("done").textContent = Object.keys(votes).length + " of " + total;
  for (const [name, value] of Object.entries(votes)) {
    const input = form.querySelector(`input[name="${name}"][value="${value}"]`);
    if (input) input.checked = true;
  }
}
form.addEventListener("change", (event) => {
  votes[event.target.name] = event.target.value;
  localStorage.setItem(kit, JSON.stringify(votes));
  show();
});
document.getElementById("save").addEventListener("click", () => {
  const list = Object.entries(votes).map(([name, vote]) => {
    const [pair, axis] = name.split("_");
    return {pair: Number(pair), axis, vote};
  });
  const text = JSON.stringify({kit, voter: document.getElementById("voter").value, votes: list}, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = "votes.json";
  link.click();
});
show();
"""


def _page(pairs: Sequence[Pair], suffix: str, kit: str) -> str:
    """The page; it names no policy."""
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Which is better?</title><style>{STYLE}</style></head>',
        f'<body data-kit="{escape(kit)}"><h1>Which is better?</h1>',
        "<p>Each row shows two videos of the same text. Answer each question by what you see; say "
        "<em>no difference</em> when you see none. Answers stay on this machine until you save them.</p><form>",
    ]
    for pair in pairs:
        lines.append(f"<article><h2>{pair.number + 1}. {escape(pair.prompt)}</h2><div class='videos'>")
        for letter in "AB":
            file = f"videos/{pair.number:03d}_{letter}{suffix}"
            lines.append(
                f"<figure><figcaption>{letter}</figcaption>"
                f"<video src='{file}' controls loop muted playsinline autoplay></video></figure>"
            )
        lines.append("</div>")
        for axis in AXES:
            name = f"{pair.number}_{axis}"
            options = (("A", "A"), ("B", "B"), ("tie", "no difference"))
            inputs = "".join(f"<label><input type='radio' name='{name}' value='{v}'> {w}</label>" for v, w in options)
            lines.append(f"<fieldset><legend>{QUESTIONS[axis]}</legend>{inputs}</fieldset>")
        lines.append("</article>")
    lines += [
        "</form><footer><label>Your name <input id='voter'></label> <span id='done'></span> answered ",
        f"<button id='save' type='button'>Save {VOTES}</button></footer><script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(lines) + "\n"
