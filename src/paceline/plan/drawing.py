"""The map of speedup as SVG text: one cell for each acceptance and draft length, and the line where it breaks even."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

WIDTH, LEFT, TOP, ROW = 860, 70, 62, 20
GAIN, LOSS = (0, 114, 178), (213, 94, 0)  # told apart by most
INK = "#111"


def surface_svg(map_: Mapping[str, Any], *, at: float | None = None) -> str:
    """The map that surface() made. at: an acceptance to mark, as measured. The text stands on its own as a file."""
    acceptances, lengths = map_["acceptances"], map_["lengths"]
    cell = (WIDTH - LEFT - 10) / len(acceptances)
    rows = {length: TOP + ROW * i for i, length in enumerate(reversed(lengths))}
    bottom = TOP + ROW * len(lengths)
    most = max(abs(math.log(value)) for row in map_["speedups"] for value in row) or 1.0
    parts = []
    for length, row in zip(lengths, map_["speedups"], strict=True):
        parts.append(_text(LEFT - 8, rows[length] + 14, f"{length:d}", "end"))
        parts += _row(row, acceptances, LEFT, rows[length], cell, length, most)
    for i, acceptance in enumerate(acceptances):
        parts.append(_text(LEFT + cell * (i + 0.5), bottom + 15, f"{acceptance:g}"))
    parts += _break_even(map_, rows, cell)
    parts += _best(map_, rows, cell)
    if at is not None:
        x = _across(at, acceptances, cell)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#7a5195" stroke-width="2" '
            f'stroke-dasharray="6 4"><title>measured: {at:.2f}</title></line>'
        )
    title = f"Speedup by acceptance and draft length, where a draft costs {map_['cost_ratio']:.3g} of a step"
    key = "black line: breaks even. ring: best draft length." + (" dashed: acceptance as measured." if at else "")
    parts += [
        f'<text x="{LEFT}" y="20" class="title" style="font-weight:600;font-size:14px">{escape(title)}</text>',
        f'<text x="{LEFT}" y="42">{escape(key)}</text>',
        _text(WIDTH - 10, bottom + 34, "acceptance", "end"),
        _text(LEFT - 8, TOP - 10, "drafts", "end"),
    ]
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 44}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">\n'
        f"{inside}\n</svg>"
    )


def _row(
    values: list[float], acceptances: list[float], left: float, y: float, cell: float, length: int, most: float
) -> Iterator[str]:
    for i, value in enumerate(values):
        x = left + cell * i
        tip = f"<title>acceptance {acceptances[i]:g}, {length} drafts: {value:.3f}</title>"
        place = f'x="{x:.1f}" y="{y}" width="{cell:.1f}" height="{ROW}"'
        yield f'<rect {place} fill="{_colour(value, most)}">{tip}</rect>'
        text = f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
        yield (
            f'<text x="{x + cell / 2:.1f}" y="{y + 14}" text-anchor="middle" '
            f'style="font-size:10px;fill:{INK};pointer-events:none">{text}</text>'
        )


def _colour(value: float, most: float) -> str:
    """White at 1; towards one of two colours above and below, never so dark that the number cannot be read."""
    strong, share = GAIN if value > 1 else LOSS, 0.75 * abs(math.log(value)) / most
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in strong)


def _across(acceptance: float, acceptances: list[float], cell: float) -> float:
    """Where an acceptance stands: cells show the middle of theirs."""
    step = (acceptances[-1] - acceptances[0]) / max(len(acceptances) - 1, 1)
    return LEFT + cell * ((acceptance - acceptances[0]) / step + 0.5 if step else 0.5)


def _break_even(map_: Mapping[str, Any], rows: Mapping[int, float], cell: float) -> Iterator[str]:
    """Through each length's break-even acceptance, in the middle of its row."""
    pairs = zip(map_["lengths"], map_["break_even"], strict=True)
    points = [(_across(at, map_["acceptances"], cell), rows[n] + ROW / 2) for n, at in pairs if n and at is not None]
    if points:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="even" points="{path}" fill="none" stroke="{INK}" stroke-width="2"/>'


def _best(map_: Mapping[str, Any], rows: Mapping[int, float], cell: float) -> Iterator[str]:
    for i, length in enumerate(map_["best"]):
        place = f'x="{LEFT + cell * i + 1:.1f}" y="{rows[length] + 1}" width="{cell - 2:.1f}" height="{ROW - 2}"'
        yield f'<rect class="best" {place} rx="8" fill="none" stroke="{INK}" stroke-width="1.2"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
