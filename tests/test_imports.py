"""Import direction: launch -> actors -> sage_ray edges -> sage_ray pure."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PURE = (
    *("types", "config", "schedule", "noise", "transition", "sampler", "equalizer"),
    *("advantage", "loss", "trust_region", "step_plan", "marginals"),
)
EDGES = ("models", "rewards", "data")


def imported(file: Path) -> set[str]:
    """Dotted names that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {str(node.module)}
    return names


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def touches(names: set[str], package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in names)


def test_sage_ray_never_imports_ray_actors_or_launch() -> None:
    for file in files("sage_ray"):
        for package in ("ray", "actors", "launch"):
            assert not touches(imported(file), package), f"{file} imports {package}"


def test_actors_never_import_launch() -> None:
    assert not any(touches(imported(file), "launch") for file in files("actors"))


def test_pure_core_imports_only_torch_numpy_and_itself() -> None:
    heavy = ("diffusers", "transformers", "pyarrow", "peft", "ray", "actors", *(f"sage_ray.{edge}" for edge in EDGES))
    for module in PURE:
        file = ROOT / "sage_ray" / f"{module}.py"
        for package in heavy:
            assert not touches(imported(file), package), f"{file} imports {package}"


def test_edges_do_not_import_each_other() -> None:
    for edge in EDGES:
        for other in set(EDGES) - {edge}:
            for file in files(f"sage_ray/{edge}"):
                assert not touches(imported(file), f"sage_ray.{other}"), f"{file} imports sage_ray.{other}"
