"""Truth: visual quality, motion quality and text alignment of any clip of the small world, from its pixels alone.

Works on generated clips as well as on rendered ones. Every score lies in [0, 1], 1 is perfect. VQ and MQ do not look
at the caption, as in VideoAlign. Truth is a held-out judge: nothing is ever trained on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sage_ray.shapes.world import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    SIZES,
    SPEEDS,
    parse_caption,
    pixel_grid,
    shape_distance,
)

MIN_CONTRAST = 0.08
"""A clip whose shape differs from the background by less holds no shape: all its scores are 0."""


@dataclass(frozen=True)
class Measurement:
    """What is seen in a batch of clips.

    mask: [B, F, H, W] in [0, 1], share of the shape in a pixel; centres: [B, F, 2] in pixels; area: [B, F] in pixels;
    colour: [B, 3]; background: [B, 3]; noise: [B], std of background pixels; contrast: [B].
    """

    mask: torch.Tensor
    centres: torch.Tensor
    area: torch.Tensor
    colour: torch.Tensor
    background: torch.Tensor
    noise: torch.Tensor
    contrast: torch.Tensor


@dataclass(frozen=True)
class Truth:
    """Scores of a batch, float32 [B] in [0, 1] each; attributes: [B, 6] in the order of world.ATTRIBUTES;
    matches: bool [B], whether every attribute is the caption's."""

    vq: torch.Tensor
    mq: torch.Tensor
    ta: torch.Tensor
    attributes: torch.Tensor
    matches: torch.Tensor


def measure(frames: torch.Tensor) -> Measurement:
    """Find the shape. Args: frames uint8 [B, F, H, W, 3]. Returns a Measurement on the same device."""
    video = frames.float() / 255
    border = torch.cat([video[:, :, 0], video[:, :, -1], video[:, :, :, 0], video[:, :, :, -1]], dim=2)
    background = border.flatten(1, 2).median(dim=1).values
    difference = (video - background[:, None, None, None]).abs().amax(-1)
    strongest = difference.flatten(2).topk(12, dim=2)
    contrast = strongest.values.mean(dim=(1, 2))
    mask = (difference / contrast.clamp_min(MIN_CONTRAST)[:, None, None, None]).clamp(0, 1)
    mask = torch.where(mask > 0.12, mask, torch.zeros_like(mask))
    area = mask.sum(dim=(2, 3))
    rows, columns = pixel_grid(frames.device)
    centres = torch.stack([(mask * rows).sum(dim=(2, 3)), (mask * columns).sum(dim=(2, 3))], -1)
    centres = centres / area.clamp_min(1e-3)[..., None]
    core = (mask > 0.85).float()
    colour = (video * core[..., None]).sum(dim=(1, 2, 3)) / core.sum(dim=(1, 2, 3)).clamp_min(1)[:, None]
    empty = (mask == 0).float()
    noise = torch.sqrt((difference**2 * empty).sum(dim=(1, 2, 3)) / empty.sum(dim=(1, 2, 3)).clamp_min(1))
    return Measurement(mask, centres, area, colour, background, noise, contrast)


def visual_quality(seen: Measurement) -> torch.Tensor:
    """Mean of edge sharpness, contrast and background cleanliness, [B]."""
    perimeter = 2 * torch.sqrt(torch.pi * seen.area.clamp_min(1.0))
    edge_width = (4 * seen.mask * (1 - seen.mask)).sum(dim=(2, 3)) / perimeter
    sharpness = torch.exp(-(edge_width.mean(1) - 1.0).clamp_min(0) / 2.0)
    contrast = (seen.contrast / 0.45).clamp(0, 1)
    cleanliness = torch.exp(-seen.noise / 0.05)
    return (sharpness + contrast + cleanliness) / 3


def motion_quality(seen: Measurement) -> torch.Tensor:
    """Mean of uniform straight motion, constant size, and moving at all, [B]."""
    num_frames = seen.centres.shape[1]
    time = torch.linspace(-0.5, 0.5, num_frames, device=seen.centres.device)
    centred = seen.centres - seen.centres.mean(1, keepdim=True)
    slope = (centred * time[None, :, None]).sum(1) / (time**2).sum()
    residual = torch.sqrt(((centred - slope[:, None] * time[None, :, None]) ** 2).sum(-1).mean(1))
    uniform = torch.exp(-(residual - 0.15).clamp_min(0) / 1.0)
    steady = torch.exp(-seen.area.std(1) / seen.area.mean(1).clamp_min(1.0) / 0.2)
    moving = (slope.norm(dim=1) / 5.0).clamp(0, 1)
    return (uniform + steady + moving) / 3


