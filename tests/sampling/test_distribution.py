"""The fast path against the reference, bit for bit, and against an oracle that shares nothing with either."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BadLogits, InvalidInput, InvalidParams
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws, Role
from paceline.sampling import TokenCounts, distribution, kernels, reference_distribution, warm_up
from paceline.types import Distribution

TINY, HUGE = 1e-6, 1e6
FILTERS = [
    {}, {"top_k": 1}, {"top_k": 3}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 1e-9}, {"top_p": 0.999999},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.2}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip
TEMPERATURES = [0.0, 5e-324, 1e-300, TINY, 0.7, 1.0, 1.5, HUGE, 1e308]


def same(logits, params: SamplingParams, prompt=(), output=()) -> Distribution:
    """Fast path and reference give equal bits, whatever is asked first; the result sums to 1 and is as documented."""
    counts = TokenCounts(prompt)
    counts.add(output)
    history = counts if params.has_penalties else None
    slow = reference_distribution(logits, params, prompt, output)
    tokens = sorted({0, len(logits) // 3, len(logits) - 1})
    first_prob, first_at = (distribution(logits, params, history) for _ in range(2))
    assert [first_prob.prob(token) for token in tokens] == [slow.prob(token) for token in tokens]
    assert first_at.at(np.array(tokens)).tolist() == slow.at(np.array(tokens)).tolist()
    assert np.array_equal(first_prob.dense(), slow.dense())
    fast = distribution(logits, params, history)
    assert (fast.ids is None) == (slow.ids is None)
    if fast.ids is not None and slow.ids is not None:
        assert fast.ids.dtype == np.int64
        assert fast.ids.tolist() == slow.ids.tolist()
        assert fast.ids[-1] < fast.vocab_size
        assert (np.diff(fast.ids) > 0).all()
    assert fast.vocab_size == slow.vocab_size == len(logits)
    assert fast.probs.dtype == np.float64
    assert np.array_equal(fast.probs, slow.probs)
    assert [fast.prob(token) for token in tokens] == [slow.prob(token) for token in tokens]
    assert fast.at(np.array(tokens)).tolist() == slow.at(np.array(tokens)).tolist()
    assert abs(math.fsum(fast.probs) - 1) <= 1e-12
    return fast


def oracle(logits, params: SamplingParams) -> list[float]:
    """Temperature and filters in pure Python, renormalised for real after each filter."""
    top = max(logits)
    p = {v: math.exp((x - top) / params.temperature) for v, x in enumerate(logits)}

    def normalised(kept):
        total = math.fsum(kept.values())
        return {v: x / total for v, x in kept.items()}

    ranked = sorted(p, key=lambda v: (-logits[v], v))
    p = normalised(p)
    if params.top_k > 0:
        p = normalised({v: p[v] for v in ranked[: params.top_k]})
    kept, mass = {}, 0.0
    for v in ranked:
        if v in p and mass < params.top_p:
            kept[v] = p[v]
            mass += p[v]
    p = normalised(kept)
    least = params.min_p * max(p.values())
    p = normalised({v: x for v, x in p.items() if x >= least})
    return [p.get(v, 0.0) for v in range(len(logits))]


class TestAgainstTheReference:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 63, 64, 65, 130, 1001, 5003])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_random_rows(self, size, dtype):
        random = np.random.default_rng(size)
        for temperature, options in itertools.product(TEMPERATURES, FILTERS):
            logits = (random.normal(size=size) * random.choice([0.1, 3.0, 30.0])).astype(dtype)
            same(logits, SamplingParams(temperature=temperature, **options))

    @pytest.mark.parametrize("options", FILTERS)
    def test_full_vocabulary(self, options):
        """An odd vocabulary, as wide as real ones, peaked and flat."""
        random = np.random.default_rng(0)
        for scale, temperature in ((3.0, 1.0), (1.0, 0.7), (0.01, 1.0)):
            logits = (random.normal(size=49_153) * scale).astype(np.float32)
            same(logits, SamplingParams(temperature=temperature, **options))

    @pytest.mark.parametrize("options", FILTERS)
    @pytest.mark.parametrize("temperature", [TINY, 1.0, HUGE])
    @pytest.mark.parametrize("kind", ["equal", "two values", "one finite", "few finite", "staircase", "far apart"])
    def test_degenerate_rows(self, kind, temperature, options):
        """Ties at every cut, rows that are mostly -inf, and spreads that overflow."""
        n = 301
        logits = {
            "equal": np.full(n, -3.25),
            "two values": np.where(np.arange(n) % 3 == 1, 1.0, 0.0),
            "one finite": np.where(np.arange(n) == 77, 5.0, -np.inf),
            "few finite": np.where(np.arange(n) % 50 == 49, np.arange(n) / 100, -np.inf),
            "staircase": np.arange(n) // 10 * 0.125,
            "far apart": np.where(np.arange(n) % 2 == 1, 1.7e308, -1.7e308),
        }[kind]
        same(logits, SamplingParams(temperature=temperature, **options))

    @given(data=st.data())
    @settings(max_examples=400, deadline=None, derandomize=True)
    def test_everything_at_once(self, data):
        size = data.draw(st.integers(1, 90))
        width = data.draw(st.sampled_from([32, 64]))
        value = st.one_of(
            st.sampled_from([-math.inf, -1.0, 0.0, -0.0, 0.5, 1.0, 2.0]),
            st.floats(-50, 50, width=32),
            st.floats(-(2.0**127), 2.0**127, width=32),
        )
        logits = np.array(data.draw(st.lists(value, min_size=size, max_size=size)), dtype=f"f{width // 8}")
        token = st.integers(0, size - 1)
        tokens = st.lists(token, max_size=12)
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([*TEMPERATURES, 0.9])),
            top_k=data.draw(st.integers(-1, size + 2)),
            top_p=data.draw(st.sampled_from([1e-300, 0.1, 0.5, 0.75, 0.9, 1 - 1e-12, 1.0])),
            min_p=data.draw(st.sampled_from([0.0, 1e-12, 0.1, 0.5, 1.0])),
            presence_penalty=data.draw(st.sampled_from([-2.0, 0.0, 0.3])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.7, 2.0])),
            repetition_penalty=data.draw(st.sampled_from([0.5, 1.0, 1.2])),
            logit_bias=data.draw(st.dictionaries(token, st.sampled_from([-100.0, 0.25, 100.0]), max_size=4)),
        )
        if np.isfinite(logits).any():
            same(logits, params, data.draw(tokens), data.draw(tokens))
        else:
            with pytest.raises(BadLogits, match=f"all {size} logits are -inf"):
                distribution(logits, params, TokenCounts([]))

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(200))
    def test_many_random_rows(self, seed):
        random = np.random.default_rng(seed)
        size = int(random.integers(1, 60_000))
        digits = int(random.integers(0, 6))
        logits = np.round(random.normal(size=size) * random.choice([0.5, 2.0, 8.0]), digits)
        same(
            logits.astype(random.choice([np.float32, np.float64])),
            SamplingParams(
                temperature=float(random.choice(TEMPERATURES)),
                top_k=int(random.integers(-1, 1.1 * size + 1)),
                top_p=float(random.choice([1.0, random.random() + 1e-9])),
                min_p=float(random.choice([0.0, random.random() ** 8])),
            ),
        )


class TestAgainstTheOracle:
    @pytest.mark.parametrize("size", [1, 2, 9, 60, 400])
    def test_filters_and_temperature(self, size):
        random = np.random.default_rng(size)
        for temperature, options in itertools.product((TINY, 0.7, 1.0, 3.0, HUGE), FILTERS):
            logits = random.normal(size=size) * 3
            params = SamplingParams(temperature=temperature, **options)
            got = distribution(logits, params, None).dense().tolist()
            expected = oracle(logits.tolist(), params)
            assert [x > 0 for x in got] == [x > 0 for x in expected]
            assert np.abs(np.subtract(got, expected)).max() <= 1e-12

    def test_real_widths(self):
        logits = (np.random.default_rng(3).normal(size=20_001) * 3).astype(np.float32)
        for options in FILTERS:
            params = SamplingParams(temperature=0.8, **options)
            got = distribution(logits, params, None).dense()
            assert np.abs(got - oracle(logits.astype(float).tolist(), params)).max() <= 1e-12


class TestGreedy:
    @pytest.mark.parametrize("logits, token", [
        ([1.0, 3.0, 3.0, 2.0], 1), ([-0.0, 0.0], 0), ([0.0, -0.0], 0), ([5.0], 0), ([-np.inf, -7.0], 1),
        ([-np.inf, 1.0, 1.0, -np.inf], 1), ([np.nextafter(1.0, 0), 1.0], 1),
    ])  # fmt: skip
    def test_lowest_id_among_the_maxima(self, logits, token):
        row = same(np.array(logits), SamplingParams(temperature=0.0))
        assert row.ids is not None
        assert (row.ids.tolist(), row.probs.tolist()) == ([token], [1.0])

    @pytest.mark.parametrize("temperature", [TINY, 1.0, HUGE, 1e300])
    def test_top_k_of_one_is_greedy_at_any_temperature(self, temperature):
        """vllm#10198. Also where the heat makes every probability equal in floats."""
        random = np.random.default_rng(5)
        for _ in range(200):
            logits = np.round(random.normal(size=30), 1) * 1e-9
            hot = distribution(logits, SamplingParams(temperature=temperature, top_k=1), None)
            cold = distribution(logits, SamplingParams(temperature=0.0), None)
            assert hot.dense().tolist() == cold.dense().tolist()

    def test_filters_do_not_matter(self):
        for options in FILTERS:
            row = distribution(np.array([0.1, 0.3, 0.2]), SamplingParams(temperature=0.0, **options), None)
            assert row.dense().tolist() == [0, 1, 0]

    @pytest.mark.parametrize("options", FILTERS)
    def test_unset_temperature_is_one_not_greedy(self, options):
        """TensorRT-LLM PR #19390: a request that set top-p alone came out greedy."""
        logits = np.array([1.0, 1.1, 0.9, 1.0])
        unset = distribution(logits, SamplingParams(**options), None).dense()
        one = distribution(logits, SamplingParams(temperature=1.0, **options), None).dense()
        zero = distribution(logits, SamplingParams(temperature=0.0, **options), None).dense()
        assert unset.tolist() == one.tolist()
        assert zero.tolist() == [0, 1, 0, 0]
        if options in ({}, {"top_p": 0.9}, {"min_p": 0.05}):
            assert np.count_nonzero(unset) == 4


