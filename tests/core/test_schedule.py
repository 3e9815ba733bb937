"""The sigma grid and the timestep."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sage_ray.schedule import sigma_grid, timestep


def test_grid_by_hand():
    # u = 1, 3/4, 1/2, 1/4, 0 and s = 5 u / (1 + 4 u).
    np.testing.assert_allclose(sigma_grid(4, 5.0), [1, 15 / 16, 5 / 6, 5 / 8, 0], rtol=1e-15)


def test_shift_one_is_uniform():
    np.testing.assert_allclose(sigma_grid(10, 1.0), np.linspace(1, 0, 11), rtol=1e-15)


@example(20, 0.05)  # 1 + (0.05 - 1) rounds: the grid once began at 1 - 8e-16
@given(st.integers(1, 300), st.floats(0.05, 20))
def test_grid_falls_from_one_to_zero(num_steps, shift):
    grid = sigma_grid(num_steps, shift)
    assert grid.dtype == np.float64 and grid.shape == (num_steps + 1,)
    assert grid[0] == 1 and grid[-1] == 0 and (np.diff(grid) < 0).all()


@pytest.mark.parametrize(
    ("num_steps", "shift", "key"),
    [(0, 5.0, "num_steps: 0"), (-1, 5.0, "num_steps: -1"), (4, 0.0, "shift: 0.0"), (4, -1.0, "shift"),
     (4, float("nan"), "shift: nan"), (4, float("inf"), "shift: inf")],
)  # fmt: skip
def test_grid_refuses(num_steps, shift, key):
    with pytest.raises(ValueError, match=key):
        sigma_grid(num_steps, shift)


def test_timesteps_are_the_float32_reference_at_every_step():
    grid = sigma_grid(20, 5.0)
    reference = (torch.tensor(grid, dtype=torch.float64) * 1000).to(torch.float32)
    assert [timestep(s) for s in grid] == reference.tolist()
    # 989.5833...: neither an integer nor a bf16 number (those are 4 apart here).
    assert timestep(grid[1]) == float(np.float32(989.58333333))
    assert timestep(grid[1]) != float(reference[1].to(torch.bfloat16))
