"""The compiled pieces, each against the obvious way to say it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.sampling import kernels, reference


def compiled_exp(x) -> np.ndarray:
    x = np.array(x, dtype=np.float64)
    out = np.empty_like(x)
    kernels.exp(x, out)
    return out


class TestExp:
    def test_within_one_unit_in_the_last_place(self):
        """Against the extended precision of the C library where the platform has one; 1.01 ulp in all."""
        random = np.random.default_rng(0)
        x = np.concatenate((
            -random.random(100_000) * 708, -random.random(50_000), -(10.0 ** -random.uniform(0, 18, 50_000)),
            -np.arange(1, 1021) * math.log(2), -(np.arange(1, 1021) + 0.5) * math.log(2),
        ))  # fmt: skip
        exact = np.exp(x.astype(np.longdouble))
        error = np.abs((compiled_exp(x) - exact) / np.spacing(exact.astype(np.float64)))
        assert float(error.max()) < 1.01

    def test_ends(self):
        assert compiled_exp([0.0, -0.0, -5e-324, -1e-17]).tolist() == [1.0, 1.0, 1.0, 1.0]
        assert compiled_exp([-708.0])[0] == pytest.approx(math.exp(-708), rel=1e-15)
        assert compiled_exp([-708.0001, -745.0, -1e6, -1e300, -math.inf]).tolist() == [0.0] * 5

    def test_never_above_one(self):
        assert compiled_exp(-np.geomspace(5e-324, 1.0, 20_000)).max() == 1.0

    def test_every_place_of_a_loop_gives_the_same(self):
        """Vectorised body and scalar remainder must round alike."""
        for x in -np.random.default_rng(1).random(50) * 40:
            assert len(set(compiled_exp(np.full(37, x)).tolist())) == 1


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 127, 128, 129, 4096, 5001])
def test_totals_agree_bit_for_bit(size):
    """Dense, sparse and reference add in one order."""
    random = np.random.default_rng(size)
    weights = random.random(size) ** 8
    keep = random.random(size) < 0.6
    kept = np.where(keep, weights, 0.0)
    assert kernels.total_of(weights) == reference.total_of(weights)
    assert kernels.total_of(kept) == reference.total_of(kept)
    ids = np.flatnonzero(keep)
    assert kernels._total_of_ids(ids, weights[ids]) == reference.total_of(kept)


LOGITS = {
    "normal": lambda random, n: random.normal(size=n) * 3,
    "equal": lambda random, n: np.zeros(n),
    "two values": lambda random, n: random.integers(0, 2, n) * 1.0,
    "coarse": lambda random, n: np.round(random.normal(size=n), 1),
    "one far away": lambda random, n: np.where(np.arange(n) == n // 2, -1e6, random.normal(size=n)),
    "descending": lambda random, n: -np.arange(n) * 1.0,
    "ascending": lambda random, n: np.arange(n) * 1.0,
    "tiny spread": lambda random, n: random.integers(0, 2, n) * 5e-324,
    "huge spread": lambda random, n: np.where(np.arange(n) % 7 == 3, -1.5e308, 1.5e308),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("n", [1, 2, 17, 128, 129, 500, 6000])
class TestRank:
    def test_whole_ranking(self, kind, n):
        logits = LOGITS[kind](np.random.default_rng(n), n)
        ranking = kernels.rank(logits, np.ones(n), n, math.inf)
        assert ranking.tolist() == np.argsort(-logits, kind="stable").tolist()

    def test_front_by_count(self, kind, n):
        logits = LOGITS[kind](np.random.default_rng(n), n)
        full = np.argsort(-logits, kind="stable").tolist()
        for count in {1, n // 3, n - 1} - {0}:
            ranking = kernels.rank(logits, np.ones(n), count, math.inf).tolist()
            assert len(ranking) >= count
            assert ranking == full[: len(ranking)]

    def test_front_by_mass(self, kind, n):
        random = np.random.default_rng(n)
        logits, weights = LOGITS[kind](random, n), random.random(n)
        full = np.argsort(-logits, kind="stable")
        for share in (0.01, 0.5, 0.99, 1.0):
            ranking = kernels.rank(logits, weights, n, share * weights.sum())
            assert ranking.tolist() == full[: ranking.size].tolist()
            assert weights[ranking].sum() >= share * weights.sum() * (1 - 1e-12)


class TestShortlist:
    @pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 9999])
    @pytest.mark.parametrize("top_k", [0, 1, 7, 150])
    @pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.999, 1.0])
    @pytest.mark.parametrize("min_p", [0.0, 1e-3, 1.0])
    def test_holds_all_that_a_filter_may_want_and_is_short(self, size, top_k, top_p, min_p):
        random = np.random.default_rng(size)
        weights = np.exp(-random.random(size) * 40)
        weights[random.integers(size)] = 1.0
        weights[random.random(size) < 0.1] *= 0.0
        weights[-1] = 1.0
        total = kernels.total_of(weights)
        ids, light = kernels.shortlist(weights, total, top_k, top_p, min_p)
        assert light.tolist() == weights[ids].tolist()
        assert (np.diff(ids) > 0).all()
        assert light.min() > 0
        assert light.max() == 1.0
        order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
        if top_k:
            front = order[:top_k]
        elif top_p < 1.0:
            before = np.cumsum(weights[order]) - weights[order]
            front = order[before < top_p * total]
        else:
            front = order
        if min_p and not (top_k and top_p < 1.0):
            front = front[weights[front] >= min_p]
        assert set(front.tolist()) <= set(ids.tolist())
        if top_k and size >= 1000:
            assert ids.size <= 1.5 * top_k + 64

    def test_a_row_of_equal_weights(self):
        weights = np.ones(1000)
        for options in ((5, 1.0, 0.0), (0, 0.1, 0.0), (0, 1.0, 1.0)):
            ids, _ = kernels.shortlist(weights, 1000.0, *options)
            assert ids.tolist() == list(range(1000))
