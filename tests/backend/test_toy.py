"""The toy model: its logits come from the cells it stores in pages, and it misbehaves only when told to."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backend.toy import ALPHABET, ToyBackend
from paceline.errors import BackendError, InvalidParams, InvalidPrompt, InvariantError, RollbackError
from paceline.types import Backend, Segment, Tokenizer

TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def toy(**options: object) -> ToyBackend:
    return ToyBackend(**{"vocab_size": 11, "max_len": 64, "max_seqs": 4, "seed": 7, **options})  # type: ignore[arg-type]


def fresh_row(tokens: tuple[int, ...], **options: object) -> np.ndarray:
    backend = toy(**options)
    return backend.forward([Segment(backend.acquire(), tokens, 0, 1)])[0][0]


def test_protocols() -> None:
    assert isinstance(toy(), Backend)
    assert isinstance(toy().tokenizer, Tokenizer)


def test_rows_do_not_depend_on_width_batch_or_chunks() -> None:
    backend = toy()
    a, b = backend.acquire(), backend.acquire()
    wide = backend.forward([Segment(a, TOKENS, 0, len(TOKENS)), Segment(b, TOKENS[:3], 0, 1)])
    for i in range(len(TOKENS)):
        assert np.array_equal(wide[0][i], fresh_row(TOKENS[: i + 1]))
    assert np.array_equal(wide[1][0], fresh_row(TOKENS[:3]))
    chunked = toy()
    slot = chunked.acquire()
    assert chunked.forward([Segment(slot, TOKENS[:5], 0, 0)])[0].shape[0] == 0
    assert np.array_equal(chunked.forward([Segment(slot, TOKENS[5:], 5, 1)])[0][0], wide[0][-1])


@pytest.mark.parametrize("at", range(len(TOKENS) - 1))
def test_every_stored_cell_and_its_place_matter(at: int) -> None:
    changed = list(TOKENS)
    changed[at] = (changed[at] + 1) % 10
    assert not np.array_equal(fresh_row(tuple(changed)), fresh_row(TOKENS))
    swapped = list(TOKENS)
    swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    assert not np.array_equal(fresh_row(tuple(swapped)), fresh_row(TOKENS))


@pytest.mark.parametrize("kept", range(len(TOKENS) + 1))
def test_rollback_then_continue_equals_a_fresh_prefill(kept: int) -> None:
    backend = toy()
    slot = backend.acquire()
    backend.forward([Segment(slot, TOKENS, 0, 0)])
    backend.truncate(slot, kept)
    row = backend.forward([Segment(slot, (7, 8), kept, 1)])[0][0]
    assert np.array_equal(row, fresh_row((*TOKENS[:kept], 7, 8)))
    assert backend.cached_tokens(slot) == (*TOKENS[:kept], 7, 8)
    backend.check()


def test_fork_shares_the_past_and_not_the_future() -> None:
    backend = toy()
    a = backend.acquire()
    backend.forward([Segment(a, TOKENS, 0, 0)])
    b = backend.fork(a)
    backend.forward([Segment(a, (1,), len(TOKENS), 0)])
    row = backend.forward([Segment(b, (2,), len(TOKENS), 1)])[0][0]
    assert np.array_equal(row, fresh_row((*TOKENS, 2)))


def test_silent_rollback_shows_in_check_and_in_the_next_row() -> None:
    backend = toy(rollback="silent")
    slot = backend.acquire()
    backend.forward([Segment(slot, TOKENS, 0, 0)])
    backend.truncate(slot, 3)
    assert backend.length(slot) == 3
    with pytest.raises(InvariantError, match="says 3 tokens but attends to 8"):
        backend.check()
    row = backend.forward([Segment(slot, (7,), 3, 1)])[0][0]
    assert not np.array_equal(row, fresh_row((*TOKENS[:3], 7)))


def test_a_silent_rollback_runs_out_of_cells_with_a_typed_error() -> None:
    backend = toy(rollback="silent")
    slot = backend.acquire()
    for _ in range(2 * 64 // len(TOKENS)):
        backend.forward([Segment(slot, TOKENS, 0, 0)])
        backend.truncate(slot, 0)
    with pytest.raises(BackendError, match="never rolled back"):
        backend.forward([Segment(slot, TOKENS, 0, 0)])


def test_told_to_misbehave() -> None:
    failing = toy(rollback="fails")
    slot = failing.acquire()
    failing.forward([Segment(slot, TOKENS, 0, 0)])
    failing.truncate(slot, len(TOKENS))
    with pytest.raises(RollbackError, match=f"slot {slot}"):
        failing.truncate(slot, 2)
    noisy = toy(width_noise=0.1)
    slot = noisy.acquire()
    assert not np.array_equal(noisy.forward([Segment(slot, TOKENS, 0, 8)])[0][0], fresh_row(TOKENS[:1]))
    broken = toy(nan_when=lambda seen: len(seen) == 3)
    rows = broken.forward([Segment(broken.acquire(), TOKENS, 0, 8)])[0]
    assert [bool(np.isnan(r).all()) for r in rows] == [i == 2 for i in range(8)]


def test_a_table_replaces_the_hash() -> None:
    backend = ToyBackend(3, table=lambda seen: [float(len(seen)), 0.0, -np.inf])
    rows = backend.forward([Segment(backend.acquire(), (0, 1), 0, 2)])[0]
    assert rows.tolist() == [[1.0, 0.0, -np.inf], [2.0, 0.0, -np.inf]]


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (lambda s: Segment(s, (1,), 5, 1), "tokens start at 5, but 0 are cached"),
        (lambda s: Segment(s, (), 0, 0), "0 rows of 0 tokens"),
        (lambda s: Segment(s, (1,), 0, 2), "2 rows of 1 tokens"),
        (lambda s: Segment(s, (11,), 0, 1), "token id 11 is not an integer in 0 .. 10"),
        (lambda s: Segment(s, (-1,), 0, 1), "token id -1"),
        (lambda s: Segment(s, (1,) * 65, 0, 1), "the context holds 64"),
        (lambda s: Segment(s, (1,) * 33, 0, 1), "the batch has 33 tokens; one step takes 32"),
        (lambda s: Segment(s + 1, (1,), 0, 1), "is not in use"),
    ],
)
def test_bad_segments_are_refused_before_anything_is_cached(segment: object, message: str) -> None:
    backend = toy(max_step_tokens=512 if "context" in message else 32)
    slot = backend.acquire()
    other = backend.acquire()
    backend.release(other)
    with pytest.raises(BackendError, match=message):
        backend.forward([segment(slot)])  # type: ignore[operator]
    assert backend.length(slot) == 0


def test_slots_run_out_and_come_back() -> None:
    backend = toy()
    slots = [backend.acquire() for _ in range(4)]
    with pytest.raises(BackendError, match="all 4 slots are in use"):
        backend.acquire()
    for slot in slots:
        backend.release(slot)
    assert backend.slots_in_use == 0
    with pytest.raises(BackendError, match="is not in use"):
        backend.release(slots[0])
    with pytest.raises(BackendError, match="is not in use"):
        backend.length(99)


def test_tokenizer() -> None:
    assert sorted(ALPHABET) == list(range(256))
    full = ToyBackend().tokenizer
    text = "héllo \n€ 你好"
    assert b"".join(full.token_bytes(t) for t in full.encode(text)).decode() == text
    assert full.token_bytes(256) == b""
    small = toy().tokenizer
    assert small.encode("0123") == [0, 1, 2, 3]
    with pytest.raises(InvalidPrompt, match="no token for byte b'x'"):
        small.encode("x")
    with pytest.raises(InvalidParams, match="vocab_size = 0"):
        ToyBackend(0)


# --- pages ---

PAGE_SIZES = (1, 3, 16)
DRAFTS = (9, 8, 7, 6, 5)


def text_of(length: int) -> tuple[int, ...]:
    return tuple((i * i + i // 3) % 10 for i in range(length))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17])
@pytest.mark.parametrize("accepted", range(len(DRAFTS) + 1))
@pytest.mark.parametrize("start", ["fresh", "hit", "fork"])
def test_after_a_rollback_the_cells_are_those_of_a_fresh_prefill(
    page_size: int, length: int, accepted: int, start: str
) -> None:
    """Drafts across a page's edge, kept in part; sglang PR #13826, TensorRT-LLM PR #16280, vllm#42971."""
    backend = toy(page_size=page_size)
    text = text_of(length)
    slot = backend.acquire(text)
    backend.forward([Segment(slot, text, 0, 0)])
    backend.commit(slot, length)
    others = []
    if start == "hit":
        others = [slot]
        slot = backend.acquire(text)
        hit = backend.length(slot)
        assert hit == (length - 1) // page_size * page_size
        backend.forward([Segment(slot, text[hit:], hit, 0)])
    elif start == "fork":
        others = [slot]
        slot = backend.fork(slot)
    rows = backend.forward([Segment(slot, DRAFTS, length, len(DRAFTS))])[0]
    for i in range(len(DRAFTS)):
        assert np.array_equal(rows[i], fresh_row((*text, *DRAFTS[: i + 1])))
    kept = (*text, *DRAFTS[:accepted])
    backend.commit(slot, len(kept))
    backend.truncate(slot, len(kept))
    assert backend.cached_tokens(slot) == kept
    row = backend.forward([Segment(slot, (3,), len(kept), 1)])[0][0]
    assert np.array_equal(row, fresh_row((*kept, 3)))
    backend.check()
    for other in others:
        assert backend.cached_tokens(other) == text, "somebody else's cells changed"
        assert np.array_equal(backend.forward([Segment(other, (4,), length, 1)])[0][0], fresh_row((*text, 4)))
    backend.check()


