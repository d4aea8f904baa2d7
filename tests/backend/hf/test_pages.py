"""What lies in the pages: after a rollback, a fork, a prefix hit or a preemption, what a fresh prefill puts there.

Bit for bit against a replay of the same widths (a linear layer's rows differ in their last bits between widths), within
1e-11 against one prefill in float64. Pools hold NaN where nothing was written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from paceline.backend.hf import HFBackend
from paceline.errors import BackendError, RollbackError
from paceline.types import Segment

from .models import VOCAB, apart, cells_apart, contents, opened, reference, tokens

PAGE = 4
K = 5


def prefill(backend: HFBackend, text: Any, chunk: int = 1000, known: bool = True) -> int:
    """A slot that holds `text`, through the prefix cache where `known`."""
    slot = backend.acquire(text if known else ())
    while backend.length(slot) < len(text):
        start = backend.length(slot)
        new = tuple(text[start : start + chunk])
        backend.forward([Segment(slot, new, start, 1)])
    return slot


def fresh(family: str, text: Any) -> Any:
    backend = opened(family, page_size=PAGE)
    return contents(backend, prefill(backend, text))


@pytest.mark.parametrize("committed", [2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("accepted", range(K + 1))
def test_a_rollback_leaves_what_a_fresh_prefill_writes(accepted: int, committed: int) -> None:
    """Every number of accepted drafts, at page borders and beside them (TensorRT-LLM PR #16280), window 9 passed.

    The replay has the same widths and other rejected drafts: bits that depend on a rejected draft would show.
    """
    text = tokens(1, committed + 1 + K)
    kept = committed + 1 + accepted
    ends = []
    for noise in (3, 17):
        backend = opened("gemma2", page_size=PAGE)
        slot = prefill(backend, text[:committed])
        drafts = [*text[committed:kept], *((t + noise) % VOCAB for t in text[kept:])]
        backend.forward([Segment(slot, tuple(drafts), committed, 1)])
        backend.truncate(slot, kept)
        backend.check()
        rows = [backend.forward([Segment(slot, (9,), kept, 1)])[0]]
        ends.append((contents(backend, slot), rows))
        backend.close()
    assert cells_apart(ends[0][0], ends[1][0]) == 0.0
    assert apart(ends[0][1][0], ends[1][1][0]) == 0.0
    assert cells_apart(ends[0][0], fresh("gemma2", (*text[:kept], 9))) <= 1e-11


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_many_steps_of_rollback(family: str) -> None:
    """Stale cells of earlier steps, overwritten or not, never come back: mlx-lm#1914, transformers#46629."""
    rng = np.random.default_rng(0)
    text = tokens(2, 80)
    backend = opened(family, page_size=PAGE)
    slot = prefill(backend, text[:6])
    while (at := backend.length(slot)) < 70:
        accepted = int(rng.integers(0, K + 1))
        drafts = [*text[at : at + 1 + accepted], *rng.integers(2, VOCAB, K - accepted).tolist()]
        backend.forward([Segment(slot, tuple(drafts), at, 1)])
        backend.truncate(slot, at + 1 + accepted)
        backend.commit(slot, at + 1 + accepted)
        backend.check()
    assert cells_apart(contents(backend, slot), fresh(family, text[: backend.length(slot)])) <= 1e-11
    backend.close()


@pytest.mark.parametrize("length", [7, 8, 9])
def test_forks_do_not_write_into_each_other(length: int) -> None:
    """Parent and child go on differently from shared pages, full ones and half ones."""
    text = tokens(3, length)
    backend = opened("mistral", page_size=PAGE)
    parent = prefill(backend, text)
    child = backend.fork(parent)
    backend.check()
    backend.forward([Segment(parent, (5, 6, 7, 8, 9), length, 1), Segment(child, (15, 16, 17), length, 1)])
    assert cells_apart(contents(backend, parent), fresh("mistral", (*text, 5, 6, 7, 8, 9))) <= 1e-11
    assert cells_apart(contents(backend, child), fresh("mistral", (*text, 15, 16, 17))) <= 1e-11
    backend.truncate(child, length - 2)
    backend.forward([Segment(child, (25,), length - 2, 1)])
    assert cells_apart(contents(backend, child), fresh("mistral", (*text[:-2], 25))) <= 1e-11
    assert cells_apart(contents(backend, parent), fresh("mistral", (*text, 5, 6, 7, 8, 9))) <= 1e-11
    backend.check()
    backend.close()


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_warm_equals_cold(family: str) -> None:
    """mlx-vlm#1715: a prefix hit after the window wrapped gave other text. Contents and rows, drafts included."""
    text = tokens(4, 50)
    backend = opened(family, page_size=PAGE)
    cold = prefill(backend, text[:41])
    backend.commit(cold, 41)
    warm = backend.acquire(text)
    assert backend.length(warm) == 40  # or the test says nothing
    (rows,) = backend.forward([Segment(warm, text[40:], 40, 10)])
    assert apart(rows, reference(family).rows(text)[40:]) <= 1e-11
    assert cells_apart(contents(backend, warm), fresh(family, text)) <= 1e-11
    backend.truncate(warm, 43)  # a rollback in a slot whose first pages are shared
    backend.forward([Segment(warm, (7, 8), 43, 1)])
    assert cells_apart(contents(backend, warm), fresh(family, (*text[:43], 7, 8))) <= 1e-11
    assert cells_apart(contents(backend, cold), fresh(family, text[:41])) <= 1e-11
    backend.release(cold)
    again = backend.acquire(text)  # published pages outlive their slot
    assert backend.length(again) == 40
    backend.check()
    backend.close()


def test_rejected_drafts_are_never_published() -> None:
    """A page is shared when its tokens are committed, not when they are written."""
    text = tokens(5, 24)
    backend = opened("llama", page_size=PAGE)
    slot = prefill(backend, text[:10])
    backend.commit(slot, 10)
    backend.forward([Segment(slot, text[10:], 10, 1)])  # drafts, none of them decided
    other = backend.acquire(text)
    assert backend.length(other) == 8
    backend.truncate(slot, 11)
    backend.commit(slot, 11)
    assert backend.length(backend.acquire(text)) == 8
    backend.check()
    backend.close()


def test_preempted_and_computed_anew() -> None:
    """Released while others run, then computed anew in other, scattered pages: the same contents."""
    texts = [tokens(seed, 30) for seed in (6, 7, 8)]
    backend = opened("gemma2", page_size=PAGE, max_len=40, kv_tokens=88, prefix_cache=False)
    slots = [prefill(backend, text[:22], chunk=5) for text in texts]
    assert not backend.reserve(slots[0], 44)  # memory is short
    backend.release(slots[1])
    for i in (0, 2):
        backend.forward([Segment(slots[i], texts[i][22:26], 22, 1)])
    again = prefill(backend, texts[1], chunk=3)
    assert any(b - a != 1 for a, b in zip(backend._book.pages(again), backend._book.pages(again)[1:], strict=False))
    assert cells_apart(contents(backend, again), fresh("gemma2", texts[1])) <= 1e-11
    assert cells_apart(contents(backend, slots[2]), fresh("gemma2", texts[2][:26])) <= 1e-11
    backend.check()
    backend.close()


def test_too_little_memory_changes_nothing() -> None:
    """A batch that does not fit is refused as a whole, and what each slot had set aside stays set aside."""
    backend = opened("llama", page_size=PAGE, max_len=40, kv_tokens=40, prefix_cache=False)
    a, b = prefill(backend, tokens(1, 9)), prefill(backend, tokens(2, 9))
    assert backend.reserve(a, 14)
    before = [list(backend._book.pages(slot)) for slot in (a, b)], contents(backend, a), contents(backend, b)
    with pytest.raises(BackendError, match=rf"slot {b}: no room for 31 tokens; .* raise kv_tokens"):
        backend.forward([Segment(a, (1,) * 8, 9, 1), Segment(b, (1,) * 22, 9, 1)])
    assert [list(backend._book.pages(slot)) for slot in (a, b)] == before[0]
    assert backend._book.reserved(a) == 14
    assert cells_apart(contents(backend, a), before[1]) == cells_apart(contents(backend, b), before[2]) == 0.0
    backend.check()
    backend.close()


def test_a_refused_forward_may_leave_a_copied_page() -> None:
    """The copy that a refused write made stays, is counted, and holds what it held; the other slot keeps its page."""
    text = tokens(1, 6)
    backend = opened("llama", page_size=PAGE, max_len=16, kv_tokens=16, prefix_cache=False)
    slot = prefill(backend, text)
    fork, other = backend.fork(slot), backend.acquire()
    shared = list(backend._book.pages(slot))
    before = contents(backend, slot)
    with pytest.raises(BackendError, match=f"slot {other}: no room for 9 tokens; 1 of 4 pages"):
        backend.forward([Segment(fork, (1,), 6, 0), Segment(other, (1,) * 9, 0, 0)])
    assert list(backend._book.pages(slot)) == shared
    first, copied = backend._book.pages(fork)
    assert first == shared[0]
    assert copied != shared[1]
    assert [backend._book.reserved(s) for s in (slot, fork, other)] == [6, 6, 0]
    assert cells_apart(contents(backend, slot), before) == cells_apart(contents(backend, fork), before) == 0.0
    backend.check()
    backend.close()


def test_truncate_does_it_or_raises() -> None:
    backend = opened("llama")
    slot = prefill(backend, tokens(1, 9))
    for length in (-1, 10):
        with pytest.raises(RollbackError, match=rf"cannot truncate slot {slot} to {length} tokens: it holds 9"):
            backend.truncate(slot, length)
    assert backend.length(slot) == 9
    backend.close()


def test_adjacent_pages_are_read_where_they_lie() -> None:
    """No copy of the KV per step: keys of a contiguous table are a view of the pool, whatever the window."""
    from paceline.backend.hf import attention, step

    backend = opened("llama", page_size=PAGE)
    slot = prefill(backend, tokens(1, 30))
    part = step.Part(0, 1, 29, backend._book.pages(slot))
    keys = backend._pools._layers[0][0]
    for window in (0, 7):
        (view,) = step.Step([part], backend._pools).views(window, 2, keys.dtype)
        seen = attention._visible(keys, view)
        assert seen.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
        assert seen.shape[2] == (window or 30)
    backend.close()


@pytest.mark.parametrize("pages", [(5, 9, 7), (5, 7, 6, 8), (2, 1, 4), (6, 14, 15, 16, 10)])
def test_tables_whose_ends_lie_as_if_contiguous(pages: tuple[int, ...]) -> None:
    """The first and the last cell as far apart as if all lay side by side, and what is between them elsewhere: the new
    tokens once went to the cells between, which were somebody else's."""
    backend = opened("llama", page_size=PAGE, max_len=64, kv_tokens=PAGE * 20, prefix_cache=False)
    text = tokens(4, PAGE * len(pages))
    slot = backend.acquire()
    assert backend.reserve(slot, len(text))
    table = backend._book.pages(slot)
    assert isinstance(table, list)
    given, table[:] = list(table), pages
    rows = backend.forward([Segment(slot, tuple(text), 0, len(text))])[0]
    assert apart(rows, reference("llama").rows(text)) < 1e-11
    assert cells_apart(contents(backend, slot), fresh("llama", text)) < 1e-11
    table[:] = given
    backend.release(slot)
    backend.check()
