"""`paceline bench`: how fast, compared with what, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidParams
from .bench_options import (
    MEASURING,
    Concurrency,
    ContenderOptions,
    DrafterName,
    GuardOptions,
    KvTokens,
    Model,
    PeerOptions,
    Repeats,
    ReportOptions,
    TrafficOptions,
    WorkloadOptions,
    counting_bar,
    distinct,
)
from .bench_session import Bench, open_bench, report_of, settings_of
from .exits import Debug
from .options import SPECULATION, BackendOptions, expand_options

if TYPE_CHECKING:
    from ..bench.peers import Peer
    from ..bench.runs import Contender, Measured, Run

bench_app = typer.Typer()


@bench_app.callback(invoke_without_command=True)
def root(context: typer.Context, *, debug: Debug = False) -> None:
    """Measure speed: of one configuration, against others, under load, and where a step's time goes."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench_app.command("run")
@expand_options
def bench_run(
    *,
    work: WorkloadOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    reports: ReportOptions,
    model: Model = "smollm2",
    drafter: DrafterName = "auto",
    draft_length: Annotated[
        int | None,
        typer.Option(
            "--draft-length",
            "-k",
            metavar="K",
            min=0,
            help="Draft tokens per step; 0 is plain. Default: the engine's choice.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    concurrency: Concurrency = None,
    repeats: Repeats = 1,
    kv_tokens: KvTokens = None,
    debug: Debug = False,
) -> None:
    """Run one configuration over prompts: tokens/s, tokens per step, acceptance, by category."""
    from ..bench.report import compared
    from ..bench.target import PLAIN, Own, Setting, settings

    reports.check()
    if draft_length == 0 or drafter == "none":
        chosen = [Setting(PLAIN, "none", 0)]
    else:
        lengths = [] if draft_length is None else [draft_length]
        chosen = settings([drafter], lengths, plain=False, adaptive=draft_length is None)
    at_once = distinct(concurrency)
    with open_bench(
        model, backend, work, guard, chosen, concurrencies=at_once, repeats=repeats, kv_tokens=kv_tokens
    ) as bench:
        contenders = [Own(bench.target, setting) for setting in chosen]
        measured = _measured(contenders, bench)
        report = _report(bench, "run", contenders, measured, baseline=contenders[0].name)
        _finish(reports, compared(report), measured.error)


def _measured(contenders: Sequence[Contender], bench: Bench) -> Measured[Run]:
    from ..bench.runs import measure

    with counting_bar() as bar:
        return measure(contenders, bench.workload, bench.prompts, bench.guard, bar)


def _report(
    bench: Bench, kind: str, contenders: Sequence[Contender], measured: Measured[Run], **rest: Any
) -> dict[str, Any]:
    made = [run.as_json() for run in measured.made]
    return report_of(bench, kind, contenders, stopped=measured.stopped, **rest, runs=made)


def _finish(reports: ReportOptions, report: dict[str, Any], error: BaseException | None) -> None:
    """Show the report while everything is still open (closing may take long, or fail); then end as `error` says."""
    reports.show(report)
    if error is not None:
        raise error


@bench_app.command("compare")
@expand_options
def bench_compare(
    *,
    work: WorkloadOptions,
    chosen: ContenderOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    reports: ReportOptions,
    peers: PeerOptions,
    model: Model = "smollm2",
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Contender that ratios are to. Default: the first, plain.", rich_help_panel=MEASURING
        ),
    ] = None,
    concurrency: Concurrency = None,
    per_run: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Requests of a timed run. Default: as many as at once.", rich_help_panel=MEASURING
        ),
    ] = None,
    repeats: Repeats = 1,
    kv_tokens: KvTokens = None,
    debug: Debug = False,
) -> None:
    """Compare plain decoding, fixed draft lengths, adaptive and other engines, prompt by prompt in turn.

    Ratios are paired: of the same prompt with the same seed in the same run, with a 95 % interval. Tokens are counted
    alike for everybody: emitted, up to the same stop.
    """
    from ..bench.report import compared
    from ..bench.target import Own

    reports.check()
    settings = settings_of(chosen)
    commands = peers.parsed(work.params())
    names = _names([s.name for s in settings] + [name for name, _ in commands], baseline)
    sizes: dict[str, Any] = {
        "concurrencies": distinct(concurrency),
        "repeats": repeats,
        "unit_size": per_run,
        "kv_tokens": kv_tokens,
    }
    with ExitStack() as stack:
        bench = stack.enter_context(open_bench(model, backend, work, guard, settings, **sizes))
        contenders: list[Contender] = [Own(bench.target, setting) for setting in settings]
        contenders += _start_peers(commands, bench, backend.threads, peers.peer_timeout, stack)
        measured = _measured(contenders, bench)
        report = _report(bench, "compare", contenders, measured, baseline=baseline or names[0])
        _finish(reports, compared(report), measured.error)


