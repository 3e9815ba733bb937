#!/usr/bin/env python
"""Command line of sage-ray: `python launch.py train [--config FILE] [key=value ...]`."""

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
    train = commands.add_parser(
        "train",
        help="train on an embedded Ray, or on the cluster that RAY_ADDRESS names",
        usage="launch.py train [-h] [--config FILE] [key=value ...]",
        description="Align a policy. Without --config it runs the small world on this machine. Every setting of "
        "sage_ray/config.py is a dotted key; official flag names are accepted too, also as --flag value.",
    )
    train.add_argument("--config", type=Path, action="append", help="YAML file; may be given several times")
    parsed, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    return run_train(parsed.config or [DEFAULT_CONFIG], overrides)


def run_train(files: list[Path], overrides: list[str]) -> int:
    """Check everything, then train. Bad input ends in one line on stderr and exit code 2."""
    from actors.train import RunStoppedError, check, train

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
