"""An exact tiny language model, for tests, lessons and `LLM("toy")`.

Its float64 logits are a hash of the tokens *stored in its KV cells*, read afresh for every row. Whoever
leaves a stale cell behind, or puts a token in the wrong place, changes every later distribution: wrong
bookkeeping shows as wrong text. Rows depend on nothing else, so they are bit-equal alone, in a batch and
at any width, unless the model is told to misbehave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from ..errors import BackendError, InvalidPrompt, InvariantError, RollbackError
from ..params import integer
from ..text.chat import render
from ..types import BackendInfo, FloatArray, IntArray, Segment

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
Table = Callable[[tuple[int, ...]], Sequence[float] | FloatArray]

# Printable characters first, so that small vocabularies are legible; all 256 bytes in the end.
_PRINTABLE = b"0123456789abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?'\"()[]{}<>=+-*/\\|&%$#@^_`~\n"
ALPHABET = _PRINTABLE + bytes(b for b in range(256) if b not in _PRINTABLE)


class ToyTokenizer:
    """Token v is the v-th byte of ALPHABET; stop ids and ids past 255 are control tokens without bytes."""

    def __init__(self, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self._bytes = [b"" if v in stop_ids or v >= len(ALPHABET) else ALPHABET[v : v + 1] for v in range(vocab_size)]
        self._ids = {piece: v for v, piece in enumerate(self._bytes) if piece}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """One id per UTF-8 byte. The toy has no special tokens to add or parse."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidPrompt(f"the text holds a lone surrogate at character {error.start}") from None
        try:
            return [self._ids[bytes([b])] for b in text.encode("utf-8")]
        except KeyError as missing:
            raise InvalidPrompt(
                f"the toy model with vocabulary {self.vocab_size} has no token for byte {missing.args[0]!r} of {text!r}"
            ) from None

    def token_bytes(self, token: int) -> bytes:
        """The byte of a token, b"" for control tokens."""
        return self._bytes[token]

    def token_text(self, token: int) -> bytes:
        """What names a token when vocabularies are compared; never empty."""
        return self._bytes[token] or b"<control %d>" % token

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """`role: content` lines, then the assistant's opened turn."""
        return render(CHAT_TEMPLATE, messages)


