"""Models on their way in: names resolved, with a bar on stderr for whatever takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..errors import UnsupportedOption
from .exits import warnings_as_notes
from .options import ModelOptions

if TYPE_CHECKING:
    from ..llm import LLM

Report = Callable[[str, int, int | None], None]
MAX_SEQS = 16
"""Samples at once; further ones wait until one is over."""


@dataclass(frozen=True, slots=True)
class Session:
    """An open LLM and how its user knows it.

    model, drafter: the names that were given, where LLM itself only saw paths; `auto` is resolved.
    load_seconds: wall time to resolve, fetch and load.
    """

    llm: LLM
    model: str
    drafter: str
    load_seconds: float


class _Bytes(DownloadColumn):
    """Bytes done of bytes in all; nothing where nobody knows how many that is."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """report(description, done, total) in bytes, shown on stderr while it lasts; total None is "no idea".

    Nothing is shown where stderr is not a terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda description, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Bytes(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)

        def report(description: str, done: int, total: int | None) -> None:
            if progress.tasks[0].description != description:
                progress.reset(task, description=description, visible=True)
            progress.update(task, completed=done, total=total)

        yield report


@contextmanager
def open_session(options: ModelOptions, samples: int = 1) -> Iterator[Session]:
    """Load target and drafter for one request at a time, of so many samples; closed at the end."""
    from ..draft import parse_drafter

    start = perf_counter()
    drafter = parse_drafter(options.drafter)  # before anything is fetched for it
    if options.threads is not None and is_toy(options.model):
        raise UnsupportedOption(f"--threads {options.threads} is not an option of a toy model; leave it out")
    with progress_bar() as report:
        model = locate(options, options.model, report)
        with_drafter = options.drafter
        if drafter.argument:
            kind = options.drafter.removesuffix(drafter.argument)
            with_drafter = f"{kind}{locate(options, drafter.argument, report)}"
        report(f"loading {options.model}", 0, None)
        llm = _open(model, with_drafter, min(samples, MAX_SEQS), options, report)
    with llm:
        off = llm.drafter.name == "none"
        if options.explain:
            _explain(llm)
        yield Session(
            llm,
            options.model,
            options.drafter if drafter.argument and not off else llm.drafter.name,
            perf_counter() - start,
        )


def _explain(llm: LLM) -> None:
    """Say every step's decision on stderr."""
    from ..schedule import Controller

    controller = llm.engine.controller
    if not isinstance(controller, Controller):
        raise UnsupportedOption(
            "--explain has nothing to say: the draft length is fixed here (toy model, no drafter, or --no-measure)"
        )
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    controller.listener = lambda said: console.print(f"\n{said}")


def is_toy(model: str) -> bool:
    """Whether a name means a toy model: nothing to fetch, and no path."""
    return model == "toy" or model.startswith("toy:")


def locate(options: ModelOptions, name: str, report: Report) -> str:
    """The path of a named model, fetched if it must be; toy models and hub ids are names for good."""
    from ..models import resolve, resolve_weights
    from ..opening import BACKENDS, chosen_backend

    if is_toy(name) or options.backend not in BACKENDS:
        return name  # LLM refuses an unknown backend before it looks for the model
    kind = chosen_backend(name, options.backend)
    return str(resolve_weights(name, report) if kind == "hf" else resolve(name, report))


def _open(model: str, drafter: str, max_seqs: int, options: ModelOptions, report: Report) -> LLM:
    from ..llm import LLM

    with warnings_as_notes(RuntimeWarning):
        return LLM(model, drafter=drafter, max_seqs=max_seqs, progress=report, **options.keywords())
