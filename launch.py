#!/usr/bin/env python
"""Command line of sage-ray: `python launch.py train|plan [--config FILE] [key=value ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
DEFAULT_CONFIG = Path(__file__).parent / "configs" / "shapes_cpu.yaml"


def main(arguments: list[str]) -> int:
    """Run one subcommand; 0 on success, 2 for input that cannot run, 1 for a run that stopped."""
    parser = argparse.ArgumentParser(prog="launch.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    settings = (
        "Without --config it takes the small world on this machine. Every setting of sage_ray/config.py is a dotted "
        "key; official flag names are accepted too, also as --flag value."
    )
    for name, help, words in (
        ("train", "train on an embedded Ray, or on the cluster that RAY_ADDRESS names", "Align a policy."),
        ("plan", "print what a configuration comes to, and every fault in it", "Check a run without starting it."),
    ):
        command = commands.add_parser(
            name,
            help=help,
            usage=f"launch.py {name} [-h] [--config FILE] [key=value ...]",
            description=f"{words} {settings}",
        )
        command.add_argument("--config", type=Path, action="append", help="YAML file; may be given several times")
    parsed, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    run = {"train": run_train, "plan": run_plan}[parsed.command]
    return run(parsed.config or [DEFAULT_CONFIG], overrides)


def run_train(files: list[Path], overrides: list[str]) -> int:
    """Check everything, then train. Bad input ends in one line on stderr and exit code 2."""
    from actors.train import RunStoppedError, train
    from sage_ray.checks import check

    try:
        checked = check(files, overrides)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        train(checked)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: interrupted", file=sys.stderr)
        return 130
    except RunStoppedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    return 0


def run_plan(files: list[Path], overrides: list[str]) -> int:
    """Print the derived numbers, then every fault; 0 when the run could start, 2 when not."""
    from sage_ray.checks import problems
    from sage_ray.config import ConfigError
    from sage_ray.config_check import validate
    from sage_ray.config_load import load_config
    from sage_ray.plan import plan
    from sage_ray.training_schedule import training_schedule

    try:
        config = load_config(files, overrides)
        validate(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        schedule = training_schedule(config)
    except (ValueError, OSError):  # named among the faults below
        schedule = None
    lines = plan(config, schedule)
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{line.name:<{width}}  {line.value}")
    faults = problems(config)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
