"""The laws of real keyed draws: marginals, and independence of everything that must be independent.

Every test computes p-values and fails where one is below ALPHA, its false-alarm probability; seeds are fixed,
so a pass repeats (but for the one test of fresh seeds). Power at N draws: a shift of 0.03 in one probability,
or a contingency coefficient of 0.07 between two draws, is caught with probability above 0.99. Each kind of
statistic is also shown to catch the mistake it is there for.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.rng import KeyedDraws, derive_seed, fresh_seed, uniforms
from paceline.types import Role

ALPHA = 1e-6
N = 20_000
WEIGHTS = np.array([0.4, 1.6, 0.0, 1.2, 0.8])  # sum 4: weights need not be normalised
P = WEIGHTS / WEIGHTS.sum()


def fit(picks, p) -> float:
    """p-value of the G-test of picks against probabilities p; a pick of probability 0 gives 0."""
    observed = np.bincount(picks, minlength=len(p))
    if observed[p == 0].any():
        return 0.0
    return stats.power_divergence(observed[p > 0], len(picks) * p[p > 0], lambda_="log-likelihood").pvalue


def independence(a, b) -> float:
    """p-value of the G-test of independence of two lists of small integers."""
    table = np.zeros((max(a) + 1, max(b) + 1))
    np.add.at(table, (a, b), 1)
    table = table[table.any(axis=1)][:, table.any(axis=0)]
    return stats.chi2_contingency(table, lambda_="log-likelihood", correction=False).pvalue


def picks(key_of, role=Role.DRAFT, weights=WEIGHTS, n=N) -> list[int]:
    """One pick for each i < n, at the (seed, step_start, position, node) that key_of(i) gives."""
    out = []
    for i in range(n):
        seed, step_start, position, node = key_of(i)
        out.append(KeyedDraws(seed, step_start).pick(weights, position, role, node=node))
    return out


ALONG = {
    "positions": lambda i: (1, 0, i, 0),
    "seeds": lambda i: (i, 0, 5, 0),
    "high seed words": lambda i: (i << 32, 0, 5, 0),
    "step starts": lambda i: (1, i, 5, 0),
    "nodes": lambda i: (1, 0, 5, i),
}


class TestMarginals:
    @pytest.mark.parametrize("along", ALONG)
    def test_picks_follow_the_weights(self, along):
        assert fit(picks(ALONG[along]), P) > ALPHA

    @pytest.mark.parametrize("along", ["positions", "seeds", "high seed words"])
    def test_target_picks_follow_the_weights(self, along):
        assert fit(picks(ALONG[along], Role.TARGET), P) > ALPHA

    def test_requests_without_a_seed_are_independent(self):
        """vllm#50440: one seed broadcast over a batch made its requests equal."""
        request_seeds = [fresh_seed() for _ in range(2000)]
        drawn = picks(lambda i: (request_seeds[i], 0, 0, 0), Role.TARGET, n=2000)
        assert fit(drawn, P) > ALPHA
        assert fit([drawn[0]] * 2000, P) < ALPHA  # what the broadcast gave

    def test_samples_of_one_request_are_independent(self):
        seeds = [derive_seed(77, i) for i in range(N)]
        drawn = picks(lambda i: (seeds[i], 0, 3, 0), Role.TARGET)
        assert fit(drawn, P) > ALPHA
        assert independence(drawn[:-1], drawn[1:]) > ALPHA

    def test_sparse_and_dense_tails(self):
        """Many light tokens: pooled in ten groups of 100, each group has its mass."""
        weights = np.linspace(0.5, 1.5, 1000)
        group_mass = weights.reshape(10, 100).sum(axis=1) / weights.sum()
        drawn = picks(lambda i: (2, 0, i, 0), weights=weights, n=5000)
        assert fit([token // 100 for token in drawn], group_mass) > ALPHA

    @pytest.mark.parametrize("probability", [0.02, 0.3, 0.5, 0.97])
    @pytest.mark.parametrize("along", ["positions", "seeds", "step starts", "nodes"])
    def test_accept_frequency(self, probability, along):
        accepted = 0
        for i in range(N):
            seed, step_start, position, node = ALONG[along](i)
            accepted += KeyedDraws(seed, step_start).accept(probability, position, node)
        assert stats.binomtest(accepted, N, probability).pvalue > ALPHA

    def test_uniforms_fill_the_interval(self):
        both = np.array([uniforms((i, 0, 0, 1), (3, 4)) for i in range(N)])
        for lane in both.T:
            assert stats.kstest(lane, "uniform").pvalue > ALPHA
        low_bits = (both * 2.0**53).astype(np.int64) % 16
        for lane in low_bits.T:
            assert fit(lane, np.full(16, 1 / 16)) > ALPHA


class TestIndependence:
    BASE = staticmethod(lambda i: (1, 7, i, 2))

    @pytest.mark.parametrize("name, role, other", [
        ("role", Role.RECOVER, lambda i: (1, 7, i, 2)),
        ("target", Role.TARGET, lambda i: (1, 7, i, 2)),
        ("position", Role.DRAFT, lambda i: (1, 7, i + 1, 2)),
        ("step start", Role.DRAFT, lambda i: (1, 8, i, 2)),
        ("node", Role.DRAFT, lambda i: (1, 7, i, 3)),
        ("seed", Role.DRAFT, lambda i: (2, 7, i, 2)),
        ("high seed word", Role.DRAFT, lambda i: (1 + 2**32, 7, i, 2)),
    ])  # fmt: skip
    def test_draws_that_differ_in_one_word(self, name, role, other):
        """flashinfer#424, flashinfer#425: roles, positions, nodes and steps each have their own noise."""
        base = picks(self.BASE)
        assert independence(base, picks(other, role)) > ALPHA, name

    def test_the_statistic_sees_shared_noise(self):
        base = picks(self.BASE, n=2000)
        other_weights = picks(self.BASE, weights=WEIGHTS[::-1].copy(), n=2000)
        assert independence(base, other_weights) < ALPHA

    @pytest.mark.parametrize("role", [Role.DRAFT, Role.RECOVER, Role.TARGET])
    def test_accept_is_independent_of_picks(self, role):
        """vllm-ascend#16370: the accept uniform must not come back as the draw of a token."""
        accepted = [int(KeyedDraws(1, 7).accept(0.5, i, 2)) for i in range(N)]
        assert independence(accepted, picks(self.BASE, role)) > ALPHA

    def test_tokens_are_independent_of_one_another(self):
        """Both lanes of one call, and neighbouring calls: 8 tokens' uniforms, every pair on a 4 x 4 grid."""
        calls = [[uniforms((pair, i, 0, 1), (3, 4)) for pair in range(4)] for i in range(5000)]
        quarters = (np.array(calls).reshape(5000, 8) * 4).astype(np.int64)
        for a in range(8):
            for b in range(a):
                assert independence(quarters[:, a], quarters[:, b]) > ALPHA, (a, b)


class TestOneSpeculativeStep:
    """Draft from q, accept with min(1, p/q), recover from (p - q)+, all with real keyed draws; K = 1 then 3."""

    P = np.array([0.5, 0.3, 0.2])
    Q = np.array([0.2, 0.2, 0.6])

    def step(self, seed: int, length: int, recover: Role = Role.RECOVER) -> tuple[list[int], int]:
        """Tokens that one step emits and how many drafts it kept; p and q are the same at every position."""
        draws, out = KeyedDraws(seed, 10), []
        residual = np.maximum(self.P - self.Q, 0.0)
        for i in range(length):
            draft = draws.pick(self.Q, 10 + i, Role.DRAFT, node=i)
            if not draws.accept(self.P[draft] / self.Q[draft], 10 + i, i):
                return [*out, draws.pick(residual, 10 + i, recover, node=i)], i
            out.append(draft)
        return [*out, draws.pick(self.P, 10 + length, Role.TARGET)], length

    @pytest.mark.parametrize("length", [1, 3])
    def test_emitted_tokens_follow_the_target(self, length):
        """vllm#54282: with the real draft sampler in the loop, every position has the target's law."""
        steps = [self.step(seed, length)[0] for seed in range(N)]
        for i in range(length + 1):
            assert fit([tokens[i] for tokens in steps if len(tokens) > i], self.P) > ALPHA

    def test_shared_draft_and_recovery_noise_is_caught(self):
        """vllm#54282: the mistake itself, which tests with drafts drawn elsewhere could not see."""
        firsts = [self.step(seed, 1, recover=Role.DRAFT)[0][0] for seed in range(N)]
        assert fit(firsts, self.P) < ALPHA

    def test_recovered_tokens_follow_the_residual(self):
        """vllm-ascend#16370: the right acceptance rate says nothing about what is drawn after a rejection."""
        steps = [self.step(seed, 1) for seed in range(N)]
        residual = np.maximum(self.P - self.Q, 0.0)
        recovered = [tokens[0] for tokens, kept in steps if kept == 0]
        assert fit(recovered, residual / residual.sum()) > ALPHA
        overlap = float(np.minimum(self.P, self.Q).sum())
        assert stats.binomtest(N - len(recovered), N, overlap).pvalue > ALPHA
