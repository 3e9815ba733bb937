"""Figure 4: the identity for the mean, and the parameters' gradient against finite differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sage_ray.experiment.gradient_norm import FILE, measure, report, slope
from tests.conftest import POLICY

PROMPT = "a small red circle moves left slowly on a gray background"


@pytest.fixture(scope="module")
def found() -> dict:
    return measure(POLICY, [PROMPT], ("sage_grpo", "cps"), num_steps=5)


def test_the_gradient_with_respect_to_the_mean_has_slope_minus_one(found: dict) -> None:
    for values in found["methods"].values():
        to_mean = np.array(values["to_mean"])[:, 0]
        assert slope(values["std"], to_mean) == pytest.approx(-1, abs=1e-4)
        assert to_mean * np.array(values["std"]) == pytest.approx(1, abs=1e-4)


def test_the_parameters_gradient_follows_n(found: dict) -> None:
    """The equalizer would be of no use otherwise: dividing by n_t takes most of the spread away."""
    for values in found["methods"].values():
        norms, n = np.array(values["to_parameters"])[:, 0], np.array(values["n"])
        assert norms.max() / norms.min() > 3 * (norms / n).max() / (norms / n).min()


def test_the_page_is_drawn_from_the_file(found: dict, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="figure4.json: is missing"):
        report(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(found))
    text = report(tmp_path).read_text()
    assert "| sage_grpo | -1.0000 |" in text and (tmp_path / "figure4.png").exists()