def attribute_scores(seen: Measurement, specs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Graded score and boolean match of every attribute, [B, 6] each, in the order of world.ATTRIBUTES."""
    device, rows = specs.device, torch.arange(len(specs), device=specs.device)

    def table(values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=device)

    def nearest(distance: torch.Tensor, scale: float, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        target = specs[:, column]
        return torch.exp(-((distance[rows, target] / scale) ** 2) / 2), distance.argmin(1) == target

    shape_overlap, radius = _shape_overlap(seen)
    first, last = seen.centres[:, :2].mean(1), seen.centres[:, -2:].mean(1)
    moved = (last - first) * (seen.centres.shape[1] - 1) / (seen.centres.shape[1] - 2)
    distance_px = moved.norm(dim=1)
    cosine = (moved @ table(DIRECTIONS.values()).T) / distance_px.clamp_min(1.0)[:, None]
    found_radius = radius[rows, shape_overlap.argmax(1)]
    pairs = (
        nearest((found_radius[:, None] - table(SIZES.values())).abs(), 1.5, 0),
        nearest(torch.cdist(seen.colour, table(COLOURS.values())), 0.25, 1),
        (torch.softmax(18 * shape_overlap, 1)[rows, specs[:, 2]], shape_overlap.argmax(1) == specs[:, 2]),
        ((1 + cosine[rows, specs[:, 3]].clamp(-1, 1)) / 2, cosine.argmax(1) == specs[:, 3]),
        nearest((distance_px[:, None] - table(SPEEDS.values())).abs(), 3.0, 4),
        nearest((seen.background.mean(1)[:, None] - table(BACKGROUNDS.values())).abs(), 0.15, 5),
    )
    return torch.stack([score for score, _ in pairs], 1), torch.stack([match for _, match in pairs], 1)


def _shape_overlap(seen: Measurement) -> tuple[torch.Tensor, torch.Tensor]:
    """Intersection over union of the mask with each shape of equal area and centre, and that shape's half extent;
    [B, 3] each, averaged over frames."""
    rows, columns = pixel_grid(seen.mask.device)
    unit_area = torch.tensor([3.1416, 3.0976, 1.8050], device=seen.mask.device)
    centroid = torch.tensor([0.0, 0.0, 0.1167], device=seen.mask.device)
    overlaps, radii = [], []
    for k in range(3):
        radius = torch.sqrt(seen.area.clamp_min(1.0) / unit_area[k])
        dy = rows - (seen.centres[..., 0] - centroid[k] * radius)[..., None, None]
        dx = columns - seen.centres[..., 1][..., None, None]
        template = (0.5 - shape_distance(dy, dx, radius[..., None, None])[k]).clamp(0, 1)
        union = torch.maximum(template, seen.mask).sum(dim=(2, 3)).clamp_min(1e-3)
        overlaps.append((torch.minimum(template, seen.mask).sum(dim=(2, 3)) / union).mean(1))
        radii.append(radius.mean(1))
    return torch.stack(overlaps, 1), torch.stack(radii, 1)


def judge(frames: torch.Tensor, prompts: Sequence[str]) -> Truth:
    """Score clips against captions of the small world.

    Args:
        frames: uint8 [B, F, H, W, 3]. prompts: B captions.
    Raises: ValueError when a prompt is not a caption of this world or the lengths differ.
    """
    if len(frames) != len(prompts):
        raise ValueError(f"prompts: {len(prompts)} given for {len(frames)} clips, one a clip is needed")
    specs = torch.tensor([parse_caption(text) for text in prompts], device=frames.device)
    seen = measure(frames)
    attributes, matches = attribute_scores(seen, specs)
    found = seen.contrast > MIN_CONTRAST
    attributes = attributes * found[:, None]
    return Truth(
        vq=visual_quality(seen) * found,
        mq=motion_quality(seen) * found,
        ta=attributes.mean(1),
        attributes=attributes,
        matches=matches.all(1) & found,
    )