class TestPenaltiesAndBias:
    @pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
    @pytest.mark.parametrize("value", [-2.0, 2.0])
    def test_a_penalty_moves_the_row(self, field, value):
        """vllm#18902: penalties were ignored on speculative rows, without a word."""
        plain = distribution(np.zeros(4), SamplingParams(), None).dense()
        moved = same(np.zeros(4), SamplingParams(**{field: value}), [], [2]).dense()
        assert math.copysign(1, plain[2] - moved[2]) == math.copysign(1, value)

    def test_a_multiplicative_penalty_acts_on_logits(self):
        """sglang PR #22049: it was applied to a row of zeros, and did nothing."""
        row = same(np.array([2.0, 2.0]), SamplingParams(repetition_penalty=2.0), [0], [])
        assert row.dense()[0] == pytest.approx(1 / (1 + math.e))

    def test_penalties_without_a_history_are_refused(self):
        with pytest.raises(InvalidInput, match="TokenCounts"):
            distribution(np.zeros(3), SamplingParams(presence_penalty=1.0), None)

    def test_a_history_outside_the_vocabulary_is_refused(self):
        params = SamplingParams(repetition_penalty=1.1)
        for call in (
            lambda: distribution(np.zeros(3), params, TokenCounts([0, 3])),
            lambda: reference_distribution(np.zeros(3), params, [0], [3]),
        ):
            with pytest.raises(InvalidInput, match="token 3, but the vocabulary has 3"):
                call()

    def test_a_bias_outside_the_vocabulary_is_refused(self):
        params = SamplingParams(logit_bias={1: 1.0, 3: 1.0})
        for call in (
            lambda: distribution(np.zeros(3), params, None),
            lambda: reference_distribution(np.zeros(3), params, [], []),
        ):
            with pytest.raises(InvalidParams, match="token 3, but the vocabulary has 3"):
                call()

    def test_a_penalty_that_overflows_is_refused(self):
        params = SamplingParams(repetition_penalty=1e-320)
        for call in (
            lambda: distribution(np.ones(3), params, TokenCounts([1])),
            lambda: reference_distribution(np.ones(3), params, [1], []),
        ):
            with pytest.raises(BadLogits, match=r"\+inf at token 1"):
                call()

    def test_a_ban_by_overflow_is_mass_zero(self):
        row = same(np.full(3, -5.0), SamplingParams(repetition_penalty=1e308), [1], [])
        assert row.dense().tolist() == [0.5, 0.0, 0.5]


