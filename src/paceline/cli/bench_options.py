"""What the commands of `paceline bench` have in common: prompts, sampling, contenders, the guard, and reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..params import SamplingParams
from .exits import say_note
from .options import SPECULATION
from .report import print_json, print_table

WORKLOAD = "Workload"
SAMPLING = "Sampling"
MEASURING = "Measuring"
REPORT = "Report"
DEFAULTS = SamplingParams()


class ReportFormat(StrEnum):
    """What a benchmark writes on stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is asked, and how it is sampled."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help='JSONL with {"question_id", "category", "turns"} a line, as Spec-Bench has it, or {"prompt"}. May be '
            "repeated. Default: a small set that comes with Paceline.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this category. May be repeated.", rich_help_panel=WORKLOAD),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Prompts of each category, evenly spaced. Default: all.", rich_help_panel=WORKLOAD
        ),
    ] = None
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Leave longer prompts out.", rich_help_panel=WORKLOAD),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            metavar="",
            help="The model's chat template, or the text as it stands. Default: --chat where there is a template.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens of an answer.", rich_help_panel=WORKLOAD)
    ] = 128
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", metavar="", help="Go on behind the model's end-of-text token.", rich_help_panel=WORKLOAD
        ),
    ] = False
    temperature: Annotated[
        list[float] | None,
        typer.Option(metavar="T", help="0 is greedy, the default. May be repeated.", rich_help_panel=SAMPLING),
    ] = None
    top_k: Annotated[int, typer.Option(metavar="N", help="As for generate.", rich_help_panel=SAMPLING)] = DEFAULTS.top_k
    top_p: Annotated[float, typer.Option(metavar="P", help="As for generate.", rich_help_panel=SAMPLING)] = (
        DEFAULTS.top_p
    )
    min_p: Annotated[float, typer.Option(metavar="P", help="As for generate.", rich_help_panel=SAMPLING)] = (
        DEFAULTS.min_p
    )
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="As for generate.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.repetition_penalty
    presence_penalty: Annotated[float, typer.Option(metavar="X", help="As for generate.", rich_help_panel=SAMPLING)] = (
        DEFAULTS.presence_penalty
    )
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="As for generate.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.frequency_penalty
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Of the first request; the others follow. The same for every contender.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1
    verification: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="As for generate. auto is coupled here, since every request has a seed.",
            rich_help_panel=SPECULATION,
        ),
    ] = DEFAULTS.verification

    @property
    def temperatures(self) -> list[float]:
        """Each once."""
        return list(dict.fromkeys(self.temperature or [0.0]))

    def params(self) -> SamplingParams:
        """At the first temperature. Raises InvalidParams where a value is out of range, at any of them."""
        made = [
            SamplingParams(
                max_tokens=self.max_tokens,
                ignore_eos=self.ignore_eos,
                temperature=temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=self.seed,
                verification=self.verification,  # type: ignore[arg-type]  # SamplingParams checks it
            )
            for temperature in self.temperatures
        ]
        return made[0]

    def sampling_facts(self) -> dict[str, Any]:
        """What a report says of it: what is not at its default, and what always matters."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(DEFAULTS, name)}
        temperatures = " and ".join(f"{t:g}" for t in self.temperatures)
        always = {"temperature": temperatures, "max_tokens": self.max_tokens, "seed": self.seed}
        return {**always, **chosen, "verification": self.verification}


@dataclass(frozen=True, kw_only=True)
class ContenderOptions:
    """Which settings of Paceline are compared."""

    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            metavar="D",
            help="As for generate; may be repeated. Default: auto.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    draft_length: Annotated[
        list[int] | None,
        typer.Option(
            "--draft-length",
            "-k",
            metavar="K",
            min=1,
            help="Also with K drafts in every step. May be repeated.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", metavar="", help="Without drafting.", rich_help_panel=SPECULATION)
    ] = True
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive/--no-adaptive",
            metavar="",
            help="With the engine choosing the draft length.",
            rich_help_panel=SPECULATION,
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """Waiting for an idle machine."""

    no_guard: Annotated[
        bool,
        typer.Option(
            "--no-guard",
            metavar="",
            help="Do not wait until the machine is idle, nor repeat what other load disturbed.",
            rich_help_panel=MEASURING,
        ),
    ] = False
    guard_wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Of waiting for an idle machine, all together. After that, runs are only marked.",
            rich_help_panel=MEASURING,
        ),
    ] = 600.0


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    output_format: Annotated[
        ReportFormat, typer.Option("--format", help="What goes to stdout.", rich_help_panel=REPORT)
    ] = ReportFormat.TEXT
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write FILE, in the format of its name: .json, .md or .html. May be repeated. The JSON holds "
            "every run, and `paceline bench report` makes the others of it.",
            rich_help_panel=REPORT,
        ),
    ] = None

    def check(self) -> None:
        """Raise InvalidParams for a file that could not be written, before anything is measured."""
        from ..bench.report import form_of

        for path in self.output or []:
            form_of(path)

    def show(self, report: dict[str, Any]) -> None:
        """Write the files, each whole or not at all, then stdout."""
        from ..bench.report import form_of, render, write_whole

        for path in self.output or []:
            write_whole(path, render(report, form_of(path)))
        if self.output_format is ReportFormat.TEXT:
            _print_text(report)
        elif self.output_format is ReportFormat.JSON:
            print_json(report)
        else:
            sys.stdout.write(render(report, self.output_format.value))
        for warning in report["warnings"]:
            say_note(warning)


def _print_text(report: dict[str, Any]) -> None:
    from ..bench.report import facts, notes
    from ..bench.tables import tables

    for name, words in facts(report):
        print(f"{name}: {words}")
    for one in tables(report):
        if one.detail:
            continue
        print(f"\n{one.title}")
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
        for i, name in enumerate(one.head):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in one.rows:
            table.add_row(*row)
        print_table(table, sys.stdout)
    print()
    for note in notes(report):
        print(note)


@contextmanager
def counting_bar() -> Iterator[Callable[[str, int, int], None]]:
    """report(what, done, total), shown on stderr while it lasts; nothing where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
