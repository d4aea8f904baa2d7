"""What a request gives back. Importable from `paceline.types`, with all other nouns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Literal

from .errors import PacelineError

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenKind = Literal["accepted", "recovered", "bonus"]


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request. Counters follow the cut at a stop.

    steps: target forwards that verified something, the first included. drafted: drafts verified.
    accepted: drafts that were kept *and* emitted. emitted: tokens handed to the user (the stop id included).
    drafted_at[i], accepted_at[i]: the same by draft position i within a step.
    prefill_seconds: wall time of the steps in which this request was prefilling. The other *_seconds: wall
    time of the steps that verified it, by stage; steps are shared with whoever else ran.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Counters and times of several samples together. A step in which two of them were verified counts as two."""
        total = cls()
        for part in parts:
            for name in (f.name for f in fields(cls)):
                mine, theirs = getattr(total, name), getattr(part, name)
                if isinstance(mine, list):
                    setattr(total, name, [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)])
                else:
                    setattr(total, name, mine + theirs)
        return total

    @property
    def rejected(self) -> int:
        """drafted - accepted."""
        return self.drafted - self.accepted

    @property
    def tokens_per_step(self) -> float:
        """Mean emitted tokens per step, bonus and recovered included; 0.0 before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's place in a row.

    logprob: natural logarithm of its probability; -inf where that is 0. rank: 1 for the likeliest token; among equals
    the lower id is first. text: what the token reads as; U+FFFD stands for bytes that are part of a character.
    """

    logprob: float
    rank: int
    text: str


Logprobs = dict[int, Logprob]
"""Token id -> its place: the token that stands there first, then the likeliest ones, by rank."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    index: which of the request's n samples. token_ids: the shortest committed prefix that covers `text`, plus the stop
    id if one ended it.
    kinds: accepted | recovered | bonus for each token of token_ids.
    finish_reason: "stop" | "length" | "cancelled" | "error"; with "error", `error` holds the exception.
    stop_reason: the stop id or stop string that ended it; None where the grammar was complete, or nothing stopped it.
    seed, verification: a replay needs both (for block also equal draft lengths).
    logprobs: one for each token of token_ids where `SamplingParams.logprobs` asked for them, else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    finish_reason: FinishReason
    seed: int
    verification: str
    stop_reason: int | str | None = None
    error: PacelineError | None = None
    logprobs: tuple[Logprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' own logprobs; None where none were asked for."""
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for token, row in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt. prompt is None when token ids were given.

    outputs: one for each of the n samples, in order. speculation: what it did for all of them together.
    prompt_logprobs: one for each prompt token where `SamplingParams.prompt_logprobs` asked for them, the first None.
    num_cached_tokens: prompt tokens that were not computed because an earlier request's could be shared.
    num_preemptions: how often it had to give its memory back and was computed anew.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    speculation: SpeculationStats
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is, from `LLM.score`. logprobs: one for each of token_ids, natural logarithms."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Of the whole continuation: their sum."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step released to the reader of a stream; text is always whole characters.

    index: which of the request's n samples. pieces: `text` cut into (text, kind of the token it came from).
    token_ids: tokens that became final. logprobs: theirs, where they were asked for. finish_reason is set on a sample's
    last chunk, output on the last chunk of all.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[tuple[str, TokenKind], ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    index: int = 0
    logprobs: tuple[Logprobs, ...] | None = None
