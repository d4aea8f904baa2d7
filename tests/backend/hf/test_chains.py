"""The compiled loop for sequences with few new tokens, beside the formula."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paceline.backend.hf import attention  # noqa: E402
from paceline.backend.hf.chains import BLOCK, attend_chains  # noqa: E402
from paceline.backend.hf.step import CHAIN_ROWS  # noqa: E402
from paceline.types import Segment  # noqa: E402

from .models import opened, tokens  # noqa: E402


class Case:
    """Some sequences whose cells lie all over a pool, and what the formula says of them."""

    def __init__(self, seed: int, dtype: Any, counts: list[int], before: list[int], groups: int, D: int, Dv: int):
        rng = np.random.default_rng(seed)
        heads, total = 2, sum(counts) + sum(before)
        self.cells = rng.permutation(total + 5)[:total].astype(np.int64)
        self.query = rng.normal(size=(sum(counts), heads, groups, D)).astype(dtype) * 2
        self.keys = rng.normal(size=(heads, total + 5, D)).astype(dtype)
        self.values = rng.normal(size=(heads, total + 5, Dv)).astype(dtype)
        ends = np.cumsum(np.add(counts, before))
        begins = ends - np.add(counts, before)
        self.chains = np.stack([np.cumsum(counts) - counts, counts, before, begins], axis=1).astype(np.int64)

    def found(self, window: int = 0, scale: float = 0.3, *, bits: bool = False, only: int | None = None) -> Any:
        out = np.full((*self.query.shape[:3], self.values.shape[2]), np.nan, self.query.dtype)
        parts = self.chains if only is None else self.chains[only : only + 1]
        pools = [self.keys, self.values]
        if bits:
            pools = [(pool.view(np.uint32) >> 16).astype(np.uint16) for pool in pools]
        attend_chains(self.query, *pools, parts, self.cells, window, scale, out)
        return out

    def formula(self, window: int = 0, scale: float = 0.3) -> Any:
        out = np.empty((*self.query.shape[:3], self.values.shape[2]))
        for at, count, before, begin in self.chains:
            for r in range(count):
                end = before + r + 1
                seen = self.cells[begin + (max(0, end - window) if window else 0) : begin + end]
                for h in range(self.keys.shape[0]):
                    keys, values = self.keys[h, seen].astype(float), self.values[h, seen].astype(float)
                    for g in range(self.query.shape[2]):
                        scores = keys @ self.query[at + r, h, g].astype(float) * scale
                        weights = np.exp(scores - scores.max())
                        out[at + r, h, g] = weights @ values / weights.sum()
        return out


SIZES = [
    ([1], [0], 1, 1, 1),
    ([1, 3, 8], [0, 70, 130], 3, 5, 7),
    ([1, 1, 2], [63, 64, 200], 2, 64, 64),
    ([5], [1], 4, 33, 9),
]


@pytest.mark.parametrize("window", [0, 1, 4, 65, 1000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-12), (np.float32, 2e-6)])
def test_beside_the_formula(dtype: Any, error: float, sizes: Any, window: int) -> None:
    """Blocks of keys that end before, at and behind a row's last key; windows that begin within one; odd widths."""
    case = Case(0, dtype, *sizes)
    np.testing.assert_allclose(case.found(window), case.formula(window), rtol=0, atol=error)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bfloat16_is_read_from_its_bits(sizes: Any) -> None:
    case = Case(1, np.float32, *sizes)
    for pool in (case.keys, case.values):
        pool.view(np.uint32)[...] &= 0xFFFF0000
    np.testing.assert_array_equal(case.found(bits=True), case.found())


@pytest.mark.parametrize("threads", [1, None])
def test_alone_as_in_company(threads: int | None) -> None:
    """To the bit: what a row gets hangs neither on its neighbours nor on how many threads share the work."""
    case = Case(2, np.float32, [1, 3, 8, 1, 2], [40, 90, 0, 300, 7], 3, 16, 16)
    together = case.found()
    before = numba.get_num_threads()
    numba.set_num_threads(threads or before)
    try:
        for i, (at, count, *_) in enumerate(case.chains):
            alone = case.found(only=i)
            np.testing.assert_array_equal(alone[at : at + count], together[at : at + count])
            assert np.isnan(np.delete(alone, np.s_[at : at + count], 0)).all()
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 50, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_of_one_as_the_first_of_eight(dtype: Any, window: int) -> None:
    """To the bit: what a row gets hangs on no draft behind it, and on no step before, of whatever length it was."""
    before = 3 * BLOCK - 3
    case = Case(5, dtype, [8], [before], 3, 64, 64)
    eight = case.found(window)
    for r in range(8):
        oldest = max(0, before + r - window + 1) // BLOCK * BLOCK if window else 0
        out = np.empty((1, *eight.shape[1:]), dtype)
        chains = np.array([[0, 1, before + r - oldest, oldest]])
        attend_chains(case.query[r : r + 1], case.keys, case.values, chains, case.cells, window, 0.3, out)
        np.testing.assert_array_equal(out[0], eight[r])


def test_a_long_context() -> None:
    case = Case(6, np.float32, [3], [9000], 2, 64, 64)
    np.testing.assert_allclose(case.found(), case.formula(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_what_a_row_does_not_see_does_not_reach_it(fault: float) -> None:
    """Keys and values of later rows and from before the window, and lines of the pool that nobody named."""
    case = Case(3, np.float32, [4], [90], 2, 8, 8)
    clean = case.found(window=20)
    unseen = np.concatenate([case.cells[-2:], case.cells[:60], np.setdiff1d(np.arange(99), case.cells)])
    case.keys[:, unseen] = fault
    case.values[:, unseen] = fault
    spoiled = case.found(window=20)
    np.testing.assert_array_equal(spoiled[:2], clean[:2])
    assert not np.isfinite(spoiled[2:]).any()  # a fault is passed on to those that see it, not hidden


def test_scores_far_apart_and_far_from_zero() -> None:
    case = Case(4, np.float64, [2], [10], 1, 4, 4)
    case.query *= 1e4
    np.testing.assert_allclose(case.found(), case.formula(), rtol=1e-9, atol=1e-9)


def test_one_call_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen requests at once: plain and verifying steps take one call a layer, not one for each request."""
    backend = opened("llama", max_seqs=16)
    calls = {"chains": 0, "one": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(attention, "attend_chains", counted("chains", attention.attend_chains))
    monkeypatch.setattr(attention, "_one", counted("one", attention._one))
    slots = [backend.acquire() for _ in range(16)]
    for lengths in ([1] * 16, list(range(1, CHAIN_ROWS + 1)) * 2):
        batch = [
            Segment(slot, tokens(slot, n), backend.length(slot), 1) for slot, n in zip(slots, lengths, strict=True)
        ]
        calls.update(chains=0, one=0)
        backend.forward(batch)
        assert calls == {"chains": len(backend._pools.layers), "one": 0}


def test_compiling_the_loop_is_not_silent() -> None:
    """It takes seconds, once after an installation, when the model is compared with itself at load."""
    said: list[tuple[str, int, int | None]] = []
    opened("llama", progress=lambda *step: said.append(step)).close()
    assert said[-1] == ("comparing LlamaForCausalLM with its own attention", 0, None)
