"""The nouns of Paceline, and the protocols between its folders.

Glossary (one word per thing, in code, docs and messages):

target, drafter      the model that decides; whatever guesses
p, q                 target / draft distribution of the next token, *after* every sampling transform
proposal             what a drafter offers for one request in one step: a chain or a tree of tokens
point proposal       chosen without a distribution to answer for (n-gram, greedy); its q is one-hot
sampled proposal     tokens really drawn from q, which travels with them
accepted             a draft that was kept
recovered            the token drawn at the first rejection
bonus                the token drawn after all drafts were kept
step                 one target forward pass with its verification
emitted              tokens a step hands to the user: accepted + 1, unless a stop cuts it
tokens per step      mean emitted, bonus and recovered included
acceptance rate      accepted / drafted
position             absolute index of a token in the sequence (prompt + output)
committed            tokens that are decided and will never change
cached               tokens whose keys and values a backend holds; committed - 1 after a step
slot                 a sequence's place in a backend's KV memory
page                 a fixed number of tokens' keys and values; a slot is a list of pages
published            pages of committed tokens that other sequences with the same beginning may share
sample               one of the n outputs of a request, each with a seed of its own; the engine runs them as sequences
constraint           what makes tokens illegal: a grammar, allowed ids, bad words, min_tokens
forced               of tokens: the only one that a grammar leaves
end id               ends a sample when it is emitted: the model's stop ids unless ignore_eos, and stop_token_ids
preempted            running, then put back in the queue because memory ran out; computed anew later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidDistribution, PacelineError
from .outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Logprobs,
    RequestOutput,
    Score,
    SpeculationStats,
    StreamChunk,
    TokenKind,
)
from .params import SamplingParams, Verification
from .proposal import FORCED, NOTHING, Proposal, Verdict

__all__ = [
    "FORCED",
    "NOTHING",
    "Backend",
    "BackendInfo",
    "CompletionOutput",
    "Distribution",
    "DraftContext",
    "Drafter",
    "Draws",
    "FinishReason",
    "Logprob",
    "Logprobs",
    "Proposal",
    "Request",
    "RequestOutput",
    "Role",
    "RowHistory",
    "SamplingParams",
    "Score",
    "Segment",
    "SpeculationStats",
    "StreamChunk",
    "TokenKind",
    "Tokenizer",
    "Verdict",
    "Verification",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Role(IntEnum):
    """What a draw is for; part of its random key, so that no two purposes share noise."""

    TARGET = 0
    """Plain, bonus, point and coupled draws, and a drafter's draws under coupled."""
    DRAFT = 1
    """A drafter's own draws."""
    ACCEPT = 2
    """The uniform that decides whether a draft is kept."""
    RECOVER = 3
    """The token drawn from a residual."""


@dataclass(frozen=True, eq=False, slots=True)
class Distribution:
    """Probabilities of the next token: dense (``ids is None``) or sparse.

    probs: float64[V] when dense, float64[n] when sparse; non-negative, sums to 1 up to rounding.
    ids: None, or int64[n] strictly ascending token ids; every other token has probability 0.
    vocab_size: V.
    """

    probs: FloatArray
    vocab_size: int
    ids: IntArray | None = None

    @classmethod
    def one_hot(cls, token: int, vocab_size: int) -> Distribution:
        """All mass on `token`; the distribution of greedy decoding."""
        return cls(np.ones(1), vocab_size, np.array([token], dtype=np.int64))

    @classmethod
    def of(cls, row: Distribution | Sequence[float] | NDArray[Any]) -> Distribution:
        """`row` itself if it is a Distribution, else a dense one around float64[V]."""
        if isinstance(row, Distribution):
            return row
        probs = np.asarray(row, dtype=np.float64)
        if probs.ndim != 1 or probs.size == 0:
            raise InvalidDistribution(f"a distribution needs one non-empty axis, got shape {probs.shape}")
        return cls(probs, int(probs.size))

    def prob(self, token: int) -> float:
        """Probability of one token; 0.0 outside the support."""
        if self.ids is None:
            return float(self.probs[token])
        i = int(np.searchsorted(self.ids, token))
        return float(self.probs[i]) if i < self.ids.size and self.ids[i] == token else 0.0

    def pick(self, draws: Draws, position: int, role: Role, node: int = 0) -> int:
        """One token drawn from it, by `draws.pick`."""
        return draws.pick(self.probs, position, role, ids=self.ids, node=node)

    def at(self, ids: IntArray | None) -> FloatArray:
        """Probabilities at `ids` (None: at every token, float64[V]). May be a view: do not write."""
        if self.ids is None:
            return self.probs if ids is None else self.probs[ids]
        if ids is None:
            dense = np.zeros(self.vocab_size)
            dense[self.ids] = self.probs
            return dense
        i = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return np.where(self.ids[i] == ids, self.probs[i], 0.0)

    def dense(self) -> FloatArray:
        """float64[V]. May be a view: do not write."""
        return self.at(None)


