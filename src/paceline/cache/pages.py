"""PageBook: slots, their tokens, and the pages that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

from ..errors import BackendError, InvalidParams, RollbackError
from .audit import audit
from .prefix import ROOT, PrefixCache
from .runs import FreeRuns

__all__ = ["PageBook"]


@dataclass(slots=True)
class SlotBook:
    """One slot: the tokens written, the page table, and how far it may be written.

    reserved: tokens that may be written in all, >= len(tokens). published: how many of the first pages are
    known here to be published; a fork may publish more of them.
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    reserved: int = 0
    published: int = 0


class PageBook:
    """Who holds which page, for a backend that owns the tensors. Integers only.

    num_pages pages of page_size tokens, for up to num_slots sequences. A slot's table lists its pages in order;
    token i of a slot is in cell i % page_size of page pages(slot)[i // page_size].

    A page is free, or held by one or more tables, or published and held by nobody; the last kind stays until memory is
    needed. A page that somebody else can see, by a shared table or because it is published, is never written:
    reserve() names the copy to be made first.

    prefix_cache: False publishes nothing, so that open() finds nothing.
    Raises InvalidParams for sizes below 1; every operation raises BackendError for a slot that is not in use.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int, *, prefix_cache: bool = True) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("num_slots", num_slots)):
            if value < 1:
                raise InvalidParams(f"{name} = {value}; allowed: 1 or more")
        self.num_pages, self.page_size, self.num_slots = num_pages, page_size, num_slots
        self.prefix_cache = prefix_cache
        self._free = FreeRuns(num_pages)
        self._prefix = PrefixCache()
        self._holders = [0] * num_pages
        self._slots: dict[int, SlotBook] = {}
        self._free_slots = list(range(num_slots))

    # --- what is known ---

    @property
    def free_pages(self) -> int:
        """Pages that can be had: free ones, and published ones that nobody holds."""
        return len(self._free) + len(self._prefix.resting)

    @property
    def slots_in_use(self) -> int:
        """How many slots are open."""
        return len(self._slots)

    def length(self, slot: int) -> int:
        """Tokens written."""
        return len(self._book(slot).tokens)

    def reserved(self, slot: int) -> int:
        """How many tokens may be written in all, at least length()."""
        return self._book(slot).reserved

    def pages(self, slot: int) -> Sequence[int]:
        """The page table, in order, reserved pages included. A live view: do not keep or write."""
        return self._book(slot).pages

    def tokens(self, slot: int) -> Sequence[int]:
        """What was written. A live view: do not keep or write."""
        return self._book(slot).tokens

    def published(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every published page with the page_size tokens it must hold."""
        return ((page, self._prefix.key(page)[1]) for page in self._prefix)

    # --- what changes ---

    def open(self, tokens: Sequence[int] = ()) -> int:
        """The lowest free slot, holding as much of `tokens` as is published, in full pages.

        At least one of `tokens` is left for the caller to forward. Raises BackendError where no slot is free.
        """
        slot, book = self._open()
        hits = (len(tokens) - 1) // self.page_size if self.prefix_cache else 0
        for i in range(hits):
            content = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            page = self._prefix.find(book.pages[-1] if book.pages else ROOT, content)
            if page is None:
                break
            self._hold(page)
            book.pages.append(page)
            book.tokens += content
        book.published = len(book.pages)
        book.reserved = len(book.tokens)
        return slot

    def reserve(self, slot: int, length: int) -> list[tuple[int, int]] | None:
        """Let `slot` be written up to `length` tokens; None where memory is short, and nothing has changed then.

        Returns page copies (source, destination), which the owner of the tensors makes before anything else: the
        page the next token goes to is copied if somebody else can see it.
        """
        book = self._book(slot)
        if length <= book.reserved:
            return []
        copy = self._next_page_is_seen(book)
        count = self._pages_for(length) - len(book.pages) + copy
        # A slot with all memory to itself can always grow: its own published page is then written, not copied.
        in_place = copy and count == self.free_pages + 1 and self._holders[book.pages[-1]] == 1
        if count > self.free_pages + in_place:
            return None
        kept = len(book.pages) - copy
        new = self._take(count - in_place, book.pages[kept - 1] if kept else None)
        book.reserved = length
        copies = []
        if in_place:
            self._prefix.forget(book.pages[-1])
            book.published = kept
        elif copy:
            copies.append((book.pages.pop(), new[0]))
            self._let_go(copies[0][0])
            book.published = min(book.published, kept)
        book.pages += new
        return copies

    def unreserve(self, slot: int, length: int) -> None:
        """Give back what was reserved beyond `length` tokens, or beyond those written if they are more."""
        book = self._book(slot)
        self._shrink(book, max(length, len(book.tokens)))

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """`tokens` were written behind length(). Raises BackendError where that was not reserved."""
        book = self._book(slot)
        end = len(book.tokens) + len(tokens)
        if end > book.reserved:
            raise BackendError(
                f"slot {slot}: {len(tokens)} tokens behind {len(book.tokens)}, but {book.reserved} are reserved; "
                f"reserve {end} first"
            )
        book.tokens += tokens

    def commit(self, slot: int, length: int) -> None:
        """The first `length` tokens are written and verified: publish their full pages.

        Where the same tokens are published already, the tables move to that page and the duplicate is given
        back. So read pages(slot) again afterwards. Raises BackendError for more tokens than were written.
        """
        book = self._book(slot)
        if not 0 <= length <= len(book.tokens):
            raise BackendError(f"slot {slot}: cannot commit {length} tokens; {len(book.tokens)} are written")
        if not self.prefix_cache:
            return
        for i in range(book.published, length // self.page_size):
            self._publish(book, i)
            book.published = i + 1

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens, and what was reserved. Raises RollbackError if there are fewer."""
        book = self._book(slot)
        if not 0 <= length <= len(book.tokens):
            raise RollbackError(f"slot {slot} holds {len(book.tokens)} tokens; cannot keep {length}")
        del book.tokens[length:]
        self._shrink(book, length)

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """The first `length` tokens stay, then those `nodes` further on; the owner has moved their cells there.

        nodes: strictly ascending offsets from `length`. Everything else is forgotten, and what was reserved. Raises
        RollbackError for nodes that were not written, or where a cell that somebody else sees would be written.
        """
        self.check_keep(slot, length, nodes)
        book = self._book(slot)
        book.tokens[length:] = [book.tokens[length + node] for node in nodes]
        self._shrink(book, len(book.tokens))

    def check_keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Raise what keep() would raise; for the owner, before it moves cells."""
        book = self._book(slot)
        written = len(book.tokens)
        ascending = all(a < b for a, b in pairwise(nodes))
        if not 0 <= length <= written or not ascending or (nodes and not 0 <= nodes[0] <= nodes[-1] < written - length):
            raise RollbackError(
                f"slot {slot} holds {written} tokens; cannot keep {length} and, further on, {tuple(nodes)}"
            )
        moved = [length + i for i, node in enumerate(nodes) if node != i]
        if moved:
            touched = book.pages[moved[0] // self.page_size : moved[-1] // self.page_size + 1]
            if any(self._is_seen(page) for page in touched):
                raise RollbackError(f"slot {slot}: cannot move tokens to {moved[0]}: that page is shared or published")

    def fork(self, slot: int) -> int:
        """A new slot that shares every written page. What `slot` had reserved is given back: reserve again.

        Raises BackendError where no slot is free.
        """
        source = self._book(slot)
        new, book = self._open()
        self._shrink(source, len(source.tokens))
        book.tokens, book.pages = source.tokens.copy(), source.pages.copy()
        book.reserved, book.published = source.reserved, source.published
        for page in book.pages:
            self._hold(page)
        return new

    def release(self, slot: int) -> None:
        """Give the slot back, whatever its state."""
        book = self._book(slot)
        del self._slots[slot]
        heappush(self._free_slots, slot)
        book.tokens.clear()
        self._shrink(book, 0)

    def check(self) -> None:
        """Raise InvariantError where the books do not balance."""
        audit(self._slots, self._free_slots, self._holders, self._free, self._prefix, self.page_size)

    # --- pages ---

    def _open(self) -> tuple[int, SlotBook]:
        if not self._free_slots:
            raise BackendError(f"all {self.num_slots} slots are in use; release one first")
        slot = heappop(self._free_slots)
        book = self._slots[slot] = SlotBook()
        return slot, book

    def _book(self, slot: int) -> SlotBook:
        book = self._slots.get(slot)
        if book is None:
            raise BackendError(f"slot {slot} is not in use; open one first (slots: 0 to {self.num_slots - 1})")
        return book

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _is_seen(self, page: int) -> bool:
        """Whether anybody but one table can see `page`."""
        return self._holders[page] > 1 or page in self._prefix

    def _next_page_is_seen(self, book: SlotBook) -> bool:
        """Whether the next token would be written into a page that somebody else can see."""
        return len(book.tokens) % self.page_size > 0 and self._is_seen(book.pages[len(book.tokens) // self.page_size])

    def _take(self, count: int, behind: int | None) -> list[int]:
        """`count` pages for one table, which are to be had."""
        while len(self._free) < count:
            self._free.add(self._prefix.evict())
        pages = self._free.take(count, behind)
        for page in pages:
            self._holders[page] = 1
        return pages

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            self._prefix.wake(page)
        self._holders[page] += 1

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._prefix:
                self._prefix.rest(page)
            else:
                self._free.add(page)

    def _shrink(self, book: SlotBook, reserved: int) -> None:
        """Let go of the pages behind `reserved` tokens, the last one first."""
        kept = self._pages_for(reserved)
        while len(book.pages) > kept:
            self._let_go(book.pages.pop())
        book.reserved = min(book.reserved, reserved)
        book.published = min(book.published, kept)

    def _publish(self, book: SlotBook, i: int) -> None:
        """Publish the i-th page of a table whose earlier pages are published."""
        page, before = book.pages[i], book.pages[i - 1] if i else ROOT
        content = tuple(book.tokens[i * self.page_size : (i + 1) * self.page_size])
        known = self._prefix.find(before, content)
        if known is None:
            self._prefix.publish(page, before, content)
        elif known != page:
            # All tables move, lest somebody hold a published page and not the published page before it.
            for other in self._slots.values():
                if len(other.pages) > i and other.pages[i] == page:
                    other.pages[i] = known
                    self._hold(known)
                    self._let_go(page)
