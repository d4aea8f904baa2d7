"""A strict draft model, fixed draws and a tokenizer, for tests that need to see what a drafter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendError, InvariantError, PacelineError, RollbackError
from paceline.params import SamplingParams
from paceline.sampling import History
from paceline.types import BackendInfo, DraftContext, Proposal, Role, RowHistory, Segment, Tokenizer

Logits = Callable[[tuple[int, ...]], NDArray[np.float64]]


def hashed_logits(vocab_size: int, scale: float = 3.0) -> Logits:
    """Logits that depend on every token before them and on its place."""

    def logits(tokens: tuple[int, ...]) -> NDArray[np.float64]:
        return np.random.default_rng((vocab_size, *tokens)).random(vocab_size) * scale

    return logits


class FakeTokenizer:
    """Token i reads as texts[i]."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = list(texts)
        self.vocab_size = len(self.texts)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def token_text(self, token: int) -> bytes:
        return self.texts[token]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        raise NotImplementedError

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        raise NotImplementedError


class FakeBackend:
    """Stores the tokens of its slots, refuses misuse loudly, and overwrites its rows at every forward."""

    def __init__(
        self,
        vocab_size: int = 7,
        *,
        logits: Logits | None = None,
        texts: Sequence[bytes] | None = None,
        max_len: int = 64,
        max_slots: int = 4,
        max_step_tokens: int = 16,
        stop_ids: Sequence[int] = (),
        can_truncate: bool = True,
    ) -> None:
        self.info = BackendInfo(
            name="fake",
            model="fake-model",
            vocab_size=vocab_size,
            stop_ids=frozenset(stop_ids),
            max_len=max_len,
            kv_tokens=max_len * max_slots,
            max_slots=max_slots,
            max_step_tokens=max_step_tokens,
            can_truncate=can_truncate,
            no_speculation_reason=None if can_truncate else "it is recurrent",
        )
        self.tokenizer: Tokenizer = FakeTokenizer(texts or [b"%d" % i for i in range(vocab_size)])
        self.logits = logits or hashed_logits(vocab_size)
        self.slots: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.committed: dict[int, int] = {}
        self.batches: list[list[Segment]] = []
        self.fail_next_forward = self.fail_next_truncate = self.closed = False
        self._rows = np.zeros((max_step_tokens, vocab_size))

    @property
    def tokens_forwarded(self) -> int:
        return sum(len(s.tokens) for batch in self.batches for s in batch)

    def acquire(self, tokens: Sequence[int] = ()) -> int:
        free = set(range(self.info.max_slots)) - self.slots.keys()
        if not free:
            raise BackendError(f"all {self.info.max_slots} slots are in use")
        self.slots[min(free)] = []
        self.reserved[min(free)] = self.committed[min(free)] = 0
        return min(free)

    def reserve(self, slot: int, length: int) -> bool:
        others = sum(n for s, n in self.reserved.items() if s != slot)
        if others + length > self.info.kv_tokens:
            return False
        self.reserved[slot] = max(length, self.reserved[slot])
        return True

    def commit(self, slot: int, length: int) -> None:
        assert self.committed[slot] <= length <= len(self.slots[slot])
        self.committed[slot] = length

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        raise NotImplementedError

    def length(self, slot: int) -> int:
        return len(self.slots[slot])

    def forward(self, batch: Sequence[Segment]) -> list[NDArray[Any]]:
        assert len({s.slot for s in batch}) == len(batch)
        assert 0 < sum(len(s.tokens) for s in batch) <= self.info.max_step_tokens
        for s in batch:
            assert s.start == len(self.slots[s.slot])
            assert s.tokens
            assert all(0 <= t < self.info.vocab_size for t in s.tokens)
            assert s.start + len(s.tokens) <= min(self.info.max_len, self.reserved[s.slot])
            assert s.num_rows in (0, 1)
        if self.fail_next_forward:
            self.fail_next_forward = False
            raise BackendError("the fake was told to fail")
        self.batches.append(list(batch))
        self._rows[:] = np.nan
        rows, used = [], 0
        for s in batch:
            self.slots[s.slot].extend(s.tokens)
            rows.append(self._rows[used : used + s.num_rows])
            if s.num_rows:
                rows[-1][0] = self.logits(tuple(self.slots[s.slot]))
            used += s.num_rows
        return rows

    def truncate(self, slot: int, length: int) -> None:
        assert self.committed[slot] <= length <= len(self.slots[slot])
        if self.fail_next_truncate:
            self.fail_next_truncate = False
            raise RollbackError("the fake was told to refuse")
        del self.slots[slot][length:]
        self.reserved[slot] = length

    def fork(self, slot: int) -> int:
        raise NotImplementedError

    def release(self, slot: int) -> None:
        del self.slots[slot], self.reserved[slot], self.committed[slot]

    def check(self) -> None:
        if not self.slots.keys() <= set(range(self.info.max_slots)):
            raise InvariantError(f"slots {sorted(self.slots)}")

    def close(self) -> None:
        self.closed = True


