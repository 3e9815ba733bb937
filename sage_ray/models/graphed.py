"""A forward recorded once as a CUDA graph and replayed: a small model no longer waits for kernel launches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

MAX_GRAPHS = 8
"""Input shapes that are kept; each holds the memory of one forward."""
WARM_UP = 3
"""Forwards before recording, so that libraries have chosen their kernels and made their handles."""


@dataclass(frozen=True)
class _Recording:
    """A graph, the tensors it reads, and the one it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor | None, ...]
    output: torch.Tensor


class GraphedForward:
    """Calls `forward` without gradient; for CUDA inputs of a shape seen before, replays its kernels.

    The same kernels on the same weights give the same bits as an eager call. Weights are read where they lie when a
    shape is first met, so they may be overwritten in place, and never replaced.

    Args: forward: tensors (or None) in, one tensor out; no step on the host may depend on the tensors' values.
    """

    def __init__(self, forward: Callable[..., torch.Tensor]):
        self.forward = forward
        self._recordings: OrderedDict[tuple, _Recording] = OrderedDict()

    @torch.no_grad()
    def __call__(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        key = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in inputs)
        if key not in self._recordings:
            self._recordings[key] = self._record(inputs)
            if len(self._recordings) > MAX_GRAPHS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        for held, given in zip(recording.inputs, inputs, strict=True):
            if held is not None:
                held.copy_(given)
        recording.graph.replay()
        return recording.output.clone()

    def _record(self, inputs: tuple[torch.Tensor | None, ...]) -> _Recording:
        held = tuple(None if x is None else x.clone() for x in inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.forward(*held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.forward(*held)
        return _Recording(graph, held, output)