ROADS = [SamplingParams(temperature=t, **o) for t in (0.0, 1.0, 0.5) for o in ({}, {"top_k": 2}, {"top_p": 0.5})]


class TestBadRows:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("size", [1, 2, 65, 1001])
    @pytest.mark.parametrize("entry, said", [(np.nan, "NaN"), (-np.nan, "NaN"), (np.inf, r"\+inf")])
    def test_nan_and_infinity_are_named(self, entry, said, size, dtype):
        """vllm#44744, vllm#53029, vllm#21876: such a row gave an id outside the vocabulary. Here: an error."""
        for place, params in itertools.product({0, size // 2, size - 1}, ROADS):
            logits = np.full(size, -np.inf, dtype=dtype)
            logits[place] = entry
            for call in (distribution, lambda z, p, _: reference_distribution(z, p, [], [])):
                with pytest.raises(BadLogits, match=rf"{said} at token {place} \(1 of {size}"):
                    call(logits, params, None)

    def test_nan_is_named_before_infinity(self):
        with pytest.raises(BadLogits, match="NaN at token 2"):
            distribution(np.array([0.0, np.inf, np.nan]), SamplingParams(), None)

    @pytest.mark.parametrize("size", [1, 2, 1001])
    def test_no_finite_entry(self, size):
        """vllm#53029: with every lane at -inf the padding won the argmax."""
        for params in ROADS:
            with pytest.raises(BadLogits, match=f"all {size} logits are -inf"):
                distribution(np.full(size, -np.inf, dtype=np.float32), params, None)

    @pytest.mark.parametrize("logits", [
        [], [[1.0, 2.0]], 1.0, ["a"], [1j], [True, False], np.array([None, None]),
    ])  # fmt: skip
    def test_what_is_no_row_is_refused(self, logits):
        for call in (distribution, lambda z, p, _: reference_distribution(z, p, [], [])):
            with pytest.raises(InvalidInput, match="shape"):
                call(logits, SamplingParams(), None)


class TestInputs:
    @pytest.mark.parametrize("options", [*FILTERS, {"temperature": 0.0}, {"temperature": 0.5}])
    def test_the_callers_row_is_never_written(self, options):
        """vllm PR #30846: raw logprobs were wrong because the logits had been changed in place."""
        logits = (np.random.default_rng(1).normal(size=500) * 3).astype(np.float32)
        before = logits.copy()
        params = SamplingParams(**options, repetition_penalty=1.5, logit_bias={3: 50.0})
        distribution(logits, params, TokenCounts([1, 2]))
        distribution(logits, SamplingParams(**options), None)
        reference_distribution(logits, params, [1], [2])
        assert np.array_equal(logits, before)

    @pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"temperature": 0.0}, {"logit_bias": {1: 1.0}}])
    @pytest.mark.parametrize("view", [
        "read-only", "strided", "reversed", "big-endian", "float16", "integers", "list", "float64",
    ])  # fmt: skip
    def test_any_real_row_will_do(self, options, view):
        values = np.random.default_rng(2).integers(-8, 9, 64).astype(np.float32)
        logits = {
            "read-only": lambda: np.frombuffer(values.tobytes(), dtype=np.float32),
            "strided": lambda: np.repeat(values, 3)[::3],
            "reversed": lambda: values[::-1].copy()[::-1],
            "big-endian": lambda: values.astype(">f4"),
            "float16": lambda: values.astype(np.float16),
            "integers": lambda: values.astype(np.int64),
            "list": lambda: values.tolist(),
            "float64": lambda: values.astype(np.float64),
        }[view]()
        params = SamplingParams(**options)
        assert np.array_equal(same(logits, params).dense(), same(values, params).dense())

    def test_integers_keep_their_last_digit(self):
        row = distribution(np.array([2**24, 2**24 + 1]), SamplingParams(temperature=0.0), None)
        assert row.prob(1) == 1.0

    def test_a_row_of_its_own_each_time(self):
        first = distribution(np.zeros(100), SamplingParams(), None)
        kept = first.probs.copy()
        distribution(np.arange(100.0), SamplingParams(), None)
        assert np.array_equal(first.probs, kept)

    def test_nothing_is_ranked_where_no_filter_is_on(self, monkeypatch):
        """sglang#6949: rows were sorted for top-p even when it was off."""

        def fail(*arguments):
            raise AssertionError("a filter kernel ran")

        for name in ("tops_of", "shortlist", "truncate"):
            monkeypatch.setattr(kernels, name, fail)
        row = np.zeros(10, dtype=np.float32)
        distribution(row, SamplingParams(top_k=10, top_p=1.0, min_p=0.0, temperature=0.7), None)
        with pytest.raises(AssertionError, match="filter kernel"):
            distribution(row, SamplingParams(top_p=0.5), None)

    def test_every_pair_of_options(self):
        """sglang#33695: the interface accepted pairs that then failed. Every pair works, and as it means."""
        logits = np.random.default_rng(4).normal(size=40)
        options = [
            {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"seed": 3},
            {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.4},
            {"logit_bias": {2: 1.5}},
        ]  # fmt: skip
        for a, b in itertools.combinations(options, 2):
            same(logits, SamplingParams(**(a | b)), [1, 2], [2, 5, 5])


