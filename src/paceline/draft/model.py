"""A second, smaller model as drafter.

Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1:
drafts are sampled from the draft model's own q, and q travels with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadLogits, InvariantError, NoLegalToken, PacelineError, UnsupportedOption
from ..types import FORCED, Backend, Distribution, DraftContext, Proposal, Segment
from .vocabulary import check_same_vocabulary

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Drafts with any backend whose vocabulary is the target's.

    backend: the draft model; the drafter owns it and closes it. name: what outputs call the drafter.
    target: the target's backend; its vocabulary and stop ids are read here and it is not kept.

    Drafts are drawn from the draft model's q under all the request's own options, over the same history as the
    target's row (the context's `history`), and that very q goes along. At temperature 0 they are the argmax and
    the proposal is a point. Drafts that are settled already (the context's `start`) come first, with a one-hot q;
    a proposal of nothing else is a point too, and costs nothing. One forward per draft depth serves all requests
    that still draft; whoever has spent its budget, drafted a token that ends it, or finds no legal one, drops out.
    The draft model's row behind every draft is kept until the step is over: at most max_seqs x drafts x V logits, in
    the backend's dtype.

    KV memory: catch up, never patch. Each request has a slot and a list of what is cached there. A
    proposal first drops cached tokens that did not become the text, then forwards every committed token
    that is missing, be it one or a whole prompt, and drafts on. So there is nothing to repair after
    full acceptance, after steps without drafts, or after anything else.

    Where the vocabularies differ in length: ids that the draft model does not know have q = 0; a request
    whose text holds one cannot be read by the draft model, so nothing is drawn for it from then on.

    Raises UnsupportedOption for a draft model that cannot roll back, VocabularyMismatch.
    """

    def __init__(self, backend: Backend, name: str, target: Backend) -> None:
        info = backend.info
        if not info.can_truncate:
            reason = info.no_speculation_reason or "its memory cannot be rolled back"
            raise UnsupportedOption(
                f"drafter {name}: {info.model} cannot draft ({reason}), for rejected drafts must be forgotten"
            )
        check_same_vocabulary(target.tokenizer, backend.tokenizer)
        self.backend, self.name = backend, name
        self._vocab_size = target.info.vocab_size
        self._stop_ids = info.stop_ids | target.info.stop_ids
        self._memories: dict[int, _Memory] = {}
        self._unreadable: set[int] = set()

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """Up to budgets[i] drafts for contexts[i]; fewer where the draft model's own context ends, none but
        `start` where its KV memory is taken by the others.

        A bad row, or a failed forward or rollback, is an error in the list for those it concerns.
        """
        jobs = [self._job(c, b) for c, b in zip(contexts, budgets, strict=True)]
        for job in jobs:
            try:
                self._begin(job)
            except PacelineError as error:
                job.fail(error)
                self.release(job.context.request_id)
        while active := [job for job in jobs if job.answer is None]:
            self._advance(active)
        return [job.answer for job in jobs if job.answer is not None]

    def observe(self, request_id: int, committed: Sequence[int], hidden: NDArray[Any] | None = None) -> None:
        """Nothing to do: every context brings all committed tokens, and the next proposal catches up."""

    def release(self, request_id: int) -> None:
        """Forget the request and free its slot."""
        self._unreadable.discard(request_id)
        memory = self._memories.pop(request_id, None)
        if memory is not None:
            self.backend.release(memory.slot)

    def close(self) -> None:
        """Close the draft model."""
        self._memories.clear()
        self.backend.close()

    def check(self, contexts: Sequence[DraftContext] = ()) -> None:
        """Raise InvariantError where the books do not balance: slots, lengths, and for the given
        contexts that what is taken as committed is."""
        slots = [memory.slot for memory in self._memories.values()]
        if len(set(slots)) != len(slots):
            raise InvariantError(f"drafter {self.name}: two requests share a slot: {slots}")
        for request_id, memory in self._memories.items():
            held = self.backend.length(memory.slot)
            if held != len(memory.cached) or memory.agreed > held:
                raise InvariantError(
                    f"drafter {self.name}, request {request_id}: {len(memory.cached)} tokens on the books, "
                    f"{memory.agreed} of them committed, {held} in slot {memory.slot}"
                )
        for context in contexts:
            known = self._memories.get(context.request_id)
            if known and known.cached[: known.agreed] != list(context.tokens[: known.agreed]):
                raise InvariantError(
                    f"drafter {self.name}, request {context.request_id}: the first {known.agreed} cached "
                    "tokens are not the committed ones"
                )
        self.backend.check()

    # --- the stages of a proposal -------------------------------------------------------------------

    def _room(self, context: DraftContext) -> int:
        """Drafts that fit the draft model's context. The last draft is never forwarded: hence the 1."""
        return self.backend.info.max_len - len(context.tokens) + 1

    def _job(self, context: DraftContext, budget: int) -> _Job:
        start = context.start[:budget]
        q = [Distribution.one_hot(token, self._vocab_size) for token in start]
        return _Job(self.name, context, min(budget, self._room(context)), list(start), q)

    def _begin(self, job: _Job) -> None:
        """Bring the request's memory back to what is committed, or answer at once with what is settled."""
        context, n = job.context, job.num_committed
        if context.request_id in self._unreadable:
            job.finish()
            return
        if self._room(context) <= 0:
            self.release(context.request_id)  # others can use what it held
            job.finish()
            return
        if job.num_settled >= job.budget:
            job.finish()
            return
        memory = self._memories.get(context.request_id)
        if not self._readable(context.tokens[memory.agreed if memory else 0 :]):
            self.release(context.request_id)
            self._unreadable.add(context.request_id)
            job.finish()
            return
        if not self._readable(job.drafts):
            job.finish()
            return
        if memory is None:
            slot = self.backend.acquire(context.tokens)
            cached = list(context.tokens[: self.backend.length(slot)])
            memory = self._memories[context.request_id] = _Memory(slot, cached, len(cached))
        job.memory = memory
        self._rewind(memory, context)
        if not self.backend.reserve(memory.slot, n + job.budget - 1):
            self.release(context.request_id)
            job.finish()

    def _readable(self, tokens: Sequence[int]) -> bool:
        return all(token < self.backend.info.vocab_size for token in tokens)

    def _rewind(self, memory: _Memory, context: DraftContext) -> None:
        """Forget cached tokens from the first that was not committed, and at least the last committed
        one, for it is the one whose row is needed."""
        tokens, cached = context.tokens, memory.cached
        if memory.agreed > len(tokens):
            raise InvariantError(
                f"drafter {self.name}, request {context.request_id}: {len(tokens)} tokens are committed, "
                f"but {memory.agreed} were before; release() a request before starting it anew"
            )
        last = len(tokens) - 1
        keep = min(memory.agreed, last)
        while keep < min(len(cached), last) and cached[keep] == tokens[keep]:
            keep += 1
        if keep < len(cached):
            self.backend.truncate(memory.slot, keep)
            del cached[keep:]
        memory.agreed = keep
        self.backend.commit(memory.slot, keep)

    def _advance(self, active: Sequence[_Job]) -> None:
        """One forward, shared by as many as fit; those who need fewest tokens come first.
        A step waits for all of them: a long prompt that the draft model has not read yet delays the others once."""
        batch: list[tuple[_Job, Segment]] = []
        room = self.backend.info.max_step_tokens
        for job in sorted(active, key=lambda job: job.missing):
            if room > 0:
                segment = job.segment(room)
                room -= len(segment.tokens)
                batch.append((job, segment))
        try:
            rows = self.backend.forward([segment for _, segment in batch])
        except PacelineError as error:
            for job, _ in batch:
                job.fail(error)
                self.release(job.context.request_id)
            return
        for (job, segment), logits in zip(batch, rows, strict=True):
            memory = job.memory
            memory.cached.extend(segment.tokens)
            memory.agreed = min(len(memory.cached), job.num_committed)
            if segment.num_rows:
                self._draft(job, logits[-1])

    def _draft(self, job: _Job, logits: NDArray[Any]) -> None:
        """Draw one token from the row behind everything cached. float[V of the draft model] -> a draft."""
        context, node = job.context, len(job.drafts)
        position = job.num_committed + node
        try:
            q = context.history.distribution(self._fit(logits), job.drafts)
        except NoLegalToken:
            job.finish()  # the target may know one that this model does not; this depends on earlier drafts only
            return
        except BadLogits as bad:
            job.fail(BadLogits(f"drafter {self.name}, request {context.request_id}, position {position}: {bad}"))
            return
        except PacelineError as error:
            job.fail(error)
            return
        token = q.pick(context.draws, position, context.role, node)
        job.drafts.append(token)
        job.q.append(q)
        # A draft that ends the request is kept and nothing is drafted behind it. Dropping it instead
        # would make the length depend on the token itself, which is not exact.
        params = context.params
        ends = token in (params.stop_token_ids or ()) or (not params.ignore_eos and token in self._stop_ids)
        if ends or len(job.drafts) == job.budget:
            job.finish()

    def _fit(self, logits: NDArray[Any]) -> NDArray[Any]:
        """The row over the target's vocabulary: ids only the target has get probability 0."""
        shared = min(logits.size, self._vocab_size)
        if shared == self._vocab_size:
            return logits[:shared]
        row = np.full(self._vocab_size, -np.inf)
        row[:shared] = logits
        return row


