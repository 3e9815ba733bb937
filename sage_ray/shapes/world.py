"""The small world: captioned, procedurally rendered clips of one moving shape on a plain background.

Every clip is described by six attributes; every combination has one caption. A quarter of the (colour, shape,
direction) triples is held out: no training prompt of the policy's reinforcement learning and no pretraining clip
uses them. Defects (blur, fade, stall, wobble) are rendered on request, so that quality can be graded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

SIZES = {"small": 5.0, "large": 8.0}
"""Half extent of the shape in pixels."""
COLOURS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.10, 0.80),
    "cyan": (0.10, 0.80, 0.85),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "up": (-1.0, 0.0), "down": (1.0, 0.0)}
"""Unit vector (rows, columns) of the motion."""
SPEEDS = {"slowly": 6.0, "quickly": 13.0}
"""Pixels travelled in one clip."""
BACKGROUNDS = {"black": 0.06, "gray": 0.42, "white": 0.90}
"""Brightness of the plain background."""

NUM_FRAMES, HEIGHT, WIDTH, FPS = 9, 32, 32, 8.0
ATTRIBUTES = ("size", "colour", "shape", "direction", "speed", "background")
VALUES = (tuple(SIZES), tuple(COLOURS), SHAPES, tuple(DIRECTIONS), tuple(SPEEDS), tuple(BACKGROUNDS))
SPECS = tuple(itertools.product(*(range(len(values)) for values in VALUES)))
"""All 864 attribute tuples, in a fixed order."""


def caption(spec: tuple[int, ...]) -> str:
    """The one caption of an attribute tuple, e.g. "a small red circle moves left slowly on a gray background"."""
    size, colour, shape, direction, speed, background = (values[i] for values, i in zip(VALUES, spec, strict=True))
    return f"a {size} {colour} {shape} moves {direction} {speed} on a {background} background"


def parse_caption(text: str) -> tuple[int, ...]:
    """The attribute tuple of a caption of this world; raises ValueError for any other text."""
    if text not in _SPEC_OF_CAPTION:
        raise ValueError(f"prompt: {text!r} is not a caption of the shapes world, so its truth is unknown")
    return _SPEC_OF_CAPTION[text]


def is_held_out(spec: tuple[int, ...]) -> bool:
    """Whether the (colour, shape, direction) triple is held out: 18 of 72, balanced over every attribute value."""
    _, colour, shape, direction, _, _ = spec
    return (colour + shape + direction) % 4 == 0


_SPEC_OF_CAPTION = {caption(spec): spec for spec in SPECS}


@dataclass(frozen=True)
class Defects:
    """What is wrong with a clip; float32 [B] each, 0 is perfect.

    blur: extra width of the edge in pixels; fade: share of background mixed into the shape, 0..1;
    stall: share of the clip at its end in which the shape stands still, 0..1; wobble: sideways zigzag in pixels.
    """

    blur: torch.Tensor
    fade: torch.Tensor
    stall: torch.Tensor
    wobble: torch.Tensor

    @staticmethod
    def none(batch: int, device: torch.device | str = "cpu") -> Defects:
        """No defect in any of `batch` clips."""
        return Defects(*(torch.zeros(batch, device=device) for _ in range(4)))


def shape_distance(dy: torch.Tensor, dx: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Signed distance in pixels to the edge of each shape, negative inside.

    Args:
        dy, dx: offsets from the centre, broadcastable to [..., H, W]. radius: half extent, same rank.
    Returns: [3, ..., H, W] in the order of SHAPES.
    """
    circle = torch.sqrt(dx**2 + dy**2) - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.88 * radius
    triangle = torch.maximum(dy - 0.75 * radius, 0.894 * dx.abs() - 0.447 * (dy + 1.15 * radius))
    return torch.stack(torch.broadcast_tensors(circle, square, triangle))


def pixel_grid(device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every pixel centre, float32 [H, W] each."""
    rows, columns = torch.arange(HEIGHT, device=device) + 0.5, torch.arange(WIDTH, device=device) + 0.5
    grid = torch.meshgrid(rows, columns, indexing="ij")
    return grid[0], grid[1]


def render(specs: torch.Tensor, defects: Defects, generator: torch.Generator) -> torch.Tensor:
    """Render one clip per row of `specs`.

    Args:
        specs: int64 [B, 6], rows of SPECS. defects: float32 [B] each. generator: draws position, size and shade;
            everything lives on its device.
    Returns: float32 [B, 3, F, H, W] in [0, 1].
    """
    batch, device = len(specs), generator.device

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(batch, generator=generator, device=device)

    def look_up(table: dict, column: int) -> torch.Tensor:
        return torch.tensor(list(table.values()), device=device)[specs[:, column]]

    radius = look_up(SIZES, 0) * uniform(0.92, 1.08)
    travel = look_up(SPEEDS, 4) * uniform(0.92, 1.08)
    centres = _trajectory(look_up(DIRECTIONS, 3), travel, radius, defects, generator)
    rows, columns = pixel_grid(device)
    dy, dx = rows - centres[..., 0, None, None], columns - centres[..., 1, None, None]
    distance = shape_distance(dy, dx, radius[:, None, None, None])[specs[:, 2], torch.arange(batch, device=device)]
    alpha = (0.5 - distance / (1.0 + defects.blur[:, None, None, None])).clamp(0, 1)
    alpha = (alpha * (1 - defects.fade[:, None, None, None]))[:, None]
    colour = look_up(COLOURS, 1) * uniform(0.94, 1.04)[:, None]
    background = look_up(BACKGROUNDS, 5) + uniform(-0.04, 0.04)
    video = alpha * colour[:, :, None, None, None] + (1 - alpha) * background[:, None, None, None, None]
    return video.clamp(0, 1)


def _trajectory(
    direction: torch.Tensor, travel: torch.Tensor, radius: torch.Tensor, defects: Defects, generator: torch.Generator
) -> torch.Tensor:
    """Centre of the shape in every frame, float32 [B, F, 2] (rows, columns), in pixels."""
    batch, device = len(travel), generator.device
    time = torch.linspace(0, 1, NUM_FRAMES, device=device)
    progress = (time / (1 - defects.stall[:, None]).clamp_min(0.1)).clamp(max=1.0) - 0.5
    room = (HEIGHT / 2 - radius[:, None] - direction.abs() * travel[:, None] / 2 - 0.5).clamp(0, 4)
    start = HEIGHT / 2 + (2 * torch.rand(batch, 2, generator=generator, device=device) - 1) * room
    zigzag = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 1.0, 1.0], device=device)
    sign = torch.where(torch.rand(batch, generator=generator, device=device) < 0.5, -1.0, 1.0)
    sideways = direction.flip(1)[:, None] * (zigzag * (sign * defects.wobble)[:, None])[..., None]
    return start[:, None] + direction[:, None] * (travel[:, None] * progress)[..., None] + sideways


def to_uint8(video: torch.Tensor) -> torch.Tensor:
    """float [B, 3, F, H, W] in [0, 1] to uint8 [B, F, H, W, 3], rounded to nearest."""
    return (video.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()
