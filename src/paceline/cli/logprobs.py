"""Logprobs as people and as programs read them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..params import SamplingParams
from ..types import Logprob, Logprobs, RequestOutput
from .exits import say_note
from .report import print_table

MOST = 20  # tokens of a row that a table shows


def logprobs_as_json(
    rows: Sequence[Logprobs | None], tokens: Sequence[int], top: int | None
) -> list[dict[str, Any] | None]:
    """One object for each token: the token's own place, and under `top` those of the likeliest, by rank.

    A logprob of minus infinity is null, for JSON has no name for it.
    """
    return [
        None if row is None else {**_entry(token, row[token]), "top": [_entry(*one) for one in likeliest(row, top)]}
        for token, row in zip(tokens, rows, strict=True)
    ]


def likeliest(row: Logprobs, top: int | None) -> list[tuple[int, Logprob]]:
    """The `top` likeliest tokens of a row that was asked for with that number, by rank; the row's own token if it is
    one of them."""
    ranked = sorted(row.items(), key=lambda entry: entry[1].rank)
    return [one for one in ranked if top is not None and (top < 0 or one[1].rank <= top)]


def print_logprobs(output: RequestOutput, params: SamplingParams) -> None:
    """A table for the prompt and for each sample, where they were asked for, on stderr.

    Where all tokens were asked for, MOST are shown; the others fill no screen usefully.
    """
    every = [f"--{name}" for name, top in (("logprobs", params.logprobs), ("prompt-logprobs", params.prompt_logprobs))
             if top == -1]  # fmt: skip
    if every:
        say_note(f"{' and '.join(every)} -1: the {MOST} likeliest of each row are shown; --format json has all")
    if output.prompt_logprobs is not None:
        _print("prompt", output.prompt_logprobs, output.prompt_token_ids, params.prompt_logprobs)
    for one in output.outputs:
        if one.logprobs is not None:
            title = "answer" if len(output.outputs) == 1 else f"sample {one.index}"
            _print(title, one.logprobs, one.token_ids, params.logprobs)


def _print(title: str, rows: Sequence[Logprobs | None], tokens: Sequence[int], top: int | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    table.add_column(title, no_wrap=True)
    for name in ("id", "logprob", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("likeliest" if top else "")
    for token, row in zip(tokens, rows, strict=True):
        if row is None:  # the first token of a prompt, which nothing is in front of
            table.add_row("", str(token), "", "", "")
            continue
        own = row[token]
        listed = likeliest(row, MOST if top == -1 else top)
        others = "  ".join(f"{one.text!r} {one.logprob:.4f}" for _, one in listed)
        # Text, because Rich reads brackets in a string as its own markup.
        table.add_row(Text(repr(own.text)), str(token), f"{own.logprob:.4f}", str(own.rank), Text(others))
    print(file=sys.stderr)
    print_table(table, sys.stderr)


def _entry(token: int, place: Logprob) -> dict[str, Any]:
    logprob = place.logprob if math.isfinite(place.logprob) else None
    return {"token_id": token, "text": place.text, "logprob": logprob, "rank": place.rank}
