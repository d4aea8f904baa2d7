"""The HF backend says what the model says by itself: packed, paged, chunked, rolled back and speculating.

References run the model's own code, masks and cache (models.py). Logits agree within 1e-11 in float64 and 3e-5 in
float32; greedy texts are equal token for token. Sequences are longer than the sliding windows (9) of the families that
have one: a window that is off by one, or counted in cells instead of positions, shows.

Norms and routers of most families round to float32 whatever the weights are. That hides differences below 1e-7, and may
once in some ten thousand forwards make one of 1e-8 out of a rounding in the 16th digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paceline.backend.hf import HFBackend  # noqa: E402
from paceline.backend.toy import ToyTokenizer  # noqa: E402
from paceline.engine import Engine  # noqa: E402
from paceline.types import SamplingParams, Segment  # noqa: E402

from ...drafters import PointDrafter  # noqa: E402
from .models import FAMILIES, VOCAB, WINDOWED, Reference, apart, build, opened, reference, tokens  # noqa: E402


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_the_models_own(family: str, page_size: int) -> None:
    """Several sequences in one forward, then in chunks and interleaved with single tokens: TensorRT-LLM#11125.

    Catches rows, positions or keys of one sequence that reach another, a mask or window that is off by one, a chunk
    that does not see the pages before it, gathered pages in the wrong order.
    """
    own = reference(family)
    texts = [tokens(seed, count) for seed, count in ((1, 7), (2, 37), (3, 70))]
    wanted = [own.rows(text) for text in texts]
    backend = opened(family, page_size=page_size)
    slots = [backend.acquire() for _ in texts]
    done = [0, 0, 0]
    for widths in ((7, 20, 15), (0, 1, 5), (0, 11, 0), (0, 5, 50)):
        batch = [
            Segment(slot, text[at : at + n], at, n)
            for slot, text, at, n in zip(slots, texts, done, widths, strict=True)
            if n
        ]
        for segment, rows in zip(batch, backend.forward(batch), strict=True):
            i = slots.index(segment.slot)
            assert apart(rows, wanted[i][done[i] : done[i] + len(segment.tokens)]) <= 1e-11
            done[i] += len(segment.tokens)
        backend.check()
    assert done == [7, 37, 70]
    backend.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_rows(family: str) -> None:
    """The same within 3e-5: catches work done in a narrower type than the model's."""
    own, text = reference(family, torch.float32), tokens(4, 50)
    wanted = own.rows(text)
    backend = opened(family, torch.float32)
    slot = backend.acquire()
    for start, count in ((0, 33), (33, 1), (34, 16)):
        (rows,) = backend.forward([Segment(slot, text[start : start + count], start, count)])
        assert rows.dtype == np.float32
        assert apart(rows, wanted[start : start + count]) <= 3e-5
    backend.close()


def speculate(backend: HFBackend, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], k: int) -> Any:
    """Greedy decoding of all prompts side by side with k drafts each: some right, some wrong, from `texts`.

    Returns the texts and the histogram of accepted drafts. Every sequence advances at its own pace.
    """
    rng = np.random.default_rng(k)
    slots = [backend.acquire() for _ in prompts]
    committed = [list(prompt) for prompt in prompts]
    accepted: list[int] = []
    turn = 0
    while True:
        batch, drafts = [], {}
        for i in sorted(range(len(prompts)), key=lambda i: rng.random()):  # rows in another order every step
            left = len(prompts[i]) + len(texts[i]) - len(committed[i])
            if left <= 0:
                continue
            at = len(committed[i]) - len(prompts[i])
            draft = list(texts[i][at : at + min(k, left - 1)])
            wrong, turn = turn % (k + 1), turn + 1
            if wrong < len(draft):
                draft[wrong] = (draft[wrong] + 1 + int(rng.integers(0, VOCAB - 3))) % VOCAB
            start = backend.length(slots[i])
            new = committed[i][start:] + draft
            assert backend.reserve(slots[i], start + len(new))
            batch.append(Segment(slots[i], tuple(new), start, len(draft) + 1))
            drafts[slots[i]] = draft
        if not batch:
            break
        for segment, rows in zip(batch, backend.forward(batch), strict=True):
            i, draft = slots.index(segment.slot), drafts[segment.slot]
            picks = rows.argmax(-1).tolist()
            n = next((j for j, token in enumerate(draft) if token != picks[j]), len(draft))
            committed[i] += picks[: n + 1]
            accepted.append(n)
            backend.truncate(segment.slot, len(committed[i]) - 1)
            backend.commit(segment.slot, len(committed[i]) - 1)
            backend.check()
    for slot in slots:
        backend.release(slot)
    backend.check()
    return [text[len(prompt) :] for text, prompt in zip(committed, prompts, strict=True)], accepted


def greedy_equals_generate(family: str, k: int, page_size: int, dtype: Any = torch.float64) -> None:
    own = reference(family, dtype)
    prompts = [tokens(10, 3), tokens(11, 15), tokens(12, 33)]
    wanted = [own.greedy(prompt, count) for prompt, count in zip(prompts, (40, 31, 22), strict=True)]
    backend = opened(family, dtype, page_size=page_size)
    texts, accepted = speculate(backend, prompts, wanted, k)
    assert texts == wanted
    assert set(accepted) == set(range(k + 1))  # every outcome came up
    backend.close()