def test_rejected_drafts_are_nobodys_prefix() -> None:
    backend = toy(page_size=2)
    slot = backend.acquire()
    backend.forward([Segment(slot, (*TOKENS, *DRAFTS), 0, 0)])
    backend.commit(slot, len(TOKENS))
    backend.truncate(slot, len(TOKENS))
    assert backend.length(backend.acquire((*TOKENS, *DRAFTS))) == len(TOKENS)


def test_warm_equals_cold() -> None:
    """A prefix hit gives the rows of a fresh prefill, bit for bit, while its owner lives, and after."""
    backend = toy(page_size=3)
    owner = backend.acquire(text_of(20))
    backend.forward([Segment(owner, text_of(20), 0, 0)])
    backend.commit(owner, 20)
    for alive in (True, False):
        if not alive:
            backend.release(owner)
        slot = backend.acquire(text_of(20))
        assert backend.length(slot) == 18
        rows = backend.forward([Segment(slot, text_of(20)[18:], 18, 2)])[0]
        assert np.array_equal(rows[0], fresh_row(text_of(19)))
        assert np.array_equal(rows[1], fresh_row(text_of(20)))
        backend.check()
        backend.release(slot)
    cold = toy(page_size=3, prefix_cache=False)
    owner = cold.acquire(text_of(20))
    cold.forward([Segment(owner, text_of(20), 0, 0)])
    cold.commit(owner, 20)
    assert cold.length(cold.acquire(text_of(20))) == 0


