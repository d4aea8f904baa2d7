"""Where a token stands in a row, against scipy and against plain sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax

from paceline.errors import BadLogits, InvalidInput
from paceline.sampling.logprobs import Entry, processed_logprobs, raw_logprobs
from paceline.types import Distribution

INF = math.inf
TOPS = (0, 1, 3, 20, 50, -1)


def by_sorting(values: NDArray[np.float64], logprobs: NDArray[np.float64], token: int, top: int) -> list[Entry]:
    """What the functions mean: everything sorted by (value downwards, id), then cut."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    rows = [(i, float(logprobs[i]), rank) for rank, i in enumerate(order, start=1)]
    own = [row for row in rows if row[0] == token]
    ahead = rows if top < 0 else rows[:top]
    return own + [row for row in ahead if row[0] != token and row[1] > -INF]


def same(found: list[Entry], expected: list[Entry]) -> None:
    assert [(i, rank) for i, _, rank in found] == [(i, rank) for i, _, rank in expected]
    np.testing.assert_allclose([x for _, x, _ in found], [x for _, x, _ in expected], rtol=0, atol=1e-12)
    assert all(type(i) is int and type(x) is float and type(rank) is int for i, x, rank in found)


def rough_row(seed: int, size: int, dtype: type) -> NDArray[np.floating]:
    """Logits with many ties, and -inf at some tokens."""
    rng = np.random.default_rng(seed)
    row = np.round(rng.normal(0, 3, size), 1).astype(dtype)
    row[rng.random(size) < 0.1] = -INF
    row[int(rng.integers(size))] = 2.0
    return row


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("top", TOPS)
def test_raw_is_log_softmax(dtype: type, top: int) -> None:
    """Catches float32 sums, ranks that count equals, a cut among equals that keeps the higher id."""
    for seed in range(40):
        row = rough_row(seed, 1 + seed, dtype)
        expected = log_softmax(row.astype(np.float64))
        before = row.copy()
        for token in range(0, row.size, 3):
            same(raw_logprobs(row, token, top), by_sorting(row.astype(np.float64), expected, token, top))
        assert np.array_equal(row, before), "the row was written to"


@given(
    st.lists(st.sampled_from([-INF, -1e30, -745.0, -1.0, 0.0, 0.5, 1.0, 700.0, 3e38]), min_size=1, max_size=12),
    st.integers(-1, 13),
)
def test_raw_on_extreme_rows(values: list[float], top: int) -> None:
    """Catches overflow, and a finite logit whose probability rounds to 0 taken for an impossible token."""
    row = np.array(values)
    if not np.isfinite(row.max()):
        with pytest.raises(BadLogits):
            raw_logprobs(row, 0, top)
        return
    with np.errstate(invalid="ignore"):
        logprobs = log_softmax(row)
    for token in range(row.size):
        same(raw_logprobs(row, token, top), by_sorting(row, logprobs, token, top))


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("sparse", [False, True])
def test_processed_is_the_logarithm_of_p(top: int, sparse: bool) -> None:
    """Catches places in a sparse p taken for ids, and a rank among tokens of probability 0 that forgets the ids."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        size = 1 + seed
        probs = rng.integers(0, 5, size) / 1.0
        probs[int(rng.integers(size))] = 2.0
        probs /= probs.sum()
        ids = np.flatnonzero(probs)
        p = Distribution(probs[ids], size, ids) if sparse else Distribution(probs, size)
        with np.errstate(divide="ignore"):
            logprobs = np.log(probs)
        for token in range(size):
            same(processed_logprobs(p, token, top), by_sorting(probs, logprobs, token, top))


def test_processed_of_greedy_decoding_is_certain() -> None:
    p = Distribution.one_hot(3, 10)
    assert processed_logprobs(p, 3, 5) == [(3, 0.0, 1)]
    assert processed_logprobs(p, 1, -1) == [(1, -INF, 3), (3, 0.0, 1)]


def test_examples() -> None:
    row = [0.0, math.log(2.0), -INF, 0.0]  # probabilities 1/4, 1/2, 0, 1/4
    quarter, half = pytest.approx(math.log(0.25)), pytest.approx(math.log(0.5))
    assert raw_logprobs(row, 3, 0) == [(3, quarter, 3)]
    assert raw_logprobs(row, 3, 2) == [(3, quarter, 3), (1, half, 1), (0, quarter, 2)]
    assert raw_logprobs(row, 1, 2) == [(1, half, 1), (0, quarter, 2)]
    assert raw_logprobs(row, 2, -1) == [(2, -INF, 4), (1, half, 1), (0, quarter, 2), (3, quarter, 3)]
    assert raw_logprobs([7.0], 0, -1) == [(0, 0.0, 1)]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_row_that_is_none_is_refused(bad: float) -> None:
    """Catches a NaN that is ranked, and an id out of nothing."""
    row = np.full(5, -1.0) if bad != -INF else np.full(5, -INF)
    row[3] = bad
    for top in TOPS:
        with pytest.raises(BadLogits):
            raw_logprobs(row, 0, top)


def test_shapes_and_tokens_are_checked() -> None:
    for row in ([], [[1.0]], ["a"]):
        with pytest.raises(InvalidInput, match="shape"):
            raw_logprobs(row, 0, 1)
    for token in (-1, 3):
        with pytest.raises(InvalidInput, match="0 to 2"):
            raw_logprobs([1.0, 2.0, 3.0], token, 1)
        with pytest.raises(InvalidInput, match="0 to 2"):
            processed_logprobs(Distribution.one_hot(0, 3), token, 1)


def test_a_row_of_a_real_size() -> None:
    row = np.random.default_rng(5).normal(0, 4, 49_152).astype(np.float32)
    same(raw_logprobs(row, 777, 20), by_sorting(row, log_softmax(row.astype(np.float64)), 777, 20))
