"""PageBook, one rule at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.cache import PageBook
from paceline.cache.runs import FreeRuns
from paceline.errors import BackendError, InvalidParams, InvariantError, RollbackError

from .memory import Memory

P = 4


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def filled(memory: Memory, tokens: list[int], *, commit: bool = True) -> int:
    """A slot that holds `tokens`, committed."""
    slot = memory.open(tokens)
    assert memory.grow(slot, tokens[memory.book.length(slot) :])
    if commit:
        memory.commit(slot, len(tokens))
    memory.compare()
    return slot


# --- what is published, and what is found ---


@pytest.mark.parametrize("length", [0, 1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1])
@pytest.mark.parametrize("asked", [0, 1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 4 * P])
def test_a_hit_is_full_pages_and_never_the_whole_prompt(length: int, asked: int) -> None:
    """Lengths about a page's edge (TensorRT-LLM PR #16280). A hit on everything would leave no row to sample from."""
    memory = Memory(16, P, 3)
    filled(memory, prompt(length))
    slot = memory.open(prompt(asked))
    expected = min(length // P, (max(asked, 1) - 1) // P) * P
    assert memory.book.length(slot) == expected
    assert memory.grow(slot, prompt(asked)[expected:])
    memory.compare()


def test_a_hit_holds_the_same_pages_and_takes_no_memory() -> None:
    memory = Memory(8, P, 2)
    first = filled(memory, prompt(3 * P))
    free = memory.book.free_pages
    second = memory.open(prompt(3 * P + 1))
    assert list(memory.book.pages(second)) == list(memory.book.pages(first))
    assert memory.book.free_pages == free


def test_only_committed_tokens_are_published() -> None:
    """A draft that was rejected, or a page that is not yet written, must never be somebody's prefix (vllm#42971)."""
    memory = Memory(8, P, 4)
    slot = filled(memory, prompt(3 * P), commit=False)
    assert memory.book.length(memory.open(prompt(3 * P))) == 0
    memory.commit(slot, 2 * P - 1)
    assert memory.book.length(memory.open(prompt(3 * P))) == P
    memory.commit(slot, 2 * P)
    assert memory.book.length(memory.open(prompt(3 * P))) == 2 * P


def test_reserved_pages_are_not_found() -> None:
    memory = Memory(8, P, 2)
    slot = memory.open(prompt(P))
    assert memory.reserve(slot, 4 * P)
    assert memory.book.length(memory.open(prompt(3 * P))) == 0
    with pytest.raises(BackendError, match=f"slot {slot}: cannot commit {P} tokens; 0 are written"):
        memory.book.commit(slot, P)


def test_equal_pages_behind_different_beginnings_are_different() -> None:
    """A page is more than its tokens: the keys and values in it depend on everything before."""
    memory = Memory(8, P, 3)
    filled(memory, [*prompt(P), *prompt(P, 50)])
    assert memory.book.length(memory.open([*prompt(P, 90), *prompt(P, 50), 1])) == 0
    assert memory.book.length(memory.open([*prompt(P, 50), *prompt(P, 50), 1])) == 0


def test_the_same_tokens_published_twice_keep_one_page() -> None:
    memory = Memory(12, P, 3)
    first, second = (filled(memory, prompt(2 * P + 1), commit=False) for _ in range(2))
    assert memory.book.free_pages == 6
    memory.commit(second, 2 * P)
    memory.commit(first, 2 * P)
    memory.compare()
    assert list(memory.book.pages(first))[:2] == list(memory.book.pages(second))[:2]
    assert memory.book.free_pages == 8
    assert len(list(memory.book.published())) == 2


def test_a_fork_moves_along_when_its_duplicate_pages_go() -> None:
    """Else it would hold a published page without the published page before it, and that one could be evicted."""
    memory = Memory(12, P, 4)
    known = filled(memory, prompt(P))
    twin = filled(memory, [*prompt(P)], commit=False)
    memory.grow(twin, prompt(P, 50))
    fork = memory.fork(twin)
    memory.commit(twin, 2 * P)
    memory.compare()
    assert list(memory.book.pages(fork)) == list(memory.book.pages(twin))
    for slot in (known, twin):
        memory.release(slot)
    filled(memory, prompt(10 * P, 100))
    assert memory.read(fork, 2 * P) == [*prompt(P), *prompt(P, 50)]


def test_without_a_prefix_cache_nothing_is_published() -> None:
    memory = Memory(8, P, 2, prefix_cache=False)
    slot = filled(memory, prompt(2 * P))
    assert memory.book.length(memory.open(prompt(3 * P))) == 0
    memory.release(slot)
    assert not list(memory.book.published())


# --- eviction ---


def test_published_pages_stay_until_memory_is_needed() -> None:
    """sglang #32459: setting aside more than is needed evicts what others would have found."""
    memory = Memory(8, P, 2)
    memory.release(filled(memory, prompt(4 * P)))
    assert memory.book.free_pages == 8
    other = filled(memory, prompt(4 * P, 100), commit=False)
    assert len(list(memory.book.published())) == 4
    memory.reserve(other, 4 * P + 1)
    assert len(list(memory.book.published())) == 3


@pytest.mark.parametrize("taken", range(7))
def test_the_longest_unused_goes_first_and_of_a_chain_the_deepest_page(taken: int) -> None:
    memory = Memory(6, P, 2)
    old, new = prompt(3 * P), prompt(3 * P, 50)
    memory.release(filled(memory, old))
    memory.release(filled(memory, new))
    memory.release(memory.open([*old, 1]))  # now `new` is the one that was not used for longest
    filled(memory, prompt(taken * P, 1000), commit=False)
    memory.compare()
    order = [*reversed(range(P * 3, P * 6, P)), *reversed(range(0, P * 3, P))]
    both = [*old, *new]
    left = {tuple(both[at : at + P]) for at in order[taken:]}
    assert {tokens for _, tokens in memory.book.published()} == left


def test_what_is_held_is_never_evicted() -> None:
    memory = Memory(4, P, 3)
    holder = filled(memory, prompt(2 * P))
    taker = memory.open()
    assert not memory.reserve(taker, 2 * P + 1)
    assert memory.grow(taker, prompt(2 * P, 50))
    memory.compare()
    assert memory.read(holder, 2 * P) == prompt(2 * P)


# --- copy on write ---


def test_a_fork_with_a_partly_filled_page_is_copied_once() -> None:
    memory = Memory(8, P, 3)
    slot = filled(memory, prompt(P + 2))
    fork = memory.fork(slot)
    assert list(memory.book.pages(slot)) == list(memory.book.pages(fork))
    assert memory.grow(slot, [7])
    assert memory.copies == 1
    assert memory.grow(fork, [8])
    assert memory.copies == 1, "nobody else sees the page any more"
    memory.compare()


def test_a_fork_gives_back_what_was_reserved() -> None:
    """Else the first writer would write into the page that both see."""
    memory = Memory(8, P, 2)
    slot = filled(memory, prompt(2))
    memory.reserve(slot, 3 * P)
    memory.fork(slot)
    assert memory.book.free_pages == 7
    with pytest.raises(BackendError, match=f"slot {slot}: 1 tokens behind 2, but 2 are reserved; reserve 3 first"):
        memory.book.append(slot, [1])


def test_a_published_page_that_was_cut_into_stays_for_others() -> None:
    memory = Memory(8, P, 2)
    slot = filled(memory, prompt(2 * P))
    memory.truncate(slot, P + 1)
    assert memory.grow(slot, [99, 98, 97, 96])
    assert memory.copies == 1
    memory.compare()
    other = memory.open(prompt(2 * P + 1))
    assert memory.read(other, memory.book.length(other)) == prompt(2 * P)


def test_a_cut_at_a_pages_edge_copies_nothing() -> None:
    memory = Memory(8, P, 2)
    slot = filled(memory, prompt(2 * P))
    memory.truncate(slot, P)
    assert memory.grow(slot, [99] * P)
    assert memory.copies == 0
    memory.compare()


def test_a_slot_alone_can_fill_all_memory_after_any_cut() -> None:
    """The copy of its own published page would be one page too many; a lone request could then never go on."""
    memory = Memory(3, P, 1)
    slot = filled(memory, prompt(3 * P))
    for cut in range(3 * P):
        memory.truncate(slot, cut)
        assert memory.grow(slot, prompt(3 * P, 100 * (cut + 1))[cut:]), cut
        memory.compare()
        memory.commit(slot, 3 * P)
        memory.compare()


def test_reserve_is_all_or_nothing() -> None:
    memory = Memory(4, P, 2)
    slot = filled(memory, prompt(2))
    memory.fork(slot)
    assert not memory.reserve(slot, 4 * P), "three free pages, one of which the copy takes"
    assert memory.reserve(slot, 3 * P)
    assert memory.copies == 1


# --- keep ---


def test_keep_refuses_what_was_not_written_or_is_seen_by_others() -> None:
    memory = Memory(8, P, 3)
    slot = filled(memory, prompt(2))
    memory.grow(slot, [5, 6, 7])
    for length, nodes in ((2, [3]), (2, [1, 0]), (2, [0, 0]), (2, [-1]), (6, []), (-1, [])):
        with pytest.raises(RollbackError, match=rf"slot {slot} holds 5 tokens; cannot keep {length}"):
            memory.keep(slot, length, nodes)
    fork = memory.fork(slot)
    with pytest.raises(RollbackError, match=f"slot {fork}: cannot move tokens to 2"):
        memory.keep(fork, 2, [1])
    memory.release(fork)
    memory.keep(slot, 2, [0, 2])
    memory.compare()
    assert list(memory.book.tokens(slot)) == [0, 1, 5, 7]


# --- refusals ---


@pytest.mark.parametrize("name", ["num_pages", "page_size", "num_slots"])
def test_sizes_below_one(name: str) -> None:
    with pytest.raises(InvalidParams, match=f"{name} = 0"):
        PageBook(**{"num_pages": 1, "page_size": 1, "num_slots": 1, name: 0})


def test_slots_run_out_and_the_lowest_comes_back_first() -> None:
    book = PageBook(4, P, 2)
    assert (book.open(), book.open()) == (0, 1)
    for move in (book.open, lambda: book.fork(0)):
        with pytest.raises(BackendError, match="all 2 slots are in use"):
            move()
    book.release(0)
    moves: list[Any] = [book.release, book.fork, book.pages, lambda s: book.reserve(s, 1), lambda s: book.commit(s, 0)]
    for move in moves:
        with pytest.raises(BackendError, match="slot 0 is not in use"):
            move(0)
    assert book.open() == 0


def test_truncate_keeps_no_more_than_there_is() -> None:
    book = PageBook(4, P, 1)
    slot = book.open()
    book.reserve(slot, 3)
    book.append(slot, [1, 2, 3])
    for length in (4, -1):
        with pytest.raises(RollbackError, match=f"slot 0 holds 3 tokens; cannot keep {length}"):
            book.truncate(slot, length)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b._holders.__setitem__(0, 2), "page 0: 2 holders on the books, 1 tables name it"),
        (lambda b: b._free.take(1), "not in exactly one of"),
        (lambda b: b._slots[0].pages.pop(), "holders on the books"),
        (lambda b: b._slots[0].tokens.__setitem__(0, 99), "its table says"),
        (lambda b: b._free_slots.append(0), "in use"),
        (lambda b: b._slots[0].tokens.extend([1] * 9), "pages of 4 for"),
        (lambda b: setattr(b._slots[0], "reserved", 2 * P + 1), "2 pages of 4 for 8 tokens"),
        (lambda b: b._prefix.forget(0), "published"),
        (lambda b: b._slots[0].tokens.pop(0), "its table says"),
    ],
)
def test_check_finds(spoil: Any, message: str) -> None:
    memory = Memory(6, P, 2)
    filled(memory, prompt(2 * P))
    memory.book.check()
    spoil(memory.book)
    with pytest.raises(InvariantError, match=message):
        memory.book.check()


