"""What a request gives back. Importable from `paceline.types`, with all other nouns."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    token_ids: the shortest committed prefix that covers `text`, plus the stop id if one ended it.
    kinds: accepted | recovered | bonus for each token of token_ids.
    finish_reason: "stop" | "length" | "cancelled" | "error"; with "error", `error` holds the exception.
    stop_reason: the stop id or stop string that ended it, else None.
    seed, verification: a replay needs both (for block also equal draft lengths).
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
    logprobs: None = None


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt. prompt is None when token ids were given.

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


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step released to the reader of a stream; text is always whole characters.

    pieces: `text` cut into (text, kind of the token it came from). token_ids: tokens that became final.
    finish_reason and output are set on the last chunk only.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[tuple[str, TokenKind], ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
