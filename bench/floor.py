"""The floor: what one block's matrix products and attention take at their own measured rates, times the blocks.

The shapes are those that a block really runs: video and text tokens have weights of their own, adaLN runs once per
sample, attention is joint. Norms, activations, rotary embedding, embedders and the refiner are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.timing import once

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


class Shapes(NamedTuple):
    """Of one block: heads x head_dim = dim; video and text: tokens."""

    heads: int
    head_dim: int
    layers: int
    video: int
    text: int

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        return self.video + self.text


class Floor(NamedTuple):
    """Seconds of all blocks. forward, backward of the matrix products; attention's by backend, None where a backend
    cannot run."""

    linear: float
    linear_backward: float
    attention: dict[str, tuple[float, float] | None]

    def best(self) -> tuple[str, float, float]:
        """(backend, forward, backward) of the fastest forward, and the fastest backward of any."""
        able = {name: times for name, times in self.attention.items() if times is not None}
        name = min(able, key=lambda n: able[n][0])
        return name, able[name][0], min(times[1] for times in able.values())

    @property
    def forward(self) -> float:
        return self.linear + self.best()[1]

    def update(self, keep_attention: bool) -> float:
        """Forward, recomputed matrix products (and attention unless its outputs are kept), backward."""
        _, attention, attention_backward = self.best()
        again = self.linear + (0.0 if keep_attention else attention)
        return self.forward + again + self.linear_backward + attention_backward


def measure_floor(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> Floor:
    """All of it, each for as long as all blocks take, so that the clock rate is the one of sustained work."""
    forward, backward = _linear(shapes, device, dtype)
    linear, linear_backward = (_all_blocks(run, shapes.layers, device) for run in (forward, backward))
    backends = BACKENDS if device.type == "cuda" else {"cpu": None}
    attention = {name: _attention(backend, shapes, device, dtype) for name, backend in backends.items()}
    return Floor(linear, linear_backward, attention)


def _all_blocks(run: Callable[[], object], layers: int, device: torch.device) -> float:
    """Seconds of one call for every block, after one that warms up."""

    def runs() -> None:
        for _ in range(layers):
            run()

    run()
    return once(runs, device)


def _linear(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """One block's matrix products, forward and backward (gradients of input and weight)."""
    d = shapes.dim
    products = [
        (rows, inner, outer)
        for rows in (shapes.video, shapes.text)
        for inner, outer in ((d, d), (d, d), (d, d), (d, d), (d, 4 * d), (4 * d, d))
    ]
    products += [(1, d, 6 * d), (1, d, 6 * d)]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype) / 50

    inputs = {(rows, inner): random(rows, inner) for rows, inner, _ in products}
    gradients = {(rows, outer): random(rows, outer) for rows, _, outer in products}
    weights = [random(outer, inner) for _, inner, outer in products]
    biases = [random(outer) for _, _, outer in products]

    def forward() -> None:
        for (rows, inner, _), weight, bias in zip(products, weights, biases, strict=True):
            functional.linear(inputs[rows, inner], weight, bias)

    def backward() -> None:
        for (rows, inner, outer), weight in zip(products, weights, strict=True):
            gradient = gradients[rows, outer]
            gradient @ weight, gradient.T @ inputs[rows, inner]

    return forward, backward


def _attention(
    backend: SDPBackend | None, shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> tuple[float, float] | None:
    """(forward, backward) seconds of all blocks; the layout is the block's, heads inside tokens."""
    size = (1, shapes.tokens, shapes.heads, shapes.head_dim)
    query, key, value = (torch.randn(size, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    with nullcontext() if backend is None else sdpa_kernel(backend):

        def forward() -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value)

        try:
            with torch.no_grad():
                seconds = _all_blocks(forward, shapes.layers, device)
            inputs = [x.requires_grad_() for x in (query, key, value)]
            output = forward()
            gradient = torch.randn_like(output)

            def backward() -> object:
                return torch.autograd.grad(output, inputs, gradient, retain_graph=True)

            return seconds, _all_blocks(backward, shapes.layers, device)
        except RuntimeError:  # torch has no kernel of this backend for these inputs
            return None
