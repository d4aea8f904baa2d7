"""The toy model: its logits come from the cells it stores, and it misbehaves only when told to."""

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
        (lambda s: Segment(s, (1,), 5, 1), "holds 0 tokens, the segment starts at 5"),
        (lambda s: Segment(s, (), 0, 0), "0 rows asked of 0 new tokens"),
        (lambda s: Segment(s, (1,), 0, 2), "2 rows asked of 1"),
        (lambda s: Segment(s, (11,), 0, 1), "token id 11; allowed: 0 to 10"),
        (lambda s: Segment(s, (-1,), 0, 1), "token id -1"),
        (lambda s: Segment(s, (1,) * 65, 0, 1), "max_len is 64"),
        (lambda s: Segment(s, (1,) * 600, 0, 1), "at most 512 fit a step"),
        (lambda s: Segment(s + 1, (1,), 0, 1), "is not in use"),
    ],
)
def test_bad_segments_are_refused_before_anything_is_cached(segment: object, message: str) -> None:
    backend = toy()
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
