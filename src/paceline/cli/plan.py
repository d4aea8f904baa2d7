"""`paceline plan`: whether drafting will pay, as a map, or for a model on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidParams, UnsupportedOption
from .bench_options import (
    REPORT,
    Concurrency,
    DrafterName,
    GuardOptions,
    KvTokens,
    Model,
    ReportFormat,
    WorkloadOptions,
    counting_bar,
    show_report,
)
from .bench_session import Bench, open_bench, report_of
from .exits import Debug
from .options import SPECULATION, BackendOptions, expand_options

if TYPE_CHECKING:
    from ..bench.runs import Contender

CHECKED_LENGTHS = (2, 4, 8)
CHECKED_BATCHES = (1, 4)
COSTS_SECONDS = 8.0

plan_app = typer.Typer()


class MapFormat(StrEnum):
    """What a map is written as on stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    SVG = "svg"


@dataclass(frozen=True, kw_only=True)
class PlanOutputs:
    """Where a plan is also written."""

    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write FILE, in the format of its name: .json, .md or .html; a map .svg too. May be repeated.",
            rich_help_panel=REPORT,
        ),
    ] = None

    def check(self, kind: str) -> None:
        """Raise InvalidParams for a file that could not be written, before anything is measured."""
        from ..plan.report import form_of

        for path in self.output or []:
            form_of(path, kind)

    def show(self, report: dict[str, Any], output_format: str) -> None:
        """See show_report."""
        from ..plan import report as views

        files = {path: views.form_of(path, report["kind"]) for path in self.output or []}
        show_report(report, output_format, files, views)


@plan_app.callback(invoke_without_command=True)
def root(context: typer.Context, *, debug: Debug = False) -> None:
    """Plan: how much drafting gains or loses, by formula, or for a model on this machine."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@plan_app.command("map")
@expand_options
def plan_map(
    *,
    outputs: PlanOutputs,
    cost_ratio: Annotated[
        float,
        typer.Option(
            "--cost-ratio", "-c", metavar="C", min=0, help="What a draft costs, in steps of the target without drafts."
        ),
    ] = 0.1,
    max_draft_length: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Draft lengths up to this one.")
    ] = 16,
    output_format: Annotated[
        MapFormat, typer.Option("--format", help="What goes to stdout.", rich_help_panel=REPORT)
    ] = MapFormat.TEXT,
    debug: Debug = False,
) -> None:
    """Draw the map of speedup over acceptance and draft length, and the line where it breaks even. Measures nothing."""
    from ..plan.report import map_report

    outputs.check("map")
    outputs.show(map_report(cost_ratio, max_draft_length), output_format.value)


@plan_app.command("model")
@expand_options
def plan_model(
    *,
    work: WorkloadOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    outputs: PlanOutputs,
    model: Model = "smollm2",
    drafter: DrafterName = "auto",
    draft_length: Annotated[
        list[int] | None,
        typer.Option(
            "--draft-length",
            "-k",
            metavar="K",
            min=1,
            max=16,
            help="Run this draft length beside its prediction. May be repeated. Default: 2, 4, 8; plain, adaptive and "
            "what is predicted to be best are always run.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    concurrency: Concurrency = None,
    kv_tokens: KvTokens = None,
    output_format: Annotated[
        ReportFormat, typer.Option("--format", help="What goes to stdout.", rich_help_panel=REPORT)
    ] = ReportFormat.TEXT,
    debug: Debug = False,
) -> None:
    """Predict what drafting gains for a model on this machine, and set measurements beside the predictions.

    First the cost of forwards is measured, then the prompts are run with 16 drafts and with 1, one request at a time
    and --concurrency at once (default: 4). From that, speed is predicted for 0 to 16 drafts and 1 to 64 requests at
    once. Then some settings are run, in turn.
    """
    from ..bench.target import PLAIN, Setting
    from ..draft import parse_drafter

    outputs.check("model")
    spec = parse_drafter(drafter)
    if spec.kind == "none":
        raise InvalidParams(f"drafter = {drafter!r}; allowed: one whose drafts can be planned, such as lookup")
    if len(work.temperatures) > 1:
        raise InvalidParams(f"{len(work.temperatures)} temperatures; allowed: one, for each has its own acceptance")
    batches = sorted({1, *(concurrency or CHECKED_BATCHES)})
    chosen = [Setting(PLAIN, "none", 0), Setting(drafter, drafter, None)]
    with open_bench(model, backend, work, guard, chosen, concurrencies=batches, kv_tokens=kv_tokens) as bench:
        report, error = _studied(bench, drafter, sorted(set(draft_length or CHECKED_LENGTHS)), batches)
        outputs.show(report, output_format.value)
        if error is not None:
            raise error


def _studied(
    bench: Bench, drafter: str, lengths: list[int], batches: list[int]
) -> tuple[dict[str, Any], BaseException | None]:
    """The report, and what ended the runs that stand beside the predictions before all were made."""
    from ..plan.report import SCHEMA
    from ..plan.study import Study, doubts, findings
    from ..plan.watch import Watch
    from ..schedule import CostTable

    target = bench.target
    if not target.backend.info.can_truncate:
        why = target.backend.info.no_speculation_reason
        raise UnsupportedOption(f"speculation is off for {target.backend.info.model}: {why}")
    with ExitStack() as stack:
        bar = stack.enter_context(counting_bar())

        def measured() -> CostTable:
            # Anew, and for longer than when a model is opened: here it is what everything else is made of.
            return CostTable.measure(
                target.backend,
                budget_seconds=COSTS_SECONDS,
                progress=lambda share: bar("forwards", int(100 * share), 100),
            )

        costs, load = bench.guard.run(measured)
        watch = stack.enter_context(Watch(target, drafter, costs))
        study = Study(watch, costs, bench.workload, bench.prompts, batches, bench.guard)
        speed = study.recorded(bar)
        checked = study.checked(speed, lengths, bar)
        found = findings(study, speed, checked.made)
    nobody: list[Contender] = []
    report = report_of(bench, "model", nobody, stopped=checked.stopped, **found)
    warnings = [*report["warnings"], *doubts(found, load)]
    return {**report, "schema": SCHEMA, "drafter": drafter, "warnings": warnings}, checked.error
