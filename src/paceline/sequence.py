"""One sample while it runs: its committed tokens and all that must move with them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from .errors import BadLogits, InvariantError, PacelineError, ProcessorError
from .sampling import History, cloned, processed_logprobs, raw_logprobs, run_processors
from .text import TextStream
from .types import (
    CompletionOutput,
    Distribution,
    FinishReason,
    Logprob,
    Logprobs,
    Request,
    RequestOutput,
    SpeculationStats,
    StreamChunk,
    TokenKind,
    Verdict,
)


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one request, in order, whether they wait, run or are over."""

    prompt: str | None
    members: list[Sequence] = field(default_factory=list)

    def output(self) -> RequestOutput | None:
        """The whole request's result, once the last chunk of every sample was made."""
        if not all(member.is_delivered for member in self.members):
            return None
        first = self.members[0]
        scored = first.request.params.prompt_logprobs is not None and first.prompt_is_scored
        return RequestOutput(
            request_id=first.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.request.prompt_ids,
            outputs=[member.completion() for member in self.members],
            speculation=SpeculationStats.sum(member.stats for member in self.members),
            num_cached_tokens=first.num_cached_tokens or 0,
            num_preemptions=sum(member.num_preemptions for member in self.members),
            prompt_logprobs=tuple(first.prompt_logprobs) if scored else None,
        )


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one sample. `commit` is the only writer of its tokens.

    tokens: prompt + output, all decided. limit: most tokens it may ever hold. cached: tokens whose KV the
    target holds; tokens[cached:] is what the next forward starts with. slot: -1 where it has none.
    history: what makes p of its logits. processors: the user's, with their state behind the committed tokens.
    token_bytes: `Tokenizer.token_bytes`. group: its request's samples.
    introduced: whether the drafter knows it. num_cached_tokens: what was cached already when it first got a slot;
    None before. slot and cached are the scheduler's to write when it is moved, the engine's within a step.
    logprobs: one for each output token. prompt_logprobs: one for each prompt token scored so far, where asked for.
    """

    request: Request
    limit: int
    end_ids: frozenset[int]
    stream: TextStream
    tokens: list[int]
    history: History
    processors: tuple[Callable[..., Any], ...]
    token_bytes: Callable[[int], bytes]
    group: Group
    slot: int = -1
    cached: int = 0
    introduced: bool = False
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    kinds: list[TokenKind] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)  # draft position of accepted tokens, else -1
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: PacelineError | None = None
    is_delivered: bool = False
    _released: int = 0

    @property
    def uncached(self) -> int:
        """Committed tokens the next forward must start with; 1 when it is ready to decode."""
        return len(self.tokens) - self.cached

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    # --- the prompt ---------------------------------------------------------------------------------

    @property
    def shared(self) -> int:
        """How many cached tokens all samples of the request have in common: the prompt but its last token."""
        return len(self.request.prompt_ids) - 1

    @property
    def siblings(self) -> Seq[Sequence]:
        """The samples of its request, itself among them."""
        return self.group.members

    @property
    def shareable(self) -> Seq[int]:
        """Tokens whose keys and values may come from somebody else; none while the prompt's rows are wanted."""
        return self.tokens if self.prompt_is_scored else ()

    @property
    def prompt_is_scored(self) -> bool:
        """Whether no more rows of the prompt are wanted. Sample 0 scores it for all."""
        asked = self.request.params.prompt_logprobs is not None and self.request.index == 0
        return not asked or len(self.prompt_logprobs) == len(self.request.prompt_ids)

    def prompt_rows(self, prefill: int) -> int:
        """How many of the rows behind the next `prefill` tokens are wanted, counted from the last."""
        if self.prompt_is_scored:
            return 0
        # Preempted in the middle of its prompt, it has scored more than it has cached.
        return max(0, self.cached + prefill - max(self.cached, len(self.prompt_logprobs) - 1))

    def score_prompt(self, logits: NDArray[Any]) -> None:
        """float[n, V]: the rows that prompt_rows() wanted, in order."""
        top = self.request.params.prompt_logprobs
        if top is None:
            return
        for row in logits:
            position = len(self.prompt_logprobs)
            try:
                entries = raw_logprobs(row, self.request.prompt_ids[position], top)
            except BadLogits as error:
                raise _located(error, self, position) from error
            self.prompt_logprobs.append(self._described(entries))

    # --- drafts -------------------------------------------------------------------------------------

    def is_over(self, drafts: Seq[int]) -> bool:
        """Whether `drafts`, were they committed, would end the sample."""
        return self.history.is_over(drafts) or self.stream.look_ahead(drafts) is not None

    def num_useful(self, drafts: Seq[int], *, sampled: bool) -> int:
        """How many of the drafts, from the first, are worth a row; see History."""
        useful = self.history.num_useful(drafts, sampled=sampled)
        return self.stream.look_ahead(drafts[:useful]) or useful

    # --- the output ---------------------------------------------------------------------------------

    def commit(self, verdict: Verdict, rows: TargetRows) -> list[int]:
        """Take over a step's verdict, up to the first thing that ends the sample; return what was taken.

        Tokens, history, processors, logprobs, text and statistics move here, token by token, exactly as if each had
        been generated alone. Order of the checks: stop id, stop string, grammar, length. Raises the error of a row
        that has one when its token is to be taken.
        """
        drafted = len(rows) - 1
        self.stats.steps += 1
        self.stats.drafted += drafted
        _grow(self.stats.drafted_at, drafted)
        for i in range(drafted):
            self.stats.drafted_at[i] += 1
        taken: list[int] = []
        for i, token in enumerate(verdict.tokens):
            rows.check(i)
            if self.request.params.logprobs is not None:
                self.logprobs.append(self._described(rows.logprobs(i, token)))
            self.processors = rows.processors_after(i)
            accepted = i < verdict.num_accepted
            self.tokens.append(token)
            self.kinds.append("accepted" if accepted else verdict.kind)
            self.draft_positions.append(i if accepted else -1)
            self.history.commit(token)
            taken.append(token)
            if self._ends_at(token):
                break
        return taken

    def _ends_at(self, token: int) -> bool:
        params = self.request.params
        if token in self.end_ids:
            if params.include_stop_str_in_output:
                self.stream.push(token, search=False)
            self.finish("stop", stop_reason=token)
        elif self.stream.push(token):
            self.finish("stop", stop_reason=self.stream.stop_string)
        elif self.history.is_over():
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")
        return self.finish_reason is not None

    def finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: PacelineError | None = None,
    ) -> None:
        """End the sample; counters are cut to what its text covers."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.error = _at_rest(error) if error is not None else None
        self.stream.finish()
        kept = self._num_kept()
        self.stats.emitted = kept
        positions = [i for i in self.draft_positions[:kept] if i >= 0]
        self.stats.accepted = len(positions)
        self.stats.accepted_at = [positions.count(i) for i in range(len(self.stats.drafted_at))]

    def _num_kept(self) -> int:
        """Output tokens that the result holds: those that cover the text, plus the stop id."""
        ended_by_id = isinstance(self.stop_reason, int)
        return self.num_output if ended_by_id else self.stream.num_tokens

    # --- what leaves --------------------------------------------------------------------------------

    def chunk(self) -> StreamChunk:
        """What became final since the last chunk; with the last one of all samples, the request's output."""
        pieces = tuple((text, self.kinds[i]) for text, i in self.stream.release())
        done = self.is_delivered = self.finish_reason is not None
        start, end = self._released, self._num_kept() if done else self.stream.num_released
        self._released = end
        return StreamChunk(
            request_id=self.request.first_id,
            text="".join(text for text, _ in pieces),
            token_ids=self._output_ids(start, end),
            pieces=pieces,
            finish_reason=self.finish_reason,
            output=self.group.output() if done else None,
            index=self.request.index,
            logprobs=self._output_logprobs(start, end),
        )

    def completion(self) -> CompletionOutput:
        """The result; call it once the sample has finished."""
        assert self.finish_reason is not None
        kept = self._num_kept()
        return CompletionOutput(
            index=self.request.index,
            text=self.stream.text,
            token_ids=self._output_ids(0, kept),
            kinds=tuple(self.kinds[:kept]),
            finish_reason=self.finish_reason,
            seed=self.request.seed,
            verification=self.request.verification,
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=self._output_logprobs(0, kept),
        )

    def _output_ids(self, start: int, end: int) -> tuple[int, ...]:
        first = len(self.request.prompt_ids)
        return tuple(self.tokens[first + start : first + end])

    def _output_logprobs(self, start: int, end: int) -> tuple[Logprobs, ...] | None:
        return None if self.request.params.logprobs is None else tuple(self.logprobs[start:end])

    def _described(self, entries: list[tuple[int, float, int]]) -> Logprobs:
        return {
            token: Logprob(logprob, rank, self.token_bytes(token).decode("utf-8", "replace"))
            for token, logprob, rank in entries
        }


