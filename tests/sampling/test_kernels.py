"""The compiled pieces, each against the obvious way to say it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from paceline.rng import KeyedDraws, Role, race_reference
from paceline.sampling import kernels, reference


def compiled_exp2(t) -> np.ndarray:
    t = np.array(t, dtype=np.float64)
    out = np.empty_like(t)
    kernels.exp2_of(t, out)
    return out


def row_of(kind: str, size: int, dtype: type) -> np.ndarray:
    """A row of logits with at least one finite entry."""
    random = np.random.default_rng(size)
    row = {
        "normal": lambda: random.normal(size=size) * 3,
        "negative": lambda: -random.random(size) * 40 - 1,
        "holes": lambda: np.where(random.random(size) < 0.7, -np.inf, random.normal(size=size)),
        "equal": lambda: np.full(size, -2.5),
        "tiny": lambda: random.integers(-3, 4, size) * 5e-324,
        "huge": lambda: random.choice([-1.0, 1.0], size) * 3e38,
        "zeros": lambda: random.choice([-0.0, 0.0], size),
    }[kind]()
    row[random.integers(size)] = {"holes": 1.25, "huge": 3e38}.get(kind, row[0])
    return row.astype(dtype)


KINDS = ["normal", "negative", "holes", "equal", "tiny", "huge", "zeros"]
SIZES = [1, 2, 31, 32, 33, 127, 128, 129, 191, 192, 193, 500, 5003]
TYPES = [np.float32, np.float64]


class TestExp2:
    def test_relative_error(self):
        """Against the extended precision of the C library where the platform has one."""
        random = np.random.default_rng(0)
        t = np.concatenate((
            -random.random(100_000) * 1021, -random.random(50_000), -(10.0 ** -random.uniform(0, 18, 50_000)),
            -np.arange(1, 1021) * 1.0, -(np.arange(1, 1021) + 0.5), -np.arange(1, 1021) - 0.5 + 2.0**-40,
        ))  # fmt: skip
        exact = np.exp2(t.astype(np.longdouble))
        assert float(np.abs(compiled_exp2(t) / exact - 1).max()) < 8e-14

    def test_ends(self):
        assert compiled_exp2([0.0, -0.0, -5e-324, -1e-17]).tolist() == [1.0, 1.0, 1.0, 1.0]
        assert compiled_exp2([-1.0, -2.0, -1000.0, -1022.0]).tolist() == [0.5, 0.25, 2.0**-1000, 2.0**-1022]
        assert compiled_exp2([-1023.0, -1023.0001, -1074.0, -1e6, -1e300, -math.inf]).tolist() == [0.0] * 6

    def test_between_the_last_normal_float_and_zero(self):
        made = compiled_exp2(-np.linspace(1022.0, 1023.0, 10_001))
        assert made.min() == 0.0
        assert made.max() <= 2.0**-1022
        assert not np.signbit(made).any()

    def test_never_above_one(self):
        assert compiled_exp2(-np.geomspace(5e-324, 1.0, 20_000)).max() == 1.0

    def test_every_place_of_a_loop_gives_the_same(self):
        """Vectorised body and scalar remainder must round alike, and so must one at a time and six at a time."""
        for x in -np.random.default_rng(1).random(50) * 40:
            assert len(set(compiled_exp2(np.full(37, x)).tolist())) == 1
            weights = np.empty(192)
            kernels.weigh(np.full(192, x), 0.0, 1.0, weights)
            assert set(weights.tolist()) == {compiled_exp2([x])[0], kernels.weight_of(x, 0.0, 1.0)}

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 0.5, 1.0, 1e308])
    def test_the_scale_of_a_temperature_never_overflows(self, temperature):
        scale = kernels.scale_of(temperature)
        assert 0.0 < scale < math.inf
        assert kernels.weight_of(1.0, 1.0, scale) == 1.0
        assert kernels.weight_of(-math.inf, 1.0, scale) == 0.0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
class TestPasses:
    """Every pass over a row against the obvious way to say it, bit for bit."""

    def test_peak_and_tops(self, kind, size, dtype):
        row = row_of(kind, size, dtype)
        assert kernels.peak_of(row) == row.max()
        expected = [row[i : i + 128].max() for i in range(0, size, 128)]
        assert kernels.tops_of(row).tolist() == [float(top) for top in expected]

    def test_nan_is_noticed_wherever_it_stands(self, kind, size, dtype):
        for place in {0, size // 2, size - 1}:
            for nan in (np.nan, -np.nan):
                row = row_of(kind, size, dtype)
                row[place] = nan
                assert math.isnan(kernels.peak_of(row))

    def test_weights_and_totals(self, kind, size, dtype):
        row = row_of(kind, size, dtype)
        peak = float(row.max())
        for temperature in (1e-300, 0.7, 1.0, 1e300):
            scale = kernels.scale_of(temperature)
            with np.errstate(over="ignore"):
                weights = reference.relative(row.astype(np.float64), temperature)
            made, filled = np.empty(size), np.empty(size)
            total = kernels.weigh(row, peak, scale, made)
            kernels.weights_of(row, peak, scale, 1.0, filled)
            assert made.tolist() == filled.tolist() == weights.tolist()
            assert weights.max() == 1.0
            assert total == kernels.total(row, peak, scale) == reference.total_of(weights)
            kernels.weights_of(row, peak, scale, 0.3, filled)
            assert filled.tolist() == (weights * 0.3).tolist()

    def test_race(self, kind, size, dtype):
        """A draw from logits decides as the reference does on the weights of all tokens."""
        row = row_of(kind, size, dtype)
        peak = float(row.max())
        for position, temperature in itertools.product(range(3), (0.05, 1.0, 30.0)):
            key = KeyedDraws(41, 3).key(position, Role.DRAFT, 2)
            token = kernels.race(row, peak, kernels.scale_of(temperature), *key)
            weights = reference.relative(row.astype(np.float64), temperature)
            assert token == race_reference(weights.tolist(), None, 41, position, 3, Role.DRAFT, 2)
            assert token == KeyedDraws(41, 3).pick(weights, position, Role.DRAFT, node=2)


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 127, 128, 129, 191, 192, 193, 4096, 5001])
def test_totals_agree_bit_for_bit(size):
    """Dense, sparse and reference add in one order."""
    random = np.random.default_rng(size)
    weights = random.random(size) ** 8
    keep = random.random(size) < 0.6
    kept = np.where(keep, weights, 0.0)
    assert kernels.total_of(weights) == reference.total_of(weights)
    assert kernels.total_of(kept) == reference.total_of(kept)
    ids = np.flatnonzero(keep)
    assert kernels.total_of_ids(ids, weights[ids]) == reference.total_of(kept)


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
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("size", [1, 63, 128, 129, 1000, 9999])
    @pytest.mark.parametrize("top_k", [0, 1, 7, 150])
    @pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.999, 1.0])
    @pytest.mark.parametrize("min_p", [0.0, 1e-3, 1.0])
    def test_holds_all_that_a_filter_may_want_and_is_short(self, size, top_k, top_p, min_p, dtype):
        random = np.random.default_rng(size)
        row = (-random.random(size) * 40).astype(dtype)
        row[random.random(size) < 0.1] = -np.inf
        row[-1] = 0.0
        weights = reference.relative(row.astype(np.float64), 1.0)
        total = kernels.total_of(weights)
        filters = (total, top_k, top_p, min_p)
        ids, light, logits = kernels.shortlist(row, kernels.tops_of(row), 0.0, kernels.scale_of(1.0), *filters)
        assert light.tolist() == weights[ids].tolist()
        assert logits.tolist() == row[ids].tolist()
        assert (np.diff(ids) > 0).all()
        assert light.min() > 0
        assert light.max() == 1.0
        order = np.argsort(-row, kind="stable")[: np.count_nonzero(weights)]
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
        row = np.ones(1000)
        for options in ((5, 1.0, 0.0), (0, 0.1, 0.0), (0, 1.0, 1.0)):
            ids, _, _ = kernels.shortlist(row, np.ones(8), 1.0, kernels.scale_of(1.0), 1000.0, *options)
            assert ids.tolist() == list(range(1000))

    def test_a_sharp_row_is_hardly_looked_at(self):
        """Top-p asks for the likeliest first; what lies far below is not even listed."""
        row = np.full(50_000, -20.0)
        row[777] = 0.0
        ids, _, _ = kernels.shortlist(row, kernels.tops_of(row), 0.0, kernels.scale_of(1.0), 1.0001, 0, 0.9, 0.0)
        assert ids.tolist() == [777]
