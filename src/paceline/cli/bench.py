"""`paceline bench`: how fast, compared with what, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidParams
from .bench_options import (
    MEASURING,
    ContenderOptions,
    GuardOptions,
    ReportFormat,
    ReportOptions,
    WorkloadOptions,
    counting_bar,
)
from .bench_session import Bench, distinct, open_bench, report_of, settings_of
from .exits import Debug
from .options import SPECULATION, BackendOptions, expand_options

if TYPE_CHECKING:
    from ..bench.peers import Peer
    from ..bench.runs import Contender

MAX_SEQS = 16

Model = Annotated[str, typer.Option("--model", "-m", metavar="M", help="As for generate.")]
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
        help="Requests at once. May be repeated. Default: 1.",
        rich_help_panel=MEASURING,
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Tokens of KV memory. Default: the context, for everybody at once.",
        rich_help_panel="Model",
    ),
]  # fmt: skip

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
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", metavar="D", help="As for generate.", rich_help_panel=SPECULATION)
    ] = "auto",
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
    from ..bench.runs import measure
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
        with counting_bar() as bar:
            runs = measure(contenders, bench.workload, bench.prompts, bench.guard, bar)
        made = [run.as_json() for run in runs]
        report = compared(report_of(bench, "run", contenders, baseline=contenders[0].name, runs=made))
    reports.show(report)


@bench_app.command("compare")
@expand_options
def bench_compare(
    *,
    work: WorkloadOptions,
    chosen: ContenderOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    reports: ReportOptions,
    model: Model = "smollm2",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another engine: a command that speaks the protocol of docs/bench.md. May be repeated.",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    peer_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="For a peer's start and each job.", rich_help_panel=MEASURING),
    ] = 600.0,
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
    from ..bench.peers import check_sampling, parse_peer
    from ..bench.report import compared
    from ..bench.runs import measure
    from ..bench.target import Own

    reports.check()
    chosen_settings = settings_of(chosen)
    peers = [parse_peer(text) for text in peer or []]
    names = [s.name for s in chosen_settings] + [name for name, _ in peers]
    if len(set(names)) < len(names):
        raise InvalidParams(f"contenders {', '.join(names)}; allowed: each with a name of its own")
    if baseline is not None and baseline not in names:
        raise InvalidParams(f"baseline = {baseline!r}; allowed: {', '.join(names)}")
    if peers:
        check_sampling(work.params())
    at_once = distinct(concurrency)
    with ExitStack() as stack:
        bench = stack.enter_context(
            open_bench(
                model, backend, work, guard, chosen_settings,
                concurrencies=at_once, repeats=repeats, unit_size=per_run, kv_tokens=kv_tokens,
            )
        )  # fmt: skip
        contenders: list[Contender] = [Own(bench.target, setting) for setting in chosen_settings]
        contenders += _start_peers(peers, bench, backend.threads, peer_timeout, stack)
        with counting_bar() as bar:
            runs = measure(contenders, bench.workload, bench.prompts, bench.guard, bar)
        made = [run.as_json() for run in runs]
        report = compared(report_of(bench, "compare", contenders, baseline=baseline or names[0], runs=made))
    reports.show(report)


def _start_peers(
    peers: Sequence[tuple[str, list[str]]],
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
        for i, (name, command) in enumerate(peers):
            bar(f"starting {name}", i, len(peers))
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
    from ..bench.runs import measure
    from ..bench.target import Own

    reports.check()
    chosen_settings = settings_of(chosen)
    with open_bench(model, backend, work, guard, chosen_settings, repeats=repeats) as bench:
        contenders = [Own(bench.target, setting) for setting in chosen_settings]
        with counting_bar() as bar:
            runs = measure(contenders, bench.workload, bench.prompts, bench.guard, bar)
        rows = list(steps(runs, [contender.name for contender in contenders]))
        made = [run.as_json() for run in runs]
        report = report_of(bench, "step", contenders, baseline=None, steps=rows, runs=made)
    reports.show(report)


@bench_app.command("load")
@expand_options
def bench_load(
    *,
    work: WorkloadOptions,
    chosen: ContenderOptions,
    backend: BackendOptions,
    guard: GuardOptions,
    reports: ReportOptions,
    model: Model = "smollm2",
    concurrency: Concurrency = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="R",
            help="Requests a second, at random moments (an open loop), instead of so many at once. May be repeated.",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests of each line.", rich_help_panel=MEASURING)
    ] = 32,
    max_seqs: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="With --rate: requests that run at once.", rich_help_panel=MEASURING),
    ] = MAX_SEQS,
    first_token_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", min=0, help="A good request has its first token by then.", rich_help_panel=MEASURING
        ),
    ] = 1000.0,
    per_token_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", min=0, help="And takes no longer than this for each further token.", rich_help_panel=MEASURING
        ),
    ] = 100.0,
    kv_tokens: KvTokens = None,
    debug: Debug = False,
) -> None:
    """Measure many readers at once: throughput, time to the first token and between tokens, requests within limits.

    --concurrency is a closed loop: so many readers, each of which asks again when it has its answer. --rate is an open
    loop: requests come as in a Poisson process, and waiting counts from when they came.
    """
    from ..bench.load import Limits, Traffic, measure_load
    from ..bench.target import Own

    reports.check()
    chosen_settings = settings_of(chosen)
    at_once = distinct(concurrency) if concurrency or not rate else []
    traffics = [Traffic(requests, concurrency=n) for n in at_once]
    traffics += [Traffic(requests, rate=each) for each in dict.fromkeys(rate or [])]
    most = [*at_once, *([max_seqs] if rate else [])]
    limits = Limits(first_token_ms / 1e3, per_token_ms / 1e3)
    with open_bench(model, backend, work, guard, chosen_settings, concurrencies=most, kv_tokens=kv_tokens) as bench:
        with counting_bar() as bar:
            rows = measure_load(
                bench.target,
                chosen_settings,
                traffics,
                bench.workload,
                bench.prompts,
                limits,
                bench.guard,
                bar,
                max_seqs,
            )
        contenders = [Own(bench.target, setting) for setting in chosen_settings]
        shown = {"first_token_seconds": limits.first_token_seconds, "per_token_seconds": limits.per_token_seconds}
        report = report_of(
            bench, "load", contenders, baseline=None, limits=shown, loads=[row.as_json() for row in rows], runs=[]
        )
    report["warnings"] = [
        f"{row.contender}, {row.traffic}: beside other load" for row in rows if row.load and row.load.disturbed
    ]
    reports.show(report)


@bench_app.command("report")
def bench_report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON of another bench command.")],
    *,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a comparison: the contender that ratios are to.")
    ] = None,
    output_format: Annotated[ReportFormat, typer.Option("--format", help="What goes to stdout.")] = ReportFormat.TEXT,
    output: Annotated[
        list[Path] | None, typer.Option("--output", "-o", metavar="FILE", help="Also write FILE: .json, .md or .html.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show a report again, in another format or against another baseline. Measures nothing."""
    from ..bench.report import compared, read_report

    reports = ReportOptions(output_format=output_format, output=output)
    reports.check()
    report = read_report(file)
    if baseline is not None and report["kind"] != "compare":
        raise InvalidParams(f"baseline = {baseline!r}: {str(file)!r} holds no comparison, but {report['kind']!r}")
    reports.show(compared(report, baseline) if report["kind"] == "compare" else report)