class Draws(Protocol):
    """All randomness of drafting and verification. Keyed, never consumed by order."""

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        """True with that probability; strictly u < probability, so 0 never accepts and 1 always does."""
        ...

    def pick(
        self,
        weights: FloatArray,
        position: int,
        role: Role,
        *,
        ids: IntArray | None = None,
        node: int = 0,
    ) -> int:
        """Draw a *token id* with probability proportional to `weights` (>= 0, any positive sum).

        ids: the token of each weight when the distribution is sparse; noise belongs to the token, not to
        the array index. node: tells apart draws that share a position and a role.
        """
        ...


# --- requests ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `seed` and `verification` are resolved, so that a replay can repeat them.

    request_id: unique among all samples; the caller knows them by that of sample 0, first_id. index: which sample.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    verification: Literal["rejection", "block", "coupled"]
    index: int = 0

    @property
    def first_id(self) -> int:
        """request_id of sample 0."""
        return self.request_id - self.index


# --- backends ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend is and can do; checked when the engine is built.

    stop_ids: ids that end a generation, from the model file. max_len: tokens one sequence may hold.
    kv_tokens: tokens all slots together may hold. max_slots: sequences at once. max_step_tokens: tokens
    in one forward. can_truncate: False for models that cannot roll back (speculation is then off, and
    `no_speculation_reason` says why). can_tree: whether segments may be trees. page_size: tokens per page;
    1 where memory is not paged. fingerprint: what the time of a forward depends on, of this model and the way it was
    opened; None where that is not known.
    """

    name: str
    model: str
    vocab_size: int
    stop_ids: frozenset[int]
    max_len: int
    kv_tokens: int
    max_slots: int
    max_step_tokens: int
    can_truncate: bool = True
    no_speculation_reason: str | None = None
    can_tree: bool = False
    page_size: int = 1
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one slot in a packed ragged forward.

    tokens go to positions start, start + 1, ...; start must equal the slot's cached length.
    num_rows: logits wanted for the last num_rows tokens (0 while prefilling).
    parents: None for a chain; else token i continues token parents[i] of this segment, or the cached tokens
    where that is -1. Token i then stands at position start + its depth, and sees its ancestors only.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    num_rows: int
    parents: tuple[int, ...] | None = None


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. May be called from two threads: one tokenises while another steps an engine."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids. add_special: begin-of-sequence if the model has one; parse_special: <|x|> is one id."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text; b"" for control tokens. May be part of a character."""
        ...

    def token_text(self, token: int) -> bytes:
        """What names a token where vocabularies are compared; control tokens have one too."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, with the assistant's turn opened.

        Raises UnsupportedOption where the model has no chat template.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """Run a model on given tokens, return logits. Owns KV memory; knows nothing of drafts or sampling."""

    @property
    def info(self) -> BackendInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def acquire(self, tokens: Sequence[int] = ()) -> int:
        """A slot for a sequence that starts with `tokens`; it may hold some of them already.

        length() says how many: what was published of the same beginning, but never all of `tokens`, for
        somebody needs the row behind the last one. Raises BackendError where no slot is free.
        """
        ...

    def length(self, slot: int) -> int:
        """Tokens cached in `slot`."""
        ...

    def reserve(self, slot: int, length: int) -> bool:
        """Set memory aside so that `slot` can grow to `length` tokens, drafts included.

        False where there is too little; nothing has changed then. What is set aside stays so until
        truncate(), keep() or release(). Forwards within it never lack memory.
        """
        ...

    def forward(self, batch: Sequence[Segment]) -> list[NDArray[Any]]:
        """Cache every segment's tokens; return float[num_rows, V] logits for each segment.

        Reserves what was not reserved. The arrays may be views that the next forward overwrites. Raises
        BackendError naming slot and size for a segment that does not start at the cached length, a token
        outside the vocabulary, a batch over max_step_tokens, or too little memory; nothing is cached then.
        """
        ...

    def commit(self, slot: int, length: int) -> None:
        """The first `length` cached tokens are committed: full pages of them may be published."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens. Succeeds or raises RollbackError; never does less."""
        ...

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """After a tree: keep the first `length` tokens and, behind them, those `nodes` further on.

        nodes: ascending offsets from `length`, a path from the cached tokens downwards; everything else is
        forgotten. Succeeds or raises RollbackError. Only where info.can_tree.
        """
        ...

    def fork(self, slot: int) -> int:
        """A new slot that holds the same tokens. What `slot` had reserved may be given back: reserve again."""
        ...

    def release(self, slot: int) -> None:
        """Give the slot back, whatever its state."""
        ...

    def check(self) -> None:
        """Raise InvariantError where the backend's books do not balance."""
        ...

    def close(self) -> None:
        """Free the model. Idempotent."""
        ...


