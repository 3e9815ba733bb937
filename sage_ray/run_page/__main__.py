"""`python -m sage_ray.run_page FOLDER`: write a run's page anew from its files."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from sage_ray.run_page.page import FILE_NAME, RunPage


def main(arguments: list[str]) -> int:
    """0 when the page is written, 2 when the folder is no run's."""
    folder = Path(arguments[0]) if len(arguments) == 1 else None
    if folder is None or not (folder / "config.yaml").exists():
        print("error: one argument is needed, the folder of a run (with config.yaml)", file=sys.stderr)
        return 2
    num_iterations = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))["num_iterations"]
    page = RunPage(folder, num_iterations, 0.0)
    page.data.refresh()
    page.write("finished" if page.data.step >= num_iterations else "not finished", force=True)
    print(folder / FILE_NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