def _names(names: list[str], baseline: str | None) -> list[str]:
    """Of all contenders. Raises InvalidParams where two are the same, or the baseline is none of them."""
    if len(set(names)) < len(names):
        raise InvalidParams(f"contenders {', '.join(names)}; allowed: each with a name of its own")
    if baseline is not None and baseline not in names:
        raise InvalidParams(f"baseline = {baseline!r}; allowed: {', '.join(names)}")
    return names


def _start_peers(
    commands: Sequence[tuple[str, list[str]]],
    bench: Bench,
    threads: int | None,
    seconds: float,
    stack: ExitStack,
) -> list[Peer]:
    from ..bench.peers import Opening, Peer

    info = bench.target.backend.info
    most = max(bench.workload.concurrencies)
    opening = Opening(bench.path, info.max_len, most, threads, tuple(sorted(info.stop_ids)))
    started = []
    with counting_bar() as bar:
        for i, (name, command) in enumerate(commands):
            bar(f"starting {name}", i, len(commands))
            started.append(stack.enter_context(Peer(name, command, opening, seconds=seconds)))
    return started


@bench_app.command("step")
@expand_options
def bench_step(
    *,
    work: WorkloadOptions,
    chosen: ContenderOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    reports: ReportOptions,
    model: Model = "smollm2",
    repeats: Repeats = 3,
    debug: Debug = False,
) -> None:
    """Show where the time of a decoding step goes, for each drafter and draft length, one request at a time.

    draft: the drafter. forward: the target. verify: distributions, draws and the rule. other: scheduling, bookkeeping
    and text. "outside" is everything but the target's forward, as a share of the step.
    """
    from ..bench.cells import steps
    from ..bench.target import Own

    reports.check()
    settings = settings_of(chosen)
    with open_bench(model, backend, work, guard, settings, repeats=repeats) as bench:
        contenders = [Own(bench.target, setting) for setting in settings]
        measured = _measured(contenders, bench)
        rows = list(steps(measured.made, [contender.name for contender in contenders]))
        report = _report(bench, "step", contenders, measured, baseline=None, steps=rows)
        _finish(reports, report, measured.error)


@bench_app.command("load")
@expand_options
def bench_load(
    *,
    work: WorkloadOptions,
    chosen: ContenderOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    reports: ReportOptions,
    traffic: TrafficOptions,
    model: Model = "smollm2",
    kv_tokens: KvTokens = None,
    debug: Debug = False,
) -> None:
    """Measure many readers at once: throughput, time to the first token and between tokens, requests within limits.

    --concurrency is a closed loop: so many readers, each of which asks again when it has its answer. --rate is an open
    loop: requests come as in a Poisson process, and waiting counts from when they came.
    """
    from ..bench.load import measure_load
    from ..bench.target import Own

    reports.check()
    settings = settings_of(chosen)
    traffics, limits = traffic.traffics(), traffic.limits()
    most = [*traffic.at_once, *([traffic.max_seqs] if traffic.rate else [])]
    with open_bench(model, backend, work, guard, settings, concurrencies=most, kv_tokens=kv_tokens) as bench:
        with counting_bar() as bar:
            measured = measure_load(
                bench.target, settings, traffics, bench.workload, bench.prompts, limits, bench.guard, bar,
                traffic.max_seqs,
            )  # fmt: skip
        contenders = [Own(bench.target, setting) for setting in settings]
        rows = [row.as_json() for row in measured.made]
        found = {"baseline": None, "limits": asdict(limits), "loads": rows, "runs": []}
        report = report_of(bench, "load", contenders, stopped=measured.stopped, **found)
        disturbed = [row for row in measured.made if row.load and row.load.disturbed]
        report["warnings"] += [f"{row.contender}, {row.traffic}: beside other load" for row in disturbed]
        _finish(reports, report, measured.error)


@bench_app.command("report")
@expand_options
def bench_report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON of another bench command.")],
    *,
    reports: ReportOptions,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a comparison: the contender that ratios are to.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show a report again, in another format or against another baseline. Measures nothing."""
    from ..bench.report import compared, read_report

    reports.check()
    report = read_report(file)
    if baseline is not None and report["kind"] != "compare":
        raise InvalidParams(f"baseline = {baseline!r}: {str(file)!r} holds no comparison, but {report['kind']!r}")
    reports.show(compared(report, baseline) if report["kind"] == "compare" else report)
