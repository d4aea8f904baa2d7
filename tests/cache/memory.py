"""A PageBook with memory: every cell stores the token that was written through the book's tables.

`Memory` does what a backend does (reserve, copy pages, write cells, tell the book) and keeps, naively, the tokens each
slot should hold. After every move the cells, read through the tables, must say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cache import PageBook

Tokens = tuple[int, ...]
GARBAGE = -1


class Memory:
    """`slots` is the naive model: slot -> its tokens. `verified`: every beginning that somebody committed."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int, *, prefix_cache: bool = True) -> None:
        self.book = PageBook(num_pages, page_size, num_slots, prefix_cache=prefix_cache)
        self.page_size = page_size
        self.cells = [[GARBAGE] * page_size for _ in range(num_pages)]
        self.slots: dict[int, list[int]] = {}
        self.verified: set[Tokens] = set()
        self.hits = self.refusals = self.copies = 0

    def open(self, tokens: Sequence[int] = ()) -> int:
        expected = min(set(range(self.book.num_slots)) - set(self.slots))
        slot = self.book.open(tokens)
        assert slot == expected, "not the lowest free slot"
        held = self.book.length(slot)
        assert held % self.page_size == 0, f"{held} tokens hit, pages of {self.page_size}"
        assert held < max(1, len(tokens)), f"all {held} tokens hit"
        for end in range(self.page_size, held + 1, self.page_size):
            assert tuple(tokens[:end]) in self.verified, f"a hit on {tokens[:end]}, which nobody committed"
        self.hits += held > 0
        self.slots[slot] = list(tokens[:held])
        return slot

    def reserve(self, slot: int, length: int) -> bool:
        before = self.books()
        copies = self.book.reserve(slot, length)
        if copies is None:
            assert self.books() == before, "a refused reserve() changed the books"
            self.refusals += 1
            return False
        for source, destination in copies:
            self.cells[destination] = list(self.cells[source])
        self.copies += len(copies)
        assert self.book.reserved(slot) >= length
        return True

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """What a forward does; the room is reserved."""
        table = self.book.pages(slot)
        for position, token in enumerate(tokens, start=len(self.slots[slot])):
            self.cells[table[position // self.page_size]][position % self.page_size] = token
        self.book.append(slot, tokens)
        self.slots[slot] += tokens

    def grow(self, slot: int, tokens: Sequence[int]) -> bool:
        if not self.reserve(slot, len(self.slots[slot]) + len(tokens)):
            return False
        self.write(slot, tokens)
        return True

    def commit(self, slot: int, length: int) -> None:
        for end in range(self.page_size, length + 1, self.page_size):
            self.verified.add(tuple(self.slots[slot][:end]))
        self.book.commit(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        self.book.truncate(slot, length)
        del self.slots[slot][length:]

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        self.book.check_keep(slot, length, nodes)
        table = self.book.pages(slot)
        for i, node in enumerate(nodes):
            if node != i:
                self.cells[table[(length + i) // self.page_size]][(length + i) % self.page_size] = self.cells[
                    table[(length + node) // self.page_size]
                ][(length + node) % self.page_size]
        self.book.keep(slot, length, nodes)
        self.slots[slot][length:] = [self.slots[slot][length + node] for node in nodes]

    def fork(self, slot: int) -> int:
        new = self.book.fork(slot)
        assert new not in self.slots
        self.slots[new] = list(self.slots[slot])
        return new

    def release(self, slot: int) -> None:
        self.book.release(slot)
        del self.slots[slot]

    def read(self, slot: int, length: int) -> list[int]:
        table = self.book.pages(slot)
        return [self.cells[table[i // self.page_size]][i % self.page_size] for i in range(length)]

    def books(self) -> object:
        """What reserve() must not change where it refuses."""
        book = self.book
        state = {slot: (list(book.pages(slot)), list(book.tokens(slot)), book.reserved(slot)) for slot in self.slots}
        return state, book.free_pages, sorted(book.published())

    def compare(self) -> None:
        """The books balance, and books and cells say what the naive model says."""
        book = self.book
        book.check()
        assert book.slots_in_use == len(self.slots)
        held = set()
        for slot, tokens in self.slots.items():
            assert list(book.tokens(slot)) == tokens
            assert book.length(slot) == len(tokens)
            assert self.read(slot, len(tokens)) == tokens, f"cells of slot {slot}"
            held.update(book.pages(slot))
        assert book.free_pages == book.num_pages - len(held)
        for page, content in book.published():
            assert tuple(self.cells[page]) == content, f"cells of published page {page}"
