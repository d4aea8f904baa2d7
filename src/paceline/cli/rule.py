"""`paceline rule`: one draft token of textbook rejection, as tables that can be checked by hand."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import InvalidDistribution, InvalidInput
from ..verify import rejection_rule
from ..verify.inputs import checked_probs
from ..verify.taught import TOLERANCE
from .options import OutputFormat
from .report import error_as_json, print_json


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One token: what happens when it is drafted, and the two ways in which it is emitted.

    accept: min(1, p/q), None where q = 0 and the token is never drafted. kept: q * accept, drafted and
    accepted. recovered: P(reject) * residual, drawn after another draft was rejected. total: their sum,
    which equals p.
    """

    token: int
    p: float
    q: float
    accept: float | None
    residual: float
    kept: float
    recovered: float
    total: float


@dataclass(frozen=True, slots=True)
class RuleTable:
    """Every token's row, and the chance that a draft is rejected: sum of q * (1 - accept)."""

    rows: tuple[RuleRow, ...]
    reject_probability: float


def rule_table(target: list[float], draft: list[float]) -> RuleTable:
    """The two-path reconstruction of the target: q(y) min(1, p(y)/q(y)) + P(reject) r(y) = p(y).

    target, draft: p and q, one probability per token. Raises InvalidDistribution where they are none, or
    differ in length.
    """
    p = checked_probs(target, "target", TOLERANCE).tolist()
    q = checked_probs(draft, "draft", TOLERANCE).tolist()
    if len(p) != len(q):
        raise InvalidDistribution(f"target has {len(p)} probabilities and draft {len(q)}; both need one per token")
    accept = [rejection_rule(p, q, x)[0] if q[x] > 0.0 else None for x in range(len(p))]
    kept = [0.0 if a is None else q[x] * a for x, a in enumerate(accept)]
    reject = sum(q[x] * (1.0 - a) for x, a in enumerate(accept) if a is not None)
    drafted = next(x for x in range(len(q)) if q[x] > 0.0)  # the residual is the same for every draft
    residual = rejection_rule(p, q, drafted)[1]
    rows = tuple(
        RuleRow(y, p[y], q[y], accept[y], residual[y], kept[y], reject * residual[y], kept[y] + reject * residual[y])
        for y in range(len(p))
    )
    return RuleTable(rows, reject)


def parse_probabilities(name: str, text: str) -> list[float]:
    """Numbers between commas, each a decimal or a fraction: "0.7,0.3" or "1/3, 2/3"."""
    numbers = []
    for part in text.split(","):
        above, slash, below = part.partition("/")
        try:
            numbers.append(float(above) / float(below) if slash else float(above))
        except (ValueError, ZeroDivisionError):
            raise InvalidInput(
                f"{name} {text!r}: {part.strip()!r} is not a number; write probabilities as 0.7,0.3 or 1/3,2/3"
            ) from None
    return numbers


def rule(
    *,
    target: Annotated[str, typer.Option(metavar="P,P,...", help="The target's distribution p: 0.7,0.3 or 1/3,2/3.")],
    draft: Annotated[str, typer.Option(metavar="Q,Q,...", help="The drafter's distribution q, as many numbers.")],
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="Tables to read, or one JSON object.")
    ] = OutputFormat.TEXT,
) -> None:
    """Show one step of rejection for p and q: acceptance, residual, and why p comes out.

    `--format json` writes one object: reject_probability, and rows with token, p, q, accept (null where the
    token is never drafted), residual, kept, recovered, total.
    """
    as_json = output_format is OutputFormat.JSON
    try:
        table = rule_table(parse_probabilities("--target", target), parse_probabilities("--draft", draft))
    except InvalidInput as error:
        if as_json:
            print_json({"error": error_as_json(error)})
        raise
    if as_json:
        print_json(dataclasses.asdict(table))
    else:
        _show(table)


def _show(table: RuleTable) -> None:
    console = Console(file=sys.stdout, highlight=False)
    console.print(_decisions(table))
    if table.reject_probability > 0.0:
        console.print("Kept: go on to the next draft. Not kept: draw from r and drop every later draft.")
    else:
        console.print("p = q: every draft is kept and r is never needed.")
    console.print()
    console.print(_two_paths(table))
    reject = _short(table.reject_probability)
    console.print(f"P(reject) = sum of q * (1 - accept) = {reject}. The two paths add up to p.")


def _decisions(table: RuleTable) -> Table:
    """For each token as a draft: its chance to stay; and what to draw from where it does not."""
    columns = ("x", "p(x)", "q(x)", "accept = min(1, p/q)", "r = (p - q)+ / its sum")
    shown = _table("1. A draft x is drawn from q. Is it kept?", columns)
    for row in table.rows:
        accept = "never drafted" if row.accept is None else _short(row.accept)
        shown.add_row(str(row.token), _short(row.p), _short(row.q), accept, _short(row.residual))
    return shown


def _two_paths(table: RuleTable) -> Table:
    """For each token as the one emitted: kept as a draft, or recovered after another was rejected."""
    columns = ("y", "kept: q * accept", "recovered: P(reject) * r", "sum", "p(y)")
    shown = _table("2. The token y that is emitted came by one of two paths.", columns)
    reject = _short(table.reject_probability)
    for row in table.rows:
        accept = 0.0 if row.accept is None else row.accept
        kept = f"{_short(row.q)} * {_short(accept)} = {_short(row.kept)}"
        recovered = f"{reject} * {_short(row.residual)} = {_short(row.recovered)}"
        shown.add_row(str(row.token), kept, recovered, _short(row.total), _short(row.p))
    return shown


def _table(title: str, columns: tuple[str, ...]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE, show_edge=False)
    for name in columns:
        shown.add_column(name, justify="right")
    return shown


def _short(value: float) -> str:
    return f"{value:.4g}"
