"""One step taken apart: how often drafts are kept, and what comes where they are not, given everything before.

A joint law can hide two errors that cancel; conditional laws cannot. G-tests summed over the conditions, alpha =
1e-6; N = 16,000 steps of two drafts, V = 4. Their power is shown on draws that were wrong elsewhere, with three
quarters of that N.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from scipy.stats import binomtest

from paceline.types import Role, Verdict
from paceline.verify import acceptance
from tests.verify.tables import Tables

from .chains import AcceptNoiseAgain, AcceptsAtZero, DraftNoiseAgain, KeyedDraws, MakeDraws, Model, Tokens, step
from .gtest import ALPHA, count, detectable_tv, g_test_given, seeds

N, V, K = 16_000, 4, 2
MODEL = Model(Tables("random", V, seed=6))


@cache
def steps(way: str, make_draws: MakeDraws = KeyedDraws) -> list[tuple[Tokens, Verdict]]:
    """The first steps of N requests, of fewer where the draws are wrong: (drafts, verdict)."""
    n = N if make_draws is KeyedDraws else 3 * N // 4
    return [step(way, MODEL, (), K, make_draws(seed, 0)) for seed in seeds(f"conditional, {way}", n)]


def ratio(x: Tokens) -> float:
    """p / q of the last token of x."""
    return float(MODEL.tables.p(x[:-1])[x[-1]] / MODEL.tables.q(x[:-1])[x[-1]])


def lent(way: str, x: Tokens) -> float:
    """The factor b of the residual after the drafts x were kept: 1 token by token, the running b_i under block."""
    b = 1.0
    for i in range(1, len(x) + 1):
        b = min(1.0, b * ratio(x[:i])) if way == "block" else 1.0
    return b


def residual_law(way: str, x: Tokens) -> dict[int, float]:
    """(b p - q)+ after x, normalised."""
    owed = np.maximum(lent(way, x) * MODEL.tables.p(x) - MODEL.tables.q(x), 0.0)
    return dict(enumerate((owed / owed.sum()).tolist()))


def recovered(way: str, make_draws: MakeDraws = KeyedDraws) -> float:
    """p-value of the recovered tokens, given the drafts that were kept and the one that was not."""
    verdicts = ((x, v) for x, v in steps(way, make_draws) if v.kind == "recovered")
    counts = count((x[: v.num_accepted + 1], v.tokens[-1]) for x, v in verdicts)
    return g_test_given(counts, lambda kept: residual_law(way, kept[:-1])).p_value


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_recovered_tokens_follow_the_residual(way: str) -> None:
    """vllm-ascend#16370, vllm#54282, EAGLE#20, flashinfer PR #424 and #425: given the rejected draft too, for what
    is recovered must not depend on it; and both kinds of shared noise are caught by this test."""
    assert recovered(way) >= ALPHA
    assert recovered(way, DraftNoiseAgain) < ALPHA
    assert recovered(way, AcceptNoiseAgain) < ALPHA


def kept(way: str, make_draws: MakeDraws = KeyedDraws) -> float:
    """p-value of whether a prefix x of the drafts is kept, given x (and, token by token, that it was reached)."""

    def events() -> Iterator[tuple[Tokens, bool]]:
        for x, verdict in steps(way, make_draws):
            for i in range(1, K + 1):
                if way == "block" or verdict.num_accepted >= i - 1:
                    yield x[:i], verdict.num_accepted >= i

    def law(x: Tokens) -> dict[bool, float]:
        p = lent(way, x) if way == "block" else min(1.0, ratio(x))
        return {True: p, False: 1.0 - p}

    # Under block the events of one step are not independent; each length is a test of its own.
    counts = count(events())
    by_length = [{x: c for x, c in counts.items() if len(x) == i} for i in range(1, K + 1)]
    return min(g_test_given(some, law).p_value for some in by_length)


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_drafts_are_kept_as_often_as_they_should(way: str) -> None:
    """vllm-ascend#13766: every draft was kept because the uniform was 0; caught here."""
    assert kept(way) >= ALPHA
    assert kept(way, AcceptsAtZero) < ALPHA


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """P(two exponential races with shared noise have the same winner) = sum_v 1 / sum_w max(p_w/p_v, q_w/q_v)."""
    return float(sum(1.0 / np.maximum(p / p[v], q / q[v]).sum() for v in range(p.size)))


@pytest.mark.parametrize("way", ["rejection", "block", "coupled", "point"])
def test_acceptance_of_the_first_draft(way: str) -> None:
    """vllm#40551 and #40651: sum min(p, q) for sampled drafts (block keeps a first draft at least as often, so it is
    compared with one draft only), p(argmax q) for a point, and for coupled drafts the overlap of two races, which
    lies between (1 - TV) / (1 + TV) and 1 - TV. Binomial test, N = 16,000, sees a difference of 0.033."""
    assert detectable_tv(N, 2) < 0.033
    p, q = MODEL.tables.p(()), MODEL.tables.q(())
    overlap = float(np.minimum(p, q).sum())
    assert acceptance(MODEL.row(True, ()), MODEL.row(False, ())) == pytest.approx(overlap, abs=1e-12)
    assert overlap / (2.0 - overlap) <= agreement(p, q) <= overlap
    wanted = {"coupled": agreement(p, q), "point": float(p[np.argmax(q)])}.get(way, overlap)
    first = (step(way, MODEL, (), 1, KeyedDraws(seed, 0))[1] for seed in seeds(f"acceptance, {way}", N))
    assert binomtest(sum(v.num_accepted for v in first), N, wanted).pvalue >= ALPHA


def test_a_point_is_not_kept_twice_as_often() -> None:
    """Medusa#56: a draft of probability 0.5 is kept every second time, not three times in four."""

    class Half(Tables):
        def p(self, prefix: Tokens) -> np.ndarray:
            return np.array([0.5, 0.5])

    model = Model(Half("random", 2))
    kept = sum(step("point", model, (), 1, KeyedDraws(seed, 0))[1].num_accepted for seed in seeds("half", 10_000))
    assert binomtest(kept, 10_000, 0.5).pvalue >= ALPHA


def test_roles_of_one_place_are_independent() -> None:
    """flashinfer PR #424 and #425: the four draws that a position may need, in pairs. V = 4, N = 10,000."""
    uniform = np.full(V, 1.0 / V)
    draws = [KeyedDraws(seed, 5) for seed in seeds("roles", 10_000)]
    seen = {role: [d.pick(uniform, 7, role, node=2) for d in draws] for role in (Role.TARGET, Role.DRAFT, Role.RECOVER)}
    seen[Role.ACCEPT] = [d.accept(0.25, 7, node=2) for d in draws]
    wanted = dict.fromkeys(range(V), 0.25)
    for a in Role:
        for b in Role:
            if a is not Role.ACCEPT and a is not b:
                law = {True: 0.25, False: 0.75} if b is Role.ACCEPT else wanted
                assert g_test_given(count(zip(seen[a], seen[b], strict=True)), lambda _, law=law: law).p_value >= ALPHA