# --- runs of neighbours ---


def test_sequences_side_by_side_grow_in_runs() -> None:
    """A table in one run is read as a view, others are gathered."""
    book = PageBook(64, P, 8)
    slots = [book.open() for _ in range(8)]
    for length in range(P, 8 * P + 1, P):
        for slot in slots:
            assert book.reserve(slot, length) == []
    assert book.free_pages == 0
    for slot in slots:
        pages = list(book.pages(slot))
        assert pages == list(range(pages[0], pages[0] + 8))


def test_free_runs_against_a_set() -> None:
    rng = random.Random(0)
    runs, free = FreeRuns(40), set(range(40))
    for _ in range(3_000):
        if rng.random() < 0.5 and free:
            count = rng.randint(1, min(6, len(free)))
            behind = rng.choice([None, *range(40)])
            taken = runs.take(count, behind)
            assert len(taken) == count
            assert set(taken) <= free
            assert behind is None or behind in free or behind + 1 not in free or taken[0] == behind + 1
            free -= set(taken)
        elif len(free) < 40:
            page = rng.choice(sorted(set(range(40)) - free))
            runs.add(page)
            free.add(page)
        assert list(runs) == sorted(free)
        assert len(runs) == len(free)
        assert not set(runs._end) & set(runs._first), "two runs that touch"
        assert len(runs._widest) <= 4 * len(runs._end) + 20