class Watched(KeyedDraws):
    """Keyed draws that somebody watches: they must be shown what is drawn from."""

    def pick(self, weights, position, role, *, ids=None, node=0):
        self.seen = weights
        return super().pick(weights, position, role, ids=ids, node=node)

    __slots__ = ("seen",)


class TestDraws:
    """A token drawn from a row without filters, which is never made into an array for it."""

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("size", [1, 2, 63, 129, 1000, 49_152])
    def test_as_the_draws_themselves_would(self, size, dtype):
        """The race on weights is that on probabilities up to rounding, which decides none of these."""
        random = np.random.default_rng(size)
        for position, scale in itertools.product(range(3), (0.1, 3.0, 30.0)):
            logits = (random.normal(size=size) * scale).astype(dtype)
            for params in (SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(logit_bias={0: 2.0})):
                p, draws = distribution(logits, params, None), KeyedDraws(9, 4)
                for role, node in ((Role.TARGET, 0), (Role.DRAFT, 3), (Role.RECOVER, 1)):
                    token = p.pick(draws, position, role, node)
                    assert token == draws.pick(p.probs, position, role, node=node)
                    assert p.prob(token) > 0

    def test_a_token_of_mass_zero_never_comes(self):
        logits = np.full(300, -np.inf, dtype=np.float32)
        logits[[7, 250]] = 0.0, -700.0
        p = distribution(logits, SamplingParams(), None)
        assert {p.pick(KeyedDraws(seed, 0), 0, Role.TARGET) for seed in range(300)} == {7}

    def test_follows_p(self):
        """20,000 draws from four tokens; each share within 5 standard deviations: a false alarm in 400,000 runs."""
        logits = np.log([0.4, 0.3, 0.2, 0.1])
        p, n = distribution(logits, SamplingParams(), None), 20_000
        picks = np.bincount([p.pick(KeyedDraws(5, 0), i, Role.TARGET) for i in range(n)], minlength=4)
        for count, share in zip(picks, (0.4, 0.3, 0.2, 0.1), strict=True):
            assert abs(count - n * share) < 5 * math.sqrt(n * share * (1 - share))

    def test_whoever_watches_the_draws_sees_p(self):
        p, draws = distribution(np.array([0.0, 1.0]), SamplingParams(), None), Watched(1, 0)
        assert p.pick(draws, 0, Role.TARGET) == KeyedDraws(1, 0).pick(p.probs, 0, Role.TARGET)
        assert draws.seen.tolist() == p.probs.tolist()

    def test_draws_that_are_replaced_see_p(self, monkeypatch):
        monkeypatch.setattr(KeyedDraws, "pick", lambda self, weights, *where, **names: int(np.argmin(weights)))
        assert distribution(np.array([0.0, -9.0, 1.0]), SamplingParams(), None).pick(KeyedDraws(1, 0), 0, 0) == 1

    def test_accept_noise_cannot_be_picked_with(self):
        with pytest.raises(InvalidInput, match="ACCEPT"):
            distribution(np.zeros(3), SamplingParams(), None).pick(KeyedDraws(1, 0), 0, Role.ACCEPT)

    def test_no_array_of_p_is_made(self, monkeypatch):
        def fail(*arguments):
            raise AssertionError("an array of weights was made")

        monkeypatch.setattr(kernels, "weigh", fail)
        monkeypatch.setattr(kernels, "weights_of", fail)
        p = distribution(np.arange(1000.0), SamplingParams(), None)
        assert p.pick(KeyedDraws(1, 0), 0, Role.TARGET) >= 0
        assert 0 < p.prob(999) < 1
        with pytest.raises(AssertionError, match="array of weights"):
            p.dense()


