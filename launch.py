#!/usr/bin/env python
"""Command line of sage-ray; `python launch.py COMMAND --help` says what each command takes."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "shapes_cpu.yaml"
SETTINGS = (
    "Without --config it takes the small world on this machine. Every setting of sage_ray/config.py is a dotted "
    "key; official flag names are accepted too, also as --flag value."
)


def main(arguments: list[str]) -> int:
    """Run one subcommand; 0 on success, 2 for input that cannot run, 1 for a run that stopped, 130 and 143 for one that
    was told to."""
    parser = argparse.ArgumentParser(prog="launch.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    where = "on an embedded Ray, or on the cluster that RAY_ADDRESS names"
    _configured(commands, "train", f"train {where}", "Align a policy.")
    described = "print what a configuration comes to, and every fault in it"
    planned = _configured(commands, "plan", described, "Check, start nothing.", " [--nodes GPUS,...]")
    planned.add_argument("--nodes", metavar="GPUS[:ROLE],...", help="the cluster to plan for, as in 8:learner,8,8")
    evaluate = _configured(
        commands,
        "evaluate",
        f"compare checkpoints with their base on fixed prompts and noise, {where}",
        "Compare policies. Give a run's config.yaml and a new output_dir.",
        " --checkpoint [NAME=]PATH ...",
    )
    evaluate.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a checkpoint, or a transformer or adapter folder; several times, with one NAME for runs of several seeds",
    )
    commands.add_parser("export", help="write a checkpoint as something that plain diffusers opens", add_help=False)
    commands.add_parser("experiment", help="make the runs of an experiment that are not stored yet", add_help=False)
    commands.add_parser("report", help="tables and figures of experiments from stored runs", add_help=False)
    commands.add_parser("prefer", help="a page for blind votes on two runs' videos, and their count", add_help=False)
    commands.add_parser("fetch", help="download the official policy, reward and prompts", add_help=False)
    commands.add_parser("convert", help="weights between the official layout and diffusers'", add_help=False)
    for name, words in CLUSTER_COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False)
    parsed, rest = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    if parsed.command in CLUSTER_COMMANDS or os.environ.get("RAY_ADDRESS"):
        from actors.auth import settle_auth

        try:
            settle_auth()  # before Ray is imported
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return RUN[parsed.command](parsed, rest)


def _configured(commands, name: str, help: str, words: str, more: str = "") -> argparse.ArgumentParser:
    """A subcommand that takes a configuration."""
    command = commands.add_parser(
        name,
        help=help,
        usage=f"launch.py {name} [-h] [--config FILE]{more} [key=value ...]",
        description=f"{words} {SETTINGS}",
    )
    command.add_argument(
        "--config", type=Path, action="append", help="YAML file; may be given several times, the later one wins"
    )
    return command


def run_train(parsed: argparse.Namespace, overrides: list[str]) -> int:
    """Check everything, then train."""
    from actors.train import train
    from sage_ray.checks import check

    return _guarded(lambda: train(check(parsed.config or [DEFAULT_CONFIG], overrides)))


def run_evaluate(parsed: argparse.Namespace, overrides: list[str]) -> int:
    """Check everything, then evaluate the base and every checkpoint."""
    from actors.evaluate import evaluate
    from sage_ray.checks import check
    from sage_ray.policies import check_evaluation

    def run() -> None:
        checked = check(parsed.config or [DEFAULT_CONFIG], overrides, trains=False)
        evaluate(checked, check_evaluation(checked.config, parsed.checkpoint))

    return _guarded(run)


def _guarded(run: Callable[[], None]) -> int:
    """Bad input ends in one line on stderr and exit code 2, a run that had to stop in exit code 1, one that was asked
    to in 130 (Ctrl-C) or 143 (SIGTERM)."""
    from actors.stop import RunStoppedError

    try:
        run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: interrupted", file=sys.stderr)
        return 130
    except RunStoppedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return error.code
    return 0


def run_plan(parsed: argparse.Namespace, overrides: list[str]) -> int:
    """Print the derived numbers, then every fault; 0 when the run could start, 2 when not."""
    from sage_ray.checks import problems
    from sage_ray.config import ConfigError
    from sage_ray.config_check import validate
    from sage_ray.config_load import load_config
    from sage_ray.plan import Line, plan
    from sage_ray.training_schedule import training_schedule

    try:
        config = load_config(parsed.config or [DEFAULT_CONFIG], overrides)
        validate(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    misfit: list[str] = []
    try:
        schedule = training_schedule(config)
    except (ValueError, OSError):  # named among the faults below
        schedule = None
    lines = plan(config, schedule)
    try:
        lines += [Line(*words) for words in _places(config, parsed.nodes)]
    except ValueError as error:  # one fault more
        misfit = [str(error)]
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{line.name:<{width}}  {line.value}")
    faults = [*misfit, *problems(config)]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _places(config, nodes: str | None) -> list[tuple[str, str]]:
    """Which actor goes to which node: of --nodes, of the cluster that RAY_ADDRESS names, or of this machine."""
    from actors.layout import describe, plan
    from actors.places import present_nodes

    source, found = present_nodes(nodes)
    return [("placed", f"on {source}"), *describe(plan(config, found), found)]


WITHOUT_CONFIG = {
    "export": "sage_ray.export",
    "convert": "sage_ray.models.official.layout",
    "fetch": "sage_ray.fetch.command",
    "experiment": "actors.experiment",
    "report": "sage_ray.experiment.report",
    "prefer": "sage_ray.preference.command",
}
"""Commands about folders: the module that knows their options and does the work."""


def run_without_config(parsed: argparse.Namespace, arguments: list[str]) -> int:
    """A command with options of its own."""
    from sage_ray import command

    module = importlib.import_module(WITHOUT_CONFIG[parsed.command])
    words = (module.__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"launch.py {parsed.command}", description=words)
    module.add_arguments(parser)
    own = parser.parse_args(arguments)
    return command.run(lambda: module.run(own))


CLUSTER_COMMANDS = {
    "submit": "run one of the other commands on a cluster, and follow it",
    "logs": "print a job's log",
    "stop": "ask a job to save and end",
    "status": "the jobs of a cluster",
    "scale": "ask a running run for another number of rollout groups",
}


def run_on_cluster(parsed: argparse.Namespace, arguments: list[str]) -> int:
    """A command about a cluster and its jobs."""
    from actors.job_commands import run

    return run(parsed.command, arguments, DEFAULT_CONFIG)


RUN = {"train": run_train, "plan": run_plan, "evaluate": run_evaluate}
RUN |= dict.fromkeys(WITHOUT_CONFIG, run_without_config)
RUN |= dict.fromkeys(CLUSTER_COMMANDS, run_on_cluster)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
