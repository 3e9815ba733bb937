"""The tables of docs/scaling.md are those that the command prints now."""

from pathlib import Path

import pytest

from bench.scaling import MARKS, main, official_way
from tests.small import ROOT


def test_the_page_is_up_to_date() -> None:
    """`python -m bench.scaling --write docs/scaling.md` writes it anew; the lines of 8 and 64 GPUs stand for all."""
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8").splitlines()
    lines = main(["--gpus", "8", "64"]).splitlines()
    assert len([line for line in lines if line.startswith("| 64 | 16 x 4 |")]) == 2
    assert [line for line in lines if line not in page] == []


def test_tables_are_put_between_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n", "utf-8")
    text = main(["--gpus", "8", "--write", str(file)])
    assert file.read_text("utf-8") == f"before\n{MARKS[0]}\n\n{text}\n\n{MARKS[1]}\nafter\n"


def test_the_official_way_by_hand() -> None:
    """8 GPUs, 8 videos, 4 pairs with two each: 2 x 20 x 2 velocities shared by two, two decodes shared."""
    found = official_way(2, 8)
    assert found.iteration_s == pytest.approx(40 * (4.36 + 15.2 + 4.36) + 3.3, abs=0.4)
    assert found.gpu_s_per_video == pytest.approx(found.iteration_s)


@pytest.mark.parametrize("gpus", ["4", "12"])
def test_gpus_that_are_no_nodes_are_refused(gpus: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--gpus", gpus])
    assert f"--gpus {gpus}: must be a multiple of 8" in capsys.readouterr().err
