"""The test statistic itself: right false-alarm rate, the stated power, and no mercy for the impossible."""

from __future__ import annotations

import numpy as np
import pytest

from .gtest import ALPHA, GTest, count, detectable_tv, g_test, g_test_given, noncentrality, pooled, seeds


def p_values(true: np.ndarray, law: np.ndarray, n: int, repeats: int) -> np.ndarray:
    draws = np.random.default_rng(1).multinomial(n, true, size=repeats)
    return np.array([g_test(dict(enumerate(row.tolist())), dict(enumerate(law))).p_value for row in draws])


def test_false_alarms_are_as_rare_as_stated() -> None:
    law = np.random.default_rng(0).dirichlet(np.ones(27))
    p = p_values(law, law, 20_000, 4000)
    for alpha in (0.1, 0.01):
        assert abs((p < alpha).mean() - alpha) < 4.0 * np.sqrt(alpha / p.size)


def test_power_is_as_high_as_stated_in_the_worst_case() -> None:
    """Mass moved evenly between equal cells is the difference that is hardest to see."""
    n, cells = 69_000, 26
    law = np.full(cells, 1.0 / cells)
    shift = np.where(np.arange(cells) % 2, 1.0, -1.0) / cells
    tv = detectable_tv(n, cells)
    assert tv == pytest.approx(0.02, rel=0.02)
    caught = p_values(law + 2.0 * tv * shift, law, n, 2000) < ALPHA
    assert caught.mean() > 0.995


def test_noncentrality_of_a_known_table() -> None:
    assert noncentrality(26, 1e-6, 0.999) == pytest.approx(109.6, abs=0.1)
    assert noncentrality(7, 1e-4, 0.99) == pytest.approx(53.5, abs=0.1)


def test_the_impossible_is_an_alarm_whatever_the_rest_says() -> None:
    law = {"a": 1.0, "b": 0.0}
    assert g_test({"a": 10_000}, law).p_value == 1.0
    result = g_test({"a": 10_000, "b": 1}, law)
    assert (result.p_value, result.impossible) == (0.0, "b")
    assert g_test({"a": 10_000, "c": 1}, law).impossible == "c"


def test_rare_cells_are_pooled() -> None:
    cells = pooled([(1, 0.5), (0, 0.5), (3, 3.0), (2, 2.5), (90, 93.5)])
    assert cells == [(6, 6.5), (90, 93.5)]
    assert pooled([(1, 0.5), (0, 0.4)]) == [(1, 0.9)]
    assert g_test({"a": 3}, {"a": 0.5, "b": 0.5}).dof == 0  # too few to say anything


def test_conditional_tests_add_up() -> None:
    counts = count([("x", 0), ("x", 1), ("y", 1), ("x", 1)])
    assert counts == {"x": {0: 1, 1: 2}, "y": {1: 1}}
    fair = {0: 0.5, 1: 0.5}
    total = g_test_given({c: {0: 30, 1: 50} for c in "xy"}, lambda c: fair)
    one = g_test({0: 30, 1: 50}, fair)
    assert total == GTest(2 * one.statistic, 2, 160)


def test_seeds_of_different_tests_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(seeds("a", 1000)).isdisjoint(seeds("b", 1000))
    assert seeds("a", 5) == seeds("a", 5)
    monkeypatch.setenv("PACELINE_TEST_SEED", "7")
    fresh = seeds("a", 5)
    monkeypatch.delenv("PACELINE_TEST_SEED")
    assert fresh != seeds("a", 5)