class ToyBackend:
    """See the module. Implements the `Backend` protocol.

    vocab_size: V. stop_ids: default the last id; () for a model without one. seed: which toy model.
    order: the last `order` tokens shape the logits strongly (so that text repeats itself and lookup finds
    something); all earlier ones weakly, but visibly. sharpness: scale of the strong part.
    table: instead of the hash, a function from the visible tokens to *logits* [V]; for enumeration.
    Misbehaviour: width_noise adds noise that depends on the number of tokens in the forward; rollback
    "fails" raises, "silent" claims success and keeps the cells; nan_when(visible tokens) makes a row NaN.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        *,
        stop_ids: Sequence[int] | None = None,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 6.0,
        max_len: int = 4096,
        max_seqs: int = 16,
        kv_tokens: int | None = None,
        max_step_tokens: int = 512,
        can_truncate: bool = True,
        table: Table | None = None,
        width_noise: float = 0.0,
        rollback: Literal["works", "fails", "silent"] = "works",
        nan_when: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> None:
        for name, value in (("vocab_size", vocab_size), ("max_len", max_len), ("max_seqs", max_seqs)):
            integer(name, value, 1)
        stops = frozenset((vocab_size - 1,) if stop_ids is None else stop_ids)
        self.info = BackendInfo(
            name="toy",
            model=f"toy(V={vocab_size}, seed={seed})",
            vocab_size=vocab_size,
            stop_ids=stops,
            max_len=max_len,
            kv_tokens=max_len * max_seqs if kv_tokens is None else kv_tokens,
            max_slots=max_seqs,
            max_step_tokens=max_step_tokens,
            can_truncate=can_truncate,
            no_speculation_reason=None if can_truncate else "this toy was built without rollback",
        )
        self.tokenizer = ToyTokenizer(vocab_size, stops)
        self.tokens_forwarded = 0
        self._seed, self._order, self._sharpness = seed, order, sharpness
        self._table, self._width_noise, self._rollback, self._nan_when = (
            table,
            width_noise,
            rollback,
            nan_when,
        )
        self._prior = _prior(vocab_size)
        # _cells[s, :_written[s]] is what slot s attends to; _length[s] is what it says it holds. They
        # differ only where rollback is told to be silent.
        self._cells = np.full((max_seqs, 2 * max_len), -1, dtype=np.int64)
        self._written = [0] * max_seqs
        self._length = [0] * max_seqs
        self._free = list(range(max_seqs - 1, -1, -1))

    def acquire(self) -> int:
        """An empty slot."""
        if not self._free:
            raise BackendError(f"toy model: all {self.info.max_slots} slots are in use; release one first")
        slot = self._free.pop()
        self._written[slot] = self._length[slot] = 0
        return slot

    def length(self, slot: int) -> int:
        """Tokens cached in `slot`."""
        self._must_hold(slot)
        return self._length[slot]

    def forward(self, batch: Sequence[Segment]) -> list[NDArray[Any]]:
        """float64[num_rows, V] for each segment."""
        width = sum(len(s.tokens) for s in batch)
        self._check_batch(batch, width)
        self.tokens_forwarded += width
        rows: list[NDArray[Any]] = []
        for segment in batch:
            slot, n = segment.slot, len(segment.tokens)
            end = self._written[slot] + n
            self._cells[slot, end - n : end] = segment.tokens
            self._written[slot] = end
            self._length[slot] += n
            visible = range(end - segment.num_rows + 1, end + 1)
            rows.append(np.array([self._row(self._cells[slot, :k], width) for k in visible]))
        return rows

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens."""
        self._must_hold(slot)
        if not 0 <= length <= self._length[slot]:
            raise RollbackError(f"toy slot {slot} holds {self._length[slot]} tokens; cannot keep {length}")
        if length == self._length[slot]:
            return
        if self._rollback == "fails" or not self.info.can_truncate:
            raise RollbackError(f"toy slot {slot}: told to refuse a rollback to {length} tokens")
        if self._rollback == "works":
            self._written[slot] = length
        self._length[slot] = length

    def fork(self, slot: int) -> int:
        """A new slot with the same tokens."""
        self._must_hold(slot)
        copy = self.acquire()
        self._cells[copy] = self._cells[slot]
        self._written[copy], self._length[copy] = self._written[slot], self._length[slot]
        return copy

    def release(self, slot: int) -> None:
        """Give the slot back."""
        self._must_hold(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Raise InvariantError where lengths and cells disagree or a slot is free twice."""
        if len(set(self._free)) != len(self._free):
            raise InvariantError(f"toy model: a slot is free twice: {self._free}")
        for slot in set(range(self.info.max_slots)) - set(self._free):
            if self._written[slot] != self._length[slot]:
                raise InvariantError(
                    f"toy slot {slot} says {self._length[slot]} tokens but attends to {self._written[slot]}"
                )

    def close(self) -> None:
        """Nothing to free."""

    def cached_tokens(self, slot: int) -> tuple[int, ...]:
        """The tokens slot attends to, for tests that compare memory with a fresh prefill."""
        self._must_hold(slot)
        return tuple(int(t) for t in self._cells[slot, : self._written[slot]])

    @property
    def slots_in_use(self) -> int:
        """How many slots are acquired."""
        return self.info.max_slots - len(self._free)

    def _row(self, visible: IntArray, width: int) -> FloatArray:
        vocab = self.info.vocab_size
        if self._nan_when is not None and self._nan_when(tuple(int(t) for t in visible)):
            return np.full(vocab, np.nan)
        if self._table is not None:
            row = np.array(self._table(tuple(int(t) for t in visible)), dtype=np.float64)
        else:
            row = self._prior.copy()
            _add_hash_logits(row, visible, self._seed, self._order, self._sharpness)
        if self._width_noise:
            noise = np.random.default_rng((width, visible.size)).standard_normal(vocab)
            row += self._width_noise * noise
        return row

    def _must_hold(self, slot: int) -> None:
        if not 0 <= slot < self.info.max_slots or slot in self._free:
            raise BackendError(f"toy slot {slot} is not in use; acquire() one first")

    def _check_batch(self, batch: Sequence[Segment], width: int) -> None:
        if width > self.info.max_step_tokens:
            raise BackendError(f"toy forward of {width} tokens; at most {self.info.max_step_tokens} fit a step")
        if len({s.slot for s in batch}) != len(batch):
            raise BackendError(f"toy forward names a slot twice: {[s.slot for s in batch]}")
        held = sum(self._length[slot] for slot in set(range(self.info.max_slots)) - set(self._free))
        if held + width > self.info.kv_tokens:
            raise BackendError(f"toy model holds {held} tokens; {width} more exceed kv_tokens = {self.info.kv_tokens}")
        for s in batch:
            self._must_hold(s.slot)
            if s.start != self._length[s.slot]:
                raise BackendError(
                    f"toy slot {s.slot} holds {self._length[s.slot]} tokens, the segment starts at {s.start}"
                )
            if not s.tokens or not 0 <= s.num_rows <= len(s.tokens):
                raise BackendError(f"toy slot {s.slot}: {s.num_rows} rows asked of {len(s.tokens)} new tokens")
            if self._written[s.slot] + len(s.tokens) > self._cells.shape[1]:
                raise BackendError(f"toy slot {s.slot}: its cells are full of tokens that were never rolled back")
            if s.start + len(s.tokens) > self.info.max_len:
                raise BackendError(
                    f"toy slot {s.slot}: {s.start} + {len(s.tokens)} tokens, max_len is {self.info.max_len}"
                )
            bad = [t for t in s.tokens if not 0 <= t < self.info.vocab_size]
            if bad:
                raise BackendError(f"toy slot {s.slot}: token id {bad[0]}; allowed: 0 to {self.info.vocab_size - 1}")


def _prior(vocab_size: int) -> FloatArray:
    """float64[V] added to every row: with many tokens, lower-case letters and spaces are likelier."""
    prior = np.zeros(vocab_size)
    if vocab_size > 64:
        likely = [v for v in range(min(vocab_size, 256)) if ALPHABET[v : v + 1] in b"abcdefghijklmnopqrstuvwxyz "]
        prior[likely] = 9.0
    return prior


_GOLDEN = 0x9E3779B97F4A7C15


@njit(cache=True)
def _mix(x: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): uint64 -> uint64."""
    x = uint64(x) + uint64(_GOLDEN)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit(cache=True)
def _add_hash_logits(row: Any, visible: Any, seed: Any, order: Any, sharpness: Any) -> None:
    """row[v] += sharpness * unit(last tokens, v) + unit(all tokens with their places, v)."""
    n = visible.size
    whole = _mix(uint64(seed))
    for i in range(n):
        whole = _mix(whole ^ (uint64(visible[i]) * uint64(_GOLDEN) + uint64(i)))
    recent = _mix(uint64(seed) ^ uint64(1))
    for i in range(max(0, n - order), n):
        recent = _mix(recent ^ uint64(visible[i]))
    unit = 2.0**-53
    for v in range(row.size):
        strong = float(_mix(recent ^ uint64(v)) >> uint64(11)) * unit
        weak = float(_mix(whole ^ uint64(v)) >> uint64(11)) * unit
        row[v] += sharpness * strong + weak