class TestOwnership:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("kind", ["array", "view", "list", "read-only"])
    def test_what_becomes_of_the_logits_does_not_matter(self, kind, dtype):
        """A backend's next forward overwrites its rows while a drafter's q is still in use."""
        whole = np.random.default_rng(0).normal(size=(2, 200)).astype(dtype)
        expected = distribution(whole[1].copy(), SamplingParams(), None).dense().tolist()
        logits = {"array": whole[1].copy(), "view": whole[1], "list": whole[1].tolist(), "read-only": whole[1].copy()}[
            kind
        ]
        if kind == "read-only":
            logits.flags.writeable = False
        p = distribution(logits, SamplingParams(), None)
        if kind == "read-only":
            logits.flags.writeable = True
        logits[:] = [0.0] * 200
        whole[:] = 0.0
        assert p.dense().tolist() == expected

    def test_borrowed_logits_are_not_copied(self):
        logits = np.array([0.0, 1.0, 2.0])
        p = distribution(logits, SamplingParams(), None, borrow=True)
        logits[:] = 2.0, 1.0, 2.0  # what a caller who borrows must not do; here it shows that nothing was copied
        assert p.prob(0) == p.prob(2)

    def test_a_row_out_of_range_is_an_error(self):
        p = distribution(np.zeros(4), SamplingParams(), None)
        with pytest.raises(IndexError):
            p.prob(4)
        with pytest.raises(IndexError):
            p.at(np.array([1, 4]))