@pytest.mark.parametrize(("k", "page_size"), [(0, 16), (1, 1), (4, 16), (8, 64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_greedy_equals_generate(family: str, k: int, page_size: int) -> None:
    """transformers#30042, #30413: greedy assisted generation differed from greedy; positions were wrong.

    Also TensorRT-LLM PR #3456 (rows in another order than slots), PR #16280 (page borders), transformers#46629 and
    mlx-lm#1914 (rollback and several tokens at once beyond a sliding window). Catches any of them in any family.
    """
    greedy_equals_generate(family, k, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_greedy_grid(family: str, k: int, page_size: int) -> None:
    greedy_equals_generate(family, k, page_size)


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_the_engine_equals_generate(family: str, k: int) -> None:
    """The real loop: drafts right and wrong, and memory for about two of the four sequences at once."""
    own = reference(family)
    prompts = [tokens(20 + i, n) for i, n in enumerate((3, 15, 33, 21))]
    wanted = [own.greedy(prompt, 30) for prompt in prompts]

    def guess(seen: tuple[int, ...], budget: int) -> list[int]:
        i = next(i for i, prompt in enumerate(prompts) if seen[: len(prompt)] == prompt)
        drafts = wanted[i][len(seen) - len(prompts[i]) :][:budget]
        return [t if (len(seen) + j) % 5 else (t + 1) % VOCAB for j, t in enumerate(drafts)]

    backend = opened(family, page_size=4, max_len=72, kv_tokens=120, tokenizer=ToyTokenizer(VOCAB, frozenset()))
    engine = Engine(backend, PointDrafter(guess), max_seqs=4)
    ids = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=30, draft_length=k)) for prompt in prompts]
    texts: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_work:
        for chunk in engine.step():
            texts[chunk.request_id] += chunk.token_ids
        engine.check()
    assert [texts[i] for i in ids] == wanted
    backend.check()
    backend.close()


@pytest.mark.parametrize("family", WINDOWED)
def test_a_prefill_longer_than_the_window(family: str) -> None:
    """One forward that fills a window several times over, wide enough for the kernel that needs no mask."""
    own, text = reference(family), tokens(5, 90)
    backend = opened(family)
    (rows,) = backend.forward([Segment(backend.acquire(), text, 0, 90)])
    assert apart(rows, own.rows(text)) <= 1e-11
    backend.close()


@pytest.mark.parametrize("groups", [(4, 4), (4, 1), (8, 4)])
def test_grouped_heads(groups: tuple[int, int]) -> None:
    """One, two and four query heads per key head: catches rows and groups folded in the wrong order."""
    sizes = {"num_attention_heads": groups[0], "num_key_value_heads": groups[1], "head_dim": 6}
    own = Reference(build("llama", **sizes))
    text = tokens(6, 80)
    wanted = own.rows(text)
    backend = HFBackend(build("llama", **sizes), max_len=128)
    slot = backend.acquire()
    for start, count in ((0, 50), (50, 1), (51, 7), (58, 22)):
        (rows,) = backend.forward([Segment(slot, text[start : start + count], start, count)])
        assert apart(rows, wanted[start : start + count]) <= 1e-11
    backend.close()


@pytest.mark.parametrize("seed", range(4))
def test_slots_in_any_order(seed: int) -> None:
    """TensorRT-LLM PR #3456: bad output where batch slots were not in order. Random arrivals, widths and rows."""
    rng = np.random.default_rng(seed)
    own = reference("gemma2")
    texts = {i: tokens(100 + i, 40) for i in range(8)}
    wanted = {i: own.rows(text) for i, text in texts.items()}
    backend = opened("gemma2", page_size=4, prefix_cache=bool(seed % 2))
    running: dict[int, int] = {}
    for _ in range(40):
        if len(running) < 5 and rng.random() < 0.6:
            i = int(rng.choice([i for i in texts if i not in running]))
            running[i] = backend.acquire(texts[i])
        batch, rows_of = [], []
        for i in rng.permutation(sorted(running)).tolist():
            start = backend.length(running[i])
            n = int(rng.integers(0, min(9, 40 - start) + 1))
            if n:
                batch.append(Segment(running[i], texts[i][start : start + n], start, int(rng.integers(0, n + 1))))
                rows_of.append(i)
        if batch:
            for i, segment, rows in zip(rows_of, batch, backend.forward(batch), strict=True):
                end = segment.start + len(segment.tokens)
                assert apart(rows, wanted[i][end - segment.num_rows : end]) <= 1e-11 if segment.num_rows else True
                backend.commit(segment.slot, end)
        for i in [i for i in running if backend.length(running[i]) == 40 or rng.random() < 0.05]:
            backend.release(running.pop(i))
        backend.check()
    backend.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_served(family: str, dtype: Any) -> None:
    """The probe's tolerance is wide enough for 16 bits, and so are pages; rows agree with the model's own within noise.

    Catches a refusal of sound models, and pages or masks in another type than the model's.
    """
    own, text = reference(family, dtype), tokens(7, 44)
    wanted = own.rows(text)
    backend = opened(family, dtype)
    slot = backend.acquire()
    for start, count in ((0, 34), (34, 1), (35, 9)):
        (rows,) = backend.forward([Segment(slot, text[start : start + count], start, count)])
        assert rows.dtype == np.float32
        off = np.sqrt(np.square(rows - wanted[start : start + count]).mean()) / wanted.std()
        assert off < 0.1
    backend.close()
