"""Every command of `paceline`, registered. What a command needs beyond its options it imports when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench_app
from .chat import chat
from .demo import demo
from .exits import Commands, Debug
from .generate import generate
from .models import models_app
from .options import expand_options
from .plan import plan_app
from .rule import rule

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding: faster generation, the same distribution.",
    epilog="Exit status: 0 worked, 1 failed, 2 bad arguments, 130 Ctrl-C, 141 closed pipe.",
)
app.command("generate")(expand_options(generate))
app.command("chat")(expand_options(chat))
app.command("rule")(rule)
app.command("demo")(expand_options(demo))
app.add_typer(bench_app, name="bench")
app.add_typer(plan_app, name="plan")
app.add_typer(models_app, name="models")


def _show_version(value: bool) -> None:
    if value:
        from .. import __version__

        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    """Lossless speculative decoding: faster generation, the same distribution."""
    if context.invoked_subcommand is None:
        print(context.get_help())
