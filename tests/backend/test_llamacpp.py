"""The Backend contract on llama.cpp, over tiny random models: rows, rollback, sliding windows, recurrent models."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from paceline.errors import BackendError, InvariantError, RollbackError
from paceline.types import Backend, Segment, Tokenizer

from .llamacpp_moves import CLOSE, MORE, PROMPT, Lying, Open, alone, alone_in, feed


def test_is_a_backend_with_a_tokenizer(tiny: Open) -> None:
    backend = tiny()
    assert isinstance(backend, Backend)
    assert isinstance(backend.tokenizer, Tokenizer)
    info = backend.info
    assert (info.name, info.model, info.vocab_size) == ("llamacpp", "llama.gguf", 261)
    assert (info.max_len, info.max_slots, info.kv_tokens, info.max_step_tokens) == (256, 6, 1024, 1024)
    assert info.can_truncate
    assert info.no_speculation_reason is None


def test_stop_ids_are_the_files_end_of_generation_set(tiny: Open) -> None:
    assert tiny().info.stop_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert tiny("spm").info.stop_ids == {2}  # </s>


# --- rows -------------------------------------------------------------------------------------------


def test_wide_rows_are_the_rows_of_one_token_at_a_time(tiny: Open) -> None:
    """TensorRT-LLM#11125, huggingface/transformers#30042: verify logits row by row against sequential decode."""
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    wide = feed(backend, slot, MORE, 5)
    np.testing.assert_allclose(wide, alone(backend, PROMPT + MORE, 5), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_one_other_token_in_the_context_shows(tiny: Open, name: str) -> None:
    """What the comparisons of this file can see; without it they could not fail."""
    backend = tiny(name)
    for at in (20, 39):
        other = (*PROMPT[:at], 200, *PROMPT[at + 1 :])
        gap = np.abs(alone(backend, PROMPT, 1) - alone(backend, other, 1)).max()
        assert gap > 0.1


def test_a_ragged_batch_of_five_slots_gives_each_its_own_rows(tiny: Open) -> None:
    """TensorRT-LLM#3456: rows and slots must not be mixed up, whatever their order."""
    backend = tiny()
    parts = [(PROMPT[:9], 1), (PROMPT[3:5], 2), (MORE, 0), (PROMPT[30:], 4), ((99,), 1)]
    slots = [backend.acquire() for _ in parts]
    order = [3, 0, 4, 1, 2]
    prefix = {i: tuple(range(100 + 10 * i, 104 + 10 * i)) for i in order}
    backend.forward([Segment(slots[i], prefix[i], 0, 0) for i in order])
    rows = backend.forward([Segment(slots[i], parts[i][0], 4, parts[i][1]) for i in order])
    rows = [np.array(r) for r in rows]
    backend.check()
    for i, got in zip(order, rows, strict=True):
        tokens, wanted = parts[i]
        assert got.shape == (wanted, backend.info.vocab_size)
        if wanted:
            np.testing.assert_allclose(got, alone(backend, prefix[i] + tokens, wanted), **CLOSE)


def test_rows_are_views_of_llama_cpps_buffer(tiny: Open) -> None:
    """Read without copying: two segments' rows lie in one block of memory, as the contract allows."""
    backend = tiny()
    a, b = backend.acquire(), backend.acquire()
    first, second = backend.forward([Segment(a, PROMPT[:3], 0, 2), Segment(b, PROMPT[:2], 0, 1)])
    assert not first.flags.owndata
    assert second.ctypes.data == first.ctypes.data + first.nbytes
    assert first.dtype == np.float32


def test_rows_are_exactly_as_wide_as_the_vocabulary(tiny: Open) -> None:
    """vllm#21876, vllm#53029: padded lanes won the argmax; 261 and 270 tokens are no multiple of any block."""
    for name, size in (("llama", 261), ("spm", 270)):
        backend = tiny(name)
        rows = feed(backend, backend.acquire(), MORE, 5)
        assert rows.shape == (5, size) == (5, backend.info.vocab_size)
        assert np.isfinite(rows).all()


def test_rows_of_the_last_tokens_only(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    every = feed(backend, slot, MORE, 5)
    backend.truncate(slot, 0)
    np.testing.assert_allclose(feed(backend, slot, MORE, 2), every[3:], **CLOSE)
    backend.truncate(slot, 0)
    assert feed(backend, slot, MORE, 0).shape == (0, backend.info.vocab_size)


def test_rows_stay_right_when_llama_cpps_buffer_grows(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    expected = alone(backend, PROMPT, 40)
    for rows in (1, 40, 1, 20):
        backend.truncate(slot, 0)
        np.testing.assert_allclose(feed(backend, slot, PROMPT, rows), expected[40 - rows :], **CLOSE)


def test_a_step_beyond_llama_cpps_own_default(tiny: Open) -> None:
    """A batch larger than n_batch, 2,048 unless set, aborts the process."""
    backend = tiny(max_len=512, kv_tokens=3000, max_step_tokens=2500)
    tokens = PROMPT * 11
    slots = [backend.acquire() for _ in range(5)]
    rows = [np.array(r) for r in backend.forward([Segment(slot, tokens, 0, 1) for slot in slots])]
    for row in rows:
        np.testing.assert_allclose(row, rows[0], **CLOSE)


def test_a_full_step_of_the_largest_size(tiny: Open) -> None:
    """A batch larger than n_batch aborts llama.cpp; the largest allowed one must not."""
    backend = tiny(max_step_tokens=64, max_len=100)
    slot = backend.acquire()
    assert feed(backend, slot, tuple(range(64)), 64).shape == (64, 261)
    assert feed(backend, slot, tuple(range(36)), 36).shape == (36, 261)
    with pytest.raises(BackendError, match="slot 0: 100 tokens cached and 1 new make 101; the context holds 100"):
        feed(backend, slot, (1,))
    backend.check()


# --- rollback ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 39, 40, 41, 44])
def test_rollback_then_continue_is_a_fresh_prefill(tiny: Open, keep: int) -> None:
    """TensorRT-LLM#10343: compare what the cache holds with a fresh prefill."""
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    feed(backend, slot, MORE, 5)
    backend.truncate(slot, keep)
    assert backend.length(slot) == keep
    backend.check()
    got = feed(backend, slot, (5, 6, 7), 3)
    np.testing.assert_allclose(got, alone(backend, (*(PROMPT + MORE)[:keep], 5, 6, 7), 3), **CLOSE)


def test_every_rollback_is_checked_round_after_round(tiny: Open) -> None:
    """ml-explore/mlx-lm#846: a trim that did nothing, round after round."""
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    rng = np.random.default_rng(3)
    committed = list(PROMPT)
    for _ in range(20):
        drafts = tuple(int(t) for t in rng.integers(3, 261, 5))
        feed(backend, slot, drafts, 5)
        accepted = int(rng.integers(0, 6))
        committed += drafts[:accepted]
        backend.truncate(slot, len(committed))
        assert backend.length(slot) == len(committed)
        backend.check()
    np.testing.assert_allclose(feed(backend, slot, (9,)), alone(backend, (*committed, 9), 1), **CLOSE)


@pytest.mark.parametrize("says", [False, True])
def test_a_rollback_that_did_nothing_is_an_error(tiny: Open, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ml-explore/mlx-lm#846: whether it admits it or not."""
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_native", Lying(backend._native, says))
        with pytest.raises(RollbackError, match=f"slot 0 from 40 to 3 tokens: seq_rm returned {says}"):
            backend.truncate(slot, 3)
    backend.truncate(slot, 3)
    backend.check()


def test_a_rollback_that_llama_cpp_calls_failed_is_an_error(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the memory looks right afterwards: a layer may have refused."""
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)

    class Doubting(Lying):
        def llama_memory_seq_rm(self, *arguments: Any) -> bool:
            self.native.llama_memory_seq_rm(*arguments)
            return False

    monkeypatch.setattr(backend, "_native", Doubting(backend._native, says=False))
    with pytest.raises(RollbackError, match="seq_rm returned False and the last position is 2"):
        backend.truncate(slot, 3)


def test_check_sees_a_cache_that_moved_behind_our_back(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, PROMPT, 0)
    backend._native.llama_memory_seq_rm(backend._model.memory, slot, 30, -1)
    with pytest.raises(InvariantError, match=r"slot 0 holds 40 tokens, but llama\.cpp's last is at 29"):
        backend.check()


def test_rollback_costs_little_in_a_full_memory(tiny: Open) -> None:
    """ggml-org/llama.cpp#28118: rollback by host copy cost 73 % of a round; here it only edits the cells."""
    backend = tiny(max_seqs=4, max_len=512, kv_tokens=2048)
    for _ in range(4):
        slot = backend.acquire()
        backend.forward([Segment(slot, tuple(range(3, 3 + 240)), 0, 0)])
    times = []
    for _ in range(20):
        feed(backend, slot, MORE, 5)
        start = time.perf_counter()
        backend.truncate(slot, 240)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


def test_truncate_refuses_what_it_cannot_do(tiny: Open) -> None:
    backend = tiny()
    slot = backend.acquire()
    feed(backend, slot, MORE, 0)
    for length in (-1, 6):
        with pytest.raises(RollbackError, match=f"slot 0 to {length} tokens: it holds 5"):
            backend.truncate(slot, length)
    with pytest.raises(BackendError, match="slot 3 is not in use"):
        backend.truncate(3, 0)
    backend.truncate(slot, 5)
    assert backend.length(slot) == 5


# --- sliding windows --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 5])
def test_sliding_window_rolls_back_across_its_border(tiny: Open, step: int) -> None:
    """ml-explore/mlx-lm#1914, huggingface/transformers#46629: multi-token steps over the window's border, then back."""
    backend = tiny("gemma2")  # a window of 8
    slot = backend.acquire()
    tokens = tuple(range(20, 50))
    for at in range(0, 30, step):
        feed(backend, slot, tokens[at : at + step], 0)
    feed(backend, slot, MORE, 5)
    backend.truncate(slot, 31)
    backend.truncate(slot, 12)
    backend.check()
    np.testing.assert_allclose(feed(backend, slot, (5, 6), 2), alone(backend, (*tokens[:12], 5, 6), 2), **CLOSE)


def test_sliding_window_fork_after_the_window_wrapped(tiny: Open) -> None:
    """Blaizzy/mlx-vlm#1715: reusing a prefix whose window has wrapped must give the rows of a cold start."""
    backend = tiny("gemma2")
    slot = backend.acquire()
    tokens = tuple(range(20, 60))
    feed(backend, slot, tokens, 0)
    warm = backend.fork(slot)
    feed(backend, slot, MORE, 0)
    np.testing.assert_allclose(feed(backend, warm, (5, 6), 2), alone(backend, (*tokens, 5, 6), 2), **CLOSE)


def test_sliding_window_cells_that_were_given_away_stop_a_rollback(tiny: Open) -> None:
    """ggml-org/llama.cpp#13963: llama.cpp reuses cells that left the window; a rollback that needs them must raise."""
    backend = tiny("gemma2", kv_tokens=256, max_step_tokens=256)
    tokens = tuple(int(t) for t in np.random.default_rng(5).integers(3, 260, 100))
    a, b, c, d = (backend.acquire() for _ in range(4))
    for slot, count in ((a, 100), (b, 100), (c, 50)):
        feed(backend, slot, tokens[:count], 0)
    backend.release(b)
    feed(backend, c, tokens[50:], 0)  # takes the first half of b's cells
    feed(backend, d, tokens[:56], 0)  # takes the rest, and runs on into c's oldest
    backend.check()
    with pytest.raises(RollbackError, match="cannot truncate slot 2 to 12 tokens: the sliding window of 8 reaches"):
        backend.truncate(c, 12)
    assert backend.length(c) == 100
    backend.truncate(c, 60)  # and where nothing is missing it is exact
    backend.release(d)
    np.testing.assert_allclose(feed(backend, c, (5, 6), 2), alone_in(tiny, (*tokens[:60], 5, 6), "gemma2", 2), **CLOSE)


def test_sliding_window_refusal_names_the_position(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny("gemma2")
    slot = backend.acquire()
    feed(backend, slot, tuple(range(20, 60)), 0)

    class Purged(Lying):
        def llama_memory_seq_pos_min(self, *_: Any) -> int:
            return 25

        def llama_memory_seq_rm(self, *arguments: Any) -> bool:
            return bool(self.native.llama_memory_seq_rm(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_native", Purged(backend._native, says=True))
        with pytest.raises(RollbackError, match="the sliding window of 8 reaches before position 25"):
            backend.truncate(slot, 31)
        backend.truncate(slot, 32)  # the next token sees positions 25 .. 32
    backend.check()


def test_sliding_window_layers_keep_what_left_the_window(tiny: Open) -> None:
    """With llama.cpp's window-sized ring, going back this far would find other tokens in its place."""
    backend = tiny("gemma2", max_len=512, kv_tokens=1024, max_step_tokens=64)
    slot = backend.acquire()
    tokens = tuple(int(t) for t in np.random.default_rng(6).integers(3, 260, 400))
    for at in range(0, 400, 50):
        feed(backend, slot, tokens[at : at + 50], 0)
    backend.truncate(slot, 100)
    np.testing.assert_allclose(feed(backend, slot, (5,)), alone(backend, (*tokens[:100], 5), 1), **CLOSE)


# --- recurrent models -------------------------------------------------------------------------------


def test_a_recurrent_model_runs_and_says_that_it_cannot_roll_back(tiny: Open) -> None:
    """vllm#39273, vllm#52942: a state-space model corrupted by drafts; here drafting is off by capability."""
    backend = tiny("mamba")
    assert not backend.info.can_truncate
    assert "mamba.gguf is a recurrent model" in (backend.info.no_speculation_reason or "")
    slot = backend.acquire()
    first = feed(backend, slot, PROMPT)
    with pytest.raises(RollbackError, match="cannot go back to an earlier token"):
        backend.truncate(slot, 10)
    assert backend.length(slot) == 40
    backend.check()
    backend.truncate(slot, 40)
    backend.truncate(slot, 0)
    np.testing.assert_allclose(feed(backend, slot, PROMPT), first, **CLOSE)


def test_a_recurrent_model_keeps_its_slots_apart_and_forks(tiny: Open) -> None:
    backend = tiny("mamba")
    a, b = backend.acquire(), backend.acquire()
    backend.forward([Segment(b, PROMPT[5:25], 0, 0), Segment(a, PROMPT, 0, 0)])
    c = backend.fork(a)
    rows = backend.forward([Segment(a, (5,), 40, 1), Segment(c, (6, 7), 40, 2), Segment(b, (8,), 20, 1)])
    rows = [np.array(r) for r in rows]
    backend.check()
    np.testing.assert_allclose(rows[0], alone(backend, (*PROMPT, 5), 1), **CLOSE)
    np.testing.assert_allclose(rows[1], alone(backend, (*PROMPT, 6, 7), 2), **CLOSE)
    np.testing.assert_allclose(rows[2], alone(backend, (*PROMPT[5:25], 8), 1), **CLOSE)
