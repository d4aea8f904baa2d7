"""Leaving an AsyncEngine: however a reader goes, its request gives everything back and no other notices."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest

from paceline import AsyncEngine, SamplingParams
from paceline.async_engine import AsyncStream
from paceline.backend.toy import ToyBackend
from paceline.errors import EngineClosed, InvalidInput

from .helpers import (
    ENDLESS,
    HANG,
    LONG,
    SHORT,
    Faulty,
    Gated,
    assert_nothing_held,
    in_thread,
    in_threads,
    read,
    run,
    solo,
    ticks,
    tokens_of,
)


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
