"""What a run ran on: versions, machine, devices. No variables of the environment, which may hold secrets."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

from sage_ray.redact import redact

FILE_NAME = "environment.json"
PACKAGES = ("ray", "torch", "diffusers", "transformers", "peft", "numpy", "av")


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Name -> value, as text. more: what only the caller knows, such as the cluster."""
    found = {
        "command": redact(" ".join(sys.argv)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPUs": str(os.cpu_count()),
    }
    found |= {name: metadata.version(name) for name in PACKAGES}
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["GPUs"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found | (more or {})


def write_environment(folder: Path, found: dict[str, str]) -> None:
    """Writes folder/environment.json."""
    (folder / FILE_NAME).write_text(json.dumps(found, indent=2) + "\n", "utf-8")