class TargetRows:
    """The target's p for one step, row by row, only when asked, and once.

    Row i is the distribution after the committed tokens and the first i drafts, by every option of the request.
    A row that cannot be had does not raise here, where the rule may look at rows whose tokens are never taken: any
    distribution stands in for it, which leaves the law of the tokens before it as it is, and check() raises when its
    token is to be taken.
    """

    def __init__(self, sequence: Sequence, drafts: tuple[int, ...], logits: NDArray[Any]) -> None:
        self._sequence, self._drafts, self._logits = sequence, drafts, logits
        self._rows: dict[int, Distribution] = {}
        self._errors: dict[int, PacelineError] = {}
        self._processors: dict[int, tuple[Callable[..., Any], ...]] = {}  # their state after row i

    def __len__(self) -> int:
        return len(self._drafts) + 1

    def __getitem__(self, i: int) -> Distribution:
        if i not in self._rows:
            try:
                self._rows[i] = self._row(i)
            except (BadLogits, ProcessorError) as error:
                known = error is self._errors.get(i - 1)
                self._errors[i] = error if known else _located(error, self._sequence, len(self._sequence.tokens) + i)
                self._rows[i] = Distribution.one_hot(0, self._logits.shape[-1])
        return self._rows[i]

    def check(self, i: int) -> None:
        """Raise what went wrong with row i, whose token is to be taken."""
        if i not in self._rows:
            raise InvariantError(f"a token was taken from row {i}, which no rule asked for")
        if i in self._errors:
            raise self._errors[i]

    def processors_after(self, i: int) -> tuple[Callable[..., Any], ...]:
        """The user's processors in the state they have once row i's token is taken."""
        return self._processors.get(i, self._sequence.processors)

    def logprobs(self, i: int, token: int) -> list[tuple[int, float, int]]:
        """(token, logprob, rank) for `token`, taken from row i, and the likeliest tokens there."""
        params = self._sequence.request.params
        assert params.logprobs is not None
        if params.logprobs_mode == "raw_logprobs":
            return raw_logprobs(self._logits[i], token, params.logprobs)
        return processed_logprobs(self[i], token, params.logprobs)

    def _row(self, i: int) -> Distribution:
        drafts = self._drafts[:i]
        if i and i == len(self._drafts) and self._sequence.is_over(drafts):
            # Only the last draft can end the sample; what is drawn behind it is cut at commit, and any row will do.
            return Distribution.one_hot(0, self._logits.shape[-1])
        return self._sequence.history.distribution(self._processed(i), drafts, borrow=True)  # rows live for a step

    def _processed(self, i: int) -> NDArray[Any]:
        """Row i of the logits after the user's processors, which see every row before it first."""
        row: NDArray[Any] = self._logits[i]
        if self._sequence.processors:
            if i:
                self[i - 1]
                self.check(i - 1)
            self._processors[i] = cloned(self.processors_after(i - 1))
            tokens = (*self._sequence.tokens, *self._drafts[:i])
            row = run_processors(self._processors[i], tokens, row)
        return row


def _located(error: PacelineError, sequence: Sequence, position: int) -> PacelineError:
    """The error with its place in front, and its cause behind it."""
    located = type(error)(f"request {sequence.request.request_id}, position {position}: {error}")
    located.__cause__ = error.__cause__
    return located


def _at_rest(error: PacelineError) -> PacelineError:
    """The error without tracebacks, whose frames would keep streams and steps alive; the cause's becomes a note."""
    cause = error.__cause__
    if cause is not None and cause.__traceback__ is not None and not isinstance(cause, PacelineError):
        error.add_note("".join(traceback.format_exception(cause)))
    seen: BaseException | None = error
    known: set[int] = set()  # a user's error may be its own cause
    while seen is not None and id(seen) not in known:
        known.add(id(seen))
        seen.__traceback__ = None
        seen.__context__, seen = None, seen.__cause__
    return error


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
