"""Tokens of AsyncEngine: each reader gets its own, in order, once, whatever the company."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline import LLM, AsyncEngine, SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.errors import EngineFull

from .helpers import SHORT, Gated, assert_nothing_held, in_threads, read, run, solo, ticks, tokens_of


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


def test_plain_threads_bring_an_event_loop_for_each_call() -> None:
    """As serving.md says: also the second loop of a thread, and the engine lives on when a loop is gone."""
    engine = AsyncEngine("toy")

    async def show(prompt: str) -> tuple[int, ...]:
        return tokens_of(await read(engine.stream(prompt, SHORT)))

    def ask(prompt: str) -> None:
        for _ in range(3):
            assert asyncio.run(engine.generate(prompt, SHORT)).outputs[0].token_ids == solo(prompt, SHORT)
            assert asyncio.run(show(prompt)) == solo(prompt, SHORT)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ["abc", "xyz", "hello", "abab"])) == [None] * 4
    asyncio.run(assert_nothing_held(engine))
    asyncio.run(engine.close())


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
