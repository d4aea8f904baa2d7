"""Small plots as SVG text, to stand inside an HTML page: no script, no font, no file beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c6d31")  # told apart by most
WIDTH, LEFT, RIGHT, ROW, HEAD = 860, 190, 70, 15, 34


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with its interval; low and high None where there is none."""

    series: str
    value: float
    low: float | None = None
    high: float | None = None


def colour(index: int) -> str:
    """The colour of a series; after eight they begin again."""
    return COLOURS[index % len(COLOURS)]


def ratio_plot(title: str, groups: Sequence[tuple[str, Sequence[Mark]]], series: Sequence[str]) -> str:
    """Rows of points with intervals on a logarithmic axis, with a line at 1."""
    values = [v for _, marks in groups for m in marks for v in (m.value, m.low or m.value, m.high or m.value)]
    if not values:
        return ""
    low, high = min(0.8, *values), max(1.25, *values)
    span = math.log(high / low)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / span

    parts, y = [], HEAD + 10.0
    for name, marks in groups:
        middle = y + ROW * (len(marks) - 1) / 2
        parts.append(_text(LEFT - 12, middle + 4, name, "end"))
        for mark in marks:
            ink = colour(series.index(mark.series))
            if mark.low is not None and mark.high is not None:
                parts.append(_line(x(mark.low), y, x(mark.high), y, ink, 2))
            tip = f"<title>{escape(mark.series)}: {mark.value:.2f}</title>"
            parts.append(f'<circle cx="{x(mark.value):.1f}" cy="{y:.1f}" r="4" fill="{ink}">{tip}</circle>')
            parts.append(_text(WIDTH - RIGHT + 12, y + 4, f"{mark.value:.2f}"))
            y += ROW
        y += 8
    bottom = y
    axis = [_line(x(v), HEAD, x(v), bottom, "currentColor", 1.5 if v == 1 else 0.2) for v in _ticks(low, high)]
    axis += [_text(x(v), bottom + 14, f"{v:g}", "middle") for v in _ticks(low, high)]
    return _svg(title, [*axis, *parts], series, bottom + 22)


def _ticks(low: float, high: float) -> Iterator[float]:
    last = 0.0
    for value in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24):
        if low <= value <= high and value > 1.2 * last:
            last = value
            yield value


def bars(title: str, rows: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], unit: str = "") -> str:
    """Rows of bars; several numbers of a row are parts of one bar."""
    most = max((sum(parts) for _, parts in rows), default=0.0)
    if most <= 0:
        return ""
    drawn, y = [], float(HEAD)
    for name, parts in rows:
        drawn.append(_text(LEFT - 12, y + 12, name, "end"))
        x = float(LEFT)
        for i, part in enumerate(parts):
            width = (WIDTH - LEFT - RIGHT) * part / most
            tip = f"<title>{escape(series[i])}: {part:.3g} {escape(unit)}</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="16" fill="{colour(i)}">{tip}</rect>'
            )
            x += width
        drawn.append(_text(x + 6, y + 12, f"{sum(parts):.3g} {unit}".strip()))
        y += 24
    return _svg(title, drawn, series if len(series) > 1 else (), y)


def lines(title: str, points: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_name: str) -> str:
    """A line through the points (x, y) of each series; both axes begin at 0."""
    xs = [x for _, line in points for x, _ in line]
    ys = [y for _, line in points for _, y in line]
    if not xs or max(xs) <= 0 or max(ys) <= 0:
        return ""
    height, base = 220.0, HEAD + 220.0
    across, up = (WIDTH - LEFT - RIGHT) / max(xs), height / (1.08 * max(ys))
    drawn = [
        _line(LEFT, base, WIDTH - RIGHT, base, "currentColor", 0.5),
        _text(WIDTH - RIGHT, base + 30, x_name, "end"),
    ]
    for value in sorted(set(xs)):
        drawn.append(_text(LEFT + across * value, base + 15, f"{value:g}", "middle"))
    for i in range(1, 5):
        value = max(ys) * i / 4
        drawn.append(_text(LEFT - 10, base - up * value + 4, f"{value:.3g}", "end"))
        drawn.append(_line(LEFT, base - up * value, WIDTH - RIGHT, base - up * value, "currentColor", 0.15))
    for i, (name, line) in enumerate(points):
        path = " ".join(f"{LEFT + across * x:.1f},{base - up * y:.1f}" for x, y in sorted(line))
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour(i)}" stroke-width="2"/>')
        for x, y in line:
            tip = f"<title>{escape(name)}: {y:.3g} at {x:g}</title>"
            place = f'cx="{LEFT + across * x:.1f}" cy="{base - up * y:.1f}"'
            drawn.append(f'<circle {place} r="4" fill="{colour(i)}">{tip}</circle>')
    return _svg(title, drawn, [name for name, _ in points], base + 36)


def _svg(title: str, parts: Sequence[str], series: Sequence[str], height: float) -> str:
    keys, x, y = [], float(LEFT), height + 14
    for i, name in enumerate(series):
        width = 30 + 7.2 * len(name)
        if x + width > WIDTH:
            x, y = float(LEFT), y + 18
        keys.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour(i)}"/>')
        keys.append(_text(x + 15, y, name))
        x += width
    heading = f'<text x="{LEFT}" y="18" class="title">{escape(title)}</text>'
    inside = "\n".join([heading, *parts, *keys])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10:.0f}" role="img" '
        f'aria-label="{escape(title)}">\n{inside}\n</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, ink: str, width: float) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{ink}" stroke-width="{width}"/>'
