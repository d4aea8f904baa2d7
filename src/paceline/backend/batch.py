"""What every backend asks of a packed batch before it runs: that it makes sense, and that there is memory for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, SupportsIndex

from ..errors import BackendError
from ..types import BackendInfo, Segment
from .trees import TreeBook, deepest

__all__ = ["check_batch", "set_aside"]


def check_batch(
    info: BackendInfo,
    length_of: Callable[[int], int],
    batch: Sequence[Segment],
    *,
    trees: TreeBook | None = None,
    code: Literal["i", "q"] = "q",
) -> list[array[int]]:
    """Everything about a batch but memory; the token ids of each segment, int32 or int64 by `code`.

    length_of: of a slot in use, else it raises BackendError. trees: where the backend runs them.

    Raises BackendError naming slot and size for an empty batch or segment, a slot that comes twice or holds a tree
    nobody decided, a start that is not the cached length, parents that are no tree or not run here, a token outside
    the vocabulary, and more tokens than a slot or a step holds.
    """
    total, ids = 0, []
    seen: set[int] = set()
    for segment in batch:
        slot, count = segment.slot, len(segment.tokens)
        cached = length_of(slot)
        if slot in seen:
            raise BackendError(f"slot {slot} comes twice in one batch")
        seen.add(slot)
        if not count or not 0 <= segment.num_rows <= count:
            raise BackendError(f"slot {slot}: {segment.num_rows} rows of {count} tokens make no sense")
        if segment.start != cached:
            raise BackendError(f"slot {slot}: tokens start at {segment.start}, but {cached} are cached")
        if trees is not None:
            trees.check_settled(slot, cached, cached)
        elif segment.parents is not None:
            raise BackendError(f"slot {slot}: a tree with parents {segment.parents}; {info.name} runs chains only")
        depth = deepest(segment)
        if cached + depth > info.max_len:
            raise BackendError(
                f"slot {slot}: {cached} tokens cached and {depth} new make {cached + depth}; "
                f"the context holds {info.max_len}"
            )
        ids.append(_token_ids(slot, segment.tokens, info.vocab_size, code))
        total += count
    if not total:
        raise BackendError("the batch is empty")
    if total > info.max_step_tokens:
        raise BackendError(f"the batch has {total} tokens; one step takes {info.max_step_tokens}")
    return ids


def _token_ids(slot: int, tokens: Sequence[int], V: int, code: Literal["i", "q"]) -> array[int]:
    try:
        ids = array(code, tokens)  # strict: numpy would cut 1.5 to 1
        if min(ids) >= 0 and max(ids) < V:
            return ids
    except (TypeError, OverflowError):
        pass
    bad = next(t for t in tokens if not (isinstance(t, SupportsIndex) and 0 <= t.__index__() < V))
    raise BackendError(f"slot {slot}: token id {bad!r} is not an integer in 0 .. {V - 1}")


class Reservations(Protocol):
    """The books of memory, PageBook or CellBook."""

    def reserved(self, slot: int) -> int:
        """Tokens a slot may grow to."""
        ...

    def unreserve(self, slot: int, length: int) -> None:
        """Give back what was reserved beyond `length` tokens and those written."""
        ...


@contextmanager
def set_aside(
    batch: Sequence[Segment], book: Reservations, reserve: Callable[[int, int], bool], room: Callable[[], str]
) -> Iterator[None]:
    """Inside, every segment has its memory. Where that cannot be, or something raises, each slot has reserved what it
    had before; a page that was copied in order to be written stays a copy.

    reserve: the backend's. room: what is free and what to do, for the BackendError where memory is short.
    """
    before: list[tuple[int, int]] = []
    try:
        for segment in batch:
            slot, end = segment.slot, segment.start + len(segment.tokens)
            before.append((slot, book.reserved(slot)))
            if not reserve(slot, end):
                raise BackendError(f"slot {slot}: no room for {end} tokens; {room()}")
        yield
    except BaseException:
        for slot, length in before:
            book.unreserve(slot, length)
        raise