@pytest.mark.parametrize(("asked", "given"), [(None, 4 * 64), (1, 16), (31, 16), (32, 32)])
def test_memory_is_whole_pages(asked: int | None, given: int) -> None:
    assert toy(kv_tokens=asked).info.kv_tokens == given
    assert toy(kv_tokens=asked).info.page_size == 16
    assert toy(max_len=17, page_size=16).info.kv_tokens == 4 * 32, "by default nobody ever waits for memory"


def test_reserve_and_forward_refuse_what_does_not_fit() -> None:
    backend = toy(page_size=4, kv_tokens=16)
    a, b = backend.acquire(), backend.acquire()
    assert backend.reserve(a, 9)
    assert not backend.reserve(b, 5)
    assert backend.reserve(b, 4)
    backend.forward([Segment(a, (1,) * 9, 0, 0)])
    with pytest.raises(
        BackendError, match="slot 0: no room for 13 tokens; kv_tokens = 16 in pages of 4, 0 of them free"
    ):
        backend.forward([Segment(b, (1,), 0, 0), Segment(a, (1,) * 4, 9, 0)])
    assert (backend.length(a), backend.length(b)) == (9, 0)
    backend.check()
    backend.truncate(b, 0)
    assert backend.free_pages == 1
    backend.truncate(a, 1)
    assert backend.free_pages == 3


