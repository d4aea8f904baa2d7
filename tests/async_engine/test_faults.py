"""Faults in an AsyncEngine: who hears of them, who goes on, and when the engine is dead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from paceline import AsyncEngine, PacelineError, SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter
from paceline.errors import (
    BackendError,
    BadLogits,
    DrafterError,
    EngineDead,
    InvalidInput,
    InvalidParams,
    InvalidPrompt,
    InvariantError,
    UnsupportedOption,
)
from paceline.types import DraftContext, Proposal

from .helpers import (
    ENDLESS,
    HANG,
    LONG,
    SHORT,
    Faulty,
    assert_nothing_held,
    error_of,
    read,
    run,
    solo,
    ticks,
    tokenised,
    tokens_of,
)


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
        nonsense: Any = "nonsense"
        answers = super().propose(contexts, budgets)
        return [nonsense if c.tokens[0] == 0 else a for c, a in zip(contexts, answers, strict=True)]


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


def test_releases_that_always_fail_end_requests_one_by_one() -> None:
    """Each with a typed error, those that find no slot any more too; no one hangs, closing works."""
    backend = Faulty(max_seqs=1)

    def broken(_: int = 0) -> None:
        raise RuntimeError("boom")

    backend.before_release = broken

    async def main() -> None:
        engine = AsyncEngine(backend, max_waiting=4)
        outputs = await asyncio.gather(*[engine.generate("abc", SHORT, wait=True) for _ in range(5)])
        faults = [error_of(output) for output in outputs]
        assert all(isinstance(fault, BackendError) for fault in faults)
        assert "RuntimeError: boom" in str(faults[0])
        assert "slots are in use" in str(faults[-1])
        await engine.close()
        assert not engine._thread.thread.is_alive()

    run(main())


def test_an_engine_that_cannot_be_put_right_is_dead_and_says_so() -> None:
    """To those in it, in line and being tokenised, and to everybody later; no one hangs, closing works."""
    backend = Faulty(max_seqs=1)
    going = threading.Event()

    def broken(_: int = 0) -> None:
        assert going.wait(HANG)
        raise RuntimeError("boom")

    def unbalanced() -> None:
        raise InvariantError("a slot is free twice")

    backend.before_forward = broken
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
                (
                    "abc",
                    SamplingParams(grammar={"json_schema": {"uniqueItems": True}}),
                    UnsupportedOption,
                    "uniqueItems",
                ),
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
