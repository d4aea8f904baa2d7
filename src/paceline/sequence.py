"""One request while it runs: its committed tokens and all that must move with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from .errors import BadLogits, PacelineError
from .sampling import TokenCounts, distribution
from .text import TextStream
from .types import (
    CompletionOutput,
    Distribution,
    FinishReason,
    Request,
    RequestOutput,
    SpeculationStats,
    StreamChunk,
    TokenKind,
    Verdict,
)


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of one request. `commit` is the only writer of its tokens.

    tokens: prompt + output, all decided. limit: most tokens it may ever hold. cached: tokens whose KV the
    target holds; tokens[cached:] is what the next forward starts with. slot: -1 where it has none.
    introduced: whether the drafter knows it. num_cached_tokens: what was cached already when it first got a slot;
    None before. slot and cached are the scheduler's to write when it is moved, the engine's within a step.
    """

    request: Request
    prompt: str | None
    limit: int
    stop_ids: frozenset[int]
    stream: TextStream
    tokens: list[int] = field(init=False)
    counts: TokenCounts | None = field(init=False)
    slot: int = -1
    cached: int = 0
    introduced: bool = False
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    kinds: list[TokenKind] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)  # draft position of accepted tokens, else -1
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: PacelineError | None = None
    _released: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.counts = TokenCounts(self.request.prompt_ids) if self.request.params.has_penalties else None

    @property
    def uncached(self) -> int:
        """Committed tokens the next forward must start with; 1 when it is ready to decode."""
        return len(self.tokens) - self.cached

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    def commit(self, verdict: Verdict, drafted: int) -> list[int]:
        """Take over a step's verdict, up to the first thing that ends the request; return what was taken.

        Tokens, counts, text and statistics move here, token by token, exactly as if each had been
        generated alone. Order of the checks: stop id, stop string, length.
        """
        self.stats.steps += 1
        self.stats.drafted += drafted
        _grow(self.stats.drafted_at, drafted)
        for i in range(drafted):
            self.stats.drafted_at[i] += 1
        taken: list[int] = []
        for i, token in enumerate(verdict.tokens):
            accepted = i < verdict.num_accepted
            self.tokens.append(token)
            self.kinds.append("accepted" if accepted else verdict.kind)
            self.draft_positions.append(i if accepted else -1)
            if self.counts is not None:
                self.counts.add([token])
            taken.append(token)
            if self._ends_at(token):
                break
        return taken

    def _ends_at(self, token: int) -> bool:
        params = self.request.params
        if token in self.stop_ids:
            if params.include_stop_str_in_output:
                self.stream.push(token)
            self.finish("stop", stop_reason=token)
        elif self.stream.push(token):
            self.finish("stop", stop_reason=self.stream.stop_string)
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
        """End the request; counters are cut to what its text covers."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
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

    def chunk(self) -> StreamChunk:
        """What became final since the last chunk."""
        pieces = tuple((text, self.kinds[i]) for text, i in self.stream.release())
        done = self.finish_reason is not None
        end = self._num_kept() if done else self.stream.num_released
        output = self.tokens[len(self.request.prompt_ids) :]
        final, self._released = tuple(output[self._released : end]), end
        return StreamChunk(
            request_id=self.request.request_id,
            text="".join(text for text, _ in pieces),
            token_ids=final,
            pieces=pieces,
            finish_reason=self.finish_reason,
            output=self.output() if done else None,
        )

    def output(self) -> RequestOutput:
        """The result; call it once the request has finished."""
        assert self.finish_reason is not None
        kept = self._num_kept()
        start = len(self.request.prompt_ids)
        completion = CompletionOutput(
            index=0,
            text=self.stream.text,
            token_ids=tuple(self.tokens[start : start + kept]),
            kinds=tuple(self.kinds[:kept]),
            finish_reason=self.finish_reason,
            seed=self.request.seed,
            verification=self.request.verification,
            stop_reason=self.stop_reason,
            error=self.error,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_ids,
            outputs=[completion],
            speculation=self.stats,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.num_preemptions,
        )


class TargetRows:
    """The target's p for one step, row by row and only when asked.

    Row i is the distribution after the committed tokens and the first i drafts: its penalties count them.
    """

    def __init__(self, sequence: Sequence, drafts: tuple[int, ...], logits: NDArray[Any]) -> None:
        self._sequence, self._drafts, self._logits = sequence, drafts, logits

    def __len__(self) -> int:
        return len(self._drafts) + 1

    def __getitem__(self, i: int) -> Distribution:
        sequence = self._sequence
        if i and self._drafts[i - 1] in sequence.stop_ids:
            # Whatever is drawn behind a draft that ends the request is cut at commit: any row will do, and the
            # model's own must not be able to fail.
            return Distribution.one_hot(0, self._logits.shape[-1])
        counts = sequence.counts
        try:
            return distribution(
                self._logits[i],
                sequence.request.params,
                counts.with_drafts(self._drafts[:i]) if counts is not None else None,
            )
        except BadLogits as bad:
            raise BadLogits(
                f"request {sequence.request.request_id}, position {len(sequence.tokens) + i}: {bad}"
            ) from None


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
