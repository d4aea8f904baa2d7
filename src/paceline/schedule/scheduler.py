"""Who holds a slot, who waits, and who has to give memory back. The one writer of the queues.

Order of arrival holds throughout: whoever runs came before whoever waits, memory is handed out oldest first,
and where there is too little the *newest* running request is preempted: its slot is released, it waits in
front of all others, and what was cached is computed anew. So the oldest request is never preempted and gets
its turn in every step. That bounds every wait: with prefill chunks of c tokens, a request is over after at
most the sum of ceil(limit / c) + max_tokens steps over itself and all that arrived before it.

Samples of one request share their prompt's memory: the first to run computes it, the others wait until it is there
and fork. Where that sample is gone, or memory is too short for two, they enter like anybody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from ..errors import BackendError, PacelineError
from ..types import Backend, FinishReason
from .fcfs import Turn, plan


class Runnable(Protocol):
    """What the scheduler knows of a request. It writes slot, cached and the two numbers.

    tokens: committed; shareable: those of them whose memory may come from the prefix cache. siblings: those whose first
    `shared` tokens are the same, itself among them. cached: how many tokens the slot holds. slot: -1 while it waits.
    num_cached_tokens: what the first slot held at once; None before.
    """

    tokens: list[int]
    cached: int
    slot: int
    num_preemptions: int
    num_cached_tokens: int | None

    @property
    def uncached(self) -> int: ...

    @property
    def shareable(self) -> Sequence[int]: ...

    @property
    def shared(self) -> int: ...

    @property
    def siblings(self) -> Sequence[Self]: ...

    def finish(self, reason: FinishReason, *, error: PacelineError | None = None) -> None: ...


R = TypeVar("R", bound=Runnable)


class Scheduler(Generic[R]):
    """Queues and slots of one engine.

    waiting, running: in order of arrival; read only. backend: hands out slots and memory.
    max_seqs: most requests that run at once.
    """

    def __init__(self, backend: Backend, max_seqs: int) -> None:
        self.backend, self.max_seqs = backend, max_seqs
        self.waiting: deque[R] = deque()
        self.running: list[R] = []

    def add(self, request: R) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def schedule(self, drafts_wanted: Callable[[R], int]) -> list[tuple[R, Turn]]:
        """Everybody who has a turn in the next step, with memory set aside for it.

        drafts_wanted(request): how many drafts it may use; cut to what memory and max_step_tokens allow.
        A request that cannot ever run is finished with an error and stays in `running` for remove().
        """
        for request in list(self.running):
            self._make_room(request)
        self._fork_siblings(drafts_wanted)
        drafts = [self._room_for_drafts(request, drafts_wanted(request)) for request in self.running]
        drafts += self._admit(drafts_wanted)
        able = [(r, n) for r, n in zip(self.running, drafts, strict=True) if r.slot >= 0]
        turns = plan([(r.cached, r.uncached, n) for r, n in able], self.backend.info.max_step_tokens)
        return [(r, turn) for (r, _), turn in zip(able, turns, strict=True) if turn.decode or turn.prefill]

    def remove(self, request: R) -> None:
        """Take a request off the queues and release its slot. The request is off even where releasing raises."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self._release(request)

    # --- memory -------------------------------------------------------------------------------------

    def _make_room(self, request: R) -> None:
        """Memory for the token that a decoding request forwards next; preempts the newest until there is."""
        while request.slot >= 0 and request.uncached == 1:
            if self.backend.reserve(request.slot, len(request.tokens)):
                return
            self._preempt(next(r for r in reversed(self.running) if r.slot >= 0))

    def _room_for_drafts(self, request: R, wanted: int) -> int:
        """How many drafts fit into what is left; nobody is preempted for a guess."""
        if request.slot < 0 or request.uncached > 1:
            return 0
        fits = range(wanted, 0, -1)
        return next((n for n in fits if self.backend.reserve(request.slot, len(request.tokens) + n)), 0)

    def _preempt(self, request: R) -> None:
        try:
            self._release(request)
        except PacelineError as error:
            request.finish("error", error=error)
            return
        request.num_preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _fork_siblings(self, drafts_wanted: Callable[[R], int]) -> None:
        """Let the next waiting requests in whose shared beginning somebody holds."""
        while self.waiting and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            donor = next((s for s in request.siblings if s.slot >= 0 and s.cached >= request.shared > 0), None)
            if donor is None:
                return
            try:
                fits = self._fork(request, donor, len(request.tokens) + drafts_wanted(request))
            except PacelineError as error:
                fits = True
                request.finish("error", error=error)
            if not fits:
                return
            self.running.append(self.waiting.popleft())

    def _fork(self, request: R, donor: R, length: int) -> bool:
        """Give the request the donor's beginning and room for `length` tokens; False where memory is short for now."""
        if donor.cached > request.shared and not self.backend.info.can_truncate:
            return False
        request.slot = self.backend.fork(donor.slot)
        self.backend.truncate(request.slot, request.shared)
        request.cached = request.shared
        # Forking may have given back what the donor had set aside for its next token; the donor comes first.
        fits = self.backend.reserve(donor.slot, len(donor.tokens)) and self.backend.reserve(request.slot, length)
        if fits:
            self._entered(request)
        else:
            self._release(request)
            self.backend.reserve(donor.slot, len(donor.tokens))
        return fits

    def _admit(self, drafts_wanted: Callable[[R], int]) -> list[int]:
        """Let waiting requests in while there is memory for all their tokens and one step's drafts."""
        granted = []
        while self.waiting and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            if any(s.slot >= 0 and s.cached < request.shared for s in request.siblings):
                break  # it forks that one soon
            drafts = drafts_wanted(request)
            try:
                fits = self._enter(request, len(request.tokens) + drafts)
            except PacelineError as error:
                fits = True
                request.finish("error", error=error)
            if not fits:
                break
            self.running.append(self.waiting.popleft())
            granted.append(drafts)
        return granted

    def _enter(self, request: R, length: int) -> bool:
        """Give the request a slot with room for `length` tokens; False where memory is short for now."""
        request.slot = self.backend.acquire(request.shareable)
        request.cached = self.backend.length(request.slot)
        if self.backend.reserve(request.slot, length):
            self._entered(request)
            return True
        self._release(request)
        if self.running:
            return False
        info = self.backend.info
        raise BackendError(
            f"{info.model} has no memory for {length} tokens, though nobody else runs here: its {info.kv_tokens} "
            "are in use elsewhere"
        )

    def _entered(self, request: R) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.cached

    def _release(self, request: R) -> None:
        slot, request.slot, request.cached = request.slot, -1, 0
        if slot >= 0:
            self.backend.release(slot)
