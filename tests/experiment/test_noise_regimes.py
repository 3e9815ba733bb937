"""Figure 9's stds against the integral that they stand for, taken numerically."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sage_ray.experiment.noise_regimes import ETA, REGIMES, largest_difference, report, stds, variance
from sage_ray.schedule import sigma_grid

GRID = sigma_grid(20, 5.0)


def integral(low: float, high: float) -> float:
    """Of s / (1 - s), by 64 Gauss points."""
    points, weights = np.polynomial.legendre.leggauss(64)
    s = low + (high - low) * (points + 1) / 2
    return float((s / (1 - s) * weights).sum() * (high - low) / 2)


def test_sage_is_the_exact_integral_wherever_no_clamp_acts() -> None:
    for regime in REGIMES:
        for step in range(1, 20):
            expected = ETA * math.sqrt(integral(GRID[step + 1], GRID[step]))
            assert stds()[regime]["sage_grpo"][step] == pytest.approx(expected, rel=1e-9)


def test_flow_takes_the_integrand_at_the_beginning_of_the_step() -> None:
    for step in range(1, 20):
        sigma, length = GRID[step], GRID[step] - GRID[step + 1]
        expected = ETA * math.sqrt(sigma / (1 - sigma) * length)
        assert stds()["same"]["flow_grpo"][step] == pytest.approx(expected, rel=1e-12)
        assert expected > stds()["same"]["sage_grpo"][step]


def test_the_first_step_by_hand() -> None:
    """Length D = 1 / 96. Published: flow sqrt(1 / (1 - 95 / 96) / 96) = 1 times eta, sage ln((1 / 96) / .003) - D."""
    found = {regime: (by["sage_grpo"][0], by["flow_grpo"][0]) for regime, by in stds().items()}
    sage = 0.5 * math.sqrt(math.log(1 / 96 / 0.003) - 1 / 96)
    assert found["published"] == pytest.approx((sage, 0.5))
    assert found["same"] == pytest.approx((sage, 0.5 * math.sqrt(1 / 96 / 0.003)))
    assert found["second"] == pytest.approx((0.0, 0.5))
    assert variance(GRID, "sage_grpo", float(GRID[1]))[0] == pytest.approx(-1 / 96)


def test_training_uses_the_published_regime() -> None:
    assert largest_difference() == 0.0


def test_the_page_has_every_step(tmp_path: Path) -> None:
    text = report(tmp_path).read_text()
    assert text.count("\n| ") == 22 and (tmp_path / "figure9.png").exists()
    assert "| 0 | 1.0000 | 0.5555 | 0.5000 | 0.5555 | 0.9317 | 0.0000 | 0.5000 |" in text