def test_a_refused_forward_sets_nothing_aside() -> None:
    backend = toy(page_size=4, kv_tokens=16)
    a, b = backend.acquire(), backend.acquire()
    with pytest.raises(BackendError, match="no room"):
        backend.forward([Segment(a, (1,) * 8, 0, 0), Segment(b, (1,) * 9, 0, 0)])
    assert backend.free_pages == 4
    backend.check()


@pytest.mark.parametrize("spoil", ["held", "published"])
def test_check_reads_the_cells(spoil: str) -> None:
    backend = toy(page_size=4)
    slot = backend.acquire()
    backend.forward([Segment(slot, TOKENS, 0, 0)])
    if spoil == "published":
        backend.commit(slot, len(TOKENS))
        backend.release(slot)
    backend.check()
    backend._cells[0, 1] += 1
    with pytest.raises(InvariantError, match="cells hold"):
        backend.check()


# --- trees ---

# Two branches from the root, one of which forks again; written in an order that mixes them.
TREE = (5, 6, 7, 8, 5, 9, 0)
PARENTS = (-1, -1, 0, 1, 0, 4, 3)


def path_to(node: int) -> list[int]:
    return [*(path_to(PARENTS[node]) if PARENTS[node] >= 0 else ()), node]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 13, 16])
@pytest.mark.parametrize("leaf", [None, *range(len(TREE))])
def test_a_trees_rows_see_their_ancestors_and_the_kept_path_is_a_fresh_prefill(
    page_size: int, length: int, leaf: int | None
) -> None:
    backend = toy(page_size=page_size)
    slot, text = backend.acquire(), text_of(length)
    if length:
        backend.forward([Segment(slot, text, 0, 0)])
    rows = backend.forward([Segment(slot, TREE, length, len(TREE), PARENTS)])[0]
    for node in range(len(TREE)):
        assert np.array_equal(rows[node], fresh_row((*text, *(TREE[i] for i in path_to(node)))))
    path = [] if leaf is None else path_to(leaf)
    backend.keep(slot, length, path)
    backend.commit(slot, length + len(path))
    kept = (*text, *(TREE[i] for i in path))
    assert backend.cached_tokens(slot) == kept
    backend.check()
    assert np.array_equal(backend.forward([Segment(slot, (3,), len(kept), 1)])[0][0], fresh_row((*kept, 3)))


def test_a_trees_depth_counts_against_max_len_and_not_its_width() -> None:
    backend = toy(max_len=16)
    slot = backend.acquire()
    backend.forward([Segment(slot, text_of(15), 0, 0)])
    with pytest.raises(BackendError, match=r"15 tokens cached and 2 new make 17; the context holds 16"):
        backend.forward([Segment(slot, (1, 2), 15, 0, (-1, 0))])
    backend.forward([Segment(slot, (1, 2), 15, 0, (-1, -1))])
    backend.keep(slot, 15, [1])
    assert backend.cached_tokens(slot) == (*text_of(15), 2)


def test_keep_misbehaves_as_truncate_does() -> None:
    silent, failing = toy(rollback="silent"), toy(rollback="fails")
    for backend in (silent, failing, toy()):
        slot = backend.acquire()
        backend.forward([Segment(slot, (1, 2, 3), 0, 0, (-1, -1, 1))])
        with pytest.raises(RollbackError, match="cannot keep 1 tokens and nodes"):
            backend.keep(slot, 1, [0, 1, 2])
    silent.keep(0, 0, [1])
    assert silent.length(0) == 1
    assert silent.cached_tokens(0) == (1, 2, 3)
    with pytest.raises(RollbackError, match="told to refuse a rollback to 1"):
        failing.keep(0, 0, [1])
    failing.release(0)
    failing.forward([Segment(failing.acquire(), (1, 2, 3), 0, 0, (-1, 0, 1))])
    failing.keep(0, 0, [0, 1, 2])
