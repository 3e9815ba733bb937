"""A publish of many small tensors from and to a GPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sage_ray.weights import pack, unpack
from tests.learner.test_small_weights import ADAPTER, Tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_it_launches_few_kernels_and_gives_what_a_cpu_gives() -> None:
    shapes = ADAPTER * 100
    sender, receiver = Tensors(shapes, 0), Tensors(shapes, 1, torch.bfloat16)
    on_cpu = unpack(receiver, [pack(sender, 1, 0, torch.bfloat16)])
    sender, on_gpu = sender.cuda(), Tensors(shapes, 1, torch.bfloat16).cuda()
    unpack(on_gpu, [pack(sender, 1, 0, torch.bfloat16)])
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        held = unpack(on_gpu, [pack(sender, 2, 0, torch.bfloat16)])
    assert held == on_cpu
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu.parameters(), receiver.parameters(), strict=True))
    assert sum(event.count for event in profiled.key_averages()) < len(shapes)
