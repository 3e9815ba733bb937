"""Charts as inline SVG: lines over iterations, and stacked bars. Text is escaped, geometry is numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from sage_ray.actor_clock import IDLE

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 20
NUM_COLOURS = 10
FEW = 60
"""Points below which each has a dot that tells its value."""

Point = tuple[int, float]


class Series(NamedTuple):
    """A line. errors: half widths of intervals by step; dots: points without a line between them."""

    name: str
    points: Sequence[Point]
    errors: Mapping[int, float] = {}
    dots: bool = False


class Frame(NamedTuple):
    """Ranges of a chart's axes."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, step: float) -> str:
        return f"{LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT):.1f}"

    def y(self, value: float) -> str:
        return f"{HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM):.1f}"


def line_chart(title: str, series: Sequence[Series], marks: Sequence[tuple[int, str]] = ()) -> str:
    """A figure with one chart and its legend; marks: (step, text) of vertical lines."""
    drawn = [one for one in series if one.points]
    frame = _frame(drawn)
    parts = [*_grid(frame)]
    for step, text in marks:
        if frame.x0 <= step <= frame.x1:
            x = frame.x(step)
            parts.append(
                f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{escape(f'iteration {step}: {text}')}</title></line>"
            )
    for number, one in enumerate(drawn):
        parts += _line(one, frame, number % NUM_COLOURS)
    legend = "".join(
        f'<span class="key c{number % NUM_COLOURS}">{escape(one.name)} <b>{number_text(one.points[-1][1])}</b></span>'
        for number, one in enumerate(drawn)
    )
    return _figure(title, "".join(parts), legend)


def _frame(series: Sequence[Series]) -> Frame:
    steps = [step for one in series for step, _ in one.points]
    low = [value - one.errors.get(step, 0.0) for one in series for step, value in one.points]
    high = [value + one.errors.get(step, 0.0) for one in series for step, value in one.points]
    y0, y1 = min(low), max(high)
    room = 0.06 * (y1 - y0) or 0.05 * abs(y0) or 1.0
    x0, x1 = min(steps), max(steps)
    return Frame(x0, x1 if x1 > x0 else x0 + 1, y0 - room, y1 + room)


def _grid(frame: Frame) -> list[str]:
    parts = []
    for value in ticks(frame.y0, frame.y1, 4):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="left" x="{LEFT - 5}" y="{float(y) + 3.5:.1f}">{number_text(value)}</text>')
    for value in ticks(frame.x0, frame.x1, 6):
        if value == int(value):
            parts.append(f'<text class="below" x="{frame.x(value)}" y="{HEIGHT - 6}">{int(value)}</text>')
    return parts


def _line(one: Series, frame: Frame, colour: int) -> list[str]:
    parts = []
    if not one.dots and len(one.points) > 1:
        places = " ".join(f"{frame.x(step)},{frame.y(value)}" for step, value in one.points)
        parts.append(f'<polyline class="c{colour}" points="{places}"/>')
    for step, value in one.points if one.dots or len(one.points) <= FEW else ():
        aside = 4 * colour if one.dots else 0  # intervals at the same step stand beside each other
        x, y, error = f"{float(frame.x(step)) + aside:.1f}", frame.y(value), one.errors.get(step, 0.0)
        if error:
            low, high = frame.y(value - error), frame.y(value + error)
            parts.append(f'<line class="error c{colour}" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>')
        words = escape(f"{one.name}, iteration {step}: {value:.6g}" + (f" ± {error:.2g}" if error else ""))
        radius = 3.2 if one.dots else 2
        parts.append(f'<circle class="c{colour}" cx="{x}" cy="{y}" r="{radius}"><title>{words}</title></circle>')
    return parts


def bar_chart(title: str, bars: Sequence[tuple[str, Mapping[str, float]]], unit: str, share: bool = False) -> str:
    """Horizontal stacked bars, one a row. share: every bar is as long as the chart; else they have one scale."""
    bars = [(name, dict(sorted(parts.items(), key=lambda one: one[0] == IDLE))) for name, parts in bars]
    kinds = sorted(dict.fromkeys(kind for _, parts in bars for kind in parts), key=lambda kind: kind == IDLE)
    longest = max((sum(parts.values()) for _, parts in bars), default=0.0)
    row, left, width = 16, 110, 1100
    drawn = []
    for number, (name, parts) in enumerate(bars):
        total, x = sum(parts.values()), float(left)
        scale = (width - left) / ((total if share else longest) or 1.0)
        drawn.append(f'<text class="left" x="{left - 6}" y="{number * row + 12}">{escape(name[:18])}</text>')
        for kind, value in parts.items():
            words = escape(f"{name}, {kind}: {value:.4g} {unit} of {total:.4g}")
            drawn.append(
                f'<rect class="{_colour(kind, kinds)}" x="{x:.1f}" y="{number * row + 2}" height="{row - 4}" '
                f'width="{max(0.0, value * scale):.2f}"><title>{words}</title></rect>'
            )
            x += value * scale
    legend = "".join(f'<span class="key {_colour(kind, kinds)}">{escape(kind)}</span>' for kind in kinds)
    box = f'<svg class="bars" viewBox="0 0 {width} {row * max(1, len(bars)) + 4}">{"".join(drawn)}</svg>'
    return f'<figure class="wide"><figcaption>{escape(title)}</figcaption>{box}<p class="legend">{legend}</p></figure>'


def _colour(kind: str, kinds: Sequence[str]) -> str:
    return "idle" if kind == IDLE else f"c{kinds.index(kind) % NUM_COLOURS}"


def _figure(title: str, drawn: str, legend: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{drawn}</svg>'
        f'<p class="legend">{legend}</p></figure>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers in [low, high], low < high."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= min((m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= count), default=10)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def number_text(value: float) -> str:
    """Short: 0.1234, 12.3, 1.2e-05, 3.4M."""
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e4:
        return f"{value:.4g}"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.2g}"
