"""The end of an AsyncEngine: closing, draining, giving up, and the interpreter's exit."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from paceline import LLM, AsyncEngine, PacelineError
from paceline.backend.toy import ToyBackend
from paceline.errors import EngineClosed, EngineDead, EngineError, EngineFull, InvalidInput, InvalidParams

from .helpers import (
    ENDLESS,
    HANG,
    LONG,
    SHORT,
    Gated,
    Slow,
    error_of,
    in_thread,
    in_threads,
    run,
    solo,
    ticks,
)


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
        with pytest.raises(EngineDead, match=r"^a step of toy.* has not ended within 0\.01 s"):
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


def test_a_drain_after_a_plain_close_drains_nothing() -> None:
    """Who closed was promised an end after the current step; another one's wish must not undo it."""
    backend = Gated()

    async def main() -> None:
        engine = AsyncEngine(backend)
        task = asyncio.create_task(engine.generate("abc", SHORT))
        await in_thread(backend.inside)
        closing = [asyncio.create_task(engine.close(drain=drain)) for drain in (False, True)]
        await ticks(2)  # both wishes are there when the step ends
        backend.open()
        await asyncio.gather(*closing)
        assert isinstance(error_of(await task), EngineClosed)
        assert backend.forwards == 1

    run(main())


def test_closing_waits_for_no_prompt_in_front_of_the_tokenizer() -> None:
    """Only for the one it is busy with, which may need the model; and readers do not even wait for that."""
    backend = ToyBackend()
    slow = Slow(backend)

    async def main() -> None:
        engine = AsyncEngine(backend)
        tasks = [asyncio.create_task(engine.generate(str(i), SHORT)) for i in range(20)]
        await in_thread(slow.reached)
        closing = asyncio.create_task(engine.close())
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineClosed)
        assert not closing.done()
        slow.go_on.set()
        await closing
        assert slow.texts == ["0"]

    run(main())


@pytest.mark.parametrize("what", ["a tokenizer call", "freeing the memory"])
def test_giving_up_names_what_has_not_ended(what: str) -> None:
    """Blaming a step would send whoever looks for the hang to the wrong place."""
    backend = ToyBackend()
    slow = Slow(backend)
    engine = AsyncEngine(backend)

    def free() -> None:
        assert slow.go_on.wait(HANG)

    async def main() -> None:
        task = None
        if what == "a tokenizer call":
            task = asyncio.create_task(engine.generate("abc", SHORT))
            await in_thread(slow.reached)
        else:
            engine._thread._owned.close = free  # type: ignore[method-assign]
        with pytest.raises(EngineDead, match=rf"^{what} of toy.* has not ended within 0\.2 s"):
            await engine.close(timeout=0.2)
        if task is not None:
            with pytest.raises(EngineClosed):
                await task
        slow.go_on.set()
        await engine.close()

    run(main())


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
            with pytest.raises(InvalidInput, match="handed over"):
                llm.generate("abc", SHORT)
            llm.close()
            assert (await engine.generate("abc", SHORT)).outputs[0].token_ids == solo("abc", SHORT)
            with pytest.raises(InvalidParams, match="was handed over"):
                AsyncEngine(llm)

    run(main())


def test_the_errors_are_one_family() -> None:
    for kind in (EngineFull, EngineClosed, EngineDead):
        assert issubclass(kind, EngineError)
        assert issubclass(kind, PacelineError)
