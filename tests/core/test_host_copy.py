"""Parts arrive where they belong; tests/gpu has the order of a device's work."""

import numpy as np
import pytest
import torch

from sage_ray.host_copy import HostCopy


def test_parts_fill_an_array() -> None:
    values = torch.randn(2, 5, 3)
    copy = HostCopy((2, 5, 3), torch.float32, "cpu")
    copy.write(0, values[0])
    copy.write((1, slice(0, 2)), values[1, :2])
    copy.write((1, slice(2, 5)), values[1, 2:].t().contiguous().t())
    values_then = values.numpy().copy()
    values.zero_()
    assert np.array_equal(copy.numpy(), values_then)
    assert HostCopy((4, 0, 3), torch.uint8, "cpu").numpy().shape == (4, 0, 3)


@pytest.mark.parametrize("part", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_part_of_another_kind_is_refused(part: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        HostCopy((4,), torch.float32, "cpu").write(slice(0, 2), part)
