"""The loop. Read this first.

    schedule -> propose -> score -> distribution -> verify -> commit -> emit

Plain decoding is the same loop with empty proposals: "any drafter has the distribution of no drafter" is
the test that defines the project.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter

import numpy as np

from .admission import admit_proposal, admit_request
from .draft import DEFAULT_DRAFT_LENGTH, AutoDrafter, GuardedDrafter, NoDrafter
from .errors import BackendError, DrafterError, InvalidParams, InvariantError, PacelineError
from .params import SamplingParams, integer
from .rng import KeyedDraws
from .sampling import CompiledGrammar, GrammarCompiler
from .schedule import MAX_DRAFTS, Candidate, Controller, FixedLengths, Scheduler, Turn, parts
from .sequence import Sequence, TargetRows
from .types import FORCED, NOTHING, Backend, DraftContext, Drafter, Draws, Proposal, Role, Segment, StreamChunk, Verdict
from .verify import verify_block, verify_point, verify_rejection

LOGITS_BYTES = 1 << 28
"""Memory cap for the logits of one forward, at 8 bytes each; a step that needs more takes several forwards."""


@dataclass(eq=False, slots=True)
class Work:
    """One request's part of the step that is being made."""

    sequence: Sequence
    turn: Turn
    draws: Draws
    candidate: Candidate | None = None
    proposal: Proposal = NOTHING
    logits: np.ndarray | None = None

    @property
    def share(self) -> tuple[int, int]:
        """New tokens in the forward, and those cached before them."""
        return len(self.proposal) + 1 if self.turn.decode else self.turn.prefill, self.sequence.cached

    @property
    def num_rows(self) -> int:
        """Rows of logits it needs."""
        return len(self.proposal) + 1 if self.turn.decode else self.sequence.prompt_rows(self.turn.prefill)


