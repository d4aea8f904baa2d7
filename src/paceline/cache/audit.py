"""The audit of a PageBook: recount everything from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ..errors import InvariantError
from .prefix import ROOT, PrefixCache

__all__ = ["audit"]


class Table(Protocol):
    """What is looked at of a slot."""

    tokens: list[int]
    pages: list[int]
    reserved: int
    published: int


def audit(
    slots: Mapping[int, Table],
    free_slots: Sequence[int],
    holders: Sequence[int],
    free: Iterable[int],
    prefix: PrefixCache,
    page_size: int,
) -> None:
    """Raise InvariantError where the books do not balance.

    Reference counts are what the tables say; every page is free, or held, or published and at rest, and only one of
    these; tables cover what is written and reserved and no more; whoever holds a published page holds the published
    pages before it, with the same tokens; no cell that may be written is in a page that others see.
    """
    both = set(slots) & set(free_slots)
    if both or len(set(free_slots)) != len(free_slots):
        raise InvariantError(f"slots free twice, or free and in use: {sorted(both) or sorted(free_slots)}")
    held = Counter(page for book in slots.values() for page in book.pages)
    for page, count in enumerate(holders):
        if count != held[page]:
            raise InvariantError(f"page {page}: {count} holders on the books, {held[page]} tables name it")
    _every_page_once(len(holders), held, list(free), prefix)
    for slot, book in slots.items():
        _table(slot, book, page_size)
        _shared(slot, book, held, prefix, page_size)
    _eviction_order(prefix)


def _every_page_once(num_pages: int, held: Counter[int], free: list[int], prefix: PrefixCache) -> None:
    places = Counter([*held.keys(), *free, *prefix.resting])
    wrong = [page for page in range(num_pages) if places[page] != 1]
    if wrong or len(places) != num_pages:
        raise InvariantError(f"pages {wrong or sorted(places)} are not in exactly one of: free, held, at rest")
    loose = [page for page in prefix.resting if page not in prefix]
    if loose:
        raise InvariantError(f"pages {loose} are at rest and not published")


def _table(slot: int, book: Table, page_size: int) -> None:
    if len(set(book.pages)) != len(book.pages):
        raise InvariantError(f"slot {slot} names a page twice: {book.pages}")
    if not len(book.tokens) <= book.reserved or len(book.pages) != -(-book.reserved // page_size):
        raise InvariantError(
            f"slot {slot}: {len(book.pages)} pages of {page_size} for {len(book.tokens)} tokens, "
            f"{book.reserved} reserved"
        )
    if book.published > len(book.pages):
        raise InvariantError(f"slot {slot}: {book.published} of its {len(book.pages)} pages are said to be published")


def _shared(slot: int, book: Table, held: Counter[int], prefix: PrefixCache, page_size: int) -> None:
    for i, page in enumerate(book.pages):
        start, end = i * page_size, (i + 1) * page_size
        written = tuple(book.tokens[start:end])
        if page in prefix:
            before, content = prefix.key(page)
            if before != (book.pages[i - 1] if i else ROOT) or content[: len(written)] != written:
                raise InvariantError(
                    f"slot {slot}: page {page} is published as {content} behind page {before}, its table says {written}"
                )
        elif i < book.published:
            raise InvariantError(f"slot {slot}: page {page} is said to be published and is not")
        writable = max(len(book.tokens), start) < min(book.reserved, end)
        if writable and (held[page] > 1 or page in prefix):
            raise InvariantError(f"slot {slot} may write page {page}, which others see")


def _eviction_order(prefix: PrefixCache) -> None:
    """A page goes after all published pages behind it."""
    turn = {page: i for i, page in enumerate(prefix.resting)}
    for page in prefix:
        before, content = prefix.key(page)
        if prefix.find(before, content) != page:
            raise InvariantError(f"page {page} is published and cannot be found")
        if before != ROOT and before not in prefix:
            raise InvariantError(f"page {page} is published behind page {before}, which is not")
        if before in turn and not (page in turn and turn[page] < turn[before]):
            raise InvariantError(f"page {before} would be evicted before page {page}, which stands behind it")
