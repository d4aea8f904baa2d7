"""The face for servers, on the toy model: threads, event loops, backpressure, faults, and how it ends.

No test waits for time to pass: gates and events order what happens. A test that hangs is ended by an alarm.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from paceline import LLM, AsyncEngine, PacelineError, RequestOutput, SamplingParams, StreamChunk
from paceline.async_engine import AsyncStream
from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter
from paceline.errors import (
    BackendError,
    BadLogits,
    DrafterError,
    EngineClosed,
    EngineDead,
    EngineError,
    EngineFull,
    InvalidInput,
    InvalidParams,
    InvalidPrompt,
    InvariantError,
    UnsupportedOption,
)
from paceline.types import DraftContext, Proposal

T = TypeVar("T")
SHORT = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, seed=3, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=4000, seed=3, ignore_eos=True)
HANG = 60


@pytest.fixture(autouse=True)
def _no_hang_and_no_thread_left() -> Iterator[None]:
    """Every test: a hang is a failure, and no thread of ours outlives it."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"the test hangs: {[t.name for t in threading.enumerate()]}")

    before = set(threading.enumerate())
    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG)
    try:
        yield
        left = [t for t in threading.enumerate() if t not in before and t.name.startswith("paceline")]
        if left:
            gc.collect()
        for thread in left:  # an engine that was dropped, not closed, needs a moment
            thread.join(timeout=10)
        assert not [t for t in left if t.is_alive()]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


