"""Keyed draws: Philox, the counter layout, and the race against its reference. The laws: test_rng_laws.py."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import rng
from paceline.errors import InvalidDistribution, InvalidInput
from paceline.rng import KeyedDraws, derive_seed, fresh_seed, philox4x32, philox4x32_rows, uniforms
from paceline.types import Role

ONES = 0xFFFFFFFF
LAST_UNIFORM = 1.0 - 2.0**-53
PICKING = (Role.TARGET, Role.DRAFT, Role.RECOVER)

# The published known-answer vectors of philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def layout(token: int, position: int, step_start: int, role: int, node: int, seed: int) -> float:
    """The uniform of one token as the module documents it, spelled out a second time."""
    if role == 0:
        step_start = node = 0
    pair = uniforms((token // 2, position, step_start, role + 256 * node), (seed % 2**32, seed // 2**32))
    return pair[token % 2]


def race(weights, ids, *key) -> int:
    """argmin E / w over w > 0, spelled out a second time."""
    arrivals = [(-math.log1p(-layout(token, *key)) / w, token) for token, w in zip(ids, weights, strict=True) if w > 0]
    return min(arrivals)[1]


# What two_processes draws. A change here changes every seeded stream users have: say so in CHANGELOG.md.
PINNED = (
    "[18135, 4534, 22841, 8866, 15369, 34381, 45073, 45993, 17108] [True, True, True, False, True, True, False, False]"
)


class TestPhilox:
    @pytest.mark.parametrize("counter, key, words", KNOWN)
    def test_known_answers(self, counter, key, words):
        assert philox4x32(counter, key) == words
        assert tuple(philox4x32_rows([counter], key)[0].tolist()) == words

    def test_compiled_rows_equal_the_scalar(self):
        random = np.random.default_rng(1)
        for key in random.integers(0, 2**32, (5, 2)).tolist():
            counters = random.integers(0, 2**32, (200, 4), dtype=np.uint32)
            expected = [philox4x32(row, key) for row in counters.tolist()]
            assert philox4x32_rows(counters, key).tolist() == [list(words) for words in expected]

    def test_rows_of_another_shape_are_refused(self):
        with pytest.raises(InvalidInput, match=r"\(3,\)"):
            philox4x32_rows([1, 2, 3], (0, 0))

    def test_lanes(self):
        low, high = uniforms(*KNOWN[0][:2])
        assert low == (0x6627E8D5E169C58D >> 11) / 2**53
        assert high == (0xBC57AC4C9B00DBD8 >> 11) / 2**53

    def test_a_uniform_is_never_one(self, monkeypatch):
        """sglang PR #30822: a hash of all ones was rounded up to a coin of 1.0."""
        monkeypatch.setattr(rng, "philox4x32", lambda counter, key: (ONES,) * 4)
        assert uniforms((0, 0, 0, 0), (0, 0)) == (LAST_UNIFORM, LAST_UNIFORM)
        assert rng._unit(np.uint64(ONES), np.uint64(ONES)) == LAST_UNIFORM
        assert rng._unit(np.uint64(0), np.uint64(0)) == 0.0
        assert 36 < -math.log1p(-LAST_UNIFORM) < 37