class TestWarmUp:
    def test_tells_how_far_it_is(self):
        told = []
        warm_up(lambda *what: told.append(what))
        what, done, everything = zip(*told, strict=True)
        assert set(what) == {"sampling kernels"}
        assert list(done) == list(range(everything[0] + 1))
        assert len(set(everything)) == 1

    def test_no_kernel_is_compiled_or_loaded_later(self):
        """The first request waited for a compiler, without a word. Every option, both widths, in a fresh process."""
        code = """
import gc

import numpy as np
from numba.core.dispatcher import Dispatcher
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws, Role
from paceline.sampling import TokenCounts, distribution, warm_up

def ready():
    return sum(len(thing.overloads) for thing in gc.get_objects() if isinstance(thing, Dispatcher))

warm_up()
before = ready()
for dtype in (np.float32, np.float64):
    rows = np.random.default_rng(0).normal(size=(2, 700)).astype(dtype)
    for options in ({}, {"temperature": 0.7}, {"top_k": 5}, {"top_k": 500}, {"top_p": 0.9}, {"min_p": 0.1},
                    {"top_p": 1, "top_k": 3, "repetition_penalty": 2}, {"logit_bias": {3: 1.0}}):
        draws, counts = KeyedDraws(1, 2), TokenCounts([1])
        p = distribution(rows[1], SamplingParams(**options), counts)
        if p.ids is None:
            p.pick(draws, 3, Role.TARGET)
        p.prob(3)
        draws.pick(p.probs, 3, Role.RECOVER, ids=p.ids)
        draws.accept(0.5, 3)
        distribution(rows[1], SamplingParams(**options), counts).dense()
print(ready() - before)
"""
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown.strip() == "0"