class Engine:
    """Runs requests on one backend with one drafter, up to max_seqs at once, first come first served.

    draft_length: drafts per step where a request does not say; None leaves it to `controller`, which decides anew in
    every step. make_draws(seed, step_start): the source of all randomness; tests put an enumerator there.
    Not thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        drafter: Drafter,
        *,
        max_seqs: int | None = None,
        draft_length: int | None = None,
        controller: Controller | None = None,
        make_draws: Callable[[int, int], Draws] = KeyedDraws,
    ) -> None:
        info = backend.info
        self.backend, self.drafter, self.make_draws = backend, GuardedDrafter(drafter), make_draws
        self.stages = [GuardedDrafter(s) for s in (drafter.stages if isinstance(drafter, AutoDrafter) else (drafter,))]
        self.max_seqs = integer("max_seqs", info.max_slots if max_seqs is None else max_seqs, 1)
        self.controller = FixedLengths() if controller is None or draft_length is not None else controller
        most = DEFAULT_DRAFT_LENGTH if controller is None else MAX_DRAFTS
        self.draft_length = integer("draft_length", most if draft_length is None else draft_length, 0)
        if not 1 <= self.max_seqs <= info.max_slots:
            raise InvalidParams(f"max_seqs = {max_seqs!r}; allowed: 1 to {info.max_slots} on {info.model}")
        if info.max_step_tokens < 2 * self.max_seqs:
            raise InvalidParams(
                f"max_seqs = {self.max_seqs}; allowed: at most half of max_step_tokens = {info.max_step_tokens}"
            )
        self.max_rows = max(1, LOGITS_BYTES // (8 * info.vocab_size))
        self.grammars = GrammarCompiler(backend.tokenizer, info.stop_ids)
        self._scheduler: Scheduler[Sequence] = Scheduler(backend, self.max_seqs)
        self._next_id = 0
        self._emit_seconds = 0.0  # of the last step

    @property
    def is_adaptive(self) -> bool:
        """Whether draft lengths are decided in every step, where a request does not say."""
        return isinstance(self.controller, Controller)

    @property
    def waiting(self) -> deque[Sequence]:
        """Requests that hold no memory, in order of arrival."""
        return self._scheduler.waiting

    @property
    def running(self) -> list[Sequence]:
        """Requests that hold a slot, in order of arrival; all of them came before those that wait."""
        return self._scheduler.running

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return bool(self.waiting or self.running)

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> int:
        """Queue a request, all its samples; its id. What cannot be honoured is refused here, by name.

        grammar: that of params, where `grammars` compiled it before.
        """
        samples = admit_request(self.backend, self.grammars, self._next_id, prompt_ids, params, prompt, grammar)
        self._next_id += len(samples)
        for sequence in samples:
            self._scheduler.add(sequence)
        return samples[0].request.request_id

    def cancel(self, request_id: int) -> list[StreamChunk]:
        """End a request now and free all it holds: the last chunk of each sample that was not over."""
        chosen = [s for s in [*self.waiting, *self.running] if s.request.first_id == request_id]
        for sequence in chosen:
            sequence.finish("cancelled")
        return [self._emit(sequence) for sequence in chosen]

    def fail(self, error: PacelineError) -> list[StreamChunk]:
        """End every request with `error`, whatever state a step was left in; the engine is as new afterwards."""
        everybody = [*self.running, *self.waiting]
        for sequence in everybody:
            if sequence.finish_reason is None:
                sequence.finish("error", error=error)
        return [self._emit(sequence) for sequence in everybody]

    def check(self) -> None:
        """Raise InvariantError where the books of engine and backend disagree. Between steps only."""
        self.backend.check()
        for s in self.running:
            held = self.backend.length(s.slot)
            if held != s.cached or s.uncached < 1 or len(s.tokens) >= s.limit:
                raise InvariantError(
                    f"request {s.request.request_id}: {s.cached} tokens of {len(s.tokens)} on the books "
                    f"(at most {s.limit}), {held} in slot {s.slot}"
                )

    def step(self) -> list[StreamChunk]:
        """One target forward for everybody who has a turn; what each of them released.

        A fault of one request ends that request alone, with the typed error in its output. A drafter that
        fails as a whole, or a forward that fails, ends the requests it was made for. Any other exception is
        a bug of a backend or of ours; fail() puts the engine right again.
        """
        t0 = perf_counter()
        work = [
            Work(sequence, self._narrowed(sequence, turn), self.make_draws(sequence.request.seed, len(sequence.tokens)))
            for sequence, turn in self._scheduler.schedule(self._drafts_wanted)
        ]
        self._introduce()
        t1 = perf_counter()
        self._draft([w for w in work if w.sequence.finish_reason is None])
        t2 = perf_counter()
        forward_seconds = 0.0
        shares: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # of those that decode, and of the others
        able = [w for w in work if w.sequence.finish_reason is None]
        for part in parts([w.num_rows for w in able], self.max_rows):
            start = perf_counter()
            self._score(able[part])
            forward_seconds += perf_counter() - start
            for w in able[part]:
                if w.logits is not None:
                    shares[w.turn.decode].append(w.share)
                self._verify_and_commit(w)
        t3 = perf_counter()
        self.controller.observe_forward(shares[True], shares[False], forward_seconds)
        # Before they are emitted, for the last chunk takes the books along; emitting is the next step's time.
        other_seconds = t1 - t0 + self._emit_seconds
        self.controller.observe_step(t3 - t2 - forward_seconds + other_seconds)
        # Samples of one request share a step: its time is booked once, on the last that decodes, where one does.
        for w in {w.sequence.group: w for w in sorted(work, key=lambda w: w.turn.decode)}.values():
            stats = w.sequence.stats
            if w.turn.decode:
                stats.draft_seconds += t2 - t1
                stats.forward_seconds += forward_seconds
                stats.verify_seconds += t3 - t2 - forward_seconds
                stats.other_seconds += other_seconds
            else:
                stats.prefill_seconds += t3 - t0
        decoded = {w.sequence.request.request_id for w in work if w.turn.decode}
        everybody = [*self.running, *self.waiting]
        chunks = [self._emit(s) for s in everybody if s.finish_reason or s.request.request_id in decoded]
        self._emit_seconds = perf_counter() - t3
        return chunks

    # --- the stages, in the order of the loop -------------------------------------------------------

    def _introduce(self) -> None:
        """The drafter learns who runs, and forgets whoever was preempted: they stand in front of the queue."""
        for sequence in takewhile(lambda s: s.introduced, self.waiting):
            sequence.introduced = False
            try:
                self._release_drafter(sequence)
            except PacelineError as error:
                sequence.finish("error", error=error)
        for sequence in self.running:
            if not sequence.introduced:
                sequence.introduced = True
                try:
                    self.drafter.observe(sequence.request.request_id, sequence.tokens)
                except PacelineError as error:
                    sequence.finish("error", error=error)

    def _drafts_wanted(self, sequence: Sequence) -> int:
        """A step emits up to drafts + 1 tokens; more than the request may still hold is wasted."""
        if not self.backend.info.can_truncate or isinstance(self.drafter.inner, NoDrafter):
            return 0
        asked = sequence.request.params.draft_length
        room = min(sequence.limit - len(sequence.tokens), self.max_rows) - 1
        return min(self.draft_length if asked is None else asked, room)

    def _narrowed(self, sequence: Sequence, turn: Turn) -> Turn:
        """A prompt whose rows are wanted is read in chunks of at most max_rows."""
        too_many = not turn.decode and sequence.prompt_rows(turn.prefill) > self.max_rows
        return Turn(prefill=self.max_rows) if too_many else turn

    def _draft(self, work: list[Work]) -> None:
        """Ask for as many drafts as seem worth it, and keep as many of them as are."""
        others = [w.share for w in work if not w.turn.decode]
        decoding = [w for w in work if w.turn.decode]
        if type(self.controller) is FixedLengths and not any(w.turn.drafts for w in decoding):
            return
        for w in decoding:
            request, params = w.sequence.request, w.sequence.request.params
            w.candidate = Candidate(request.request_id, w.share, w.turn.drafts, params.draft_length is not None)
            w.candidate.has_grammar, w.candidate.greedy = params.grammar is not None, params.temperature == 0.0
        candidates = [w.candidate for w in decoding if w.candidate is not None]
        for stage in self.stages:
            name = stage.inner.name.removeprefix(f"{FORCED}+")
            budgets = self.controller.budgets(name, candidates, others)
            start = perf_counter()
            self._propose(stage, [(w, budget) for w, budget in zip(decoding, budgets, strict=True) if budget])
            for one, w in zip(candidates, decoding, strict=True):
                if w.proposal is not one.proposal:
                    one.proposal, one.drafter = w.proposal, name
            self.controller.observe_drafting(name, candidates, budgets, perf_counter() - start)
        for w, length in zip(decoding, self.controller.lengths(candidates, others), strict=True):
            w.proposal = w.proposal.first(length)

    def _propose(self, drafter: GuardedDrafter, work: list[tuple[Work, int]]) -> None:
        """What one drafter has for them; who gets nothing keeps what another had."""
        work = [(w, budget) for w, budget in work if w.sequence.finish_reason is None]
        if not work:
            return
        contexts = [
            DraftContext(
                request_id=w.sequence.request.request_id,
                tokens=w.sequence.tokens,
                prompt_length=len(w.sequence.request.prompt_ids),
                params=w.sequence.request.params,
                draws=w.draws,
                role=Role.TARGET if w.sequence.request.verification == "coupled" else Role.DRAFT,
                history=w.sequence.history,
            )
            for w, _ in work
        ]
        answers = drafter.propose(contexts, [budget for _, budget in work])
        for (w, budget), answer in zip(work, answers, strict=True):
            try:
                who = f"drafter {drafter.inner.name}, request {w.sequence.request.request_id}"
                proposal = admit_proposal(answer, who, budget, self.backend.info.vocab_size, w.sequence)
                w.proposal = proposal if len(proposal) else w.proposal
            except PacelineError as error:
                w.sequence.finish("error", error=error)
            except Exception as error:
                fault = DrafterError(f"{who}: a malformed proposal ({type(error).__name__}: {error})")
                w.sequence.finish("error", error=fault)

    def _score(self, work: list[Work]) -> None:
        batch = []
        for w in work:
            s, drafts = w.sequence, w.proposal.tokens
            new = (s.tokens[-1], *drafts) if w.turn.decode else s.tokens[s.cached : s.cached + w.turn.prefill]
            batch.append(Segment(s.slot, tuple(new), s.cached, w.num_rows))
        try:
            rows = self.backend.forward(batch)
            shapes = [getattr(r, "shape", None) for r in rows]
            asked = [(s.num_rows, self.backend.info.vocab_size) for s in batch]
            if any(a[0] and a != shape for a, shape in zip(asked, shapes, strict=True)):
                raise BackendError(f"{self.backend.info.model} returned rows of shape {shapes}, asked was {asked}")
            for w, logits in zip(work, rows, strict=True):
                w.logits = logits
        except PacelineError as error:
            for w in work:
                w.sequence.finish("error", error=error)

    def _verify_and_commit(self, w: Work) -> None:
        """Tokens, KV and the drafter's memory move together, or the request ends."""
        sequence = w.sequence
        if w.logits is None:
            return  # the forward failed
        try:
            if not w.turn.decode:
                sequence.score_prompt(w.logits)
                sequence.cached += w.turn.prefill
            else:
                position = len(sequence.tokens)
                rows = TargetRows(sequence, w.proposal.tokens, w.logits)
                verdict = self._verify(w, rows)
                taken = sequence.commit(verdict, rows)
                if w.candidate is not None:
                    self.controller.observe(w.candidate, position, taken, verdict.num_accepted, len(w.proposal))
                sequence.cached = len(sequence.tokens) - 1
                if sequence.finish_reason is None:
                    self.backend.truncate(sequence.slot, sequence.cached)
                    self.drafter.observe(sequence.request.request_id, taken)
            self.backend.commit(sequence.slot, sequence.cached)
        except PacelineError as error:
            sequence.finish("error", error=error)
        finally:
            w.logits = None  # the rows of one forward at a time, see LOGITS_BYTES

    def _verify(self, w: Work, rows: TargetRows) -> Verdict:
        """The rule follows the kind of the proposal and the request's choice, never the drafter's name."""
        verification = w.sequence.request.verification
        if w.proposal.kind == "point" or verification == "coupled":
            rule = verify_point
        else:
            rule = verify_block if verification == "block" else verify_rejection
        return rule(rows, w.proposal, w.draws, len(w.sequence.tokens))

    def _emit(self, sequence: Sequence) -> StreamChunk:
        """What became final; whoever is finished gives everything back."""
        if sequence.finish_reason is not None:
            try:
                try:
                    self._scheduler.remove(sequence)
                finally:  # both are given back whatever the other does
                    self._release_drafter(sequence)
            except PacelineError as error:
                sequence.finish("error", error=error)
            except Exception as error:
                fault = BackendError(f"releasing slot and memory failed with {type(error).__name__}: {error}")
                sequence.finish("error", error=fault)
        return sequence.chunk()

    def _release_drafter(self, sequence: Sequence) -> None:
        self.controller.forget(sequence.request.request_id)
        self.drafter.release(sequence.request.request_id)
