"""An exact tiny language model, for tests, lessons and `LLM("toy")`.

Its float64 logits are a hash of the tokens *stored in its KV cells*, read afresh for every row through the page
tables. Whoever leaves a stale cell behind, puts a token in the wrong place, or shares a page that somebody writes,
changes every later distribution: wrong bookkeeping shows as wrong text. Rows depend on nothing else, so they are
bit-equal alone, in a batch, at any width, in a tree and on a prefix hit, unless the model is told to misbehave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from ..cache import PageBook
from ..errors import BackendError, InvalidPrompt, InvariantError, RollbackError
from ..params import integer
from ..text.chat import render
from ..types import BackendInfo, FloatArray, IntArray, Segment
from .batch import check_batch, set_aside
from .trees import TreeBook, depths

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
    page_size: cells per page. kv_tokens: cells in all, rounded down to whole pages, but at least one; default
    what max_seqs sequences of max_len take. prefix_cache: whether committed pages are shared.
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
        page_size: int = 16,
        prefix_cache: bool = True,
        can_truncate: bool = True,
        table: Table | None = None,
        width_noise: float = 0.0,
        rollback: Literal["works", "fails", "silent"] = "works",
        nan_when: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> None:
        sizes = {"vocab_size": vocab_size, "max_len": max_len, "max_seqs": max_seqs, "page_size": page_size}
        for name, value in sizes.items():
            integer(name, value, 1)
        stops = frozenset((vocab_size - 1,) if stop_ids is None else stop_ids)
        num_pages = -(-max_len // page_size) * max_seqs if kv_tokens is None else max(1, kv_tokens // page_size)
        self.info = BackendInfo(
            name="toy",
            model=f"toy(V={vocab_size}, seed={seed})",
            vocab_size=vocab_size,
            stop_ids=stops,
            max_len=max_len,
            kv_tokens=num_pages * page_size,
            max_slots=max_seqs,
            max_step_tokens=max_step_tokens,
            can_truncate=can_truncate,
            no_speculation_reason=None if can_truncate else "this toy was built without rollback",
            can_tree=True,
            page_size=page_size,
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
        if rollback == "silent":  # room for the stale cells, which nobody reckons with
            num_pages += -(-2 * max_len // page_size) * max_seqs
        self._book = PageBook(num_pages, page_size, max_seqs, prefix_cache=prefix_cache)
        # _cells[page, i] is what rows are made of. The book knows what is there; _claimed[slot] is the length that
        # slot says it has. They differ only where rollback is told to be silent.
        self._cells = np.full((num_pages, page_size), -1, dtype=np.int64)
        self._flat = self._cells.reshape(-1)
        self._claimed: dict[int, int] = {}
        self._trees = TreeBook()

    def acquire(self, tokens: Sequence[int] = ()) -> int:
        """A slot for a sequence that starts with `tokens`, holding what is published of them, but not all."""
        slot = self._book.open(tokens)
        self._claimed[slot] = self._book.length(slot)
        return slot

    def length(self, slot: int) -> int:
        """Tokens cached in `slot`."""
        self._must_hold(slot)
        return self._claimed[slot]

    def reserve(self, slot: int, length: int) -> bool:
        """Set pages aside for `length` tokens; False where too few are free."""
        self._must_hold(slot)
        stale = self._book.length(slot) - self._claimed[slot]
        copies = self._book.reserve(slot, length + stale)
        for source, destination in copies or ():
            self._cells[destination] = self._cells[source]
        return copies is not None

    def forward(self, batch: Sequence[Segment]) -> list[NDArray[Any]]:
        """float64[num_rows, V] for each segment."""
        width = sum(map(len, check_batch(self.info, self.length, batch, trees=self._trees)))
        self._check_stale(batch)
        with set_aside(batch, self._book, self.reserve, self._room):
            pass
        self.tokens_forwarded += width
        rows: list[NDArray[Any]] = []
        for segment in batch:
            slot, n = segment.slot, len(segment.tokens)
            before = self._book.length(slot)
            where = self._where(slot, before + n)
            self._flat[where[before:]] = segment.tokens
            self._book.append(slot, segment.tokens)
            self._claimed[slot] += n
            self._trees.wrote(segment)
            cells = self._flat[where]
            seen = _seen(segment, before)
            rows.append(np.array([self._row(cells[seen(i)], width) for i in range(n - segment.num_rows, n)]))
        return rows

    def commit(self, slot: int, length: int) -> None:
        """The first `length` tokens are committed: their full pages are published."""
        self._trees.check_settled(slot, length, self.length(slot))
        self._book.commit(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens."""
        self._trees.check_truncate(slot, length, self.length(slot))
        self._forget(slot, length, range(0))

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Keep the first `length` tokens and, behind them, those `nodes` further on, which are one path."""
        self._trees.check_keep(slot, length, nodes, self.length(slot))
        self._forget(slot, length, nodes)

    def fork(self, slot: int) -> int:
        """A new slot with the same tokens."""
        cached = self.length(slot)
        self._trees.check_settled(slot, cached, cached)
        copy = self._book.fork(slot)
        self._claimed[copy] = self._claimed[slot]
        return copy

    def release(self, slot: int) -> None:
        """Give the slot back."""
        self._must_hold(slot)
        self._book.release(slot)
        del self._claimed[slot]
        self._trees.forget(slot)

    def check(self) -> None:
        """Raise InvariantError where books, lengths and cells disagree."""
        self._book.check()
        self._trees.check(self.length)
        for slot, claimed in self._claimed.items():
            written = self._book.length(slot)
            if written != claimed:
                raise InvariantError(f"toy slot {slot} says {claimed} tokens but attends to {written}")
            if self.cached_tokens(slot) != tuple(self._book.tokens(slot)):
                raise InvariantError(
                    f"toy slot {slot}: cells hold {self.cached_tokens(slot)}, written were {self._book.tokens(slot)}"
                )
        for page, tokens in self._book.published():
            if tuple(self._cells[page].tolist()) != tokens:
                raise InvariantError(f"toy page {page}: cells hold {self._cells[page]}, published were {tokens}")

    def close(self) -> None:
        """Nothing to free."""

    def cached_tokens(self, slot: int) -> tuple[int, ...]:
        """The tokens slot attends to, for tests that compare memory with a fresh prefill."""
        self._must_hold(slot)
        return tuple(self._flat[self._where(slot, self._book.length(slot))].tolist())

    @property
    def slots_in_use(self) -> int:
        """How many slots are acquired."""
        return self._book.slots_in_use

    @property
    def free_pages(self) -> int:
        """Pages that can be had, published ones that nobody holds included."""
        return self._book.free_pages

    def _where(self, slot: int, length: int) -> IntArray:
        """int64[length], the flat cell of every position."""
        size = self.info.page_size
        pages = np.array(self._book.pages(slot)[: -(-length // size)], dtype=np.int64)
        return (pages[:, None] * size + np.arange(size)).reshape(-1)[:length]

    def _forget(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Keep `length` tokens and those `nodes` further on, or misbehave."""
        claimed, kept = self._claimed[slot], length + len(nodes)
        if kept < claimed and (self._rollback == "fails" or not self.info.can_truncate):
            raise RollbackError(f"toy slot {slot}: told to refuse a rollback to {kept} tokens")
        if self._rollback == "silent":
            self._book.truncate(slot, self._book.length(slot))  # gives back what was reserved
        else:
            self._book.check_keep(slot, length, nodes)
            where = self._where(slot, claimed)
            self._flat[where[length:kept]] = self._flat[where[[length + node for node in nodes]]]
            self._book.keep(slot, length, nodes)
        self._claimed[slot] = kept
        self._trees.forget(slot)

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
        if slot not in self._claimed:
            raise BackendError(f"toy slot {slot} is not in use; acquire() one first")

    def _room(self) -> str:
        return (
            f"kv_tokens = {self.info.kv_tokens} in pages of {self.info.page_size}, {self._book.free_pages} of them free"
        )

    def _check_stale(self, batch: Sequence[Segment]) -> None:
        """Cells of silent rollbacks are never given back: raise BackendError where there are too many."""
        for s in batch:
            if self._rollback == "silent" and self._book.length(s.slot) + len(s.tokens) > 2 * self.info.max_len:
                raise BackendError(f"toy slot {s.slot}: its cells are full of tokens that were never rolled back")


def _seen(segment: Segment, before: int) -> Callable[[int], slice | IntArray]:
    """What token i of a segment sees of its slot's cells: the `before` cached ones, its ancestors and itself."""
    if segment.parents is None:
        return lambda i: slice(before + i + 1)
    sees = depths(segment.parents)[1]
    return lambda i: np.concatenate([np.arange(before), before + np.flatnonzero(sees[i])])


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
