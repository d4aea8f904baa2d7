"""The thread that steps an engine for many threads and event loops; AsyncEngine is its face.

    event loops  --submit-->  tokenizer thread  --command-->  engine thread  --letters-->  event loops

The engine thread alone touches the engine, the line of accepted requests, and who is in the engine. Everybody
else sends it commands, which it carries out between steps; so nothing but the books of who is in flight needs
a lock. Putting a command into a SimpleQueue is safe wherever a garbage collector may run.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Literal

from .errors import BackendError, EngineClosed, EngineDead, EngineError, EngineFull, InvariantError, PacelineError
from .llm import LLM, Message, Prompt
from .params import SamplingParams
from .sampling import CompiledGrammar
from .types import StreamChunk

END: Final = object()
"""The letter to a reader who still waits when his stream is closed."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way. All but the mailbox belongs to the engine thread once it is submitted.

    prompt: what was asked; ids, text, grammar: what became of it. whole: the reader wants the last chunk only.
    over: its reader has left, or has been told how it ended.
    loop, mail: the reader's event loop, and its letters: the request id, then chunks; or an error; or END.
    """

    prompt: Prompt | Seq[Message]
    params: SamplingParams
    whole: bool
    loop: asyncio.AbstractEventLoop
    mail: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    text: str | None = None
    ids: Seq[int] = ()
    grammar: CompiledGrammar | None = None
    request_id: int | None = None
    over: bool = False


class EngineThread:
    """The engine thread, and the tokenizer thread in front of it.

    Tokenising has one thread of its own: a long prompt stops neither an event loop nor a step, and prompts keep their
    order.
    """

    def __init__(self, llm: LLM, max_waiting: int) -> None:
        self.llm, self.engine, self.model = llm, llm.engine, llm.backend.info.model
        self._owned = llm.hand_over()
        self.max_waiting = max_waiting
        self.capacity = llm.engine.max_seqs + max_waiting
        self.commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        self._lock = threading.Lock()
        self._in_flight: set[Ticket] = set()  # under the lock, as is:
        self._refusal: tuple[type[EngineError], str] | None = None
        self._line: deque[Ticket] = deque()
        self._entered: dict[int, Ticket] = {}
        self._stopping: Literal["no", "drain", "now"] = "no"
        self.doing = "a step"  # what whoever waits for the end may be waiting for
        self._tokenizer = ThreadPoolExecutor(1, "paceline-tokenizer")
        self._tokenizer.submit(int)  # start its thread now, so that submit() never has to
        # A daemon, so that an engine nobody closed does not keep the interpreter from exiting; see _stop_all.
        self.thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self.thread.start()
        _threads.add(self)
        # Last registered, first called: before whatever the model's libraries do when the interpreter exits.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)

    # --- from any thread ----------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests that were taken and are not over."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot; in the middle of a step a snapshot. None once the thread has ended."""
        return len({sequence.request.first_id for sequence in list(self.engine.running)})

    def post(self, command: Callable[[], object]) -> None:
        """Have the engine thread do something between steps."""
        self.commands.put(command)

    def call(self, work: Callable[[], None]) -> Future[None]:
        """post(), with what became of it. Raises where nobody is there to do it."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def command() -> None:
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        with self._lock:
            self._raise_refusal()
            self.post(command)
        return future

    def submit(self, ticket: Ticket, *, wait: bool) -> None:
        """Take a request, in order of the calls. Raises EngineFull, EngineClosed, EngineDead."""
        with self._lock:
            self._raise_refusal()
            if len(self._in_flight) >= self.capacity and not wait:
                raise EngineFull(
                    f"{len(self._in_flight)} requests are in flight; allowed: max_seqs + max_waiting = "
                    f"{self.engine.max_seqs} + {self.max_waiting}; try again later, or ask with wait=True"
                )
            self._tokenizer.submit(self._encode, ticket)
            self._in_flight.add(ticket)

    def refuse(self, kind: type[EngineError], why: str) -> None:
        """From now on nothing is taken; an earlier reason stands."""
        with self._lock:
            self._refusal = self._refusal or (kind, why)

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            kind, why = self._refusal
            raise kind(f"{why}; open a new one")

    def send(self, loop: asyncio.AbstractEventLoop, letters: list[tuple[Ticket, object]]) -> None:
        """Put each letter into its mailbox; all of them are read in `loop`."""
        try:
            loop.call_soon_threadsafe(_put, letters)
        except Exception:  # a closed loop; its readers are gone
            for ticket, _ in letters:
                self.post(partial(self.leave, ticket))

    def stop(self, *, drain: bool = False) -> None:
        """Have the thread end; takes no lock, for a garbage collector calls it."""
        self.post(partial(self._stop, "drain" if drain else "now"))

    async def has_ended(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the thread to end."""
        await asyncio.wait([asyncio.wrap_future(self.ended)], timeout=timeout)
        return self.ended.done()

    def give_up(self, why: str) -> EngineDead:
        """The thread does not answer: tell everybody in its place."""
        with self._lock:
            self._refusal = (EngineDead, why)
            tickets = list(self._in_flight)
        for ticket in tickets:
            self.send(ticket.loop, [(ticket, EngineDead(why))])
        return EngineDead(why)

    # --- the tokenizer thread -----------------------------------------------------------------------

    def _encode(self, ticket: Ticket) -> None:
        if ticket.over:  # nobody waits for it, others may wait behind it
            return
        prompt, ticket.prompt = ticket.prompt, ()  # nobody else needs it
        try:
            ticket.text, ticket.ids = self.llm.encode(prompt)
            if ticket.params.grammar is not None:
                # It may take a second, which no step should wait for.
                ticket.grammar = self.engine.grammars.compile(ticket.params.grammar)
        except BaseException as error:
            self.post(partial(self._finish, ticket, _typed(error, "tokenising the prompt")))
        else:
            self.post(partial(self._line_up, ticket))

    # --- commands -----------------------------------------------------------------------------------

    def _stop(self, how: Literal["drain", "now"]) -> None:
        if self._stopping != "now":  # who was promised an end now does not wait for a drain
            self._stopping = how

    def _line_up(self, ticket: Ticket) -> None:
        if not ticket.over:  # its reader may have left meanwhile
            self._line.append(ticket)

    def cancel(self, request_id: int) -> None:
        """End a request that is in the engine; its reader is told."""
        if request_id in self._entered:
            self._deliver(self.engine.cancel(request_id))

    def leave(self, ticket: Ticket) -> None:
        """The reader is gone: forget the request wherever it is."""
        if ticket.request_id in self._entered:
            self.engine.cancel(ticket.request_id)
        with suppress(ValueError):
            self._line.remove(ticket)
        self._finish(ticket)

    def check(self) -> None:
        """The engine's books, and ours."""
        self.engine.check()
        known = {s.request.first_id for s in [*self.engine.running, *self.engine.waiting]}
        if known != set(self._entered):
            raise InvariantError(f"requests {sorted(known)} are in the engine, {sorted(self._entered)} on the books")

    # --- the engine thread --------------------------------------------------------------------------

    def _run(self) -> None:
        kind: type[EngineError] = EngineClosed
        why = f"the engine of {self.model} was closed while the request was in flight"
        cause: BaseException | None = None
        try:
            while not self._shall_end():
                try:
                    self._turn()
                except BaseException as error:
                    self._recover(error)
            self._deliver(self.engine.fail(EngineClosed(why)))
        except BaseException as error:
            kind, cause = EngineDead, error
            why = f"the engine of {self.model} broke down for good ({type(error).__name__}: {error})"
        self._bury(kind, why, cause)

    def _shall_end(self) -> bool:
        return self._stopping == "now" or (self._stopping == "drain" and not self._in_flight)

    def _turn(self) -> None:
        """Carry out commands, let requests in, and make a step; sleeps while there is nothing to do."""
        if not self.engine.has_work and not self._line:
            self.commands.get()()
        for _ in range(self.commands.qsize()):
            self.commands.get()()
        if self._shall_end():
            return
        self._let_in()
        if self.engine.has_work:
            self._deliver(self.engine.step())
        if self._entered and not self.engine.has_work:
            raise InvariantError(f"requests {sorted(self._entered)} are no longer in the engine")

    def _let_in(self) -> None:
        while self._line and len(self._entered) < self.capacity:
            ticket = self._line.popleft()
            try:
                ticket.request_id = self.engine.add(
                    ticket.ids, ticket.params, prompt=ticket.text, grammar=ticket.grammar
                )
            except Exception as error:
                self._finish(ticket, _typed(error, "adding the request"))
                continue
            self._entered[ticket.request_id] = ticket
            self.send(ticket.loop, [(ticket, ticket.request_id)])

    def _deliver(self, chunks: Seq[StreamChunk]) -> None:
        """Chunks to their readers, with one call for each event loop."""
        mail: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, object]]] = {}
        for chunk in chunks:
            ticket = self._entered.get(chunk.request_id)
            if ticket is None:
                continue
            if chunk.output is not None:
                self._finish(ticket)
            if chunk.output is not None or not ticket.whole or ticket.loop.is_closed():
                mail.setdefault(ticket.loop, []).append((ticket, chunk))
        for loop, letters in mail.items():
            self.send(loop, letters)

    def _finish(self, ticket: Ticket, error: PacelineError | None = None) -> None:
        """Off the books; with `error`, the reader is told."""
        already, ticket.over = ticket.over, True
        if ticket.request_id is not None:
            self._entered.pop(ticket.request_id, None)
        with self._lock:
            self._in_flight.discard(ticket)
        if error is not None and not already:
            self.send(ticket.loop, [(ticket, error)])

    def _recover(self, error: BaseException) -> None:
        """A step was broken off. Whoever was in it ends; raises where the engine cannot be put right."""
        fault = BackendError(f"a step was broken off by {type(error).__name__}: {error}")
        fault.__cause__ = error
        self._deliver(self.engine.fail(fault))
        for ticket in list(self._entered.values()):  # whose last chunk went down with the step
            self._finish(ticket, fault)
        self.engine.check()

    def _bury(self, kind: type[EngineError], why: str, cause: BaseException | None) -> None:
        """The thread's last act: nobody is left waiting, the model is freed."""
        self.refuse(kind, why)
        for ticket in list(self._in_flight):
            error = kind(why)
            error.__cause__ = cause
            self._finish(ticket, error)
        self.doing = "a tokenizer call"
        self._tokenizer.shutdown()  # after the call under way, which may need the model; the others are over
        while not self.commands.empty():
            with suppress(BaseException):
                self.commands.get()()
        self.doing = "freeing the memory"
        try:
            self._owned.close()
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _stop_all() -> None:
    """Engines nobody closed end before the interpreter is taken down around them."""
    for one in list(_threads):
        one.stop()
    for one in list(_threads):
        one.thread.join(timeout=10)


def _put(letters: list[tuple[Ticket, object]]) -> None:
    for ticket, letter in letters:
        ticket.mail.put_nowait(letter)


def _typed(error: BaseException, doing: str) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    fault = BackendError(f"{doing} failed with {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
