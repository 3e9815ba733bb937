"""The core is pure: torch, numpy and the core itself. Mathematics takes numbers, never a Config."""

import ast
from pathlib import Path

import pytest

import sage_ray

CORE = ("schedule", "noise", "transition", "sampler", "equalizer", "advantage", "loss", "trust_region", "step_plan")
ALLOWED = {"torch", "numpy", "__future__", "collections", "dataclasses", "math", "operator", "typing"}


@pytest.mark.parametrize("name", CORE)
def test_imports(name):
    tree = ast.parse((Path(sage_ray.__file__).parent / f"{name}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            found.add(node.module)
    assert found, "a module without imports is not the one we mean"
    outside = {module for module in found if module.split(".")[0] not in ALLOWED}
    assert outside <= {f"sage_ray.{core}" for core in CORE}
