"""A report's tables and plots, alike in every format. They read the JSON object, so old reports can be shown anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import svg
from .cells import MEAN

STAGES = ("draft", "forward", "verify", "other")
Row = dict[str, Any]
LOAD_PLOTS = {
    "Tokens/s": ("tokens_per_second",),
    "Good requests/s": ("good_per_second",),
    "First token, p95, ms": ("first_token_ms", "p95"),
    "A token, p95, ms": ("per_token_ms", "p95"),
}


@dataclass(frozen=True, slots=True)
class Table:
    """head: names of the columns; the first is text, the others are numbers. detail: too long for a terminal."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    detail: bool = False


def tables(report: Row) -> list[Table]:
    """What the report says in numbers."""
    kind = report["kind"]
    if kind == "step":
        return [_step_table(report)]
    if kind == "load":
        return [_load_table(report)]
    if kind == "run":
        return [_cell_table(report, report["cells"], "Speed", detail=False), *_acceptance(report)]
    return [*_matrices(report), _cell_table(report, report["cells"], "Every cell", detail=True), *_acceptance(report)]


def plots(report: Row) -> list[str]:
    """SVG texts; those without anything to show are left out."""
    makers = {"step": _step_plots, "load": _load_plots, "run": _run_plots, "compare": _ratio_plots}
    found = makers[report["kind"]](report)
    return [plot for plot in found if plot]


def _groups(report: Row) -> Iterator[tuple[str, list[Row]]]:
    """Cells that belong into one table: of one temperature and concurrency."""
    for key in dict.fromkeys((c["concurrency"], c["temperature"]) for c in report["cells"]):
        title = f"temperature {key[1]:g}, " + ("one request" if key[0] == 1 else f"{key[0]} requests at once")
        yield title, [c for c in report["cells"] if (c["concurrency"], c["temperature"]) == key]


def _names(report: Row) -> list[str]:
    return [c["name"] for c in report["contenders"]]


def _matrices(report: Row) -> Iterator[Table]:
    """One line for each category: the baseline's speed, and everybody's ratio to it."""
    baseline = report["baseline"]
    others = [name for name in _names(report) if name != baseline]
    for title, cells in _groups(report):
        at = {(c["category"], c["contender"]): c for c in cells}
        rows = [
            [
                category,
                _number(at[category, baseline]["tokens_per_second"]),
                *(_ratio(at[category, name]) for name in others),
            ]
            for category in dict.fromkeys(c["category"] for c in cells)
        ]
        head = ["category", f"{baseline}, tokens/s", *(f"{name}: ratio (95 %), tokens per step" for name in others)]
        yield Table(title, head, rows)


def _ratio(cell: Row) -> str:
    """`1.75 (1.70 to 1.80), 3.56`."""
    ratio, steps = cell["ratio"], cell["tokens_per_step"]
    if ratio is None:
        return "failed" if cell["error"] else "-"
    mark = "*" if cell["disturbed"] else ""
    return f"{ratio['ratio']:.2f}{_span(ratio)}" + (f", {steps:.2f}" if steps else "") + mark


def _span(ratio: Row) -> str:
    return "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _cell_table(report: Row, cells: Sequence[Row], title: str, *, detail: bool) -> Table:
    with_ratio = report["kind"] == "compare"
    several = {key: len({c[key] for c in cells}) > 1 for key in ("temperature", "concurrency", "contender")}
    head = ["category", *(key for key, many in several.items() if many)]
    head += ["runs", "tokens", "tokens/s", "without prompts", "tokens per step", "accepted"]
    head += ["ratio (95 %)", "ratio without prompts", "same text"] if with_ratio else []
    rows = []
    for c in cells:
        row = [c["category"], *(_plain(c[key]) for key, many in several.items() if many)]
        row += [str(c["runs"]), str(c["tokens"]), _number(c["tokens_per_second"])]
        row += [_number(c["decode_tokens_per_second"]), _number(c["tokens_per_step"], 2), _share(c)]
        if with_ratio:
            row += [_whole(c["ratio"]), _whole(c["decode_ratio"]), _same(c, report["baseline"])]
        rows.append(row)
    return Table(title, head, rows, detail)


def _whole(ratio: Row | None) -> str:
    return "-" if ratio is None else f"{ratio['ratio']:.3f}{_span(ratio)}"


def _same(cell: Row, baseline: str) -> str:
    known = cell["same_text"] is not None and cell["contender"] != baseline
    return f"{cell['same_text']} of {cell['runs']}" if known else "-"


def _share(cell: Row) -> str:
    if cell["drafted"] is None:
        return "-"
    share = f"{100 * cell['accepted'] / cell['drafted']:.0f} % of " if cell["drafted"] else ""
    return f"{share}{cell['drafted']}"


