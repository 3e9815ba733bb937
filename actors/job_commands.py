"""`launch.py submit | logs | stop | status | scale`: what they take, and what they print."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.jobs import STOP_WAIT_S, JobError, Jobs, check_words, row, tell
from sage_ray.config_check import validate
from sage_ray.config_load import load_config

CONFIGURED = ("train", "evaluate", "plan")
COMMANDS = (*CONFIGURED, "export", "convert", "fetch", "experiment", "report", "scale")
"""What a job may run."""
STARTS_S = 60
"""Longer than a stop's own bound, until Ray must have noted that a job has ended."""


def run(command: str, arguments: Sequence[str], default_config: Path) -> int:
    """One of the commands; its exit code: that of the job where it waits for one, 2 for bad input."""
    parser = argparse.ArgumentParser(prog=f"launch.py {command}", description=WORDS[command])
    ADD[command](parser)
    for name in ("ray.dashboard", "ray._private.runtime_env"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return RUN[command](parser.parse_args(arguments), default_config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped watching: interrupted; a job goes on", file=sys.stderr)
        return 130


def _address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="URL",
        help="of the cluster's dashboard; else RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else the Ray on this machine",
    )


def _add_submit(parser: argparse.ArgumentParser) -> None:
    _address(parser)
    parser.add_argument("--job", metavar="ID", help="the job's id; without it Ray makes one")
    parser.add_argument("--no-wait", action="store_true", help="print the job's id and return")
    parser.add_argument(
        "--stop-wait",
        type=int,
        default=STOP_WAIT_S,
        metavar="S",
        help="seconds to save when it is stopped (%(default)s)",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help=f"one of {', '.join(COMMANDS)}")


def _submit(parsed: argparse.Namespace, default_config: Path) -> int:
    if not parsed.words or parsed.words[0] not in COMMANDS:
        raise JobError(f"submit {' '.join(parsed.words[:1])}: must be followed by one of {', '.join(COMMANDS)}")
    if parsed.stop_wait < 1:
        raise JobError(f"--stop-wait {parsed.stop_wait}: must be at least 1")
    name = _check(parsed.words, default_config)
    jobs = Jobs(parsed.address)
    job = jobs.submit(parsed.words, name, job=parsed.job, stop_wait_s=parsed.stop_wait)
    tell(f"job {job} on the cluster at {jobs.address}; launch.py logs | stop | status {job}")
    if parsed.no_wait:
        print(job)
        return 0
    code = jobs.follow(job)
    tell(f"job {job} ended with exit code {code}")
    return code


def _check(words: Sequence[str], default_config: Path) -> str:
    """The rules that need nothing of the cluster; the job's name."""
    command, *rest = words
    if command not in CONFIGURED:
        return command
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--checkpoint", action="append", default=[])
    parser.add_argument("--nodes")
    parsed, overrides = parser.parse_known_args(rest)
    config = load_config(parsed.config or [default_config], overrides)
    validate(config)
    check_words(words, parsed.config, "" if command == "plan" else config.output_dir)
    return Path(config.output_dir).name


def _add_job(parser: argparse.ArgumentParser) -> None:
    _address(parser)
    parser.add_argument("job", help="the job's id, as `submit` and `status` print it")


def _add_logs(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="until the job ends, with its exit code")


def _logs(parsed: argparse.Namespace, _: Path) -> int:
    jobs = Jobs(parsed.address)
    tell(f"log of {parsed.job} on the cluster at {jobs.address}")
    if parsed.follow:
        return jobs.follow(parsed.job)
    print(jobs.logs(parsed.job), end="")
    return 0


def _stop(parsed: argparse.Namespace, _: Path) -> int:
    """A job ends after it has saved; then it is STOPPED."""
    jobs = Jobs(parsed.address)
    jobs.stop(parsed.job)
    tell(f"job {parsed.job} on the cluster at {jobs.address} is asked to save and stop")
    code = jobs.wait(parsed.job, STOP_WAIT_S + STARTS_S)
    lines = [line for line in jobs.logs(parsed.job).splitlines() if line.startswith("stopped: ")]
    print(lines[-1] if lines else f"job {parsed.job} ended with exit code {code}")
    return 0


def _add_status(parser: argparse.ArgumentParser) -> None:
    _address(parser)
    parser.add_argument("job", nargs="?", help="one job; its exit code is this command's once it has ended")


def _status(parsed: argparse.Namespace, _: Path) -> int:
    jobs = Jobs(parsed.address)
    found = [jobs.details(parsed.job)] if parsed.job else jobs.all()
    tell(f"{len(found)} jobs on the cluster at {jobs.address}")
    rows = [row(one) for one in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    ended = parsed.job and found[0].status.is_terminal()
    return jobs.wait(parsed.job, 0) if ended else 0


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("count", type=int, metavar="N", help="rollout groups")
    parser.add_argument("--run", metavar="NAME", help="which run, by its name or Ray's job id, where several listen")


def _scale(parsed: argparse.Namespace, _: Path) -> int:
    from actors.places import joined
    from actors.scale import ask

    address = os.environ.get("RAY_ADDRESS", "auto")
    with joined(address):
        chosen = ask(parsed.count, parsed.run)
    print(f"asked {chosen.name} (job {chosen.job}, cluster {address}) for {parsed.count} rollout groups")
    return 0


WORDS = {
    "submit": "Run a launch.py command on a cluster: the project is uploaded, its log is printed, and its exit code "
    "is this command's. Ctrl-C stops watching; the job goes on.",
    "logs": "Print what a job has written.",
    "stop": "Ask a job to save its last finished iteration and to end; `submit` it again with resume=auto to go on.",
    "status": "The jobs of a cluster.",
    "scale": "Ask a running run for a number of rollout groups, on the cluster that RAY_ADDRESS names, or on this "
    "machine's. From elsewhere: launch.py submit scale N.",
}
ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "submit": _add_submit,
    "logs": _add_logs,
    "stop": _add_job,
    "status": _add_status,
    "scale": _add_scale,
}
RUN: dict[str, Callable[[argparse.Namespace, Path], int]] = {
    "submit": _submit,
    "logs": _logs,
    "stop": _stop,
    "status": _status,
    "scale": _scale,
}
