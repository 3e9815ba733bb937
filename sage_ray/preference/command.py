"""Make a page for blind votes on two stored runs' videos, or count the votes."""

from __future__ import annotations

import argparse
from pathlib import Path

from sage_ray.evaluation import preview_places
from sage_ray.experiment.results import SET
from sage_ray.experiment.stored import VIDEOS, StoredRun, read_run
from sage_ray.preference.page import key_path, write_kit
from sage_ray.preference.votes import rates_table, read_key, read_votes, win_rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kit", type=Path, help="folder of the page")
    parser.add_argument(
        "--run", action="append", default=[], metavar="NAME=PATH", help="twice: a stored run with videos"
    )
    parser.add_argument("--votes", action="append", default=[], type=Path, help="a voter's file; counts instead")
    parser.add_argument("--seed", type=int, default=0, help="of the order")


def run(parsed: argparse.Namespace) -> Path | None:
    """Write the page, or print the win rates. Raises: ValueError."""
    if parsed.votes:
        policies, pairs = read_key(key_path(parsed.kit))
        files = [read_votes(path, pairs) for path in parsed.votes]
        print(rates_table(win_rates(policies[0], pairs, files), policies[1]))
        return None
    if len(parsed.run) != 2 or any("=" not in word for word in parsed.run):
        raise ValueError(f"--run {parsed.run}: must be given twice as NAME=PATH, or --votes to count")
    runs = {word.partition("=")[0]: read_run(Path(word.partition("=")[2])) for word in parsed.run}
    prompts = {name: _prompts(one) for name, one in runs.items()}
    if len(prompts) != 2 or len({tuple(found) for found in prompts.values()}) != 1:
        raise ValueError(f"--run {parsed.run}: must be two names whose runs were evaluated on the same prompts")
    videos = {name: _videos(one, len(prompts[name])) for name, one in runs.items()}
    write_kit(parsed.kit, videos, next(iter(prompts.values())), parsed.seed)
    return parsed.kit


def _prompts(run: StoredRun) -> list[str]:
    """Those that have a video."""
    texts = [row.prompt for row in run.rows if row.prompts == SET and row.sample == 0]
    return [texts[place] for place in preview_places(len(texts))]


def _videos(run: StoredRun, count: int) -> list[Path]:
    files = sorted((run.path / VIDEOS / "final").glob(f"{SET}_*.mp4"))
    if len(files) != count:
        raise ValueError(f"{run.path / VIDEOS}: must hold {count} videos, holds {len(files)}")
    return files
