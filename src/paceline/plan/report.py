"""Plans as JSON, Markdown, a page that needs nothing beside it, or the map alone as SVG; and their tables as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..bench import report as bench_report
from ..bench import svg
from ..bench.report import html_table, markdown, page
from ..bench.tables import Table
from ..errors import InvalidParams
from .drawing import surface_svg
from .model import BATCHES, surface

SCHEMA = "paceline-plan/1"
KINDS = {"map": "Speedup by acceptance and draft length", "model": "What drafting is expected to gain"}
SHORT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHORT_ACCEPTANCES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FORMULA = "(1 - a^(g+1)) / ((1 - a)(g c + 1))"
Report = dict[str, Any]


def map_report(cost_ratio: float, most: int) -> Report:
    """The map at one cost ratio, for draft lengths up to `most`. Raises InvalidParams for a cost ratio below 0."""
    acceptances = [round(0.05 * i, 2) for i in range(21)]
    found = surface(cost_ratio, range(most + 1), acceptances)
    return {"schema": SCHEMA, "kind": "map", "map": found, "warnings": []}


# --- in words -----------------------------------------------------------------------------------------


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured, on what and how, as (name, words)."""
    if report["kind"] == "map":
        return [("cost of a draft", f"c = {report['map']['cost_ratio']:g} of a plain step")]
    known = report["acceptance"]
    at = " ".join(f"{rate:.2f}" for rate in known["at"])
    return [
        *bench_report.facts(report),
        ("drafter", report["drafter"]),
        ("recorded", f"{known['steps']} steps with up to {known['recorded_length']} drafts, {report['context']} tokens "
         "of context on average"),
        ("acceptance", f"{known['mean']:.3f} of all drafts that were judged; by position: {at or '-'}"),
        ("cost of a draft", f"c = {known['cost_ratio']:.3f} of a plain step"),
    ]  # fmt: skip


def verdicts(report: Mapping[str, Any]) -> list[str]:
    """What it comes to, in a few lines."""
    if report["kind"] == "map":
        return []
    said = []
    for best in report["best"]:
        if best["batch"] in (1, report["measured_batch"]):
            where = "one request" if best["batch"] == 1 else f"{best['batch']} requests at once"
            what = f"{best['length']} drafts, {best['ratio']:.2f} times plain" if best["length"] else "no drafts"
            said.append(f"Best setting predicted for {where}: {what}.")
    even = report["break_even_batch"]
    if even is None:
        said.append(f"Break-even batch: none up to {BATCHES[-1]}; some draft length gains at each of them.")
    else:
        said.append(f"Break-even batch: {even}; with so many requests at once, no draft length is predicted to gain.")
    return said


