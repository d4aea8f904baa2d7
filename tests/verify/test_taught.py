"""rejection_rule and speculative_step_verification: worked values, exact laws, refusals."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidDistribution, InvalidInput
from paceline.verify import rejection_rule, speculative_step_verification

from ..conformance.enumerator import Branches, enumerate_outcomes
from .stubs import LARGEST_UNIFORM
from .tables import Tables, error


def test_one_step_by_hand() -> None:
    assert rejection_rule([0.7, 0.3], [0.4, 0.6], 1) == (0.5, [1.0, 0.0])
    assert rejection_rule([0.7, 0.3], [0.4, 0.6], 0) == (1.0, [1.0, 0.0])


def test_result_is_plain_python() -> None:
    accept, residual = rejection_rule(np.array([0.7, 0.3]), np.array([0.4, 0.6]), np.int64(1))
    assert type(accept) is float
    assert [type(r) for r in residual] == [float, float]
    assert rejection_rule([Fraction(1, 4), Fraction(3, 4)], [0.5, 0.5], 0)[0] == 0.5  # type: ignore[list-item]


def test_residual_is_p_where_p_equals_q() -> None:
    assert rejection_rule([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], 2) == (1.0, [0.1, 0.2, 0.7])


def test_no_epsilon_in_the_denominator() -> None:
    tiny = 5e-324
    assert rejection_rule([0.5, 0.5], [1.0, tiny], 1)[0] == 1.0  # p/q overflows to infinity
    assert rejection_rule([1.0, tiny], [1.0, tiny], 1)[0] == 1.0  # q + 1e-10 would give about 5e-314


def eighths(vocab_size: int) -> list[tuple[Fraction, ...]]:
    """Every distribution over `vocab_size` tokens whose entries are multiples of 1/8."""
    return [
        tuple(Fraction(n, 8) for n in counts)
        for counts in itertools.product(range(9), repeat=vocab_size)
        if sum(counts) == 8
    ]


@pytest.mark.parametrize("V", [2, 3])
def test_against_fractions(V: int) -> None:
    # Eighths are exact in binary and one division is rounded once, so floats must equal the exact results.
    for p, q in itertools.product(eighths(V), repeat=2):
        owed = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        mass = sum(owed)
        exact = [r / mass for r in owed] if mass else list(p)
        kept = [min(a, b) for a, b in zip(p, q, strict=True)]
        for x in range(V):
            if q[x] == 0:
                continue
            accept, residual = rejection_rule([float(a) for a in p], [float(b) for b in q], x)
            assert accept == float(min(Fraction(1), p[x] / q[x]))
            assert residual == [float(r) for r in exact]
        assert [k + (1 - sum(kept)) * r for k, r in zip(kept, exact, strict=True)] == list(p)


probabilities = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).filter(lambda w: sum(w) > 1e-3)


@given(probabilities, probabilities)
@settings(max_examples=200, derandomize=True)
def test_two_paths_add_up_to_p(a: list[float], b: list[float]) -> None:
    n = min(len(a), len(b))
    if sum(a[:n]) <= 1e-3 or sum(b[:n]) <= 1e-3:
        return
    p, q = np.array(a[:n]) / sum(a[:n]), np.array(b[:n]) / sum(b[:n])
    rebuilt = np.zeros(n)
    for x in range(n):
        if q[x] > 0.0:
            accept, residual = rejection_rule(p, q, x)
            assert 0.0 <= accept <= 1.0
            assert sum(residual) == pytest.approx(1.0, abs=1e-12)
            rebuilt[x] += q[x] * accept
            rebuilt += q[x] * (1.0 - accept) * np.array(residual)
    assert rebuilt == pytest.approx(p, abs=1e-12)


GOOD = [0.5, 0.25, 0.25]
BAD_ROWS: dict[str, Any] = {
    "empty": [],
    "short": [0.5, 0.5],
    "long": [0.25, 0.25, 0.25, 0.25],
    "negative": [1.5, -0.25, -0.25],
    "NaN": [0.5, math.nan, 0.5],
    "all NaN": [math.nan] * 3,
    "infinite": [0.5, math.inf, 0.5],
    "minus infinite": [0.5, -math.inf, 0.5],
    "both infinities": [math.inf, -math.inf, 1.0],
    "sum below": [0.5, 0.25, 0.25 - 2e-9],
    "sum above": [0.5, 0.25, 0.25 + 2e-9],
    "zero": [0.0, 0.0, 0.0],
    "nested": [[0.5, 0.25, 0.25]],
    "ragged": [[0.5], [0.25, 0.25]],
    "text": ["0.5", "0.25", "0.25"],
    "a string": "abc",
    "complex": [0.5, 0.25 + 0j, 0.25],
    "None": None,
    "None inside": [0.5, None, 0.5],
    "number": 1.0,
    "huge": [10**400, 0, 0],
}
BAD_TOKENS: list[Any] = [-1, 3, 10**30, 1.0, 0.5, True, False, np.True_, None, "1", [1], math.nan]


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rejection_rule_refuses_rows(row: Any) -> None:
    with pytest.raises(InvalidDistribution, match="target_probs"):
        rejection_rule(row, GOOD, 0)
    with pytest.raises(InvalidDistribution, match="draft_probs"):
        rejection_rule(GOOD, row, 0)


@pytest.mark.parametrize("token", BAD_TOKENS, ids=repr)
def test_tokens_that_are_no_index_are_refused(token: Any) -> None:
    with pytest.raises(InvalidDistribution, match="draft_token = "):
        rejection_rule(GOOD, GOOD, token)
    with pytest.raises(InvalidDistribution, match=r"draft_tokens\[0\]"):
        speculative_step_verification([token], [GOOD], [GOOD])


def test_refusals_are_value_errors_that_repeat_the_value() -> None:
    with pytest.raises(ValueError, match=r"target_probs\[1\] = nan"):
        rejection_rule(BAD_ROWS["NaN"], GOOD, 0)
    with pytest.raises(ValueError, match="draft_token = 2 has q = 0"):
        rejection_rule(GOOD, [0.5, 0.5, 0.0], 2)
    with pytest.raises(ValueError, match=r"sums to 1\.0000000"):
        rejection_rule(BAD_ROWS["sum above"], GOOD, 0)


def test_sums_within_the_tolerance_pass() -> None:
    assert rejection_rule([0.5, 0.25, 0.25 + 5e-10], GOOD, 0)[0] == 1.0


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_speculative_step_refuses_rows_wherever_they_stand(row: Any) -> None:
    for i in range(3):  # also rows that no decision would have reached
        p = [GOOD, GOOD, GOOD]
        p[i] = row
        with pytest.raises(InvalidDistribution):
            speculative_step_verification([0, 0], p, [GOOD, GOOD])
    with pytest.raises(InvalidDistribution):
        speculative_step_verification([0, 0], [GOOD, GOOD], [GOOD, row])


@pytest.mark.parametrize("rows_p, rows_q, drafts", [(1, 2, 2), (4, 2, 2), (2, 1, 2), (2, 3, 2), (1, 1, 0)])
def test_speculative_step_refuses_shapes_that_differ(rows_p: int, rows_q: int, drafts: int) -> None:
    with pytest.raises(InvalidDistribution, match="rows of q_probs"):
        speculative_step_verification([0] * drafts, [GOOD] * rows_p, [GOOD] * rows_q)


@pytest.mark.parametrize("bad", [None, 3, 0.5, np.array(1.0)], ids=repr)
def test_speculative_step_refuses_what_is_no_sequence(bad: Any) -> None:
    for arguments in ((bad, [GOOD], [GOOD]), ([0], bad, [GOOD]), ([0], [GOOD], bad)):
        with pytest.raises(InvalidDistribution, match="not a sequence"):
            speculative_step_verification(*arguments)


def test_a_draft_without_proposal_mass_is_refused_before_anything_is_drawn() -> None:
    with pytest.raises(InvalidDistribution, match=r"draft_tokens\[1\] = 2 has q = 0"):
        speculative_step_verification([0, 2], [GOOD, GOOD], [GOOD, [0.5, 0.5, 0.0]])


@pytest.mark.parametrize("rng", ["seed", 1.5, -1, True, object()], ids=repr)
def test_an_rng_that_is_none_is_refused(rng: Any) -> None:
    with pytest.raises(InvalidInput, match="rng = "):
        speculative_step_verification([0], [GOOD], [GOOD], rng)


cell = st.one_of(st.floats(), st.integers(-2, 2), st.none(), st.booleans(), st.text(max_size=2))
rows = st.one_of(st.just(GOOD), st.lists(cell, max_size=4), cell)
tokens = st.one_of(st.integers(-3, 5), st.floats(), st.none(), st.booleans(), st.text(max_size=2))


@given(rows, rows, tokens)
@settings(max_examples=300, derandomize=True)
def test_rejection_rule_returns_a_distribution_or_refuses(p: Any, q: Any, x: Any) -> None:
    try:
        accept, residual = rejection_rule(p, q, x)
    except InvalidDistribution:
        return
    assert 0.0 <= accept <= 1.0
    assert min(residual) >= 0.0
    assert sum(residual) == pytest.approx(1.0, abs=1e-8)


@given(st.lists(tokens, max_size=3), st.lists(rows, max_size=4), st.lists(rows, max_size=3))
@settings(max_examples=300, derandomize=True)
def test_speculative_step_emits_tokens_or_refuses(x: Any, p: Any, q: Any) -> None:
    try:
        emitted = speculative_step_verification(x, p, q, 0)
    except InvalidDistribution:
        return
    assert all(type(t) is int and 0 <= t < len(p[0]) for t in emitted)
    assert len(emitted) <= len(p)


# --- the step as a whole ------------------------------------------------------------------------------


def test_identical_rows_keep_everything() -> None:
    rng = np.random.default_rng(0)
    for seed in range(200):
        p = rng.dirichlet(np.ones(10), size=4)
        drafts = [int(rng.choice(10, p=row)) for row in p[:3]]
        assert speculative_step_verification(drafts, p[:3], p[:3], seed) == drafts
        with_bonus = speculative_step_verification(drafts, p, p[:3], seed)
        assert with_bonus[:3] == drafts
        assert len(with_bonus) == 4


def test_no_drafts() -> None:
    assert speculative_step_verification([], [[0.0, 1.0]], []) == [1]
    assert speculative_step_verification([], [], []) == []
    assert speculative_step_verification([], np.zeros((0, 3)), np.zeros((0, 3))) == []


def test_any_source_of_uniforms_will_do() -> None:
    p, q = [[0.7, 0.3]] * 2, [[0.4, 0.6]]
    for rng in (None, 3, np.int64(3), np.random.default_rng(3), random.Random(3)):
        emitted = speculative_step_verification(np.array([1]), p, q, rng)
        assert [type(t) for t in emitted] == [int] * len(emitted)
    again = speculative_step_verification([1], p, q, np.random.default_rng(3))
    assert speculative_step_verification([1], p, q, 3) == again


class Constant:
    """random() is always u."""

    def __init__(self, u: float) -> None:
        self.u = u

    def random(self) -> float:
        return self.u


@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_token_without_probability_is_never_emitted(u: float) -> None:
    p, q = [0.0, 0.6, 0.0, 0.4, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]
    for x in range(5):
        emitted = speculative_step_verification([x], [p, p], [q], Constant(u))
        assert all(p[t] > 0.0 for t in emitted)
        assert (emitted[0] == x and len(emitted) == 2) == (u < rejection_rule(p, q, x)[0])


@pytest.mark.parametrize("u", [0.0, LARGEST_UNIFORM])
def test_a_recovered_token_has_residual(u: float) -> None:
    p, q = [0.3, 0.3, 0.0, 0.4, 0.0], [0.3, 0.1, 0.4, 0.0, 0.2]  # residual only on 1 and 3
    emitted = speculative_step_verification([2], [p], [q], Constant(u))
    assert emitted == [1 if u == 0.0 else 3]


def test_each_uniform_belongs_to_one_token() -> None:
    # Token v owns [sum before v, sum up to v): the edge itself is the next token's.
    p = [[0.25, 0.0, 0.5, 0.25]]
    for u, token in ((0.0, 0), (np.nextafter(0.25, 0.0), 0), (0.25, 2), (np.nextafter(0.75, 0.0), 2), (0.75, 3)):
        assert speculative_step_verification([], p, [], Constant(u)) == [token]


def test_a_uniform_of_one_is_survived_sglang_30822() -> None:
    # sglang#30822: a short float rounded a coin up to 1.0. No token lies there; the last one is taken.
    assert speculative_step_verification([], [[0.5, 0.5, 0.0]], [], Constant(1.0)) == [1]


class GridUniforms:
    """Uniforms on the middles of `cells` equal cells, each followed with its weight 1/cells."""

    def __init__(self, branches: Branches, cells: int) -> None:
        self._branches = branches
        self._cells = cells
        self._drawn = 0

    def random(self) -> float:
        self._drawn += 1
        cells = list(range(self._cells))
        weights = [1.0 / self._cells] * self._cells
        return (self._branches.draw(("u", self._drawn), cells, weights, every=False) + 0.5) / self._cells


class Quarters(Tables):
    """p and q in quarters, so that every threshold a step compares with is a multiple of 1/12."""

    def _both(self, prefix: tuple[int, ...]) -> Any:
        if prefix not in self._rows:
            rng = np.random.default_rng([*self._seed, len(prefix), *prefix])
            p, q = (np.bincount(rng.integers(self.vocab_size, size=4), minlength=self.vocab_size) for _ in "pq")
            self._rows[prefix] = (p / 4.0, q / 4.0)
        return self._rows[prefix]


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("V, K, seed", [(2, 2, 0), (2, 2, 1), (3, 1, 0), (3, 1, 1), (3, 2, 2)])
def test_the_law_of_a_taught_step_is_p(V: int, K: int, seed: int, bonus: bool) -> None:
    model = Quarters("random", V, seed)

    def run(branches: Branches) -> tuple[int, ...]:
        x: tuple[int, ...] = ()
        for i in range(K):
            row = model.q(x)
            support = np.flatnonzero(row).tolist()
            x = (*x, branches.draw(("draft", i), support, row[support].tolist(), every=False))
        p = [model.p(x[:i]) for i in range(K + bonus)]
        q = [model.q(x[:i]) for i in range(K)]
        return tuple(speculative_step_verification(x, p, q, GridUniforms(branches, 12)))

    law = enumerate_outcomes(run)
    assert error(law, model, K + 1) <= 1e-12
