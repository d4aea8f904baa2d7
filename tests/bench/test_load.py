"""Many readers: arrivals, what readers see, and that everybody is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from statistics import fmean

import pytest

from paceline.bench.guard import Guard
from paceline.bench.load import Limits, LoadRow, Timing, Traffic, _asks, _read, arrivals, measure_load
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, Prompts, Workload
from paceline.bench.target import Setting, open_target, settings
from paceline.errors import BadLogits, InvalidParams
from paceline.params import SamplingParams
from paceline.types import CompletionOutput, RequestOutput, SpeculationStats, StreamChunk

LIMITS = Limits(1.0, 0.1)
NONE = Limits(0.0, 0.0)
TOKENS = 12


def measured(
    *traffics: Traffic, limits: Limits = LIMITS, drafter: str = "model:toy", max_seqs: int = 4
) -> list[LoadRow]:
    """Rows of plain and of adaptive on the toy model."""
    questions = {c: [(Question(f"{c}{i}", c, "x"), (10 + i, 11, 12)) for i in range(2)] for c in ("a", "b")}
    work = Workload(questions=(), params=SamplingParams(max_tokens=TOKENS, ignore_eos=True), temperatures=(1.0,))
    with open_target("toy", {drafter: drafter}, max_seqs=4) as target:
        return measure_load(
            target,
            settings([drafter], []),
            traffics,
            work,
            Prompts(questions, {}, False),
            limits,
            Guard(on=False),
            lambda what, done, total: None,
            max_seqs,
        ).made


def test_everybody_is_answered_in_a_closed_and_in_an_open_loop() -> None:
    """Catches requests that get lost, tokens that are counted twice, and settings that do not reach the engine."""
    rows = measured(Traffic(7, concurrency=1), Traffic(7, concurrency=3), Traffic(9, rate=500.0))
    named = [(r.contender, r.traffic) for r in rows]
    traffics = ("1 at once", "3 at once", "500 a second")
    assert named == [(contender, traffic) for traffic in traffics for contender in ("plain", "adaptive")]
    for row in rows:
        assert row.requests == (9 if row.rate else 7)
        assert row.tokens == TOKENS * row.requests
        assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
        assert row.good_per_second <= row.requests_per_second
        assert (row.drafted > 0) == (row.contender == "adaptive")
        for times in (row.first_token_ms, row.per_token_ms, row.between_chunks_ms):
            p50, p95, p99 = (times[share] for share in ("p50", "p95", "p99"))
            assert p50 is not None
            assert p95 is not None
            assert p99 is not None
            assert 0 <= p50 <= p95 <= p99


def test_nobody_is_content_where_the_limit_is_nothing() -> None:
    """Catches a goodput that does not look at the limits."""
    assert [r.good_per_second for r in measured(Traffic(2, concurrency=2), limits=NONE)] == [0.0, 0.0]


def test_arrivals_are_a_poisson_process() -> None:
    """Catches even spacing. Mean gap 1/rate within 5 sd, and as many long gaps as an exponential law has; N = 4,000,
    false alarms below 1e-5."""
    times = arrivals(Traffic(4000, rate=50.0), seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert fmean(gaps) == pytest.approx(0.02, rel=5 / 4000**0.5)
    assert sum(gap > 0.02 for gap in gaps) / 4000 == pytest.approx(0.368, abs=0.04)
    assert times == sorted(times)
    assert arrivals(Traffic(4000, rate=50.0), seed=1) == times
    assert arrivals(Traffic(4000, rate=50.0), seed=2) != times


def test_what_a_reader_waits_for_a_token() -> None:
    """Catches the first chunk's tokens counted among those that came after it."""
    timing = Timing(first=0.5, first_tokens=4, gaps=(0.2, 0.4), last=1.1, tokens=10, preemptions=0,
                    speculation=SpeculationStats())  # fmt: skip
    assert timing.per_token == pytest.approx(0.1)
    assert timing.within(Limits(0.5, 0.11))
    assert not timing.within(Limits(0.4, 0.11))
    assert not timing.within(Limits(0.5, 0.09))
    at_once = Timing(0.5, 10, (), 0.5, 10, 0, SpeculationStats())
    assert at_once.per_token is None
    assert at_once.within(Limits(0.5, 0.0))


class FakeStream:
    """Chunks of one and of three tokens, as a clock goes on by itself."""

    def __init__(self) -> None:
        done = CompletionOutput(0, "abcd", (1, 2, 3, 4), (), "length", 1, "coupled")
        output = RequestOutput(0, None, (1,), [done], SpeculationStats(), num_preemptions=2)
        self._chunks = iter(
            [
                StreamChunk(0, "a", (1,), ()),
                StreamChunk(0, "", (), ()),  # bytes of a character that is not whole yet
                StreamChunk(0, "bcd", (2, 3, 4), (), "length", output),
            ]
        )

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *args: object) -> None:
        pass

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> StreamChunk:
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration


def test_waiting_counts_from_the_arrival() -> None:
    """Catches an open loop that leaves out the time in line, and empty chunks taken for tokens."""

    class FakeEngine:
        def stream(self, *args: object, **options: object) -> FakeStream:
            return FakeStream()

    ask = Ask(Question("q", "a", "x"), (1,), SamplingParams())
    times = [
        asyncio.run(_read(FakeEngine(), ask, count(100).__next__, arrived))  # type: ignore[arg-type]
        for arrived in (None, 97.0)
    ]
    wanted = [(1.0, 1, (1.0,), 2.0, 4, 2), (3.0, 1, (1.0,), 4.0, 4, 2)]
    assert [(t.first, t.first_tokens, t.gaps, t.last, t.tokens, t.preemptions) for t in times] == wanted


def test_prompts_come_from_every_category_in_turn() -> None:
    """Catches a load that is made of the first category alone."""
    questions = {c: [(Question(f"{c}{i}", c, "x"), (i,)) for i in range(n)] for c, n in (("a", 3), ("b", 1))}
    work = Workload(questions=(), params=SamplingParams())
    asks = _asks(Prompts(questions, {}, False), work, 8)
    assert Counter(a.question.question_id for a in asks) == {"a0": 2, "b0": 2, "a1": 2, "a2": 2}
    assert len({a.params.seed for a in asks}) == 8


@pytest.mark.parametrize("options", [{}, {"concurrency": 2, "rate": 1.0}, {"rate": 0.0}, {"rate": float("inf")}])
def test_traffic_is_one_of_two_kinds(options: dict[str, float]) -> None:
    """Catches a division by zero, and options that contradict each other."""
    with pytest.raises(InvalidParams, match="rate = "):
        Traffic(1, **options)  # type: ignore[arg-type]


def test_an_answer_that_fails_stops_the_measurement() -> None:
    """Catches numbers of requests that ended with an error."""
    questions = {"a": [(Question("a", "a", "x"), (10, 11))]}
    work = Workload(questions=(), params=SamplingParams(max_tokens=4))
    with open_target("toy", {}, max_seqs=1) as target:
        target.backend._nan_when = lambda tokens: len(tokens) > 3  # type: ignore[attr-defined]
        with pytest.raises(BadLogits, match="NaN"):
            measure_load(
                target, [Setting("plain", "none", 0)], [Traffic(5, concurrency=1)], work,
                Prompts(questions, {}, False), LIMITS, Guard(on=False), lambda *a: None, 1,
            )  # fmt: skip