def statements(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which of it is which: (algorithm, measurement or extrapolation; a sentence)."""
    if report["kind"] == "map":
        return [
            ("algorithm", f"S = {FORMULA}, at a = 1 (g + 1) / (g c + 1): exact where each draft is kept with the same "
             "chance, verifying g + 1 tokens takes as long as one, and nothing else takes time."),
            ("extrapolation", "Any use of it for a real model, whose drafts do better and worse from place to place "
             "and whose wide steps cost more: see `paceline plan model`."),
        ]  # fmt: skip
    costs, most = report["costs"], report["measured_batch"]
    return [
        ("algorithm", "What is generated follows the target's distribution at every draft length. A step emits the "
         f"drafts it keeps and one token more. The i.i.d. column is (1 - a^(g+1)) / (1 - a), the formula column "
         f"S = {FORMULA}: true under their assumptions, which this drafter need not meet."),
        ("measurement", f"Forwards of {costs['widths'][0]} to {costs['widths'][-1]} tokens behind "
         f"{' and '.join(map(str, costs['contexts']))}; steps of "
         f"{report['acceptance']['recorded_length']} and of 1 drafts for acceptance and for the time beside forwards, "
         f"with {' and '.join(map(str, report['workload']['concurrencies']))} at once; and everything called measured, "
         "which was run afterwards and is no part of any prediction."),
        ("extrapolation", "Tokens per step of other lengths: the recorded text walked again, where a draft behind a "
         "bonus token counts as kept if the next one was. Batches: requests at unrelated places, all of average "
         f"context, all decoding. Marked ~: more than {most} at once, forwards wider than {costs['widths'][-1]} "
         f"tokens, or a context beyond {costs['contexts'][-1]}. Other prompts than these."),
    ]  # fmt: skip


def notes(report: Mapping[str, Any]) -> list[str]:
    """What stands behind the tables of a terminal: verdicts, then statements."""
    return [*verdicts(report), *(f"{level}: {said}" for level, said in statements(report))]


# --- tables -------------------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> list[Table]:
    """What it says in numbers; those in detail are left out on a terminal."""
    if report["kind"] == "map":
        return [_map_table(report["map"], short=True), _map_table(report["map"], short=False)]
    return [
        _check_table(report),
        _ratio_table(report, short=True),
        _tokens_table(report, short=True),
        _cost_table(report),
        _ratio_table(report, short=False),
        _tokens_table(report, short=False),
        _acceptance_table(report),
    ]


def _map_table(found: Mapping[str, Any], *, short: bool) -> Table:
    shown = [i for i, a in enumerate(found["acceptances"]) if not short or a in SHORT_ACCEPTANCES]
    rows = []
    for length, row, even in zip(found["lengths"], found["speedups"], found["break_even"], strict=True):
        if length and (not short or length in SHORT_LENGTHS):
            rows.append([str(length), *(_gain(row[i]) for i in shown), "never" if even is None else f"{even:.3f}"])
    rows.append(["best", *(str(found["best"][i]) for i in shown), ""])
    head = ["drafts", *(f"a = {found['acceptances'][i]:g}" for i in shown), "even at"]
    title = f"Speedup at c = {found['cost_ratio']:g}; losses in brackets"
    return Table(title if short else f"{title}, every cell", head, rows, detail=not short)


def _gain(value: float, mark: str = "") -> str:
    """1.18, or (0.87) where drafting loses."""
    return f"({mark}{value:.2f})" if value < 1 else f"{mark}{value:.2f}"


def _check_table(report: Mapping[str, Any]) -> Table:
    head = ["setting", "at once", "tokens/s: predicted", "measured", "off by", "ratio: predicted", "measured (95 %)"]
    head += ["tokens per step: walked", "measured", "runs"]
    rows = []
    for check in report["checks"]:
        said, rate = check["predicted"], check["tokens_per_second"]
        mark = "*" if check["disturbed"] else ""
        row = [check["setting"], str(check["batch"])]
        row += [_number(said and said["tokens_per_second"]), _number(rate) + mark]
        row.append(f"{100 * (said['tokens_per_second'] / rate - 1):+.0f} %" if said and rate else "-")
        row.append(_gain(said["ratio"], "~" if said["beyond"] else "") if said else "-")
        row.append(_span(check["ratio"]))
        row += [f"{said['tokens_per_step']:.2f}" if said else "-", _number(check["tokens_per_step"], 2)]
        rows.append([*row, str(check["runs"])])
    return Table("Prediction beside measurement", head, rows)


def _span(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    width = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['ratio']:.2f}{width}"


def _ratio_table(report: Mapping[str, Any], *, short: bool) -> Table:
    at = {(p["length"], p["batch"]): p for p in report["predictions"]}
    lengths = sorted({length for length, _ in at})
    rows = []
    for length in lengths[1:]:
        if not short or length in SHORT_LENGTHS:
            cells = [at[length, batch] for batch in BATCHES]
            even = report["break_even_batches"][length - 1]
            row = [_gain(c["ratio"], "~" if c["beyond"] else "") for c in cells]
            rows.append([str(length), *row, "-" if even is None else str(even)])
    rows.append(["best", *(str(best["length"]) for best in report["best"]), _whole(report["break_even_batch"])])
    head = ["drafts", *(f"{batch} at once" for batch in BATCHES), "breaks even at"]
    title = "Predicted speed against plain; losses in brackets, extrapolations with ~"
    return Table(title if short else f"{title}, every length", head, rows, detail=not short)


def _tokens_table(report: Mapping[str, Any], *, short: bool) -> Table:
    rows = [
        [
            str(row["length"]), f"{row['iid']:.2f}", f"{row['by_position']:.2f}", f"{row['walked']:.2f}",
            _number(row["measured"], 2), _gain(row["formula_ratio"]), _gain(row["ratio"]),
        ]
        for row in report["tokens"]
        if not short or row["length"] in SHORT_LENGTHS
    ]  # fmt: skip
    head = ["drafts", "i.i.d. formula", "by position", "walked", "measured", "speedup by formula", "predicted"]
    title = "Tokens per step, one request"
    return Table(title if short else f"{title}, every length", head, rows, detail=not short)


def _cost_table(report: Mapping[str, Any]) -> Table:
    costs = report["costs"]
    rows = [
        [str(context), *(f"{1e3 * seconds:.3g}" for seconds in row)]
        for context, row in zip(costs["contexts"], costs["seconds"], strict=True)
    ]
    title = f"A forward, ms, by new tokens; each further sequence adds {1e3 * costs['per_sequence']:.3g} ms"
    return Table(title, ["context", *map(str, costs["widths"])], rows)


def _acceptance_table(report: Mapping[str, Any]) -> Table:
    known = report["acceptance"]
    rows = [
        [str(i + 1), f"{known['at'][i]:.3f}" if i < len(known["at"]) else "-", f"{reach:.3f}"]
        for i, reach in enumerate(known["reach"])
    ]
    head = ["position", "kept, where all before it were", "there and kept, of all steps"]
    return Table("Acceptance by draft position", head, rows, detail=True)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


# --- plots --------------------------------------------------------------------------------------------


def plots(report: Mapping[str, Any]) -> Iterator[str]:
    """SVG texts."""
    if report["kind"] == "map":
        yield surface_svg(report["map"])
        return
    at = {(p["length"], p["batch"]): p["ratio"] for p in report["predictions"]}
    shown = [length for length in (1, 2, 4, 8, 16) if (length, 1) in at]
    series = [(f"K = {n}", [(float(b), at[n, b]) for b in BATCHES]) for n in shown]
    plain = ("plain", [(float(b), 1.0) for b in BATCHES])
    yield svg.lines("Predicted speed against plain", [plain, *series], "requests at once")
    tokens = report["tokens"]
    names = {"iid": "i.i.d. formula", "by_position": "by position", "walked": "walked", "measured": "measured"}
    lines = [
        (name, [(float(row["length"]), row[key]) for row in tokens if row[key] is not None])
        for key, name in names.items()
    ]
    yield svg.lines("Tokens per step", [line for line in lines if line[1]], "drafts")
    costs = report["costs"]
    curves = [
        (f"context {context}", [(float(w), 1e3 * s) for w, s in zip(costs["widths"], row, strict=True)])
        for context, row in zip(costs["contexts"], costs["seconds"], strict=True)
    ]
    yield svg.lines("A forward, ms", curves, "new tokens")
    known = report["acceptance"]
    found = surface(known["cost_ratio"], range(len(report["break_even_batches"]) + 1), [0.05 * i for i in range(21)])
    yield surface_svg({**found, "acceptances": [round(a, 2) for a in found["acceptances"]]}, at=known["mean"])


# --- formats ------------------------------------------------------------------------------------------


def form_of(path: Path, kind: str) -> str:
    """The format that a file's name asks for: of bench, and for a map "svg". Raises InvalidParams for another."""
    suffix = path.suffix.lower()
    if suffix == ".png":
        raise InvalidParams(
            f"output file {str(path)!r}: a PNG needs a drawing library, which Paceline does without; "
            + ("name it .svg or .html" if kind == "map" else "name it .html")
        )
    if suffix == ".svg" and kind == "map":
        bench_report.form_of(path.with_suffix(".html"))  # for its folder
        return "svg"
    return bench_report.form_of(path)


def render(report: Report, form: str) -> str:
    """form: "json", "markdown", "html", or for a map "svg"."""
    if form == "json":
        return json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    if form == "svg":
        return surface_svg(report["map"]) + "\n"
    return _markdown(report) if form == "markdown" else _html(report)


def _title(report: Report) -> str:
    return KINDS[report["kind"]] + (f": {report['model']['name']}" if "model" in report else "")


def _markdown(report: Report) -> str:
    said = ["## What is what", "", *(f"- *{level}*: {words}" for level, words in statements(report))]
    return markdown(_title(report), facts(report), verdicts(report), tables(report), said, report["warnings"])


def _html(report: Report) -> str:
    parts = [f"<p><strong>{escape(said)}</strong></p>" for said in verdicts(report)]
    parts += [plot for plot in plots(report) if plot]
    parts += [html_table(table) for table in tables(report)]
    parts.append("<h2>What is what</h2>")
    parts += [f"<p><em>{level}</em>: {escape(said)}</p>" for level, said in statements(report)]
    return page(_title(report), facts(report), parts, report["warnings"])
