"""Weights & Biases, offline: the package itself, where it is installed or `make watch` has put it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sage_ray.config import ConfigError
from sage_ray.wandb_log import check_wandb
from tests.small import ROOT, small_config

PLACE = ROOT / ".venv" / "wandb"
HAS = PLACE.exists() or importlib.util.find_spec("wandb") is not None
LOG = """
import sys
sys.path.append(sys.argv[1])
from pathlib import Path
from sage_ray.config_load import open_output
from sage_ray.wandb_log import WandbLog
from tests.small import small_config
config = small_config(Path(sys.argv[2]), ["watch.wandb=sage", "watch.wandb_offline=true", "checkpoint.path=s3://me:hunter2@b/x"])
open_output(config)
log = WandbLog(config)
for iteration in (1, 2):
    log.write(iteration, {"reward/total": 0.25 * iteration, "kl/anchor": None, "loss/total": float("nan")})
log.close()
"""


def test_without_the_package_it_is_a_fault_of_the_configuration(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_wandb(small_config(tmp_path))
    with pytest.raises(ConfigError, match="watch.wandb='sage': needs the package wandb, which is not installed"):
        check_wandb(small_config(tmp_path, ["watch.wandb=sage"]))


@pytest.mark.skipif(not HAS, reason="the package wandb is not installed: `make watch` installs it beside the rest")
def test_an_offline_run_is_recorded_without_secrets(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOG, str(PLACE), str(tmp_path), "s3://me:hunter2@b/x"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"reward/total" in content and json.dumps(0.5).encode() in content
    assert b"hunter2" not in content and b"loss/total" not in content
