"""AsyncEngine: the face for servers. Requests from any thread and any asyncio event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from .engine_thread import END, EngineThread, Ticket
from .errors import EngineClosed, InvalidInput, InvalidParams, InvariantError, PacelineError
from .llm import LLM, Message, Prompt, spread
from .params import SamplingParams, integer
from .types import Backend, RequestOutput, StreamChunk


class AsyncEngine:
    """Serves one model to any number of threads and event loops; a thread of its own steps the engine.

    Every call that waits is a coroutine. A thread without an event loop brings one: asyncio.run(engine.generate(...)).

    model, options: as in LLM; or an open LLM, which belongs to the AsyncEngine from then on and refuses calls of
    its own. Opening blocks, so a running event loop wants `await asyncio.to_thread(AsyncEngine, ...)`.
    max_waiting: requests that may be in flight beyond the max_seqs that may run.

    What is wrong with a request before it starts is raised: InvalidInput, UnsupportedOption, EngineFull,
    EngineClosed, EngineDead. A fault while it runs ends it alone, with finish_reason "error" and the typed error
    in its output. If a step breaks off (a bug of a backend or of ours), everybody who was in the engine ends so;
    those still in line and new ones go on. Only if the books cannot be put right is the engine dead, and says so.
    """

    def __init__(self, model: str | Path | Backend | LLM, *, max_waiting: int = 256, **options: Any) -> None:
        max_waiting = integer("max_waiting", max_waiting, 0)
        if isinstance(model, LLM) and options:
            raise InvalidParams(f"{next(iter(options))} cannot be chosen for an LLM, which is open already")
        llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._thread = EngineThread(llm, max_waiting)
        # Whoever forgets close(): the thread ends with the last reference, and frees the model.
        weakref.finalize(self, self._thread.stop).atexit = False

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._thread.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in flight that hold none: being tokenised, in line, or preempted."""
        return max(0, self._thread.num_in_flight - self._thread.num_running)

    def stream(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None, *, wait: bool = False
    ) -> AsyncStream:
        """What each step releases, for one prompt or one conversation: `async for chunk in engine.stream(...)`.

        Nothing happens before the first `await`. wait: where the engine is full, wait in line, first come first
        served, instead of EngineFull at once.
        """
        return AsyncStream(self, prompt, spread(params, 1)[0], wait=wait)

    async def generate(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None, *, wait: bool = False
    ) -> RequestOutput:
        """The whole output of one prompt or one conversation. Cancelling the task cancels the request."""
        async with AsyncStream(self, prompt, spread(params, 1)[0], wait=wait, whole=True) as stream:
            async for chunk in stream:
                if chunk.output is not None:
                    return chunk.output
        raise InvariantError(f"request {stream.request_id} ended without an output")

    def cancel(self, request_id: int) -> None:
        """End a request before the next step: its stream gets a last chunk, "cancelled". Unknown ids are ignored.

        From any thread; does not wait.
        """
        self._thread.post(partial(self._thread.cancel, request_id))

    async def check(self) -> None:
        """Raise InvariantError where the engine's books do not balance; looks between two steps.

        Whatever was cancelled before has been freed then.
        """
        await asyncio.wrap_future(self._thread.call(self._thread.check))

    async def close(self, *, drain: bool = False, timeout: float = 30.0) -> None:
        """Take no more requests, end those in flight with EngineClosed, stop the thread, free the model. Idempotent.

        drain: let those in flight finish first, those in line included, for at most `timeout` seconds; after a plain
        close() it drains nothing. The step and the tokenizer call that are under way end in any case; if that takes
        more than `timeout` seconds, the thread is given up, and everybody in flight gets EngineDead, as does the
        caller. Prompts that wait to be tokenised are not waited for.
        """
        thread = self._thread
        thread.refuse(EngineClosed, f"the engine of {thread.model} was closed")
        thread.stop(drain=drain)
        if drain and not await thread.has_ended(timeout):
            thread.stop()
        if not await thread.has_ended(timeout):
            raise thread.give_up(f"{thread.doing} of {thread.model} has not ended within {timeout:g} s of close()")
        thread.thread.join()
        thread.ended.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream(AsyncIterator[StreamChunk]):
    """The chunks of one request, for one reader at a time, in one event loop.

    The last chunk carries finish_reason and the whole output. The request is cancelled, and all it holds freed, by
    aclose(), by cancelling the task that waits for a chunk (also with a timeout), or by dropping the stream. A slow
    reader stops nobody: chunks wait in a mailbox, at most one for each token.
    """

    _engine: AsyncEngine | None = None  # None: over

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: Prompt | Seq[Message],
        params: SamplingParams,
        *,
        wait: bool,
        whole: bool = False,
    ) -> None:
        self.request_id: int | None = None
        self._asked: Callable[[asyncio.AbstractEventLoop], Ticket] | None = partial(Ticket, prompt, params, whole)
        self._wait, self._reading = wait, False
        self._ticket: Ticket | None = None
        self._engine = engine

    async def start(self) -> int:
        """Wait until the request is in the engine; its id. What is wrong with the request is raised here.

        Optional: the first chunk waits for it too. A server calls it to know the status before it answers.
        """
        if self.request_id is None:
            if self._asked is not None and self._engine is not None:
                ticket = self._asked(asyncio.get_running_loop())
                self._engine._thread.submit(ticket, wait=self._wait)
                self._ticket, self._asked = ticket, None
            letter = await self._next_letter()
            if letter is END:
                raise EngineClosed("this stream was closed before its request began")
            self.request_id = cast(int, letter)
        return self.request_id

    async def __anext__(self) -> StreamChunk:
        if self._engine is None:
            raise StopAsyncIteration
        await self.start()
        letter = await self._next_letter()
        if letter is END:
            raise StopAsyncIteration
        chunk = cast(StreamChunk, letter)
        if chunk.output is not None:
            self._engine = None
        return chunk

    async def aclose(self) -> None:
        """Cancel the request unless it is over. Idempotent; whoever waits for a chunk gets the end."""
        engine = self._engine
        self._leave()
        if engine is not None and self._ticket is not None and self._reading:
            engine._thread.send(self._ticket.loop, [(self._ticket, END)])

    async def _next_letter(self) -> Any:
        if self._engine is None or self._ticket is None:
            return END
        if self._reading or asyncio.get_running_loop() is not self._ticket.loop:
            raise InvalidInput(f"request {self.request_id} has a reader; allowed: one task, in one event loop")
        self._reading = True
        try:
            letter = await self._ticket.mail.get()
        except BaseException:
            self._leave()
            raise
        finally:
            self._reading = False
        if isinstance(letter, PacelineError):
            self._engine = None
            raise letter
        return letter

    def _leave(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._ticket is not None:
            engine._thread.post(partial(engine._thread.leave, self._ticket))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()
