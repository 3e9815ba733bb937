"""The kernels that are called by name, against attention written out in float32."""

import pytest
import torch

from sage_ray.models.attention import CUDNN, FLASH, best_kernel, masked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def heads_in_tokens() -> torch.Tensor:
    """[B, heads, N, head_dim] as a block has it: a view of [B, N, heads, head_dim]."""
    return torch.randn(2, 300, 4, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


@pytest.mark.parametrize("kernel", [CUDNN, FLASH, masked(None)], ids=lambda kernel: kernel.name)
def test_kernels_and_their_backward(kernel) -> None:
    torch.manual_seed(0)
    query, key, value, gradient = (heads_in_tokens() for _ in range(4))
    exact = [x.float().requires_grad_() for x in (query, key, value)]
    plain = (torch.einsum("bhqd,bhkd->bhqk", exact[0], exact[1]) / 128**0.5).softmax(-1) @ exact[2]
    attended = kernel.forward(query, key, value)
    torch.testing.assert_close(attended.output.float(), plain, rtol=0, atol=0.01)
    ours = kernel.backward(gradient, query, key, value, attended)
    for a, b in zip(ours, torch.autograd.grad(plain, exact, gradient.float()), strict=True):
        assert (a.float() - b).norm() < 0.01 * b.norm()
    again = kernel.forward(query, key, value)
    assert torch.equal(again.output, attended.output)


def test_float32_and_masks_take_torch_s_own_choice() -> None:
    query = heads_in_tokens()
    assert best_kernel(query).name in ("cudnn", "flash")
    assert best_kernel(query.float()).name == "sdpa"
    assert best_kernel(query, torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")).name == "sdpa"
