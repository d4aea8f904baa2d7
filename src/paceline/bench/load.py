"""Many readers at once, through AsyncEngine: a closed loop of so many at a time, or arrivals at random at a rate.

In a closed loop everybody asks again as soon as they have their answer. In an open loop requests arrive as in a
Poisson process, whether the engine keeps up or not, and waiting counts from the arrival.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

from ..async_engine import AsyncEngine
from ..errors import InvalidParams
from ..types import SpeculationStats, StreamChunk
from .guard import Guard, Load
from .intervals import percentile
from .runs import Ask, Measured, Prompt, Prompts, Report, Workload, kept, rotated
from .target import Setting, Target, emitted_tokens

SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests come: `concurrency` at a time, or `rate` a second on average. requests: how many in all."""

    requests: int
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise InvalidParams(f"concurrency = {self.concurrency!r}, rate = {self.rate!r}; allowed: one of the two")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidParams(f"rate = {self.rate!r}; allowed: more than 0 requests a second")

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader puts up with: seconds to the first token, and seconds a token behind it."""

    first_token_seconds: float
    per_token_seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """What one reader saw, in seconds: until the first token from the arrival, between chunks, until the end.

    A chunk holds what one step made final, often several tokens; first_tokens: those of the first one. tokens: without
    the id that ended the answer.
    """

    first: float
    first_tokens: int
    gaps: tuple[float, ...]
    last: float
    tokens: int
    preemptions: int
    speculation: SpeculationStats

    @property
    def per_token(self) -> float | None:
        """Seconds for each token behind the first chunk; None where there is none."""
        behind = self.tokens - self.first_tokens
        return (self.last - self.first) / behind if behind > 0 else None

    def within(self, limits: Limits) -> bool:
        """Whether the reader is content."""
        return self.first <= limits.first_token_seconds and (self.per_token or 0.0) <= limits.per_token_seconds


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A line of a report. Times in milliseconds, each {"p50", "p95", "p99"}; good_per_second: those within limits."""

    contender: str
    temperature: float
    traffic: str
    concurrency: int | None
    rate: float | None
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    good_per_second: float
    first_token_ms: dict[str, float | None]
    per_token_ms: dict[str, float | None]
    between_chunks_ms: dict[str, float | None]
    tokens_per_step: float
    drafted: int
    accepted: int
    preemptions: int
    load: Load | None

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def arrivals(traffic: Traffic, seed: int) -> list[float]:
    """Seconds from the start at which each request of an open loop comes: the gaps are exponential."""
    assert traffic.rate is not None
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(traffic.requests):
        now += rng.expovariate(traffic.rate)
        times.append(now)
    return times


def measure_load(
    target: Target,
    settings: Sequence[Setting],
    traffics: Sequence[Traffic],
    workload: Workload,
    prompts: Prompts,
    limits: Limits,
    guard: Guard,
    report: Report,
    max_seqs: int,
) -> Measured[LoadRow]:
    """Every setting under all traffic, in turn. max_seqs: requests that run at once in an open loop; others wait."""
    total = len(traffics) * len(workload.temperatures) * len(settings)

    def rows() -> Iterator[LoadRow]:
        done = 0
        for i, traffic in enumerate(traffics):
            asks = _asks(prompts, workload, traffic.requests)
            for temperature in workload.temperatures:
                for setting in rotated(settings, i):
                    report(f"{setting.name}, temperature {temperature:g}, {traffic}", done, total)
                    done += 1
                    mine = [_as(ask, temperature, setting) for ask in asks]
                    work = partial(_serve, target, setting, traffic, mine, workload.seed, max_seqs)
                    (timings, seconds), load = guard.run(work)
                    yield _row(setting, temperature, traffic, timings, seconds, limits, load)
        report("", total, total)

    measured = kept(rows(), total)
    order = [setting.name for setting in settings]
    measured.made.sort(key=lambda r: (r.rate or 0, r.concurrency or 0, r.temperature, order.index(r.contender)))
    return measured


def _asks(prompts: Prompts, workload: Workload, count: int) -> list[Ask]:
    """A prompt of each category in turn, over and over, each with a seed of its own."""
    columns = list(prompts.groups.values())
    longest = max(map(len, columns))
    mixed: list[Prompt] = [c[i] for i in range(longest) for c in columns if i < len(c)]
    chosen = [mixed[i % len(mixed)] for i in range(count)]
    return [Ask(q, ids, replace(workload.params, seed=workload.seed + i)) for i, (q, ids) in enumerate(chosen)]


