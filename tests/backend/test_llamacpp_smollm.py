"""SmolLM2-135M through the backend: rows equal bit for bit where llama.cpp's kernels allow it.

llama.cpp's quantised kernels give the same bits for widths 1 to 8, alone or beside other sequences, with one thread,
flash attention on auto, the same chunks of prefill and fewer than 64 tokens in a forward. BF16 never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backend.llamacpp import LlamaCppBackend
from paceline.types import Segment

pytestmark = pytest.mark.model

TEXT = "Riders in a paceline take turns in front and draft behind one another, because the wind is the enemy of all."
QUANTISED = ["smollm2:q4_0", "smollm2:q4_1"]


@pytest.fixture(scope="module", params=QUANTISED)
def backend(request: pytest.FixtureRequest, model_path: Callable[[str], Path]) -> Iterator[LlamaCppBackend]:
    opened = LlamaCppBackend(model_path(request.param), max_seqs=6, max_len=256, n_threads=1)
    yield opened
    opened.check()
    assert opened._cells.free == opened.info.kv_tokens  # every test gave back what it took
    opened.close()


def feed(backend: LlamaCppBackend, slot: int, tokens: tuple[int, ...], rows: int = 1) -> NDArray[np.float32]:
    return np.array(backend.forward([Segment(slot, tokens, backend.length(slot), rows)])[0])


def prefilled(backend: LlamaCppBackend, tokens: tuple[int, ...]) -> int:
    """A slot that holds `tokens`, always cached in the same chunks."""
    slot = backend.acquire()
    for at in range(0, len(tokens), 16):
        feed(backend, slot, tokens[at : at + 16], 0)
    return slot


def words(backend: LlamaCppBackend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ids = tuple(backend.tokenizer.encode(TEXT))
    return ids[:-8], ids[-8:]


def one_by_one(backend: LlamaCppBackend, prefix: tuple[int, ...], tokens: tuple[int, ...]) -> NDArray[np.float32]:
    slot = prefilled(backend, prefix)
    rows = np.concatenate([feed(backend, slot, (token,)) for token in tokens])
    backend.release(slot)
    return rows


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_wide_rows_equal_narrow_rows_bit_for_bit(backend: LlamaCppBackend, width: int) -> None:
    prefix, tail = words(backend)
    expected = one_by_one(backend, prefix, tail[:width])
    slot = prefilled(backend, prefix)
    got = feed(backend, slot, tail[:width], width)
    backend.release(slot)
    assert np.array_equal(got, expected)
    assert np.isfinite(got).all()


def test_rows_do_not_depend_on_the_company(backend: LlamaCppBackend) -> None:
    """sgl-project/sglang#12411: acceptance that varied with the batch."""
    prefix, tail = words(backend)
    expected = one_by_one(backend, prefix, tail[:5])
    companions = [prefilled(backend, prefix[: 5 + 7 * i]) for i in range(3)]
    slot = prefilled(backend, prefix)
    batch = [Segment(s, tail[i : i + 2 + i], backend.length(s), 1) for i, s in enumerate(companions)]
    batch.insert(1, Segment(slot, tail[:5], len(prefix), 5))
    got = np.array(backend.forward(batch)[1])
    for s in (*companions, slot):
        backend.release(s)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_after_a_rollback_the_bits_are_those_of_a_fresh_cache(backend: LlamaCppBackend, accepted: int) -> None:
    prefix, tail = words(backend)
    expected = one_by_one(backend, prefix, tail[:6])[5:]
    slot = prefilled(backend, prefix)
    drafts = (*tail[:accepted], *(7, 8, 9, 10, 11)[accepted:])
    feed(backend, slot, drafts, 5)
    backend.truncate(slot, len(prefix) + accepted)
    got = [feed(backend, slot, (token,)) for token in tail[accepted:6]][-1]
    backend.release(slot)
    assert np.array_equal(got, expected)


def test_a_fork_continues_with_the_same_bits(backend: LlamaCppBackend) -> None:
    prefix, tail = words(backend)
    expected = one_by_one(backend, prefix, tail[:3])
    slot = prefilled(backend, prefix)
    new = backend.fork(slot)
    feed(backend, slot, (9, 9, 9), 0)
    got = feed(backend, new, tail[:3], 3)
    backend.release(slot)
    backend.release(new)
    assert np.array_equal(got, expected)


def test_the_models_own_words(backend: LlamaCppBackend) -> None:
    tokenizer = backend.tokenizer
    assert backend.info.stop_ids == {0, 2, 4}
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert tokenizer.encode("<|im_start|>user", parse_special=True)[0] == 1
    for text in (TEXT, "d\u00e9j\u00e0 vu \u2014 \u6f22\u5b57 \U0001f600\n\n  def f(x):\n\treturn x"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text, parse_special=True).count(1) == 3


def test_it_knows_something(backend: LlamaCppBackend) -> None:
    tokenizer = backend.tokenizer
    slot = backend.acquire()
    row = feed(backend, slot, tuple(tokenizer.encode("Paris is in France. Berlin is in Germany. Rome is in")))[0]
    backend.release(slot)
    assert tokenizer.token_bytes(int(row.argmax())) == b" Italy"


def test_target_and_drafter_share_a_vocabulary_and_a_process(model_path: Callable[[str], Path]) -> None:
    target = LlamaCppBackend(model_path("smollm2:bf16"), max_seqs=1, max_len=128, n_threads=1)
    drafter = LlamaCppBackend(model_path("smollm2:q4_0"), max_seqs=1, max_len=128, n_threads=1)
    ids = tuple(target.tokenizer.encode(TEXT))
    assert ids == tuple(drafter.tokenizer.encode(TEXT))
    assert all(target.tokenizer.token_text(t) == drafter.tokenizer.token_text(t) for t in range(49152))
    ours = feed(target, target.acquire(), ids, 4)
    theirs = feed(drafter, drafter.acquire(), ids, 4)
    assert not np.array_equal(ours, theirs)
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.95  # the same model but for its precision
    target.close()
    drafter.close()
