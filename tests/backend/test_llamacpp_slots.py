"""The Backend contract on llama.cpp, over tiny random models: slots and forks, refusals, failures, life and death."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.backend.llamacpp import LlamaCppBackend
from paceline.errors import BackendError, RollbackError
from paceline.types import Segment

from .llamacpp_moves import CLOSE, MORE, PROMPT, Failing, Open, alone, alone_in, feed

# --- forks and slots --------------------------------------------------------------------------------


def test_fork_shares_the_prefix_and_then_goes_its_own_way(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    free = backend._cells.free
    new = backend.fork(slot)
    assert backend._cells.free == free  # no cell of its own yet
    assert backend.length(new) == 40
    ours, theirs = backend.forward([Segment(slot, (5, 6), 40, 2), Segment(new, (7,), 40, 1)])
    ours, theirs = np.array(ours), np.array(theirs)
    backend.check()
    np.testing.assert_allclose(ours, alone(backend, (*PROMPT, 5, 6), 2), **CLOSE)
    np.testing.assert_allclose(theirs, alone(backend, (*PROMPT, 7), 1), **CLOSE)
    backend.truncate(slot, 10)
    backend.release(slot)
    np.testing.assert_allclose(feed(backend, new, (8,)), alone(backend, (*PROMPT, 7, 8), 1), **CLOSE)
    backend.release(new)
    backend.check()
    assert backend._cells.free == backend.info.kv_tokens


def test_fork_of_an_empty_slot_and_fork_without_room(tiny: Open) -> None:
    backend = tiny(max_seqs=2)
    slot = backend.acquire()
    assert backend.length(backend.fork(slot)) == 0
    with pytest.raises(BackendError, match="all 2 slots are in use"):
        backend.fork(slot)
    backend.check()


def test_slots_come_lowest_first_and_only_once(tiny: Open) -> None:
    backend = tiny(max_seqs=3)
    assert [backend.acquire() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(BackendError, match="all 3 slots are in use"):
        backend.acquire()
    backend.release(1)
    with pytest.raises(BackendError, match="slot 1 is not in use"):
        backend.release(1)
    assert backend.acquire() == 1
    assert backend.length(1) == 0


def test_a_released_slot_is_empty_for_its_next_owner(tiny: Open) -> None:
    backend = tiny(max_seqs=1)
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    backend.release(slot)
    slot = backend.acquire()
    assert backend.length(slot) == 0
    np.testing.assert_allclose(feed(backend, slot, MORE), alone_in(tiny, MORE), **CLOSE)


def test_nothing_leaks_over_random_moves(tiny: Open) -> None:
    """sgl-project/sglang#13826: after random requests the free memory is the memory there was."""
    backend = tiny(max_seqs=5, max_len=64, kv_tokens=200, max_step_tokens=64)
    rng = np.random.default_rng(11)
    texts: dict[int, list[int]] = {}
    for _ in range(300):
        move = rng.integers(0, 5)
        slot = int(rng.choice(list(texts))) if texts else -1
        if move == 0 and len(texts) < 5:
            texts[backend.acquire()] = []
        elif move == 1 and texts and len(texts) < 5:
            texts[backend.fork(slot)] = list(texts[slot])
        elif move == 2 and texts:
            keep = int(rng.integers(0, len(texts[slot]) + 1))
            backend.truncate(slot, keep)
            del texts[slot][keep:]
        elif move == 3 and texts:
            backend.release(slot)
            del texts[slot]
        elif texts:
            new = [int(t) for t in rng.integers(3, 261, rng.integers(1, 6))]
            if len(texts[slot]) + len(new) <= 64 and len(new) <= backend._cells.free:
                backend.forward([Segment(slot, tuple(new), len(texts[slot]), 1)])
                texts[slot] += new
        backend.check()
        assert {s: backend.length(s) for s in texts} == {s: len(t) for s, t in texts.items()}
    for slot in texts:
        backend.release(slot)
    backend.check()
    assert backend._cells.free == 200


# --- what a forward refuses -------------------------------------------------------------------------


def segment(slot: int = 0, tokens: tuple[Any, ...] = (5,), start: int = 5, rows: int = 1) -> Segment:
    return Segment(slot, tokens, start, rows)


