"""What the commands of `paceline bench` have in common: prompts, sampling, contenders, the guard, and reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..params import SamplingParams
from .exits import say_note
from .options import SPECULATION
from .report import print_json, print_table

if TYPE_CHECKING:
    from ..bench.load import Limits, Traffic
    from ..bench.tables import Table as ReportTable

WORKLOAD = "Workload"
SAMPLING = "Sampling"
MEASURING = "Measuring"
REPORT = "Report"
DEFAULTS = SamplingParams()
MAX_SEQS = 16
LINE_SECONDS = 60.0  # between lines of progress in a log

Model = Annotated[str, typer.Option("--model", "-m", metavar="M", help="As for generate.")]
DrafterName = Annotated[
    str, typer.Option("--drafter", "-d", metavar="D", help="As for generate.", rich_help_panel=SPECULATION)
]
Repeats = Annotated[
    int, typer.Option(metavar="N", min=1, help="Of every prompt, with other seeds.", rich_help_panel=MEASURING)
]
Concurrency = Annotated[
    list[int] | None,
    typer.Option(
        "--concurrency",
        "-c",
        metavar="N",
        min=1,
        help="Requests at once. May be repeated. Default: 1; of a plan, 1 and 4.",
        rich_help_panel=MEASURING,
    ),
]
OutputFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write FILE, in the format of its name: .json, .md or .html. The JSON holds every run, and "
        "`paceline bench report` makes the others of it. May be repeated.",
        rich_help_panel=REPORT,
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Tokens of KV memory. Default: the context, for everybody at once.",
        rich_help_panel="Model",
    ),
]  # fmt: skip


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
class PeerOptions:
    """Other engines that are compared."""

    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another engine: a command that speaks the protocol of docs/bench.md. May be repeated.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    peer_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="For a peer's start and each job.", rich_help_panel=MEASURING),
    ] = 600.0

    def parsed(self, params: SamplingParams) -> list[tuple[str, list[str]]]:
        """(name, argument list) of each. Raises InvalidParams where one is neither, or cannot do such sampling."""
        from ..bench.peers import check_sampling, parse_peer

        peers = [parse_peer(text) for text in self.peer or []]
        if peers:
            check_sampling(params)
        return peers


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """How many readers come, how, and what they put up with."""

    concurrency: Concurrency = None
    rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="R",
            help="Requests a second, at random moments (an open loop), instead of so many at once. May be repeated.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests of each line.", rich_help_panel=MEASURING)
    ] = 32
    max_seqs: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="With --rate: requests that run at once.", rich_help_panel=MEASURING),
    ] = MAX_SEQS
    first_token_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", min=0, help="A good request has its first token by then.", rich_help_panel=MEASURING
        ),
    ] = 1000.0
    per_token_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", min=0, help="And takes no longer than this for each further token.", rich_help_panel=MEASURING
        ),
    ] = 100.0

    @property
    def at_once(self) -> list[int]:
        """Of closed loops."""
        return distinct(self.concurrency) if self.concurrency or not self.rate else []

    def traffics(self) -> list[Traffic]:
        """Closed loops, then open ones. Raises InvalidParams for a rate that is none."""
        from ..bench.load import Traffic

        closed = [Traffic(self.requests, concurrency=n) for n in self.at_once]
        return closed + [Traffic(self.requests, rate=each) for each in dict.fromkeys(self.rate or [])]

    def limits(self) -> Limits:
        """In seconds."""
        from ..bench.load import Limits

        return Limits(self.first_token_ms / 1e3, self.per_token_ms / 1e3)


def distinct(values: list[int] | None) -> list[int]:
    """Each once; 1 where nothing was given."""
    return list(dict.fromkeys(values or [1]))


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    output_format: Annotated[
        ReportFormat, typer.Option("--format", help="What goes to stdout.", rich_help_panel=REPORT)
    ] = ReportFormat.TEXT
    output: OutputFiles = None

    def check(self) -> None:
        """Raise InvalidParams for a file that could not be written, before anything is measured."""
        self._files()

    def show(self, report: dict[str, Any]) -> None:
        """See show_report."""
        from ..bench import report as views

        show_report(report, self.output_format, self._files(), views)

    def _files(self) -> dict[Path, str]:
        from ..bench.report import form_of

        return {path: form_of(path) for path in self.output or []}


class Views(Protocol):
    """A module that knows how reports of a kind are shown: as a file of some form, and in parts for a terminal."""

    def render(self, report: dict[str, Any], form: str) -> str: ...
    def facts(self, report: dict[str, Any]) -> Sequence[tuple[str, str]]: ...
    def tables(self, report: dict[str, Any]) -> Sequence[ReportTable]: ...
    def notes(self, report: dict[str, Any]) -> Sequence[str]: ...


def show_report(report: dict[str, Any], output_format: str, files: Mapping[Path, str], views: Views) -> None:
    """Write the files (path -> form), each whole or not at all, then stdout: as text it is facts, tables and notes."""
    from ..bench.report import write_whole

    for path, form in files.items():
        write_whole(path, views.render(report, form))
    if output_format == "text":
        _print_text(views.facts(report), views.tables(report), views.notes(report))
    elif output_format == "json":
        print_json(report)
    else:
        sys.stdout.write(views.render(report, output_format))
    for warning in report["warnings"]:
        say_note(warning)


def _print_text(facts: Sequence[tuple[str, str]], tables: Sequence[ReportTable], notes: Sequence[str]) -> None:
    for name, words in facts:
        print(f"{name}: {words}")
    for one in tables:
        if one.detail:
            continue
        print(f"\n{one.title}")
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
        for i, name in enumerate(one.head):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in one.rows:
            table.add_row(*row)
        print_table(table, sys.stdout)
    print()
    for note in notes:
        print(note)


def _lines_of_progress() -> Callable[[str, int, int], None]:
    """report(what, done, total) that says so every LINE_SECONDS, for a log that is to tell something and stay short."""
    last = perf_counter()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if perf_counter() - last >= LINE_SECONDS and done < total:
            last = perf_counter()
            say_note(f"{done} of {total}: {what}")

    return report


@contextmanager
def counting_bar() -> Iterator[Callable[[str, int, int], None]]:
    """report(what, done, total), shown on stderr while it lasts; where that is no terminal, a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines_of_progress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
