"""Real keyed draws with the drafter in the loop over several steps: the joint law of the tokens is p's.

Exact enumeration treats every draw as fresh. Whether the draws of one step are independent of those that the steps
before it have looked at, drafted with, or recovered from, only real noise can tell (vllm#54282: tests with drafts
from elsewhere passed). Every test: G-test of joint token strings, alpha = 1e-6, power 0.999 against the total
variation that its docstring names; the number of requests follows from these.
"""

from __future__ import annotations

import pytest

from tests.verify.tables import Tables

from .chains import RULES, Model, sequences
from .gtest import ALPHA, detectable_tv, g_test, seeds

WAYS = list(RULES)


def check(way: str, pair: str, V: int, K: int, length: int, n: int, tv: float) -> None:
    """n requests of `length` tokens with K drafts a step follow p, as far as `tv` can be seen."""
    assert detectable_tv(n, V**length) <= tv
    model = Model(Tables(pair, V, seed=3))
    name = f"joint law, {way}, {pair}, V={V}, K={K}"
    result = g_test(sequences(way, model, K, length, seeds(name, n)), model.law(length))
    assert result.p_value >= ALPHA, f"{name}: {result}, p = {result.p_value:.1e}"


@pytest.mark.parametrize("way", WAYS)
def test_seven_tokens(way: str) -> None:
    """V = 2, K = 2: three steps at least, 128 cells, N = 12,500, sees TV 0.06."""
    check(way, "random", V=2, K=2, length=7, n=12_500, tv=0.06)


@pytest.mark.parametrize("way, n, tv", [("block", 69_000, 0.02), ("rejection", 17_500, 0.04)])
def test_three_tokens(way: str, n: int, tv: float) -> None:
    """V = 3, K = 2: 27 cells, N = 69,000 sees TV 0.02, N = 17,500 TV 0.04."""
    check(way, "random", V=3, K=2, length=3, n=n, tv=tv)


@pytest.mark.parametrize("pair", ["zeros in both", "disjoint"])
def test_what_p_forbids_never_comes(pair: str) -> None:
    """vllm-ascend#13766, sglang#35771 with PR #35788, openvino.genai PR #2331: drafts that p forbids, by the thousand.

    V = 3, K = 3, N = 1,500 a way; one forbidden token is an alarm.
    """
    for way in WAYS:
        model = Model(Tables(pair, 3, seed=3))
        law = model.law(4)
        counts = sequences(way, model, 3, 4, seeds(f"forbidden, {way}, {pair}", 1_500))
        assert all(law[tokens] > 0.0 for tokens in counts)
        assert g_test(counts, law).p_value >= ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_seven_tokens_closely(way: str) -> None:
    """V = 2, K = 3: two steps at least, 128 cells, N = 112,000, sees TV 0.02."""
    check(way, "random", V=2, K=3, length=7, n=112_000, tv=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rejection", "block"])
@pytest.mark.parametrize("pair, n, tv", [("random", 1_100_000, 0.005), ("zeros in q", 275_000, 0.01)])
def test_three_tokens_closely(pair: str, n: int, tv: float, way: str) -> None:
    """V = 3, K = 3: 27 cells, N = 1,100,000 sees TV 0.005, N = 275,000 TV 0.01."""
    check(way, pair, V=3, K=3, length=3, n=n, tv=tv)