# --- drafters ---------------------------------------------------------------------------------------


class RowHistory(Protocol):
    """What makes p of logits for one request: its options, and the tokens before the row."""

    def distribution(self, logits: Any, drafts: Sequence[int] = ()) -> Distribution:
        """Float[V] -> the distribution behind the committed tokens and `drafts`, by all options but logits_processors.

        Raises NoLegalToken where nothing may follow `drafts`; BadLogits, InvalidInput as `sampling.distribution`.
        """
        ...

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens, each the only one that the grammar leaves; () where it leaves a choice."""
        ...


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know of one request at the start of a step.

    tokens: the committed tokens, prompt and output (a live view: do not keep or write). prompt_length: how
    many of them are prompt. draws and role: what to draw with (TARGET when the request is verified
    coupled, else DRAFT): draft i is draws.pick(q_i, len(tokens) + i, role, node=i).
    history: the road from a drafter's logits to its q. start: forced drafts; a proposal begins
    with them and they count towards its budget.
    """

    request_id: int
    tokens: Sequence[int]
    prompt_length: int
    params: SamplingParams
    draws: Draws
    role: Role
    history: RowHistory
    start: tuple[int, ...] = ()


@runtime_checkable
class Drafter(Protocol):
    """Whatever guesses. Its memory is its own, written through observe() and release() only."""

    name: str

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """At most budgets[i] tokens for contexts[i]; an empty proposal is always allowed.

        An exception *in the list* ends that request alone; one that is raised ends all that were asked.
        """
        ...

    def observe(self, request_id: int, committed: Sequence[int], hidden: NDArray[Any] | None = None) -> None:
        """Newly committed tokens: first all there are (the prompt; after a preemption the output too), then each
        step's block."""
        ...

    def release(self, request_id: int) -> None:
        """Forget the request, which is over or was preempted; unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free what the drafter owns. Idempotent."""
        ...