class Gated(ToyBackend):
    """A forward waits for a permit, until the gate is open. closed: whether close() was called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inside = threading.Event()
        self.closed = False
        self.forwards = 0
        self.widest = 0
        self._permits = threading.Semaphore(0)
        self._open = False

    def forward(self, batch: Sequence[Any]) -> Any:
        self.inside.set()
        if not self._open:
            assert self._permits.acquire(timeout=HANG)
        self.forwards += 1
        self.widest = max(self.widest, len(batch))
        return super().forward(batch)

    def open(self) -> None:
        self._open = True
        self._permits.release(1000)

    def close(self) -> None:
        self.closed = True


class Faulty(ToyBackend):
    """Each forward, and each release, first asks a function that may raise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.forwards = 0
        self.before_forward: Callable[[int], object] = lambda n: None
        self.before_release: Callable[[], object] = lambda: None

    def forward(self, batch: Sequence[Any]) -> Any:
        self.forwards += 1
        self.before_forward(self.forwards)
        return super().forward(batch)

    def release(self, slot: int) -> None:
        self.before_release()
        super().release(slot)


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def in_threads(jobs: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
    """Run each job in an event loop of a thread of its own; results in order, the first exception raised."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            results[i] = asyncio.run(jobs[i]())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@functools.cache
def solo(prompt: str, params: SamplingParams) -> tuple[int, ...]:
    return LLM("toy", drafter="none").generate(prompt, params)[0].outputs[0].token_ids


async def read(stream: AsyncStream) -> list[StreamChunk]:
    return [chunk async for chunk in stream]


def tokens_of(chunks: Sequence[StreamChunk]) -> tuple[int, ...]:
    output = chunks[-1].output
    assert output is not None
    assert "".join(c.text for c in chunks) == output.outputs[0].text
    return output.outputs[0].token_ids


def error_of(result: RequestOutput | Sequence[StreamChunk]) -> PacelineError | None:
    output = result if isinstance(result, RequestOutput) else result[-1].output
    assert output is not None
    assert output.outputs[0].finish_reason == "error"
    return output.outputs[0].error


async def ticks(n: int) -> None:
    """Let the event loop go round n times."""
    for _ in range(n):
        await asyncio.sleep(0)


async def in_thread(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, HANG)


async def tokenised(engine: AsyncEngine) -> None:
    """Whatever was submitted before has been handed to the engine thread."""
    await asyncio.to_thread(engine._thread._tokenizer.submit(int).result)


async def assert_nothing_held(engine: AsyncEngine) -> None:
    """No slot, no place in a queue, no drafter memory, no seat; the books of everybody balance."""
    await engine.check()
    runner = engine._thread
    assert not runner.engine.has_work
    assert not runner._line
    assert runner.num_in_flight == 0
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert runner.llm.backend.slots_in_use == 0  # type: ignore[attr-defined]
    if isinstance(runner.llm.drafter, LookupDrafter):
        assert not runner.llm.drafter._histories


# --- tokens -----------------------------------------------------------------------------------------


def test_thirty_two_streams_from_four_loops_equal_generate() -> None:
    """A token that went to the wrong reader, out of order, or twice; company that changes a request."""
    prompts = [f"{'abcabc'[: 1 + i % 6]}{i}" for i in range(32)]
    params = [SamplingParams(max_tokens=20 + i, seed=i, temperature=(0, 0.8, 1)[i % 3]) for i in range(32)]
    expected = [o.outputs[0].token_ids for o in LLM("toy").generate(prompts, params)]
    backend = Gated()
    engine = AsyncEngine(backend)
    submit = engine._thread.submit

    async def ask(i: int) -> tuple[int, ...]:
        if i % 4 == 3:
            return (await engine.generate(prompts[i], params[i])).outputs[0].token_ids
        return tokens_of(await read(engine.stream(prompts[i], params[i])))

    async def client(first: int) -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*[ask(i) for i in range(first, 32, 4)]))

    taken: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> None:
        submit(*args, **kwargs)
        taken.append(1)
        if len(taken) == 32:  # only now does the first step go on: all of them are in flight together
            backend.open()

    engine._thread.submit = counting  # type: ignore[method-assign]
    got = in_threads([lambda first=first: client(first) for first in range(4)])  # type: ignore[misc]
    assert {4 * j + first: got[first][j] for first in range(4) for j in range(8)} == dict(enumerate(expected))
    assert backend.widest == 16

    async def end() -> None:
        await assert_nothing_held(engine)
        await engine.close()

    run(end())


def test_chat_text_and_ids() -> None:
    talk = [{"role": "user", "content": "hi"}]
    llm = LLM("toy")
    texts = [llm.chat(talk, SHORT)[0].outputs[0].text, llm.generate("abc", SHORT)[0].outputs[0].text]

    async def main() -> None:
        async with AsyncEngine("toy") as engine:
            assert (await engine.generate(talk, SHORT)).outputs[0].text == texts[0]
            assert "".join([c.text async for c in engine.stream(talk, SHORT)]) == texts[0]
            assert (await engine.generate(llm.tokenizer.encode("abc"), SHORT)).outputs[0].text == texts[1]
            assert (await engine.generate("abc", SHORT)).prompt == "abc"

    run(main())


def test_two_hundred_random_requests() -> None:
    """Staggered arrivals, aborts at any moment, little memory, a short line: survivors equal their solo run."""
    rng = random.Random(5)
    kinds = [SamplingParams(max_tokens=n, seed=s, temperature=t) for n in (1, 7, 30) for s, t in ((1, 1.0), (2, 0.7))]
    asked = [(rng.choice(["abab", "xyz", "a", "hello hello"]), rng.choice(kinds)) for _ in range(200)]
    expected = {(p, k.max_tokens, k.seed): solo(p, k) for p, k in set(asked)}
    backend = ToyBackend(max_seqs=5, kv_tokens=300, max_len=100)
    engine = AsyncEngine(backend, drafter="lookup", max_waiting=3)
    survived: list[int] = []
    ends: list[str] = []

    async def client(which: int) -> None:
        mine = random.Random(which)
        tasks = []

        async def one(i: int) -> None:
            prompt, params = asked[i]
            try:
                output = await engine.generate(prompt, params, wait=mine.random() < 0.8)
            except (EngineFull, asyncio.CancelledError) as error:
                ends.append(type(error).__name__)
                raise
            ends.append(str(output.outputs[0].finish_reason))
            if ends[-1] != "cancelled":
                assert output.outputs[0].token_ids == expected[prompt, params.max_tokens, params.seed]
                survived.append(i)

        for i in range(which, 200, 4):
            tasks.append(asyncio.create_task(one(i)))
            await ticks(mine.randrange(20))
            if mine.random() < 0.15:
                await asyncio.wait([mine.choice(tasks)])
            if mine.random() < 0.3:
                mine.choice(tasks[-10:]).cancel()
            if mine.random() < 0.1:
                engine.cancel(mine.randrange(200))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError | EngineFull):
                raise result

    in_threads([lambda which=which: client(which) for which in range(4)])  # type: ignore[misc]
    assert len(survived) > 50
    assert {"length", "EngineFull", "CancelledError"} <= set(ends)

    async def end() -> None:
        await assert_nothing_held(engine)
        await engine.close()

    run(end())


# --- leaving ----------------------------------------------------------------------------------------


async def leave_somehow(engine: AsyncEngine, rng: random.Random, prompt: str, params: SamplingParams) -> object:
    """Read up to some chunk and leave in some way, or read all; the tokens where it was read to its end."""
    stream = engine.stream(prompt, params, wait=True)
    way, at = rng.choice(["task", "aclose", "drop", "cancel", "raise", "stay", "stay"]), rng.randrange(12)
    if way == "task":
        reached = asyncio.Event()

        async def count() -> None:
            for _ in range(at):
                await anext(stream)
            reached.set()
            await read(stream)

        task = asyncio.create_task(count())
        if rng.random() < 0.6:
            await reached.wait()
        await ticks(rng.randrange(60))
        task.cancel()
        await asyncio.wait([task])
        return None
    if way == "stay":
        return tokens_of(await read(stream))
    if way == "cancel":
        engine.cancel(await stream.start())
        chunks = await read(stream)
        assert chunks[-1].finish_reason in ("cancelled", "length", "stop")
        return None
    seen = 0
    try:
        async for _ in stream:
            seen += 1
            if seen > at and way == "raise":
                raise ZeroDivisionError
            if seen > at:
                break
    except ZeroDivisionError:
        pass
    if way == "aclose":
        await stream.aclose()
    return None


@pytest.mark.parametrize("seed", range(25))
def test_leaving_at_any_moment_frees_everything(seed: int) -> None:
    """Slots, places in line, seats, drafter memory: after 14 requests were left in every way, nothing is held."""
    rng = random.Random(seed)
    asked = [(rng.choice(["abab", "xyz"]), SamplingParams(max_tokens=40, seed=rng.randrange(3))) for _ in range(14)]

    async def main() -> None:
        backend = ToyBackend(max_seqs=rng.choice([1, 3, 16]), kv_tokens=400, max_len=100)
        async with AsyncEngine(backend, max_waiting=rng.choice([0, 2, 16])) as engine:
            got = await asyncio.gather(
                *[leave_somehow(engine, random.Random(100 * seed + i), *asked[i]) for i in range(14)]
            )
            for tokens, (prompt, params) in zip(got, asked, strict=True):
                assert tokens is None or tokens == solo(prompt, params)
            await assert_nothing_held(engine)

    run(main())


def test_a_dropped_stream_frees_everything() -> None:
    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            engine.stream("abc", LONG)  # never started
            stream = engine.stream("abc", ENDLESS)
            await anext(stream)
            del stream
            await assert_nothing_held(engine)
            async for _ in engine.stream("abc", ENDLESS):
                break
            await assert_nothing_held(engine)
            knot: list[object] = [engine.stream("abc", ENDLESS)]
            await anext(knot[0])  # type: ignore[call-overload]
            knot.append(knot)
            del knot
            gc.collect()
            await assert_nothing_held(engine)

    run(main())


def test_a_stream_collected_within_a_step_touches_nobody() -> None:
    """The garbage collector runs in any thread at any moment, the engine's own in the middle of a step included."""
    backend = Faulty()
    streams: list[AsyncStream] = []

    def collect(_: int) -> None:
        streams.clear()
        gc.collect()

    async def main() -> None:
        async with AsyncEngine(backend) as engine:
            streams.append(engine.stream("abc", ENDLESS))
            await anext(streams[0])
            backend.before_forward = collect
            assert tokens_of(await read(engine.stream("xyz", SHORT))) == solo("xyz", SHORT)
            assert not streams
            await assert_nothing_held(engine)

    run(main())


def test_cancel_by_id_tells_the_reader() -> None:
    """The reader gets what there is and "cancelled"; from any thread; unknown and old ids are nothing."""

    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            stream = engine.stream("abc", ENDLESS)
            request_id = await stream.start()
            assert stream.request_id == request_id
            first = await anext(stream)
            await asyncio.to_thread(engine.cancel, request_id)
            engine.cancel(12345)
            rest = await read(stream)
            assert rest[-1].finish_reason == "cancelled"
            tokens = tokens_of([first, *rest])
            assert 0 < len(tokens) < 4000
            assert tokens == solo("abc", ENDLESS)[: len(tokens)]
            engine.cancel(request_id)
            await assert_nothing_held(engine)
            assert await read(stream) == []

    run(main())


def test_a_reader_that_fails_frees_its_request_and_no_other() -> None:
    async def failing(engine: AsyncEngine) -> None:
        async with engine.stream("abc", ENDLESS) as stream:
            async for _ in stream:
                raise ZeroDivisionError

    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            other = asyncio.create_task(read(engine.stream("xyz", LONG)))
            with pytest.raises(ZeroDivisionError):
                await failing(engine)
            assert tokens_of(await other) == solo("xyz", LONG)
            await assert_nothing_held(engine)

    run(main())


def test_one_reader_at_a_time() -> None:
    """A second reader would steal chunks, and one of them would wait for ever; closing wakes whoever waits."""
    backend = Gated()

    async def main() -> None:
        async with AsyncEngine(backend) as engine:
            stream = engine.stream("abc", ENDLESS)
            reader = asyncio.create_task(read(stream))
            await ticks(3)
            with pytest.raises(InvalidInput, match="has a reader"):
                await anext(stream)
            backend.open()
            await asyncio.to_thread(backend.inside.wait, HANG)
            await stream.aclose()
            await stream.aclose()
            assert all(c.output is None for c in await reader)
            await assert_nothing_held(engine)
            elsewhere = engine.stream("abc", SHORT)
            await elsewhere.start()
            with pytest.raises(InvalidInput, match="one event loop"):
                in_threads([lambda: read(elsewhere)])
            assert tokens_of(await read(elsewhere)) == solo("abc", SHORT)
            assert await read(elsewhere) == []

    run(main())


def test_closing_a_stream_that_waits_to_start() -> None:
    backend = Gated(max_seqs=1)

    async def main() -> None:
        async with AsyncEngine(backend, max_waiting=0) as engine:
            first = asyncio.create_task(read(engine.stream("abc", SHORT)))
            await in_thread(backend.inside)
            stream = engine.stream("abc", SHORT, wait=True)
            reader, starter = asyncio.create_task(read(stream)), None
            await ticks(2)
            await stream.aclose()
            with pytest.raises(EngineClosed, match="before its request began"):
                await reader
            starter = engine.stream("abc", SHORT)
            await starter.aclose()
            with pytest.raises(EngineClosed):
                await starter.start()
            backend.open()
            await first
            await assert_nothing_held(engine)

    run(main())


@pytest.mark.parametrize("whole", [False, True])
def test_a_readers_event_loop_that_closes(whole: bool) -> None:
    """The engine thread survives, frees that request, and others never notice."""
    backend = ToyBackend()
    engine = AsyncEngine(backend)
    kept = AsyncStream(engine, "abc", ENDLESS, wait=False, whole=whole)

    def leave() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(kept.start())
        loop.close()

    async def main() -> None:
        other = asyncio.create_task(read(engine.stream("xyz", LONG)))
        await asyncio.to_thread(leave)
        assert tokens_of(await other) == solo("xyz", LONG)
        assert tokens_of(await read(engine.stream("xyz", SHORT))) == solo("xyz", SHORT)
        await assert_nothing_held(engine)
        await engine.close()

    run(main())


def test_a_loop_that_closes_while_its_request_waits_in_line() -> None:
    backend = Gated(max_seqs=1)
    engine = AsyncEngine(backend, max_waiting=0)
    kept = engine.stream("abc", SHORT, wait=True)

    def leave() -> None:
        loop = asyncio.new_event_loop()
        reader = kept.start()
        loop.call_soon(lambda: reader.send(None))  # as a task would, but nobody is told when the loop goes
        loop.call_soon(loop.stop)
        asyncio._set_running_loop(None)
        loop.run_forever()
        loop.close()
        parked.append(reader)

    parked: list[Any] = []

    async def main() -> None:
        first = asyncio.create_task(read(engine.stream("abc", SHORT)))
        await in_thread(backend.inside)
        await asyncio.to_thread(leave)
        assert engine._thread.num_in_flight == 2
        last = asyncio.create_task(read(engine.stream("xyz", SHORT, wait=True)))
        await ticks(2)
        backend.open()
        await first
        assert tokens_of(await last) == solo("xyz", SHORT)
        await assert_nothing_held(engine)
        await engine.close()

    run(main())
    parked[0].close()


# --- backpressure -----------------------------------------------------------------------------------


def test_full_is_said_at_once_and_waiters_are_served_in_order() -> None:
    """The step never ends while others are refused; whoever waits cannot be overtaken, and may leave."""
    backend = Gated(max_seqs=1)
    names: dict[int, str] = {}
    ended: list[int] = []  # as the engine ended them; readers of several chunks at once may wake in any order

    async def main() -> None:
        async with AsyncEngine(backend, max_waiting=2) as engine:
            step = engine._thread.engine.step

            def watching() -> list[StreamChunk]:
                chunks = step()
                ended.extend(c.request_id for c in chunks if c.output is not None)
                return chunks

            engine._thread.engine.step = watching  # type: ignore[method-assign]

            async def ask(name: str, *, wait: bool) -> None:
                stream = engine.stream("abc", SHORT, wait=wait)
                names[await stream.start()] = name
                await read(stream)

            tasks = {name: asyncio.create_task(ask(name, wait=False)) for name in "ABC"}
            await in_thread(backend.inside)
            assert engine.num_running + engine.num_waiting == 3
            with pytest.raises(EngineFull, match=r"max_seqs \+ max_waiting = 1 \+ 2"):
                await engine.generate("abc", SHORT)
            for name in "DEFG":
                tasks[name] = asyncio.create_task(ask(name, wait=True))
                await ticks(2)
            assert engine.num_running + engine.num_waiting == 7
            retried = engine.stream("abc", SHORT)
            with pytest.raises(EngineFull):
                await retried.start()
            tasks["E"].cancel()
            tasks["B"].cancel()
            await ticks(3)
            backend.open()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            assert [names[i] for i in ended] == list("ACDFG")
            await assert_nothing_held(engine)
            assert tokens_of(await read(retried)) == solo("abc", SHORT)

    run(main())


def test_the_engine_itself_never_holds_more_than_it_may() -> None:
    """A line of 50 must not become 50 requests in the engine, whose queue is walked in every step."""
    backend = Gated(max_seqs=2)

    async def main() -> None:
        async with AsyncEngine(backend, max_waiting=3) as engine:
            most: list[int] = []
            step = engine._thread.engine.step

            def watching() -> Any:
                most.append(len(engine._thread.engine.running) + len(engine._thread.engine.waiting))
                return step()

            engine._thread.engine.step = watching  # type: ignore[method-assign]
            tasks = [asyncio.create_task(engine.generate("abc", SHORT, wait=True)) for _ in range(50)]
            await in_thread(backend.inside)
            await ticks(2)
            backend.open()
            await asyncio.gather(*tasks)
            assert max(most) == 5
            await assert_nothing_held(engine)

    run(main())


def test_what_runs_and_what_waits_is_counted() -> None:
    backend = Gated(max_seqs=2)

    async def main() -> None:
        async with AsyncEngine(backend, max_waiting=5) as engine:
            assert (engine.num_running, engine.num_waiting) == (0, 0)
            backend.open()
            streams = [engine.stream("abc", ENDLESS) for _ in range(5)]
            for stream in streams[:2]:
                await anext(stream)
            for stream in streams[2:]:
                await stream.start()
            await engine.check()
            assert (engine.num_running, engine.num_waiting) == (2, 3)
            for stream in streams:
                await stream.aclose()
            await assert_nothing_held(engine)

    run(main())


def test_a_slow_reader_slows_nobody_in_steps() -> None:
    """Both run to their end in the same steps whether one of them is read or not; what waits is bounded."""

    async def forwards(*, slow: bool) -> int:
        backend = Gated()
        async with AsyncEngine(backend, drafter="none") as engine:
            lazy, eager = engine.stream("abc", LONG), engine.stream("xyz", LONG)
            starts = [asyncio.create_task(s.start()) for s in (lazy, eager)]
            await in_thread(backend.inside)
            await tokenised(engine)
            backend.open()
            await asyncio.gather(*starts)
            late = None if slow else asyncio.create_task(read(lazy))
            assert tokens_of(await read(eager)) == solo("xyz", LONG)
            if slow:
                while engine.num_running:  # the other one may be a step behind; this ends with its last token
                    await asyncio.sleep(0)
                assert 0 < lazy._ticket.mail.qsize() <= 500  # type: ignore[union-attr]
                assert tokens_of(await read(lazy)) == solo("abc", LONG)
            elif late is not None:
                assert tokens_of(await late) == solo("abc", LONG)
            await assert_nothing_held(engine)
        return backend.forwards

    assert abs(run(forwards(slow=True)) - run(forwards(slow=False))) <= 3


def test_a_long_tokenisation_stops_neither_steps_nor_the_event_loop() -> None:
    """And its request can be left, and closing waits for it; seats are counted from the call on."""
    backend = Gated(max_seqs=2)
    backend.open()
    encode, reached, go_on = backend.tokenizer.encode, threading.Event(), threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        if text == "slow":
            reached.set()
            assert go_on.wait(HANG)
        return encode(text, **options)

    async def main() -> None:
        engine = AsyncEngine(backend, max_waiting=1)
        running = engine.stream("abc", LONG)
        await running.start()
        backend.tokenizer.encode = slow  # type: ignore[method-assign]
        left, kept = (asyncio.create_task(engine.generate("slow", SHORT)) for _ in range(2))
        await in_thread(reached)
        with pytest.raises(EngineFull):
            await engine.generate("abc", SHORT)
        assert tokens_of(await read(running)) == solo("abc", LONG)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await engine.check()
        assert engine._thread.num_in_flight == 1
        closing = asyncio.create_task(engine.close())
        await ticks(2)
        assert not closing.done()
        go_on.set()
        with pytest.raises(EngineClosed):
            await kept
        await closing
        assert backend.slots_in_use == 0

    run(main())


# --- faults -----------------------------------------------------------------------------------------


def test_a_nan_row_ends_one_request() -> None:
    """One bad row must neither end the batch nor become an id; the others equal their solo run."""
    bad = ToyBackend().tokenizer.encode("bad")

    def nan_when(visible: tuple[int, ...]) -> bool:
        return list(visible[:3]) == bad and len(visible) > 8

    async def main() -> None:
        async with AsyncEngine(ToyBackend(nan_when=nan_when)) as engine:
            asked = ["abc", "bad", "xyz", "bad", "hello"]
            got = await asyncio.gather(*[read(engine.stream(p, SHORT)) for p in asked])
            for prompt, chunks in zip(asked, got, strict=True):
                if prompt == "bad":
                    assert isinstance(error_of(chunks), BadLogits)
                else:
                    assert tokens_of(chunks) == solo(prompt, SHORT)
            assert isinstance(error_of(await engine.generate("bad", SHORT)), BadLogits)
            await assert_nothing_held(engine)

    run(main())


class Rude(LookupDrafter):
    """Breaks the contract for prompts that begin with token 0."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        answers: list[Any] = list(super().propose(contexts, budgets))
        return ["nonsense" if c.tokens[0] == 0 else a for c, a in zip(contexts, answers, strict=True)]


def test_a_bad_drafter_answer_ends_one_request() -> None:
    async def main() -> None:
        async with AsyncEngine(ToyBackend(), drafter=Rude()) as engine:
            bad, good = await asyncio.gather(engine.generate([0, 1], SHORT), engine.generate("abab", SHORT))
            assert isinstance(error_of(bad), DrafterError)
            assert good.outputs[0].token_ids == solo("abab", SHORT)
            await assert_nothing_held(engine)

    run(main())


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt("boom"), SystemExit(1), MemoryError("boom")])
def test_a_broken_step_fails_who_was_in_it_and_the_engine_goes_on(error: BaseException) -> None:
    """Whatever a backend raises: the thread lives on, everybody hears of it, and those in line are served."""
    backend = Faulty(max_seqs=2)
    going = threading.Event()

    def once(n: int) -> None:
        assert going.wait(HANG)
        if n == 6:
            raise error

    backend.before_forward = once

    async def main() -> None:
        async with AsyncEngine(backend, max_waiting=1, drafter="none") as engine:
            tasks = [asyncio.create_task(read(engine.stream("abc", SHORT, wait=True))) for _ in range(5)]
            await ticks(2)
            await tokenised(engine)
            going.set()
            got = await asyncio.gather(*tasks)
            failed = [chunks for chunks in got if chunks[-1].finish_reason == "error"]
            assert len(failed) == 3  # max_seqs + max_waiting were in the engine
            for chunks in failed:
                fault = error_of(chunks)
                assert isinstance(fault, BackendError)
                assert type(error).__name__ in str(fault)
                assert fault.__cause__ is error
            for chunks in got[3:]:
                assert tokens_of(chunks) == solo("abc", SHORT)
            assert tokens_of(await read(engine.stream("abc", SHORT))) == solo("abc", SHORT)
            await assert_nothing_held(engine)

    run(main())


def test_steps_that_always_break() -> None:
    """No request hangs, nothing spins, and the engine closes as ever."""
    backend = Faulty()

    def always(_: int) -> None:
        raise RuntimeError("no weights")

    backend.before_forward = always

    async def main() -> None:
        async with AsyncEngine(backend) as engine:
            for n in range(1, 6):
                assert "no weights" in str(error_of(await engine.generate("abc", SHORT)))
                assert backend.forwards == n
            many = await asyncio.gather(*[engine.generate("abc", SHORT) for _ in range(20)])
            assert all("no weights" in str(error_of(output)) for output in many)
            await assert_nothing_held(engine)

    run(main())


def test_chunks_that_went_down_with_a_step() -> None:
    """A step that ended requests and then broke off: their readers must hear of it though the engine forgot them."""

    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            inner = engine._thread.engine
            step = inner.step

            def broken() -> Any:
                if any(chunk.output is not None for chunk in step()):
                    inner.step = step  # type: ignore[method-assign]
                    raise RuntimeError("lost")
                return []

            inner.step = broken  # type: ignore[method-assign]
            with pytest.raises(BackendError, match="lost"):
                await read(engine.stream("abc", SHORT))
            assert tokens_of(await read(engine.stream("abc", SHORT))) == solo("abc", SHORT)
            await assert_nothing_held(engine)

    run(main())


def test_a_request_that_vanished_is_an_error_not_a_hang() -> None:
    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            stream = engine.stream("abc", ENDLESS)
            request_id = await stream.start()

            def lose() -> None:
                engine._thread.engine.cancel(request_id)

            await asyncio.wrap_future(engine._thread.call(lose))
            with pytest.raises(BackendError, match=rf"InvariantError.*\[{request_id}\]"):
                await read(stream)
            await assert_nothing_held(engine)

    run(main())


@pytest.mark.parametrize("what", ["release", "check"])
def test_an_engine_that_cannot_be_put_right_is_dead_and_says_so(what: str) -> None:
    """To those in it, in line and being tokenised, and to everybody later; no one hangs, closing works."""
    backend = Faulty(max_seqs=1)
    going = threading.Event()

    def broken(_: int = 0) -> None:
        assert going.wait(HANG)
        raise RuntimeError("boom")

    def unbalanced() -> None:
        raise InvariantError("a slot is free twice")

    backend.before_forward = broken
    if what == "release":
        backend.before_release = broken
    else:
        backend.check = unbalanced  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(backend, max_waiting=1)
        tasks = [asyncio.create_task(engine.generate("abc", SHORT, wait=True)) for _ in range(5)]
        await ticks(2)
        going.set()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(g) for g in got[2:]] == [EngineDead] * 3
        for early in got[:2]:
            fault = early if isinstance(early, BaseException) else error_of(early)
            assert isinstance(fault, (EngineDead, BackendError))
        for later in (engine.generate("abc", SHORT), engine.stream("abc", SHORT).start(), engine.check()):
            with pytest.raises(EngineDead, match="open a new one"):
                await later
        engine.cancel(0)
        await engine.close()
        assert not engine._thread.thread.is_alive()
        with pytest.raises(EngineDead):
            await engine.generate("abc", SHORT)

    run(main())


def test_what_is_wrong_with_a_request_is_raised_before_it_starts() -> None:
    async def main() -> None:
        async with AsyncEngine("toy", max_len=50) as engine:
            with pytest.raises(InvalidParams, match="params = 5"):
                engine.stream("abc", 5)  # type: ignore[arg-type]
            wrong: list[tuple[Any, SamplingParams, type[Exception], str]] = [
                ("", SHORT, InvalidPrompt, "no tokens"),
                (5, SHORT, InvalidPrompt, "prompt = 5"),
                ([999], SHORT, InvalidPrompt, "999"),
                ("a" * 60, SHORT, InvalidPrompt, "60"),
                ([{"role": "user"}], SHORT, InvalidInput, "content"),
                ("abc", SamplingParams(logprobs=1), UnsupportedOption, "logprobs"),
            ]
            for prompt, params, kind, message in wrong:
                for ask in (engine.stream(prompt, params).start, engine.stream(prompt, params).__anext__):
                    with pytest.raises(kind, match=message):
                        await ask()
                with pytest.raises(kind, match=message):
                    await engine.generate(prompt, params)
            await assert_nothing_held(engine)

    run(main())


@pytest.mark.parametrize("where", ["encode", "add"])
def test_a_bug_in_front_of_the_engine_is_typed_and_ends_one_request(where: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("bug")

    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            running = engine.stream("abc", LONG)
            await running.start()
            with pytest.MonkeyPatch.context() as patch:
                if where == "encode":
                    patch.setattr(engine._thread.llm.backend.tokenizer, "encode", broken)
                else:
                    patch.setattr(engine._thread.engine, "add", broken)
                with pytest.raises(BackendError, match="ZeroDivisionError: bug"):
                    await engine.generate("abc", SHORT)
            assert tokens_of(await read(running)) == solo("abc", LONG)
            await assert_nothing_held(engine)

    run(main())


# --- the end ----------------------------------------------------------------------------------------


def test_closing_ends_everybody_with_a_typed_error() -> None:
    """In the engine, in line, in several event loops; twice at once; and nothing can be asked any more."""
    backend = Gated(max_seqs=2)
    engine = AsyncEngine(LLM(backend), max_waiting=2)
    submitted = threading.Barrier(3)

    async def client() -> list[Any]:
        tasks = [asyncio.create_task(engine.generate("abc", ENDLESS, wait=True)) for _ in range(4)]
        await ticks(2)
        await asyncio.to_thread(submitted.wait, HANG)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def closer() -> list[Any]:
        await asyncio.to_thread(submitted.wait, HANG)
        await in_thread(backend.inside)
        both = [asyncio.create_task(engine.close()) for _ in range(2)]
        await ticks(2)
        with pytest.raises(EngineClosed):
            await engine.generate("abc", SHORT)
        backend.open()
        await asyncio.gather(*both)
        await engine.close()
        for later in (engine.generate("abc", SHORT), engine.stream("abc", SHORT).start(), engine.check()):
            with pytest.raises(EngineClosed, match="open a new one"):
                await later
        engine.cancel(0)
        return []

    results = [result for results in in_threads([client, client, closer]) for result in results]
    assert len(results) == 8
    for result in results:
        assert isinstance(result if isinstance(result, BaseException) else error_of(result), EngineClosed)
    assert sum(isinstance(result, EngineClosed) for result in results) >= 4  # those in line
    assert not engine._thread.thread.is_alive()
    assert backend.slots_in_use == 0
    assert not backend.closed  # its owner opened it


def test_closing_frees_what_was_opened_here(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Gated] = []

    def open_one(*_: Any, **__: Any) -> Gated:
        opened.append(Gated())
        return opened[-1]

    monkeypatch.setattr("paceline.llm.open_backend", open_one)

    async def main() -> None:
        async with AsyncEngine("any"):
            pass

    run(main())
    engine = AsyncEngine("any")
    thread = engine._thread.thread
    del engine
    gc.collect()
    thread.join(HANG)
    assert [b.closed for b in opened] == [True, True]


def test_draining_lets_everybody_finish() -> None:
    backend = Gated(max_seqs=2)

    async def main() -> None:
        engine = AsyncEngine(backend, max_waiting=1)
        tasks = [asyncio.create_task(engine.generate("abc", SHORT, wait=True)) for _ in range(6)]
        await in_thread(backend.inside)
        closing = asyncio.create_task(engine.close(drain=True))
        await ticks(2)
        with pytest.raises(EngineClosed):
            await engine.generate("abc", SHORT)
        backend.open()
        assert {o.outputs[0].token_ids for o in await asyncio.gather(*tasks)} == {solo("abc", SHORT)}
        await closing
        idle = AsyncEngine("toy")
        await idle.close(drain=True)

    run(main())


def test_draining_is_cut_short_by_its_time_or_by_a_plain_close() -> None:
    async def main() -> None:
        for by_time in (True, False):
            engine = AsyncEngine(ToyBackend(max_len=4096))
            task = asyncio.create_task(engine.generate("abc", ENDLESS))
            await ticks(1)
            if by_time:
                await engine.close(drain=True, timeout=0.05)
            else:
                draining = asyncio.create_task(engine.close(drain=True, timeout=HANG))
                await ticks(2)
                await engine.close()
                await draining
            with pytest.raises(EngineClosed):
                raise error_of(await task) or AssertionError

    run(main())


def test_a_step_that_never_ends_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """A backend that hangs must not make close() or a reader hang; nor does it matter if the step ends one day."""
    backend = Gated(max_seqs=1)
    engine = AsyncEngine(backend, max_waiting=0)

    async def main() -> None:
        tasks = [asyncio.create_task(engine.generate("abc", SHORT, wait=True)) for _ in range(3)]
        await in_thread(backend.inside)
        with pytest.raises(EngineDead, match=r"has not ended within 0\.01 s"):
            await engine.close(timeout=0.01)
        for task in tasks:
            with pytest.raises(EngineDead):
                await task
        with pytest.raises(EngineDead):
            await engine.generate("abc", SHORT)

    run(main())
    backend.open()
    engine._thread.thread.join(HANG)
    run(engine.close())
    assert not engine._thread.thread.is_alive()
    assert not [r for r in caplog.records if r.name != "asyncio"]
    assert backend.slots_in_use == 0


def test_a_close_that_is_cancelled_can_be_repeated() -> None:
    backend = Gated()

    async def main() -> None:
        engine = AsyncEngine(backend)
        task = asyncio.create_task(engine.generate("abc", SHORT))
        await in_thread(backend.inside)
        closing = asyncio.create_task(engine.close())
        await ticks(2)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        backend.open()
        await engine.close()
        assert isinstance(error_of(await task), EngineClosed)

    run(main())


def test_an_idle_engine_sleeps() -> None:
    async def main() -> None:
        async with AsyncEngine(ToyBackend()) as engine:
            await engine.generate("abc", SHORT)
            turns: list[int] = []
            turn = engine._thread._turn

            def counting() -> None:
                turns.append(1)
                turn()

            engine._thread._turn = counting  # type: ignore[method-assign]
            await engine.check()
            threading.Event().wait(0.2)
            assert len(turns) <= 2

    run(main())


def test_the_interpreter_exits_though_nobody_closed() -> None:
    """No hang at exit, no crash, nothing on stderr; neither idle nor in the middle of a request."""
    code = """
import asyncio, sys, threading
from paceline import AsyncEngine, SamplingParams
async def main():
    stream = idle.stream("abc", SamplingParams(max_tokens=4000, ignore_eos=True))
    await anext(stream)
    return stream
idle, other = AsyncEngine("toy"), AsyncEngine("toy:1")
kept = asyncio.run(main())
print("done")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, env=os.environ)
    assert (out.returncode, out.stdout, out.stderr) == (0, "done\n", "")


def test_what_it_is_opened_with() -> None:
    with pytest.raises(TypeError, match="drafer"):
        AsyncEngine("toy", drafer="lookup")
    for value in (-1, 1.5, True):
        with pytest.raises(InvalidParams, match="max_waiting"):
            AsyncEngine("toy", max_waiting=value)  # type: ignore[arg-type]
    llm = LLM("toy")
    with pytest.raises(InvalidParams, match="max_seqs cannot be chosen"):
        AsyncEngine(llm, max_seqs=2)
    stream = llm.stream("abc", LONG)
    with pytest.raises(InvalidParams, match="requests in flight"):
        AsyncEngine(llm)
    stream.close()

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(InvalidInput, match="closed"):
                llm.generate("abc", SHORT)
            llm.close()
            assert (await engine.generate("abc", SHORT)).outputs[0].token_ids == solo("abc", SHORT)
            with pytest.raises(InvalidParams, match="is closed"):
                AsyncEngine(llm)

    run(main())


def test_the_errors_are_one_family() -> None:
    for kind in (EngineFull, EngineClosed, EngineDead):
        assert issubclass(kind, EngineError)
        assert issubclass(kind, PacelineError)