@pytest.mark.parametrize(
    "batch, message",
    [
        ([], "the batch is empty"),
        ([segment(tokens=(), rows=0)], "slot 0: 0 rows of 0 tokens"),
        ([segment(rows=2)], "slot 0: 2 rows of 1 tokens"),
        ([segment(rows=-1)], "slot 0: -1 rows of 1 tokens"),
        ([segment(slot=1)], "slot 1 is not in use"),
        ([segment(slot=-1)], "slot -1 is not in use"),
        ([segment(slot=99)], "slot 99 is not in use"),
        ([segment(), segment()], "slot 0 comes twice"),
        ([segment(start=4)], "slot 0: tokens start at 4, but 5 are cached"),
        ([segment(start=6)], "slot 0: tokens start at 6, but 5 are cached"),
        ([segment(tokens=(-1,))], "slot 0: token id -1 is not an integer in 0 .. 260"),
        ([segment(tokens=(3, 261))], "slot 0: token id 261 is not an integer in 0 .. 260"),
        ([segment(tokens=(3, 2**40))], f"slot 0: token id {2**40} is not"),
        ([segment(tokens=(3, 1.5))], "slot 0: token id 1.5 is not an integer"),
        ([segment(tokens=("a",))], "slot 0: token id 'a' is not an integer"),
        ([segment(tokens=(5,) * 65)], "the batch has 65 tokens; one step takes 64"),
    ],
)
def test_forward_refuses_and_caches_nothing(tiny: Open, batch: list[Segment], message: str) -> None:
    """vllm#44744 (an id outside the vocabulary crashed steps later): refused by name, before llama.cpp."""
    backend = tiny(max_seqs=2, max_step_tokens=64)
    slot = backend.acquire()
    feed(backend, slot, MORE, 0)
    with pytest.raises(BackendError, match=message.replace(".", r"\.").replace("(", r"\(")):
        backend.forward(batch)
    assert backend.length(slot) == 5
    backend.check()
    np.testing.assert_allclose(feed(backend, slot, (6,)), alone(backend, (*MORE, 6), 1), **CLOSE)


def test_one_bad_segment_refuses_the_whole_batch(tiny: Open) -> None:
    backend = tiny()
    a, b = backend.acquire(), backend.acquire()
    with pytest.raises(BackendError, match="slot 1: tokens start at 3"):
        backend.forward([Segment(a, MORE, 0, 1), Segment(b, MORE, 3, 1)])
    assert (backend.length(a), backend.length(b)) == (0, 0)
    backend.check()


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 5])
def test_drafts_at_the_context_limit(tiny: Open, left: int) -> None:
    """ggml-org/llama.cpp#10547, ggml-org/llama.cpp#13963, turboderp-org/exllamav2#274, vllm#42533: 0 .. K+1 left."""
    backend = tiny(max_len=64, max_step_tokens=64)
    slot = backend.acquire()
    feed(backend, slot, (5,) * (64 - left), 0)
    if left < 5:
        with pytest.raises(BackendError, match=f"{64 - left} tokens cached and 5 new make {69 - left}"):
            feed(backend, slot, MORE, 5)
    assert backend.length(slot) == 64 - left
    if left:
        assert feed(backend, slot, MORE[:left], left).shape == (left, 261)
    backend.check()


def test_kv_memory_is_shared_and_full_memory_is_refused(tiny: Open) -> None:
    backend = tiny(max_seqs=3, max_len=64, kv_tokens=100, max_step_tokens=64)
    assert backend.info.kv_tokens == 100
    a, b = backend.acquire(), backend.acquire()
    feed(backend, a, (5,) * 60, 0)
    with pytest.raises(BackendError, match="the batch has 41 tokens and the KV memory has room for 40 of 100"):
        feed(backend, b, (5,) * 41, 0)
    c = backend.fork(a)  # costs nothing
    feed(backend, b, (5,) * 40, 0)
    backend.release(a)
    with pytest.raises(BackendError, match="room for 0 of 100"):
        feed(backend, c, (5,), 0)
    backend.release(c)
    feed(backend, b, (5,) * 20, 0)
    backend.check()


def test_reserved_memory_is_nobody_elses(tiny: Open) -> None:
    """What one slot has set aside, drafts included, no other slot can take; rolling back lets go of it."""
    backend = tiny(max_seqs=3, max_len=64, kv_tokens=100, max_step_tokens=64)
    a, b = backend.acquire(), backend.acquire()
    assert backend.reserve(a, 60)
    assert not backend.reserve(b, 41)
    with pytest.raises(BackendError, match="the batch has 41 tokens and the KV memory has room for 100 of 100, res"):
        feed(backend, b, (5,) * 41, 0)
    assert backend.reserve(b, 40)
    assert not backend.reserve(a, 61)
    feed(backend, a, (5,) * 60, 0)  # within what was set aside: always works
    feed(backend, b, (5,) * 10, 0)
    backend.truncate(b, 10)  # nothing to forget, and yet it lets go of the other 30
    assert not backend.reserve(a, 91)
    assert backend.reserve(a, 90)
    backend.release(a)
    assert backend.reserve(b, 100)
    backend.check()