class FakeDraws:
    """Draws that depend on the seed and the key only; keeps what it was asked."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.asked: list[tuple[NDArray[Any], int, Role, Any, int]] = []

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        raise AssertionError("a drafter accepts nothing")

    def pick(self, weights: NDArray[Any], position: int, role: Role, *, ids: Any = None, node: int = 0) -> int:
        self.asked.append((weights, position, role, ids, node))
        u = np.random.default_rng((self.seed, position, int(role), node)).random()
        i = int(np.searchsorted(np.cumsum(weights), u * np.sum(weights), side="right"))
        return i if ids is None else int(ids[i])


def context_of(
    tokens: Sequence[int],
    request_id: int = 0,
    *,
    prompt_length: int | None = None,
    params: SamplingParams | None = None,
    draws: FakeDraws | None = None,
    role: Role = Role.DRAFT,
    history: RowHistory | None = None,
    grammar: FakeGrammar | None = None,
    vocab_size: int = 7,
    start: tuple[int, ...] = (),
) -> DraftContext:
    """A context with everything a test does not care about filled in."""
    length = len(tokens) if prompt_length is None else prompt_length
    params = params or SamplingParams()
    return DraftContext(
        request_id=request_id,
        tokens=tokens,
        prompt_length=length,
        params=params,
        draws=draws or FakeDraws(request_id),
        role=role,
        history=history or history_of(tokens, length, params, vocab_size=vocab_size, grammar=grammar),
        start=start,
    )


def history_of(
    tokens: Sequence[int],
    prompt_length: int | None = None,
    params: SamplingParams | None = None,
    *,
    vocab_size: int = 7,
    grammar: FakeGrammar | None = None,
) -> History:
    """What the engine would have of a request with these committed tokens."""
    length = len(tokens) if prompt_length is None else prompt_length
    return History(params or SamplingParams(), tokens, length, vocab_size, grammar=grammar)  # type: ignore[arg-type]


class FakeGrammar:
    """A grammar by a table: legal_after[drafts] are the ids that may follow them; no entry is no constraint.

    It knows the committed text as the place where it stands and nothing else: a grammar for one step.
    """

    def __init__(
        self,
        vocab_size: int,
        legal_after: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        forced: Sequence[int] | PacelineError = (),
    ) -> None:
        self.vocab_size, self.legal_after, self.forced_ids = vocab_size, legal_after or {}, forced
        self.limits: list[int] = []

    def legal(self, drafts: Sequence[int] = ()) -> NDArray[np.bool_] | None:
        ids = self.legal_after.get(tuple(drafts))
        return None if ids is None else np.isin(np.arange(self.vocab_size), ids)

    def forced(self, limit: int) -> tuple[int, ...]:
        self.limits.append(limit)
        if isinstance(self.forced_ids, PacelineError):
            raise self.forced_ids
        return tuple(self.forced_ids[:limit])


def proposed(answer: Proposal | PacelineError) -> Proposal:
    """The answer, which must not be an error."""
    if isinstance(answer, PacelineError):
        raise answer
    return answer


def softmax(logits: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    """float64[V] -> float64[V]."""
    weights = np.exp((logits - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def dense(rows: Sequence[Any] | NDArray[Any]) -> NDArray[np.float64]:
    """float64[rows, V]."""
    return np.array([row.dense() for row in rows])


class CountingList(list[int]):
    """Counts the elements that are read."""

    read = 0

    def __getitem__(self, i: Any) -> Any:
        found = super().__getitem__(i)
        CountingList.read += len(found) if isinstance(i, slice) else 1
        return found

    def __iter__(self) -> Any:
        CountingList.read += len(self)
        return super().__iter__()
