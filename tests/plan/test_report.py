"""Plans: alike in every format, well-formed, and with the line where it belongs."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from paceline.errors import InvalidParams
from paceline.plan.drawing import LEFT, ROW, TOP, WIDTH, surface_svg
from paceline.plan.model import break_even_acceptance, speedup
from paceline.plan.report import form_of, map_report, render, statements, tables

SVG = "{http://www.w3.org/2000/svg}"


def drawn(cost_ratio: float, most: int) -> ET.Element:
    return ET.fromstring(render(map_report(cost_ratio, most), "svg"))


def test_the_map_shows_every_cell_and_the_line() -> None:
    """Catches a picture upside down, a cell in another's place, and a line beside the crossing."""
    root = drawn(0.1, 8)
    tips = [tip.text or "" for tip in root.iter(f"{SVG}title")]
    assert len([tip for tip in tips if tip.startswith("acceptance")]) == 21 * 9
    assert f"acceptance 0.4, 4 drafts: {speedup(0.4, 4, 0.1):.3f}" in tips
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    cell = (WIDTH - LEFT - 10) / 21
    assert len(points) == 8  # lengths 1 to 8
    for length, (x, y) in enumerate(points, start=1):
        even = break_even_acceptance(length, 0.1)
        assert even is not None
        assert x == pytest.approx(LEFT + cell * (even / 0.05 + 0.5), abs=0.1)
        assert y == TOP + ROW * (8 - length) + ROW / 2
    # Left of the line cells lose, right of it they gain.
    for rect in root.iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is None:
            continue
        drafts, value = map(float, re.findall(r", (\d+) drafts: ([\d.]+)", tip.text or "")[0])
        middle = float(rect.attrib["x"]) + cell / 2
        if drafts and abs(value - 1) > 0.01:
            assert (middle > points[int(drafts) - 1][0]) == (value > 1), tip.text


def test_a_draft_that_costs_more_than_a_step_has_no_line() -> None:
    root = drawn(1.5, 4)
    assert not list(root.iter(f"{SVG}polyline"))
    (short, _) = tables(map_report(1.5, 4))
    assert {row[-1] for row in short.rows} == {"never", ""}
    assert short.rows[-1][1:-1] == ["0"] * 8


def test_the_measured_acceptance_is_marked() -> None:
    text = surface_svg(map_report(0.1, 4)["map"], at=0.5)
    line = next(ET.fromstring(text).iter(f"{SVG}line"))
    assert float(line.attrib["x1"]) == pytest.approx(LEFT + (WIDTH - LEFT - 10) / 21 * 10.5, abs=0.1)


def test_every_format_of_a_map_says_the_same() -> None:
    """Catches a format without its table, a page that does not parse, and one that loads something."""
    report = map_report(0.1, 8)
    assert json.loads(render(report, "json")) == report
    page = render(report, "html")
    root = ET.fromstring(page.split("\n", 1)[1])
    cells = {"".join(cell.itertext()) for cell in root.iter("td")}
    markdown = render(report, "markdown")
    for table in tables(report):
        for row in table.rows:
            assert set(row) <= cells
            assert all(f"| {text} |" in markdown for text in row)
    assert len(list(root.iter(f"{SVG}svg"))) == 1
    assert not re.search(r"<(script|link|img)|(src|href)=|url\(|@import", page)
    for level, said in statements(report):
        assert said in markdown
        assert level in ("algorithm", "measurement", "extrapolation")


def test_losses_are_in_brackets() -> None:
    (short, full) = tables(map_report(0.1, 8))
    row = next(row for row in short.rows if row[0] == "8")
    assert row[1:4] == ["(0.69)", "(0.93)", "1.11"]
    assert (short.detail, full.detail) == (False, True)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("a.png", "map", "name it .svg or .html"),
        ("a.png", "model", "name it .html"),
        ("a.svg", "model", "allowed: a name that ends in .json, .md, .html"),
        ("a.pdf", "map", "allowed"),
        ("none/a.svg", "map", "make it first"),
    ],
)
def test_files_that_cannot_be_written_are_refused(tmp_path: Path, name: str, kind: str, said: str) -> None:
    with pytest.raises(InvalidParams, match=re.escape(said)):
        form_of(tmp_path / name, kind)


def test_forms() -> None:
    names = ("a.json", "a.md", "a.html", "a.svg")
    assert [form_of(Path(name), "map") for name in names] == ["json", "markdown", "html", "svg"]
