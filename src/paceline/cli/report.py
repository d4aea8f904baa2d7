"""What a finished answer is reported as: JSON, or small tables."""

from __future__ import annotations

import io
import json
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from ..types import SpeculationStats
from .exits import is_utf8
from .streaming import Answer

WIDE = 1000  # columns of a table that no terminal limits
STAGES = ("draft", "forward", "verify", "other")


def print_json(value: dict[str, Any]) -> None:
    """One object on stdout, in one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=not is_utf8(sys.stdout), allow_nan=False) + "\n")
    sys.stdout.flush()


def error_as_json(error: Exception) -> dict[str, str]:
    """{"type": its class, "message": its text}."""
    return {"type": type(error).__name__, "message": str(error)}


def decode_seconds(stats: SpeculationStats) -> float:
    """Wall time of the steps that emitted tokens: everything but the prompt's own forwards."""
    return stats.draft_seconds + stats.forward_seconds + stats.verify_seconds + stats.other_seconds


def tokens_per_second(stats: SpeculationStats) -> float | None:
    """Emitted tokens per second of decoding; None where no step was for decoding alone."""
    seconds = decode_seconds(stats)
    return stats.emitted / seconds if seconds > 0 else None


def _speed(stats: SpeculationStats) -> str:
    speed = tokens_per_second(stats)
    return "- tokens/s" if speed is None else f"{speed:.1f} tokens/s"


def print_stats(answer: Answer) -> None:
    """The table of `--stats`, on stderr."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in stats_rows(answer):
        table.add_row(name, value)
    print(file=sys.stderr)
    print_table(table, sys.stderr)


def print_table(table: Table, file: TextIO) -> None:
    """A table as it is; where no terminal limits its width, in full and without padding at the line ends."""
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(file=io.StringIO(), highlight=False, width=WIDE)
    wide.print(table)
    for line in wide.file.getvalue().splitlines():  # type: ignore[attr-defined]
        print(line.rstrip(), file=file)


def stats_rows(answer: Answer) -> list[tuple[str, str]]:
    """(name, value) of what `--stats` shows."""
    stats = answer.output.speculation
    seconds = decode_seconds(stats)
    prompt_tokens = len(answer.output.prompt_token_ids)
    rows = [
        ("prompt", f"{prompt_tokens} tokens in {stats.prefill_seconds:.2f} s"),
        ("speed", f"{_speed(stats)} ({stats.emitted} tokens in {seconds:.2f} s)"),
        ("tokens per step", f"{stats.tokens_per_step:.2f} in {stats.steps} steps (bonus and recovered included)"),
        (
            "accepted",
            f"{_percent(stats.accepted, stats.drafted)} ({stats.accepted} of {stats.drafted})"
            if stats.drafted
            else "no drafts",
        ),
    ]
    if stats.drafted:
        at = zip(stats.accepted_at, stats.drafted_at, strict=True)
        rates = [f"{i}: {_percent(accepted, drafted)}" for i, (accepted, drafted) in enumerate(at, start=1)]
        rows.append(("by position", "  ".join(rates)))
    if seconds > 0:
        shares = [f"{stage} {100 * getattr(stats, f'{stage}_seconds') / seconds:.1f} %" for stage in STAGES]
        rows.append(("time", "  ".join(shares)))
    return rows


def stats_line(answer: Answer) -> str:
    """The same in one line, for a conversation."""
    stats = answer.output.speculation
    return (
        f"{stats.emitted} tokens, {_speed(stats)}, {stats.tokens_per_step:.2f} tokens per step "
        f"(bonus and recovered included), {stats.accepted} of {stats.drafted} drafts accepted"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