@pytest.mark.parametrize("why", ["memory", "llama.cpp"])
def test_a_refused_forward_sets_nothing_aside(tiny: Open, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither segments before the one that does not fit, nor those of a batch that failed, keep cells from others."""
    backend = tiny(max_seqs=3, max_len=64, kv_tokens=100, max_step_tokens=100)
    a, b, c = (backend.acquire() for _ in range(3))
    assert backend.reserve(a, 20)
    batch = [Segment(a, (5,) * 50, 0, 0), Segment(b, (5,) * (50 if why == "llama.cpp" else 40), 0, 0)]
    with monkeypatch.context() as patch:
        if why == "memory":
            assert backend.reserve(c, 20)
        else:
            patch.setattr(backend, "_native", Failing(backend._native, 1))
        with pytest.raises(BackendError, match="slot 1: no room for 40" if why == "memory" else "status 1"):
            backend.forward(batch)
    backend.release(c)
    backend.check()
    assert not backend.reserve(b, 81)
    assert backend.reserve(b, 80)  # all but the 20 that were set aside before
    backend.check()


def test_trees_are_refused(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    assert not backend.info.can_tree
    with pytest.raises(BackendError, match=r"a tree with parents \(-1, -1\)"):
        backend.forward([Segment(slot, (1, 2), 0, 2, parents=(-1, -1))])
    with pytest.raises(RollbackError, match="no trees"):
        backend.keep(slot, 0, [0])


def test_a_failed_forward_leaves_every_slot_as_it_was(tiny: Open) -> None:
    backend = tiny()
    a, b = backend.acquire(), backend.acquire()
    backend.forward([Segment(a, PROMPT, 0, 0), Segment(b, MORE, 0, 0)])
    native = backend._native
    abort = native.ggml_abort_callback(lambda _: True)
    native.llama_set_abort_callback(backend._model.context, abort, ctypes.c_void_p(0))
    with pytest.raises(BackendError, match=r"slots \[0, 1\]: aborted \(status 2\)"):
        backend.forward([Segment(a, (5, 6), 40, 2), Segment(b, (7,), 5, 1)])
    native.llama_set_abort_callback(backend._model.context, native.ggml_abort_callback(), ctypes.c_void_p(0))
    assert (backend.length(a), backend.length(b)) == (40, 5)
    backend.check()
    rows = [np.array(r) for r in backend.forward([Segment(a, (5, 6), 40, 2), Segment(b, (7,), 5, 1)])]
    np.testing.assert_allclose(rows[0], alone(backend, (*PROMPT, 5, 6), 2), **CLOSE)
    np.testing.assert_allclose(rows[1], alone(backend, (*MORE, 7), 1), **CLOSE)


@pytest.mark.parametrize("status", [1, -1, -2, -3, 77])
def test_a_status_of_llama_cpp_becomes_an_error_with_its_meaning(
    tiny: Open, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, MORE, 0)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_native", Failing(backend._native, status))
        with pytest.raises(BackendError, match=rf"a batch of 2 tokens for slots \[0\]: .*\(status {status}\)"):
            feed(backend, slot, (6, 7))
    assert backend.length(slot) == 5
    backend.check()


def test_a_recurrent_slot_that_a_failed_forward_spoiled_is_emptied(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny("mamba")
    slot = backend.acquire()
    feed(backend, slot, MORE, 0)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_native", Failing(backend._native, -3))
        with pytest.raises(BackendError, match="the computation failed"):
            feed(backend, slot, (6, 7))
    assert backend.length(slot) == 0
    backend.check()


# --- life and death ---------------------------------------------------------------------------------


def test_close_twice_and_use_after_close(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, MORE)
    known = backend.tokenizer.token_bytes(70)
    backend.close()
    backend.close()
    calls: list[Callable[[], object]] = [
        backend.acquire,
        backend.check,
        lambda: backend.fork(slot),
        lambda: backend.release(slot),
        lambda: backend.truncate(slot, 0),
        lambda: backend.forward([Segment(slot, (5,), 5, 1)]),
        lambda: backend.tokenizer.encode("hello"),
        lambda: backend.tokenizer.token_bytes(71),
        lambda: backend.tokenizer.token_text(71),
        lambda: backend.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]),
    ]
    for call in calls:
        with pytest.raises(BackendError, match=r"llama\.gguf is closed"):
            call()
    assert backend.tokenizer.token_bytes(70) == known


def test_two_backends_at_once(tiny: Open) -> None:
    """A target and a drafter, interleaved, closed in either order."""
    target, drafter = tiny(), tiny("draft")
    t, d = target.acquire(), drafter.acquire()
    for token in PROMPT[:6]:
        feed(target, t, (token,), 0)
        feed(drafter, d, (token,), 0)
    ours, theirs = feed(target, t, (9,)), feed(drafter, d, (9,))
    assert not np.allclose(ours, theirs, atol=0.1)
    np.testing.assert_allclose(ours, alone(target, (*PROMPT[:6], 9), 1), **CLOSE)
    target.close()
    np.testing.assert_allclose(theirs, alone(drafter, (*PROMPT[:6], 9), 1), **CLOSE)


def test_collecting_a_backend_frees_it(tiny_path: Callable[[str], Any]) -> None:
    pytest.importorskip("llama_cpp")
    backend = LlamaCppBackend(tiny_path("llama"), max_seqs=1, n_threads=1)
    model = backend._model
    finalizer = model._finalizer
    del backend, model
    gc.collect()
    assert not finalizer.alive


def test_an_open_backend_does_not_spoil_the_interpreters_exit(
    tiny_path: Callable[[str], Any], survives: Callable[..., str]
) -> None:
    pytest.importorskip("llama_cpp")
    code = (
        "import sys; from paceline.backend.llamacpp import LlamaCppBackend; "
        "backend = LlamaCppBackend(sys.argv[1], n_threads=1); backend.acquire(); print('done')"
    )
    assert survives(code, tiny_path("llama")) == "done\n"