class TestLayout:
    @given(
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 2**32 - 1),
        step_start=st.integers(0, 2**32 - 1),
        node=st.integers(0, 2**24 - 1),
        role=st.sampled_from(PICKING),
        ids=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=5, unique=True).map(sorted),
    )
    @settings(max_examples=150, deadline=None, derandomize=True)
    def test_pick_follows_the_documented_counter(self, seed, position, step_start, node, role, ids):
        draws = KeyedDraws(seed, step_start)
        weights = np.linspace(1.0, 2.0, len(ids))
        token = draws.pick(weights, position, role, ids=np.array(ids), node=node)
        assert token == race(weights, ids, position, step_start, role, node, seed)
        assert token == rng.race_reference(weights.tolist(), ids, seed, position, step_start, role, node)

    @given(
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 2**32 - 1),
        step_start=st.integers(0, 2**32 - 1),
        node=st.integers(0, 2**24 - 1),
    )
    @settings(max_examples=100, deadline=None, derandomize=True)
    def test_accept_is_strictly_below_lane_0_of_word_0(self, seed, position, step_start, node):
        u = layout(0, position, step_start, Role.ACCEPT, node, seed)
        draws = KeyedDraws(seed, step_start)
        assert not draws.accept(u, position, node)
        assert draws.accept(math.nextafter(u, 1.0), position, node)

    def test_target_noise_knows_seed_position_and_token_only(self):
        """vllm-ascend#13608, vllm#6038: a step, a draft or a neighbour must not move a seeded request's noise."""
        weights = np.ones(1000)
        plain = [KeyedDraws(7, 0).pick(weights, t, Role.TARGET) for t in range(40)]
        assert plain == [KeyedDraws(7, t).pick(weights, t, Role.TARGET, node=t) for t in range(40)]

    def test_nothing_is_consumed_by_order(self):
        """vllm-ascend#13608, sglang PR #30822, TensorRT-LLM PR #17599: other draws in between change nothing."""
        weights, jobs = np.ones(1000), list(itertools.product(range(12), PICKING, range(3)))
        draws = KeyedDraws(3, 5)
        straight = {job: draws.pick(weights, job[0], job[1], node=job[2]) for job in jobs}
        for i in np.random.default_rng(0).permutation(len(jobs)):
            position, role, node = jobs[i]
            KeyedDraws(4, 5).pick(weights, position, role, node=node)  # a neighbour in the batch
            draws.accept(0.5, position, node)
            assert draws.pick(weights, position, role, node=node) == straight[jobs[i]]

    def test_no_two_purposes_share_a_counter(self):
        """vllm#54282, flashinfer#424, flashinfer#425, vllm-ascend#16370: draft, accept, recovery: own noise each."""
        words = [
            rng.counter_words(position, step_start, role, node)
            for role in (Role.DRAFT, Role.ACCEPT, Role.RECOVER)
            for position, step_start, node in itertools.product((0, 1, 255, 256, 2**32 - 1), (0, 1, 256), (0, 1, 255))
        ]
        words += [rng.counter_words(position, 9, Role.TARGET, 9) for position in (0, 1, 255, 256, 2**32 - 1)]
        assert len(set(words)) == len(words)

    def test_two_processes_draw_the_same(self):
        """vllm#17498: workers with equal inputs must decide alike; also pins the streams of this version."""
        code = (
            "import numpy as np; from paceline.rng import KeyedDraws, Role; d = KeyedDraws(2**63 + 11, 5);"
            "w = np.ones(50000); print([d.pick(w, t, Role(r), node=t) for t in range(3) for r in (0, 1, 3)],"
            "[d.accept(0.5, t) for t in range(8)])"
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown.strip() == PINNED


class TestRace:
    @given(data=st.data())
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_compiled_decides_as_the_reference(self, data):
        """Exact equality on ordinary and absurd weights, dense and sparse."""
        weight = st.one_of(
            st.sampled_from([0.0, -0.0, 5e-324, 1e-310, 1e-300, 1e-17, 0.25, 1.0, 3.0, 1e17, 1e300, 1.7e308]),
            st.floats(0.0, 1.0),
        )
        weights = data.draw(st.lists(weight, min_size=1, max_size=40).filter(any))
        position = data.draw(st.integers(0, 10_000))
        gaps = data.draw(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights)))
        ids = (np.cumsum(gaps) - 1).tolist()
        draws = KeyedDraws(99, 1)
        for names in (None, ids):
            got = draws.pick(
                np.array(weights), position, Role.DRAFT, ids=None if names is None else np.array(names), node=2
            )
            assert got == rng.race_reference(weights, names, 99, position, 1, Role.DRAFT, 2)
            assert dict(zip(names or range(len(weights)), weights, strict=True))[got] > 0

    @pytest.mark.parametrize("size", [1, 2, 3, 127, 128, 129, 255, 256, 257, 1000])
    @pytest.mark.parametrize("shape", ["flat", "peaked", "holes", "rising", "falling"])
    def test_block_borders(self, size, shape):
        random = np.random.default_rng(size)
        weights = {
            "flat": np.ones(size),
            "peaked": random.random(size) ** 30,
            "holes": random.random(size) * (random.random(size) < 0.1) + np.eye(1, size, size // 2)[0],
            "rising": np.geomspace(1e-200, 1.0, size),
            "falling": np.geomspace(1.0, 1e-200, size),
        }[shape]
        ids = np.sort(random.choice(5 * size, size, replace=False))
        draws = KeyedDraws(5, 0)
        for position in range(4):
            expected = rng.race_reference(weights.tolist(), None, 5, position, 0, Role.RECOVER)
            assert draws.pick(weights, position, Role.RECOVER) == expected
            expected = rng.race_reference(weights.tolist(), ids.tolist(), 5, position, 0, Role.RECOVER)
            assert draws.pick(weights, position, Role.RECOVER, ids=ids) == expected

    def test_photo_finish(self):
        """A second runner whose noise is tiny, so that u and E nearly agree, arrives a few ulp before or after."""
        position, pair = 9, []
        for token in range(1, 40_000):
            u = layout(token, position, 0, Role.TARGET, 0, 77)
            if u < 2e-4:
                pair.append((token, -math.log1p(-u)))
        first = -math.log1p(-layout(0, position, 0, Role.TARGET, 0, 77))
        assert len(pair) >= 3
        winners = set()
        for token, arrival in pair:
            for factor in (1 - 1e-9, 1 - 4e-16, 1.0, 1 + 4e-16, 1 + 1e-9):
                weights = [1.0, arrival / first * factor]
                expected = rng.race_reference(weights, [0, token], 77, position, 0, Role.TARGET)
                got = KeyedDraws(77, 0).pick(np.array(weights), position, Role.TARGET, ids=np.array([0, token]))
                assert got == expected
                winners.add(got == 0)
        assert winners == {True, False}

    def test_full_vocabulary(self):
        random = np.random.default_rng(0)
        weights = np.exp(random.normal(size=49_152) * 3)
        for position in range(3):
            expected = rng.race_reference(weights.tolist(), None, 1, position, 0, Role.TARGET)
            assert KeyedDraws(1, 0).pick(weights, position, Role.TARGET) == expected

    def test_noise_belongs_to_the_token_not_to_its_place(self):
        random = np.random.default_rng(2)
        draws = KeyedDraws(11, 3)
        for position in range(300):
            n = int(random.integers(1, 30))
            ids = np.sort(random.choice(400, n, replace=False))
            dense = np.zeros(401)
            dense[ids] = random.random(n) + 0.01
            assert draws.pick(dense[ids], position, Role.TARGET, ids=ids) == draws.pick(dense, position, Role.TARGET)

    @pytest.mark.parametrize("factor", [2.0**-1040, 2.0**-300, 2.0**300, 2.0**1000])
    def test_any_positive_sum_will_do(self, factor):
        weights = np.random.default_rng(3).integers(1, 1000, 50) * 1.0
        for position in range(50):
            plain = KeyedDraws(1, 0).pick(weights, position, Role.DRAFT)
            assert KeyedDraws(1, 0).pick(weights * factor, position, Role.DRAFT) == plain

    def test_compiled_logarithm_is_pythons(self):
        """The race is decided alike only while both call the same log1p."""
        compiled = numba.njit(lambda u: math.log1p(-u))
        edges = [0.0, 2.0**-53, 2.0**-52, 0.5, LAST_UNIFORM]
        for u in edges + np.random.default_rng(4).random(20_000).tolist():
            assert compiled(u) == math.log1p(-u)

    def test_ties_go_to_the_lowest_token(self, monkeypatch):
        monkeypatch.setattr(rng, "uniforms", lambda counter, key: (0.5, 0.5))
        assert rng.race_reference([0.0, 1.0, 2.0, 2.0], None, 0, 0, 0, Role.TARGET) == 2

    @pytest.mark.parametrize("before, after", [(-1, 4), (3, 3), (200, 4)])
    def test_equal_arrivals_in_whatever_order_go_to_the_lowest_token(self, monkeypatch, before, after):
        """The block of the largest weight runs first, so a higher token may lead when a lower one arrives."""
        monkeypatch.setattr(rng, "_uniform_of", lambda token, *key: 0.5)
        words, best = np.zeros(64, dtype=np.uint32), math.inf if before < 0 else math.log(2) / 2
        weights = np.array([1.0, 2.0, 2.0])
        won = rng.run_block.py_func(3, weights, 1.0, words, words, ONES, before, best, 0, 0, 0, 0, 0)
        assert won == (after, pytest.approx(math.log(2) / 2))

    def test_inputs_are_only_read(self):
        weights, ids = np.array([1.0, 2.0, 0.0]), np.array([3, 5, 8])
        weights.flags.writeable = ids.flags.writeable = False
        assert KeyedDraws(0, 0).pick(weights, 0, Role.TARGET, ids=ids) in (3, 5)
        assert KeyedDraws(0, 0).pick(np.array([0.0, 9.0, 1.0, 9.0])[::2], 0, Role.TARGET) == 1

    def test_one_weight_needs_no_noise(self):
        assert KeyedDraws(0, 0).pick(np.array([1e-9]), 0, Role.TARGET) == 0
        assert KeyedDraws(0, 0).pick(np.array([1e-9]), 0, Role.TARGET, ids=np.array([17])) == 17


class TestEdges:
    @pytest.mark.parametrize("u, probability, verdict", [
        (0.0, 0.0, False), (0.0, -1.0, False), (0.0, 5e-324, True), (0.0, 1.0, True), (0.25, 0.25, False),
        (0.25, math.nextafter(0.25, 1), True), (LAST_UNIFORM, LAST_UNIFORM, False), (LAST_UNIFORM, 1.0, True),
        (LAST_UNIFORM, 1.5, True),
    ])  # fmt: skip
    def test_accept_at_the_ends_of_the_coin(self, monkeypatch, u, probability, verdict):
        """sglang#35771: `coin <= sum` accepted a draft of probability 0 when the coin was 0."""
        monkeypatch.setattr(rng, "_lane0", lambda *counter: u)
        assert KeyedDraws(0, 0).accept(probability, 0) is verdict

    def test_accept_refuses_nan(self):
        with pytest.raises(InvalidDistribution, match="position 4, node 2 is NaN"):
            KeyedDraws(0, 0).accept(math.nan, 4, 2)

    @pytest.mark.parametrize("weights, said", [
        ([], r"shape \(0,\)"), ([[1.0]], r"shape \(1, 1\)"), ([0.0, 0.0], "all 2 weights are zero"),
        ([0.0, -0.0], "all 2 weights are zero"), ([0.0], "all 1 weights are zero"), ([-1.0], "token 0 is -1.0"),
        ([1.0, -1e-300], "token 1 is -1e-300"), ([1.0, math.nan, math.nan], "token 1 is nan"),
        ([math.inf, 1.0], "token 0 is inf"), ([1.0, -math.inf], "token 1 is -inf"),
    ])  # fmt: skip
    def test_weights_that_mean_nothing(self, weights, said):
        """vllm#44744: an all-zero or NaN row is a typed error, never a token id."""
        with pytest.raises(InvalidDistribution, match=said):
            KeyedDraws(0, 0).pick(np.array(weights), 3, Role.RECOVER)

    def test_the_bad_weight_is_named_by_its_token(self):
        with pytest.raises(InvalidDistribution, match="position 3, role RECOVER: the weight of token 40 is nan"):
            KeyedDraws(0, 0).pick(np.array([1.0, math.nan]), 3, Role.RECOVER, ids=np.array([7, 40]))

    @pytest.mark.parametrize("ids", [[2, 1], [1, 1], [-1, 4], [0, 2**33]])
    def test_ids_that_do_not_ascend(self, ids):
        with pytest.raises(InvalidDistribution, match="ascend"):
            KeyedDraws(0, 0).pick(np.ones(2), 0, Role.TARGET, ids=np.array(ids))

    def test_ids_of_another_shape(self):
        with pytest.raises(InvalidDistribution, match=r"shape \(2,\) and ids of shape \(3,\)"):
            KeyedDraws(0, 0).pick(np.ones(2), 0, Role.TARGET, ids=np.arange(3))

    def test_negative_zeros_are_zeros(self):
        assert KeyedDraws(0, 0).pick(np.array([-0.0, 2.0, -0.0]), 0, Role.TARGET) == 1

    def test_accept_noise_cannot_be_picked_with(self):
        with pytest.raises(InvalidInput, match="ACCEPT"):
            KeyedDraws(0, 0).pick(np.ones(2), 0, Role.ACCEPT)

    @pytest.mark.parametrize("bad", [
        lambda: KeyedDraws(-1, 0), lambda: KeyedDraws(2**64, 0), lambda: KeyedDraws(0, -1),
        lambda: KeyedDraws(0, 2**32), lambda: KeyedDraws(0, 0).accept(0.5, -1),
        lambda: KeyedDraws(0, 0).accept(0.5, 2**32), lambda: KeyedDraws(0, 0).accept(0.5, 0, 2**24),
        lambda: KeyedDraws(0, 0).pick(np.ones(2), 0, Role.DRAFT, node=-1),
        lambda: derive_seed(2**64, 1), lambda: derive_seed(0, -1), lambda: derive_seed(0, 2**32),
    ])  # fmt: skip
    def test_values_outside_their_field(self, bad):
        with pytest.raises(InvalidInput, match=r"\d"):
            bad()


class TestSeeds:
    def test_fresh_seeds_are_64_bits_and_differ(self):
        """vllm#50440: requests without a seed never share one."""
        seeds = [fresh_seed() for _ in range(1000)]
        assert len(set(seeds)) == 1000
        assert all(0 <= seed < 2**64 for seed in seeds)
        assert min(seeds) < 2**63 < max(seeds)

    def test_sample_0_uses_the_seed_itself(self):
        assert derive_seed(2**64 - 1, 0) == 2**64 - 1

    def test_derived_seeds_follow_the_documented_call(self):
        seed = 0x0123456789ABCDEF
        high, low, _, _ = philox4x32((5, 0, 0, 255), (0x89ABCDEF, 0x01234567))
        assert derive_seed(seed, 5) == high * 2**32 + low

    def test_derived_seeds_differ(self):
        seeds = {derive_seed(seed, i) for seed in range(40) for i in range(40)}
        assert len(seeds) == 1600


def test_repr_names_what_a_replay_needs():
    assert repr(KeyedDraws(12, 3)) == "KeyedDraws(seed=12, step_start=3)"
