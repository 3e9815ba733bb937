"""The transformer's ways: diffusers as shipped and this program's, over one set of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bench.floor import Floor, Shapes, measure_floor
from bench.real_size import Size, Weights, random_condition, random_latents, random_weights, transformer
from bench.timing import Report, Row, free, measure
from sage_ray.cost import attention_flops, forward_flops, linear_flops
from sage_ray.models.packed_velocity import PackedVelocity
from sage_ray.models.stock_velocity import StockVelocity

SHIPPED = "as diffusers ships it"
EAGER = "packed"
COMPILED = "packed, compiled"
KEPT = "packed, compiled, attention kept"
NOT_KEPT = "packed, compiled, attention recomputed"
DTYPE = torch.bfloat16
TIMESTEP = 833.3
"""Float32 for this program; diffusers' pipeline rounds it to bfloat16, 832, which is part of its error."""
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    SHIPPED: lambda model: StockVelocity(model, DTYPE),
    EAGER: lambda model: PackedVelocity(model, DTYPE),
    COMPILED: lambda model: PackedVelocity(model, DTYPE, compiled=True),
    KEPT: lambda model: PackedVelocity(model, DTYPE, compiled=True),
    NOT_KEPT: lambda model: PackedVelocity(model, DTYPE, compiled=True, keep_attention=False),
}


class VelocityBench:
    """Measures into a report; every number of frames has a floor of its own."""

    def __init__(self, size: Size, device: torch.device, repeats: int, report: Report):
        self.size, self.device, self.repeats, self.report = size, device, repeats, report
        self.condition = random_condition(size, device)
        self.timestep = torch.tensor([TIMESTEP], device=device)
        self.weights: Weights = random_weights(size, device, DTYPE)
        self.floors: dict[int, Floor] = {}

    def shapes(self, frames: int) -> Shapes:
        """Of a block at so many frames."""
        config = transformer(self.size, self.weights).config
        _, *grid = self.size.latent_shape(frames)
        heads, width, layers = config.num_attention_heads, config.attention_head_dim, config.num_layers
        return Shapes(heads, width, layers, grid[0] * grid[1] * grid[2], self.size.text)

    def floor(self, frames: int) -> Floor:
        """Measured once for a number of frames; every part of it is a row."""
        if frames not in self.floors:
            shapes = self.shapes(frames)
            floor = self.floors[frames] = measure_floor(shapes, self.device, DTYPE)
            free()
            size = shapes.dim, shapes.layers, shapes.tokens
            linear, attention = linear_flops(*size), attention_flops(*size)
            rows = [("block GEMMs", floor.linear, linear), ("block GEMMs, backward", floor.linear_backward, 2 * linear)]
            for name, times in floor.attention.items():
                forward, backward = times or (None, None)
                rows.append((f"attention, {name}", forward, attention))
                rows.append((f"attention, {name}, backward", backward, 2 * attention))
            rows.append((f"forward, attention {floor.best()[0]}", floor.forward, linear + attention))
            for kept, words in ((True, "attention kept"), (False, "attention recomputed")):
                rows.append((f"update, {words}", floor.update(kept), 3 * (linear + attention)))
            for name, seconds, flops in rows:
                error = None if seconds else "no such kernel for these inputs"
                self.report.add(Row("floor", name, frames, seconds, flops=flops, error=error))
        return self.floors[frames]

    def forward(self, frames: int, name: str) -> None:
        """One way of a forward as a rollout runs it: without gradient."""
        floor, flops, latents = self.floor(frames), self._flops(frames), random_latents(self.size, frames, self.device)
        model = WAYS[name](transformer(self.size, self.weights)).requires_grad_(False)
        shipped = self.report.seconds("forward", SHIPPED, frames)
        row = Row("forward", name, frames, flops=flops, floor_s=floor.forward, shipped_s=shipped)
        repeats = 1 if name == SHIPPED else self.repeats
        with torch.no_grad():
            measure(row, lambda: model(latents, self.timestep, *self.condition), self.device, repeats)
        self.report.add(row)

    def update(self, frames: int, name: str) -> None:
        """One way of a forward and backward of all parameters: blocks recomputed, bfloat16 gradients, no optimizer."""
        floor, flops, latents = self.floor(frames), self._flops(frames), random_latents(self.size, frames, self.device)
        model = WAYS[name](transformer(self.size, self.weights))
        model.transformer.enable_gradient_checkpointing()
        shipped = self.report.seconds("update", SHIPPED, frames)
        row = Row("update", name, frames, flops=3 * flops, floor_s=floor.update(name == KEPT), shipped_s=shipped)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(latents, self.timestep, *self.condition).square().mean().backward()

        self.report.add(measure(row, run, self.device, 1 if name == SHIPPED else min(2, self.repeats)))
        model.zero_grad(set_to_none=True)  # compiled code may hold the parameters on

    @torch.no_grad()
    def truth(self, frames: int) -> torch.Tensor:
        """The velocity in float32 under the same weights, all layers."""
        exact = {name: tensor.float() for name, tensor in self.weights.items()}
        model = PackedVelocity(transformer(self.size, exact), torch.float32).requires_grad_(False)
        return model(random_latents(self.size, frames, self.device), self.timestep, *self.condition)

    @torch.no_grad()
    def error(self, frames: int, name: str, truth: torch.Tensor) -> None:
        """Relative L2 of one way's velocity against `truth`."""
        model = WAYS[name](transformer(self.size, self.weights)).requires_grad_(False)
        latents, found = random_latents(self.size, frames, self.device), []
        row = Row("error", f"{name}, against float32", frames)
        measure(row, lambda: found.append(model(latents, self.timestep, *self.condition)), self.device, 1, warm_up=0)
        row.seconds = row.peak_bytes = None
        if found:
            row.values = {"relative_l2": float((found[0] - truth).norm() / truth.norm())}
        self.report.add(row)

    def _flops(self, frames: int) -> float:
        shapes = self.shapes(frames)
        return forward_flops(shapes.dim, shapes.layers, shapes.tokens)