def _acceptance(report: Row) -> list[Table]:
    """Accepted / drafted by draft position."""
    cells = [c for c in report["cells"] if c["category"] != MEAN and c["acceptance_at"]]
    if not cells:
        return []
    deepest = min(16, max(len(c["acceptance_at"]) for c in cells))
    head = ["category", "contender", "temperature", "at once", *(str(i) for i in range(1, deepest + 1))]
    rows = []
    for c in cells:
        shares = [f"{share:.2f}" for share in c["acceptance_at"][:deepest]]
        named = [c["category"], c["contender"], _plain(c["temperature"]), str(c["concurrency"])]
        rows.append([*named, *shares, *["-"] * (deepest - len(shares))])
    return [Table("Acceptance by draft position", head, rows, detail=True)]


def _step_table(report: Row) -> Table:
    head = ["contender", "temperature", "drafts a step", "tokens per step"]
    head += ["draft us", "forward us", "verify us", "other us", "outside the forward"]
    rows = []
    for r in report["steps"]:
        low, high = 100 * r["share_outside_low"], 100 * r["share_outside_high"]
        share = f"{100 * r['share_outside']:.1f} % ({low:.1f} to {high:.1f})"
        times = [_number(r[f"{stage}_us"], 0) for stage in STAGES]
        counts = [_number(r["drafts_per_step"], 2), _number(r["tokens_per_step"], 2)]
        rows.append([r["contender"], _plain(r["temperature"]), *counts, *times, share])
    return Table("Where a step's time goes (medians of the repeats)", head, rows)


def _load_table(report: Row) -> Table:
    limits = report["limits"]
    good = f"good/s (first <= {1e3 * limits['first_token_seconds']:g} ms, token <= "
    good += f"{1e3 * limits['per_token_seconds']:g} ms)"
    head = ["traffic", "contender", "temperature", "requests", "tokens/s", "requests/s", good, "tokens per step"]
    head += ["first token ms, p50 / p95 / p99", "a token ms, p50 / p95 / p99", "between chunks ms, p50 / p95 / p99"]
    rows = []
    for r in report["loads"]:
        named = [r["traffic"], r["contender"], _plain(r["temperature"]), str(r["requests"])]
        speeds = [_number(r[f"{key}_per_second"], d) for key, d in (("tokens", 1), ("requests", 2), ("good", 2))]
        times = [_three(r[key]) for key in ("first_token_ms", "per_token_ms", "between_chunks_ms")]
        rows.append([*named, *speeds, _number(r["tokens_per_step"], 2), *times])
    return Table("Many readers", head, rows)


def _three(values: Row) -> str:
    return " / ".join(_number(values[key]) for key in ("p50", "p95", "p99"))


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- plots ----------------------------------------------------------------------------------------------


def _ratio_plots(report: Row) -> Iterator[str]:
    baseline = report["baseline"]
    series = [name for name in _names(report) if name != baseline]
    for title, cells in _groups(report):
        groups = []
        for category in dict.fromkeys(c["category"] for c in cells):
            mine = [c for c in cells if c["category"] == category and c["ratio"]]
            marks = [svg.Mark(c["contender"], *(c["ratio"][key] for key in ("ratio", "low", "high"))) for c in mine]
            if marks:
                groups.append((category, marks))
        yield svg.ratio_plot(f"Times the speed of {baseline}: {title}", groups, series)


def _run_plots(report: Row) -> Iterator[str]:
    for title, cells in _groups(report):
        rows = [(c["category"], [c["tokens_per_second"] or 0.0]) for c in cells]
        yield svg.bars(f"Tokens/s: {title}", rows, ["tokens/s"])
        at = [(c["category"], list(enumerate(c["acceptance_at"], start=1))) for c in cells if c["acceptance_at"]]
        yield svg.lines(f"Accepted by draft position: {title}", at, "draft position")


def _step_plots(report: Row) -> Iterator[str]:
    rows = []
    for r in report["steps"]:
        name = f"{r['contender']}, t = {r['temperature']:g}"
        rows.append((name, [r[f"{stage}_us"] / 1e3 for stage in STAGES]))
    yield svg.bars("Milliseconds of a step", rows, STAGES, "ms")


def _load_plots(report: Row) -> Iterator[str]:
    for key, name in (("concurrency", "requests at once"), ("rate", "requests a second")):
        rows = [r for r in report["loads"] if r[key] is not None]
        for temperature in dict.fromkeys(r["temperature"] for r in rows):
            these = [r for r in rows if r["temperature"] == temperature]
            for title, value in LOAD_PLOTS.items():
                points = [
                    (contender, [(float(r[key]), _at(r, value)) for r in these if r["contender"] == contender])
                    for contender in dict.fromkeys(r["contender"] for r in these)
                ]
                yield svg.lines(f"{title}, temperature {temperature:g}", points, name)


def _at(row: Row, keys: Sequence[str]) -> float:
    value: Any = row
    for key in keys:
        value = value[key]
    return float(value or 0.0)
