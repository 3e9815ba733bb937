"""Download the official files: a policy, the reward with its prompt template, prompt files.

Every file is written under FOLDER/.fetch, checked by size and hash and then renamed, so nothing half-written has a
final name. A call hashes what is there already: it brings what is missing or damaged, goes on with what a former call
began, and downloads nothing when all is well. Files are fetched one after the other over plain HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sage_ray.config_files import check_pipeline
from sage_ray.data.prompts import read_prompts
from sage_ray.fetch import files as disk
from sage_ray.fetch import manifest
from sage_ray.fetch.manifest import Wanted
from sage_ray.rewards.checkpoint import open_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `launch.py fetch`."""
    parser.add_argument(
        "what",
        nargs="+",
        choices=(*manifest.WHAT, "all"),
        metavar="policy|reward|prompts|all",
        help="HunyuanVideo-1.5; VideoReward with its prompt template; VideoAlign's evaluation prompts",
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="where their folders go, e.g. checkpoints"
    )
    layout = "of the policy (default: diffusers; official: what `launch.py convert` takes)"
    parser.add_argument("--layout", choices=manifest.LAYOUTS, default="diffusers", help=layout)
    version = "of the policy (default: 480p_t2v)"
    parser.add_argument("--version", choices=manifest.VERSIONS, default="480p_t2v", help=version)
    parser.add_argument("--revision", help="of the policy's or the reward's own repository (default: main)")
    template = "a copy of VideoAlign's prompt_template.py, or of its text, instead of a download"
    parser.add_argument("--template", type=Path, metavar="FILE", help=template)
    parser.add_argument("--dry-run", action="store_true", help="say what would be fetched, write nothing")


def run(arguments: argparse.Namespace) -> None:
    """Fetch as parsed by `add_arguments`, saying what is done. Raises: ValueError naming file and rule."""
    what = manifest.WHAT if "all" in arguments.what else tuple(dict.fromkeys(arguments.what))
    if arguments.revision is not None and (what not in (("policy",), ("reward",)) or not arguments.revision):
        raise ValueError(f"--revision {arguments.revision!r}: goes with policy or reward alone")
    if arguments.template and "reward" not in what:
        raise ValueError(f"--template {arguments.template}: goes with reward")
    _go_online()
    to, console = arguments.to, Console(highlight=False, soft_wrap=True)
    try:
        given = None
        if arguments.template:
            given = disk.take(arguments.template.read_bytes(), manifest.TEMPLATE_VARIABLE, str(arguments.template))
        wanted = _listed(arguments, what, given is not None, console)
        with contextlib.nullcontext() if arguments.dry_run else disk.locked(to):
            missing = _plan(wanted, to, console)
            if arguments.dry_run:
                return
            if given is not None:
                disk.write(to / manifest.REWARD_FOLDER / manifest.TEMPLATE, given, to)
            _fetch(missing, to, console)
            for part in what:
                console.print(_checked(part, arguments, to), markup=False)
    except OSError as error:
        raise ValueError(f"{error.filename or to}: {error.strerror or error}") from error


