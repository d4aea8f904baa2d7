"""`paceline models`: which names there are, and fetching them ahead of time."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from .exits import Debug, say_note
from .loading import is_toy, progress_bar
from .options import OutputFormat
from .report import print_json, print_table

TOY_NOTE = "an exact tiny language model for tests; toy:SEED is another one"

models_app = typer.Typer()


@models_app.callback(invoke_without_command=True)
def root(context: typer.Context, *, debug: Debug = False) -> None:
    """List and fetch the models that have a name."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@models_app.command("list")
def list_models(
    *,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="A table, or JSON.")] = OutputFormat.TEXT,
    debug: Debug = False,
) -> None:
    """Names, whether they are cached, their size, path and origin. Fetches nothing."""
    from ..models import available

    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "cached": entry.cached,
            "size": entry.size,
            "path": str(entry.path),
            "origin": entry.origin,
            "note": entry.note,
        }
        for entry in available()
    ]
    toy = {"name": "toy", "aliases": [], "cached": True, "size": 0, "path": None, "origin": "built in"}
    rows.append({**toy, "note": TOY_NOTE})
    if output_format is OutputFormat.JSON:
        print_json({"models": rows})
    else:
        _print_table(rows)


@models_app.command("pull")
def pull_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `paceline models list`.")],
    *,
    debug: Debug = False,
) -> None:
    """Fetch or make a model unless it is cached, and print the path of its file."""
    if is_toy(name):
        say_note("toy is built in; there is nothing to fetch")
        return
    from ..models import pull

    with progress_bar() as report:
        path = pull(name, report)
    print(path)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", no_wrap=True)
    table.add_column("CACHED", no_wrap=True)
    table.add_column("SIZE", no_wrap=True, justify="right")
    table.add_column("WHAT IT IS", overflow="fold")
    table.add_column("PATH", overflow="fold", style="dim")
    for row in rows:
        name = " = ".join([*row["aliases"], row["name"]])
        size = f"{row['size'] / 1e6:.0f} MB" if row["size"] else "-"
        what = f"{row['note']} ({row['origin']})"
        table.add_row(name, "yes" if row["cached"] else "no", size, what, row["path"] or "-")
    print_table(table, sys.stdout)
