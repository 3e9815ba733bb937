"""One PNG that shows what training changed: per prompt five frames before and five frames after, with their scores."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sage_ray.video import check_frames, enlarge

NUM_FRAMES = 5
FRAME_WIDTHS = (112, 224)
"""Pixels: smaller frames are enlarged by a whole factor, larger ones are reduced."""
FONT_SIZE, LINE, MARGIN, GAP = 14, 20, 12, 24
INK, FAINT, PAPER = (20, 20, 20), (95, 95, 95), (255, 255, 255)


@dataclass(frozen=True)
class SheetRow:
    """One prompt. before, after: uint8 [T, H, W, 3], any T; scores: printed over their frames in the given order,
    a missing or not finite one as failed."""

    label: str
    before: np.ndarray
    after: np.ndarray
    before_scores: Mapping[str, float | None] = field(default_factory=dict)
    after_scores: Mapping[str, float | None] = field(default_factory=dict)


def contact_sheet(path: str | Path, rows: Sequence[SheetRow]) -> None:
    """Writes the sheet as PNG; its folder is made when missing.

    Raises:
        ValueError: no rows, or frames that are not uint8 [T, H, W, 3].
    """
    if not rows:
        raise ValueError("rows: a contact sheet needs at least one prompt")
    bands = [_band(row) for row in rows]
    width = max(band.width for band in bands)
    sheet = Image.new("RGB", (width, MARGIN + sum(band.height + MARGIN for band in bands)), PAPER)
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for position, band in enumerate(bands):
        if position:
            draw.line((MARGIN, top - MARGIN // 2, width - MARGIN, top - MARGIN // 2), fill=(205, 205, 205))
        sheet.paste(band, (0, top))
        top += band.height + MARGIN
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")


def _band(row: SheetRow) -> Image.Image:
    """The caption over the whole width, then two blocks side by side."""
    font = _font()
    blocks = [
        _block("before", row.before, row.before_scores, font),
        _block("after", row.after, row.after_scores, font),
    ]
    width = 2 * MARGIN + GAP + sum(block.width for block in blocks)
    caption = textwrap.wrap(row.label, max(20, int((width - 2 * MARGIN) / (0.62 * FONT_SIZE)))) or [""]
    band = Image.new("RGB", (width, LINE * len(caption) + max(block.height for block in blocks)), PAPER)
    ImageDraw.Draw(band).multiline_text((MARGIN, 0), "\n".join(caption), INK, font, spacing=LINE - FONT_SIZE)
    band.paste(blocks[0], (MARGIN, LINE * len(caption)))
    band.paste(blocks[1], (MARGIN + blocks[0].width + GAP, LINE * len(caption)))
    return band


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans from matplotlib: has Latin, Greek and Cyrillic; other scripts show as boxes."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), FONT_SIZE)


def _block(
    name: str, frames: np.ndarray, scores: Mapping[str, float | None], font: ImageFont.FreeTypeFont
) -> Image.Image:
    """The word before or after with its scores, over a strip of frames."""
    strip = Image.fromarray(frame_strip(name, frames))
    words = [name, *(f"{what} {_number(value)}" for what, value in scores.items())]
    lines = _fit(words, strip.width, font)
    block = Image.new("RGB", (strip.width, LINE * len(lines) + strip.height), PAPER)
    ImageDraw.Draw(block).multiline_text((0, 0), "\n".join(lines), FAINT, font, spacing=LINE - FONT_SIZE)
    block.paste(strip, (0, LINE * len(lines)))
    return block


def _number(value: float | None) -> str:
    return f"{value:+.3f}" if value is not None and math.isfinite(value) else "failed"


def _fit(words: Sequence[str], width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """Lines no wider than width pixels, never broken inside a score."""
    lines = [words[0]]
    for word in words[1:]:
        longer = f"{lines[-1]}   {word}"
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def frame_strip(name: str, frames: np.ndarray) -> np.ndarray:
    """Five frames spread evenly over uint8 [T, H, W, 3], side by side: uint8 [h, 5 * w + 4 * 2, 3]."""
    check_frames(name, frames)
    chosen = frames[np.linspace(0, len(frames) - 1, NUM_FRAMES).round().astype(int)]
    smallest, largest = FRAME_WIDTHS
    chosen = enlarge(chosen, max(1, -(-smallest // chosen.shape[2])))
    if chosen.shape[2] > largest:
        size = (largest, max(1, round(chosen.shape[1] * largest / chosen.shape[2])))
        chosen = np.stack(
            [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)) for frame in chosen]
        )
    padded = np.pad(chosen, ((0, 0), (0, 0), (0, 2), (0, 0)), constant_values=255)
    return np.concatenate(list(padded), axis=1)[:, :-2]