def _go_online() -> None:
    """Undo HF_HUB_OFFLINE=1, which launch.py sets by default: asking for a download says otherwise.

    huggingface_hub reads the variables at its first import; where that is over, its constant is set.
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False


def _listed(arguments: argparse.Namespace, what: tuple[str, ...], has_template: bool, console: Console) -> list[Wanted]:
    """Every file to have, by what the repositories list now."""
    from sage_ray.fetch import transfer

    sources = {
        "policy": manifest.policy(arguments.layout, arguments.version),
        "reward": manifest.reward(),
        "prompts": manifest.prompts(),
    }
    own = (manifest.VIDEO_REWARD, manifest.policy_repo(arguments.layout, arguments.version))
    wanted: list[Wanted] = []
    for source in (source for part in what for source in sources[part]):
        if isinstance(source, manifest.CodeFile):
            if not (source.variable and has_template):
                wanted.append(transfer.code_file(source))
            continue
        commit, found = transfer.hub_files(source, arguments.revision if source.repo in own else None)
        console.print(f"{source.repo} at {commit[:12]}: {len(found)} files", markup=False)
        wanted += found
    return wanted


def _plan(wanted: list[Wanted], to: Path, console: Console) -> list[Wanted]:
    """What is missing or damaged, after saying so. Raises: ValueError when the rest does not fit on the disk."""
    missing, needed_bytes = [], 0
    for file in wanted:
        state = disk.state(file, to / file.file)
        if state != "there":
            partial = disk.partial(to, file)
            has = min(partial.stat().st_size, file.num_bytes) if partial.exists() else 0
            state += f", {disk.bytes_text(has)} of it came before" if has else ""
            missing.append(file)
            needed_bytes += file.num_bytes - has
        console.print(f"  {disk.bytes_text(file.num_bytes):>10}  {file.file}  {state}", markup=False)
    nearest = next(parent for parent in (to, *to.absolute().parents) if parent.exists())
    free_bytes = shutil.disk_usage(nearest).free
    total = sum(file.num_bytes for file in wanted)
    needs, free = disk.bytes_text(needed_bytes), disk.bytes_text(free_bytes)
    rest = f"{len(missing)} of them to fetch, {needs}; free in {nearest}: {free}"
    console.print(f"{len(wanted)} files, {disk.bytes_text(total)}; {rest}", markup=False)
    if needed_bytes > free_bytes:
        raise ValueError(f"--to {to}: needs {needs} ({needed_bytes} bytes), its disk has {free} free")
    return missing


def _fetch(missing: list[Wanted], to: Path, console: Console) -> None:
    """Download, check and rename, one after the other. Raises: ValueError naming file and rule."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    with bar:
        for i, file in enumerate(missing):
            task, start_s = bar.add_task(Path(file.file).name, total=file.num_bytes), time.monotonic()
            _fetch_one(file, to, lambda size, task=task: bar.update(task, completed=size))
            bar.remove_task(task)
            seconds = time.monotonic() - start_s
            console.print(f"{i + 1}/{len(missing)} {file.file}, checked, {seconds:.1f} s", markup=False)


def _fetch_one(file: Wanted, to: Path, told: Callable[[int], None]) -> None:
    from sage_ray.fetch import transfer

    partial = disk.partial(to, file)
    try:
        transfer.download(file, partial, told)
    except ValueError as error:
        hint = "; or give a copy of this file with --template" if file.variable else ""
        raise ValueError(f"{error}{hint}") from error
    if (found := disk.digest(partial, file.digest)) != file.digest:
        partial.unlink()
        rule = f"what came has {found}, must have {file.digest}; it was deleted. The same command fetches it again"
        raise ValueError(f"{file.source}: {rule}")
    if file.variable:
        disk.write(to / file.file, disk.take(partial.read_bytes(), file.variable, file.source), to)
        partial.unlink()
    else:
        (to / file.file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, to / file.file)


def _checked(part: str, arguments: argparse.Namespace, to: Path) -> str:
    """Open a part's folder as a run does, without tensors; what there is to say. Raises: ValueError."""
    if part == "reward":
        return f"{open_folder(to / manifest.REWARD_FOLDER).path}: complete, for reward.path"
    if part == "prompts":
        files = [source.file for source in manifest.prompts() if isinstance(source, manifest.CodeFile)]
        return f"{to / 'prompts'}: {len(read_prompts([to / file for file in files]))} prompts, for data.prompts"
    folder = to / manifest.policy_folder(arguments.layout, arguments.version)
    if arguments.layout == "diffusers":
        check_pipeline(folder)
        return f"{folder}: complete, for model.path"
    from sage_ray.models.official.layout import PROGRAM_ONLY, recognise

    lacks = [file for file in recognise(folder).missing if "Glyph" not in file and file not in PROGRAM_ONLY]
    if lacks:
        raise ValueError(f"{folder}: holds no {' and no '.join(lacks)}")
    return f"{folder}: {manifest.GLYPH_NOTE}; `launch.py convert` then makes a pipeline of it"
