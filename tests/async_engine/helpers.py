"""The AsyncEngine tests' common ground: gated and faulty toy backends, event loops in threads, readers."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from paceline import LLM, AsyncEngine, PacelineError, RequestOutput, SamplingParams, StreamChunk
from paceline.async_engine import AsyncStream
from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter

T = TypeVar("T")
SHORT = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, seed=3, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=4000, seed=3, ignore_eos=True)
HANG = 60


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


class Slow:
    """The backend's tokenizer from here on: waits until go_on is set, at each text or at one.

    texts: those it was asked for. reached: it waits.
    """

    def __init__(self, backend: ToyBackend, *, at: str | None = None) -> None:
        self.texts: list[str] = []
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._encode, self._at = backend.tokenizer.encode, at
        backend.tokenizer.encode = self.encode  # type: ignore[method-assign]

    def encode(self, text: str, **options: Any) -> list[int]:
        self.texts.append(text)
        if self._at in (None, text):
            self.reached.set()
            assert self.go_on.wait(HANG)
        return self._encode(text, **options)


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