def _as(ask: Ask, temperature: float, setting: Setting) -> Ask:
    params = replace(ask.params, temperature=temperature, draft_length=setting.draft_length)
    return Ask(ask.question, ask.ids, params)


def _serve(
    target: Target, setting: Setting, traffic: Traffic, asks: Sequence[Ask], seed: int, max_seqs: int
) -> tuple[list[Timing], float]:
    """All asks answered, and the seconds that took."""

    async def serve() -> tuple[list[Timing], float]:
        llm = target.fresh_llm(setting.drafter, max_seqs if traffic.concurrency is None else traffic.concurrency)
        async with AsyncEngine(llm, max_waiting=max(len(asks), 1)) as engine:
            for ask in asks[:WARM_UP]:
                await _read(engine, ask, perf_counter)
            start = perf_counter()
            if traffic.rate is None:
                timings = await _closed(engine, asks, traffic.concurrency or 1)
            else:
                timings = await _open(engine, asks, arrivals(traffic, seed))
            return timings, perf_counter() - start

    try:
        return asyncio.run(serve())
    except ExceptionGroup as group:  # readers that failed together; the first one says why
        raise group.exceptions[0] from None


async def _closed(engine: AsyncEngine, asks: Sequence[Ask], readers: int) -> list[Timing]:
    waiting = iter(asks)

    async def reader() -> list[Timing]:
        return [await _read(engine, ask, perf_counter) for ask in waiting]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader()) for _ in range(readers)]
    return [timing for task in tasks for timing in task.result()]


async def _open(engine: AsyncEngine, asks: Sequence[Ask], times: Sequence[float]) -> list[Timing]:
    start = perf_counter()

    async def reader(ask: Ask, when: float) -> Timing:
        await asyncio.sleep(start + when - perf_counter())
        return await _read(engine, ask, perf_counter, arrived=start + when)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader(ask, when)) for ask, when in zip(asks, times, strict=True)]
    return [task.result() for task in tasks]


async def _read(engine: AsyncEngine, ask: Ask, clock: Callable[[], float], arrived: float | None = None) -> Timing:
    """One answer, read to its end."""
    start = clock() if arrived is None else arrived
    times: list[float] = []
    first_tokens = 0
    last: StreamChunk | None = None
    async with engine.stream(ask.ids, ask.params, wait=True) as stream:
        async for last in stream:
            if last.token_ids:
                first_tokens = first_tokens or len(last.token_ids)
                times.append(clock() - start)
    assert last is not None
    assert last.output is not None
    tokens = emitted_tokens(last.output)
    times = times or [clock() - start]
    gaps = tuple(b - a for a, b in pairwise(times))
    return Timing(times[0], first_tokens, gaps, times[-1], tokens, last.output.num_preemptions, last.output.speculation)


def _row(
    setting: Setting,
    temperature: float,
    traffic: Traffic,
    timings: Sequence[Timing],
    seconds: float,
    limits: Limits,
    load: Load | None,
) -> LoadRow:
    stats = SpeculationStats.sum(timing.speculation for timing in timings)
    tokens = sum(timing.tokens for timing in timings)
    return LoadRow(
        contender=setting.name,
        temperature=temperature,
        traffic=str(traffic),
        concurrency=traffic.concurrency,
        rate=traffic.rate,
        requests=len(timings),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        requests_per_second=len(timings) / seconds,
        good_per_second=sum(timing.within(limits) for timing in timings) / seconds,
        first_token_ms=_percentiles([timing.first for timing in timings]),
        per_token_ms=_percentiles([t.per_token for t in timings if t.per_token is not None]),
        between_chunks_ms=_percentiles([gap for timing in timings for gap in timing.gaps]),
        tokens_per_step=stats.tokens_per_step,
        drafted=stats.drafted,
        accepted=stats.accepted,
        preemptions=sum(timing.preemptions for timing in timings),
        load=load,
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {name: percentile(seconds, share) for name, share in SHARES.items()}
    return {name: None if value is None else 1e3 * value for name, value in found.items()}