@dataclass(slots=True)
class _Memory:
    """What the draft model holds of one request.

    cached: the tokens in the slot. agreed: how many of them, from the start, are known to be committed; they
    are never compared again.
    """

    slot: int
    cached: list[int] = field(default_factory=list)
    agreed: int = 0


@dataclass(slots=True)
class _Job:
    """One request within one propose(). answer is None while it still drafts.

    name: the drafter's. budget: drafts that may be in it, settled ones included; less than those where the draft
    model's context ends.
    drafts, q: in the beginning the settled ones, num_settled of them.
    """

    name: str
    context: DraftContext
    budget: int
    drafts: list[int]
    q: list[Distribution]
    memory: _Memory = field(init=False)
    num_committed: int = field(init=False)
    num_settled: int = field(init=False)
    answer: Proposal | PacelineError | None = None

    def __post_init__(self) -> None:
        self.num_committed = len(self.context.tokens)
        self.num_settled = len(self.drafts)

    @property
    def missing(self) -> int:
        """Tokens to forward before the next draft can be drawn."""
        return self.num_committed + len(self.drafts) - len(self.memory.cached)

    def segment(self, room: int) -> Segment:
        """The next at most `room` missing tokens; a row is wanted with the last of them."""
        start = len(self.memory.cached)
        stop = start + min(room, self.missing)
        committed = self.context.tokens[start : min(stop, self.num_committed)]
        drafts = self.drafts[max(0, start - self.num_committed) : max(0, stop - self.num_committed)]
        complete = stop == self.num_committed + len(self.drafts)
        return Segment(self.memory.slot, (*committed, *drafts), start, 1 if complete else 0)

    def finish(self) -> None:
        """Answer with the drafts so far."""
        greedy = self.context.params.temperature == 0.0
        sampled = len(self.drafts) > self.num_settled and not greedy
        sources = ((FORCED, self.num_settled), (self.name, len(self.drafts) - self.num_settled))
        if sampled:
            self.answer = Proposal.sampled(self.drafts, self.q, sources=sources)
        else:
            self.answer = Proposal.point(self.drafts, sources=sources)

    def fail(self, error: PacelineError) -> None:
        """Answer with an error, which ends this request alone."""
        self.answer = error
