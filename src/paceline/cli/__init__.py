"""The command line. `paceline --help` lists the commands; app.py registers them."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `paceline` command; ends the process with its exit status."""
    from .app import app

    app(prog_name="paceline")
