"""Backpressure of AsyncEngine: who is refused, who waits in line, and what never waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline import AsyncEngine, StreamChunk
from paceline.backend.toy import ToyBackend
from paceline.errors import EngineClosed, EngineFull

from .helpers import (
    ENDLESS,
    LONG,
    SHORT,
    Gated,
    Slow,
    assert_nothing_held,
    in_thread,
    read,
    run,
    solo,
    ticks,
    tokenised,
    tokens_of,
)


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

    async def main() -> None:
        engine = AsyncEngine(backend, max_waiting=1)
        running = engine.stream("abc", LONG)
        await running.start()
        slow = Slow(backend, at="slow")
        left, kept = (asyncio.create_task(engine.generate("slow", SHORT)) for _ in range(2))
        await in_thread(slow.reached)
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
        slow.go_on.set()
        with pytest.raises(EngineClosed):
            await kept
        await closing
        assert backend.slots_in_use == 0

    run(main())


def test_a_prompt_whose_reader_has_left_is_not_tokenised() -> None:
    """Otherwise whoever comes next waits behind work that nobody wants."""
    backend = ToyBackend()

    async def main() -> None:
        async with AsyncEngine(backend) as engine:
            slow = Slow(backend)
            first = asyncio.create_task(engine.generate("abc", SHORT))
            await in_thread(slow.reached)
            left = [asyncio.create_task(engine.generate("left", SHORT)) for _ in range(5)]
            last = asyncio.create_task(engine.generate("xyz", SHORT))
            await ticks(2)
            for task in left:
                task.cancel()
            await asyncio.wait(left)
            await engine.check()
            slow.go_on.set()
            assert (await first).outputs[0].token_ids == solo("abc", SHORT)
            assert (await last).outputs[0].token_ids == solo("xyz", SHORT)
            assert slow.texts == ["abc", "xyz"]
            await assert_nothing_held(engine)

    run(main())
