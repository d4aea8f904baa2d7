"""The three rules: which draw decides what, which rows are read, edges, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DrafterError, InvalidDistribution, InvalidInput, PacelineError
from paceline.rng import KeyedDraws
from paceline.types import Distribution, Proposal, Role
from paceline.verify import acceptance, residual, verify_block, verify_point, verify_rejection
from paceline.verify.block import keep_prefix

from .stubs import LARGEST_UNIFORM, FixedDraws, LazyRows
from .tables import POSITION, Rule, dense, sparse

RATIO_RULES = pytest.mark.parametrize("rule", [verify_rejection, verify_block])
ALL_RULES = pytest.mark.parametrize("rule", [verify_rejection, verify_block, verify_point])


def random_rows(n: int, V: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).dirichlet(np.ones(V), size=n)


def one_hot(token: int, V: int) -> np.ndarray[Any, Any]:
    return np.eye(V)[token]


# --- plain decoding -----------------------------------------------------------------------------------


@ALL_RULES
@pytest.mark.parametrize("empty", [Proposal.point(()), Proposal.sampled((), [])], ids=["point", "sampled"])
def test_no_drafts_is_plain_decoding(rule: Rule, empty: Proposal) -> None:
    p = random_rows(1, 5)
    draws = FixedDraws(0.4)
    verdict = rule(p, empty, draws, POSITION)
    assert (verdict.num_accepted, verdict.path, verdict.kind) == (0, (), "bonus")
    assert draws.accepts == []
    assert draws.picks == [(POSITION, Role.TARGET, 0)]
    for seed in range(20):
        plain = KeyedDraws(seed, POSITION).pick(p[0], POSITION, Role.TARGET)
        assert rule(p, empty, KeyedDraws(seed, POSITION), POSITION).tokens == (plain,)


# --- keys ---------------------------------------------------------------------------------------------


def test_keys_of_rejection() -> None:
    p, q = np.array([[0.5, 0.5]] * 4), np.array([[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]])
    draws = FixedDraws(0.7)
    verdict = verify_rejection(p, Proposal.sampled([0, 1, 1], q), draws, POSITION)
    assert draws.accepts == [(1.0, POSITION, 0), (1.0, POSITION + 1, 1), (pytest.approx(2 / 3), POSITION + 2, 2)]
    assert draws.picks == [(POSITION + 2, Role.RECOVER, 2)]
    assert (verdict.tokens, verdict.num_accepted, verdict.path) == ((0, 1, 0), 2, (0, 1))
    assert verdict.kind == "recovered"


def test_keys_of_block_run_from_the_end_and_stop_at_the_first_success() -> None:
    p, q = np.array([[0.5, 0.5]] * 4), np.array([[0.4, 0.6], [0.4, 0.6], [0.4, 0.6]])
    draws = FixedDraws(0.95)
    verdict = verify_block(p, Proposal.sampled([1, 1, 1], q), draws, POSITION)
    assert [(position, node) for _, position, node in draws.accepts] == [
        (POSITION + 2, 2),
        (POSITION + 1, 1),
        (POSITION, 0),
    ]
    assert draws.accepts[0][0] == pytest.approx((5 / 6) ** 3)
    assert draws.picks == [(POSITION, Role.RECOVER, 0)]
    assert (verdict.tokens, verdict.num_accepted, verdict.kind) == ((0,), 0, "recovered")

    draws = FixedDraws(0.5)
    verdict = verify_block(p, Proposal.sampled([1, 1, 1], q), draws, POSITION)
    assert [node for _, _, node in draws.accepts] == [2]
    assert draws.picks == [(POSITION + 3, Role.TARGET, 0)]
    assert (verdict.tokens[:3], verdict.num_accepted, verdict.kind) == ((1, 1, 1), 3, "bonus")


def test_block_recovers_from_the_scaled_residual() -> None:
    # b_1 = 1/2, so after one kept draft the residual is (p_2 / 2 - q_2)+ = (0, 0.1, 0), not (p_2 - q_2)+.
    p = np.array([[0.25, 0.5, 0.25], [0.4, 0.5, 0.1], [0.2, 0.2, 0.6]])
    q = np.array([[0.5, 0.25, 0.25], [0.5, 0.15, 0.35]])
    seen: list[list[float]] = []

    class Recording(FixedDraws):
        def accept(self, probability: float, position: int, node: int = 0) -> bool:
            super().accept(probability, position, node)
            return node == 0

        def pick(self, weights: Any, position: int, role: Role, **keywords: Any) -> int:
            seen.append(weights.tolist())
            return super().pick(weights, position, role, **keywords)

    draws = Recording(0.0)
    verdict = verify_block(p, Proposal.sampled([0, 2], q), draws, POSITION)
    assert verdict.tokens == (0, 1)
    assert seen == [pytest.approx([0.0, 0.1, 0.0])]
    assert draws.accepts[1][0] == pytest.approx(0.1 / (0.1 + 0.5))


def test_keys_of_point() -> None:
    p = np.array([one_hot(1, 3), one_hot(2, 3), one_hot(0, 3)])
    for drafts, accepted, kind in (((1, 2), 2, "bonus"), ((1, 0), 1, "recovered"), ((0, 2), 0, "recovered")):
        draws = FixedDraws(0.5)
        verdict = verify_point(p, Proposal.point(drafts), draws, POSITION)
        assert draws.picks == [(POSITION + i, Role.TARGET, 0) for i in range(accepted + 1)]
        assert draws.accepts == []
        assert verdict.tokens == (1, 2, 0)[: accepted + 1]
        assert (verdict.num_accepted, verdict.kind) == (accepted, kind)


def test_coupled_is_the_point_rule_and_does_not_look_at_q() -> None:
    p = random_rows(3, 4)
    nonsense = np.full((2, 4), np.nan)
    for seed in range(50):
        point = verify_point(p, Proposal.point((1, 2)), KeyedDraws(seed, 5), POSITION)
        coupled = verify_point(p, Proposal.sampled((1, 2), nonsense), KeyedDraws(seed, 5), POSITION)
        assert point == coupled


def test_point_is_the_plain_samplers_stream() -> None:
    p = random_rows(5, 6)
    for seed in range(100):
        plain = [KeyedDraws(seed, POSITION + i).pick(p[i], POSITION + i, Role.TARGET) for i in range(5)]
        for drafts in (plain[:4], [plain[0], (plain[1] + 1) % 6, plain[2], plain[3]]):
            verdict = verify_point(p, Proposal.point(drafts), KeyedDraws(seed, POSITION), POSITION)
            assert list(verdict.tokens) == plain[: len(verdict.tokens)]
            assert len(verdict.tokens) == (5 if drafts == plain[:4] else 2)


@ALL_RULES
def test_verdict_is_plain_and_frozen(rule: Rule) -> None:
    proposal = Proposal.sampled([0, 1], random_rows(2, 4, 1))
    verdict = rule(random_rows(3, 4), proposal, KeyedDraws(1, POSITION), POSITION)
    assert all(type(t) is int for t in verdict.tokens)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.tokens = ()  # type: ignore[misc]


# --- rows are read when needed, once --------------------------------------------------------------------


@ALL_RULES
def test_each_row_is_asked_for_once_and_none_behind_the_end(rule: Rule) -> None:
    p = random_rows(5, 3)
    q = (p[:4] + random_rows(4, 3, 7)) / 2.0
    ends = set()
    for seed in range(400):
        rng = np.random.default_rng(seed)
        drafts = [int(rng.choice(3, p=row)) for row in q]
        rows = LazyRows([dense(row) for row in p])
        verdict = rule(rows, Proposal.sampled(drafts, q), KeyedDraws(seed, POSITION), POSITION)
        ends.add(verdict.num_accepted)
        # Block looks at p(x) of every draft; the row after the last one is read for a bonus only.
        last = verdict.num_accepted if rule is not verify_block else max(3, verdict.num_accepted)
        assert rows.asked == list(range(last + 1))
        assert verdict == rule(p, Proposal.sampled(drafts, q), KeyedDraws(seed, POSITION), POSITION)
    assert ends == {0, 1, 2, 3, 4}


@ALL_RULES
def test_no_row_behind_an_impossible_draft_is_read(rule: Rule) -> None:
    # The row after a draft with p = 0 may be anything; here reading it is an error.
    p = [dense(row) for row in np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])]
    for draws in (FixedDraws(0.0), FixedDraws(LARGEST_UNIFORM)):
        rows = LazyRows([*p, None, None])
        verdict = rule(rows, Proposal.sampled([0, 1, 2], np.full((3, 3), 1 / 3)), draws, POSITION)
        assert verdict.num_accepted <= 1
        assert max(rows.asked) <= 1


@RATIO_RULES
def test_unused_rows_of_q_are_not_looked_at(rule: Rule) -> None:
    q = np.array([[0.5, 0.5], [np.nan, np.nan]])
    assert rule(np.full((2, 2), 0.5), Proposal.sampled([0], q), FixedDraws(0.5), POSITION).num_accepted == 1


# --- edges of the uniforms ------------------------------------------------------------------------------


@ALL_RULES
@pytest.mark.parametrize("form", [dense, sparse], ids=["dense", "sparse"])
@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 0.75, LARGEST_UNIFORM])
def test_a_token_without_probability_is_never_emitted(rule: Rule, form: Any, u: float) -> None:
    p = np.array([[0.0, 0.5, 0.5, 0.0], [0.25, 0.0, 0.0, 0.75], [0.0, 0.0, 1.0, 0.0]])
    q = np.array([[0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0]])
    for drafts in itertools.product(range(4), (1, 2)):
        proposal = Proposal.sampled(drafts, [form(row) for row in q])
        verdict = rule([form(row) for row in p], proposal, FixedDraws(u), POSITION)
        assert all(p[i, token] > 0.0 for i, token in enumerate(verdict.tokens))


@RATIO_RULES
def test_equal_distributions_keep_everything_at_any_uniform(rule: Rule) -> None:
    p = random_rows(4, 10)
    rng = np.random.default_rng(1)
    for _ in range(200):
        drafts = [int(rng.choice(10, p=row)) for row in p[:3]]
        draws = FixedDraws(LARGEST_UNIFORM)
        verdict = rule(p, Proposal.sampled(drafts, p[:3].copy()), draws, POSITION)
        assert verdict.tokens[:3] == tuple(drafts)
        assert (verdict.num_accepted, verdict.kind) == (3, "bonus")
        assert {probability for probability, _, _ in draws.accepts} == {1.0}


@pytest.mark.parametrize("b", [1.0, 0.75, 0.3, 1e-12, 0.0])
def test_keep_prefix_is_a_probability_and_grows_with_r(b: float) -> None:
    values = [keep_prefix(b, r) for r in (0.0, 5e-324, 1e-300, 1e-17, 0.1, 0.5, 1.0)]
    assert values == sorted(values)
    assert all(0.0 <= h <= 1.0 for h in values)
    assert values[0] == (1.0 if b == 1.0 else 0.0)  # 0/0 = 1


def test_keep_prefix_needs_its_brackets() -> None:
    # With b = 1 the prefix must be kept whatever r is. r / (r + 1 - b), read from left to right, is less.
    sums = [i / 1000 for i in range(1, 1000)]
    assert {keep_prefix(1.0, r) for r in sums} == {1.0}
    assert min(r / (r + 1.0 - 1.0) for r in sums) < 1.0  # such an h loses to the largest uniform


def test_block_keeps_a_prefix_whose_b_is_one_even_if_the_next_draft_is_impossible() -> None:
    # b_1 = 1 and r_1 = 0.1: the naive bracketing gives h_1 = 0.99999999999999911.
    p = np.array([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]])
    q = np.array([[0.5, 0.5], [0.6, 0.4]])
    draws = FixedDraws(LARGEST_UNIFORM)
    verdict = verify_block(p, Proposal.sampled([0, 1], q), draws, POSITION)
    assert draws.accepts[-1] == (1.0, POSITION, 0)
    assert (verdict.tokens, verdict.num_accepted) == ((0, 0), 1)


@RATIO_RULES
def test_rounding_dust_falls_back_to_p(rule: Rule) -> None:
    # q is one rounding above p everywhere, as two softmaxes of the same logits may be. At the largest
    # uniform the draft is not kept, and (p - q)+ is empty.
    p = np.array([[0.3, 0.7, 0.0], [1.0, 0.0, 0.0]])
    q = np.nextafter(p[:1], 1.0)
    verdict = rule(p, Proposal.sampled([0], q), FixedDraws(LARGEST_UNIFORM), POSITION)
    assert verdict.kind == "recovered"
    assert p[0, verdict.tokens[0]] > 0.0
    assert rule(p, Proposal.sampled([0], q), FixedDraws(0.999), POSITION).num_accepted == 1


@RATIO_RULES
def test_ratios_that_leave_the_floats(rule: Rule) -> None:
    tiny = 5e-324
    p = np.array([[1.0, tiny], [tiny, 1.0], [0.5, 0.5]])
    q = np.array([[tiny, 1.0], [1.0, tiny]])
    assert rule(p, Proposal.sampled([0, 1], q), FixedDraws(LARGEST_UNIFORM), POSITION).num_accepted == 2
    assert rule(p, Proposal.sampled([1, 0], q), FixedDraws(0.5), POSITION).num_accepted == 0


# --- greedy is no special case ------------------------------------------------------------------------


@RATIO_RULES
@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_UNIFORM])
def test_one_hot_p_means_equal_to_the_argmax(rule: Rule, u: float) -> None:
    best = (2, 0, 1)
    p = [Distribution.one_hot(t, 3) for t in best]
    for q in (np.full((2, 3), 1 / 3), None):
        for drafts in itertools.product(range(3), repeat=2):
            rows = q if q is not None else [Distribution.one_hot(t, 3) for t in drafts]
            verdict = rule(p, Proposal.sampled(drafts, rows), FixedDraws(u), POSITION)
            greedy = verify_point(p, Proposal.point(drafts), FixedDraws(u), POSITION)
            assert verdict == greedy
            assert verdict.tokens == best[: verdict.num_accepted + 1]


# --- closed forms and residuals -------------------------------------------------------------------------


@pytest.mark.parametrize("form_p", [dense, sparse], ids=["dense p", "sparse p"])
@pytest.mark.parametrize("form_q", [dense, sparse], ids=["dense q", "sparse q"])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_residual_in_every_form(form_p: Any, form_q: Any, scale: float) -> None:
    p, q = np.array([0.5, 0.0, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.4, 0.0, 0.3])
    wanted = np.maximum(scale * p - q, 0.0)
    row = form_p(p)
    got = residual(row, form_q(q), scale)
    assert got == pytest.approx(wanted if row.ids is None else wanted[row.ids], abs=1e-15)
    assert acceptance(row, form_q(q)) == pytest.approx(np.minimum(p, q).sum(), abs=1e-15)
    assert p.tolist() == [0.5, 0.0, 0.3, 0.2, 0.0]  # rows are views and must not be written
    assert q.tolist() == [0.1, 0.2, 0.4, 0.0, 0.3]


@RATIO_RULES
@pytest.mark.parametrize("form", [dense, sparse], ids=["dense", "sparse"])
def test_a_drafter_may_lack_tokens_or_have_more(rule: Rule, form: Any) -> None:
    p = np.array([[0.2, 0.3, 0.1, 0.4], [0.25, 0.25, 0.25, 0.25]])
    for narrow, padded in (([0.5, 0.5], [0.5, 0.5, 0, 0]), ([0.4, 0, 0.6, 0, 0, 0], [0.4, 0, 0.6, 0])):
        for x in np.flatnonzero(padded):
            for u in (0.0, 0.3, 0.6, 0.9):
                same = [
                    rule(p, Proposal.sampled([int(x)], [Distribution.of(row)]), FixedDraws(u), POSITION)
                    for row in (form(np.array(narrow)), dense(np.array(padded, dtype=float)))
                ]
                assert same[0] == same[1]
                assert all(t < 4 for t in same[0].tokens)


@RATIO_RULES
@pytest.mark.parametrize("form", [dense, sparse], ids=["dense", "sparse"])
def test_mass_on_tokens_that_the_target_lacks_is_refused(rule: Rule, form: Any) -> None:
    """Dropping it would be silent and wrong: what is left of q is not what drafts were drawn from."""
    q = form(np.array([0.3, 0.3, 0.4]))
    with pytest.raises(DrafterError, match="mass to tokens from 2 on"):
        rule(np.array([[0.9, 0.1], [0.5, 0.5]]), Proposal.sampled([0], [q]), FixedDraws(0.5), POSITION)


@RATIO_RULES
def test_nan_in_q_is_an_error_at_the_latest_when_something_is_drawn(rule: Rule) -> None:
    q = Distribution(np.array([0.6, np.nan]), 2)
    with pytest.raises(InvalidDistribution):
        rule(np.array([[0.3, 0.7], [0.5, 0.5]]), Proposal.sampled([0], [q]), KeyedDraws(1, 3), 3)


# --- refusals -----------------------------------------------------------------------------------------

HALF = np.full((3, 2), 0.5)
CHAIN = Proposal.sampled([0, 1], HALF[:2])


@ALL_RULES
def test_trees_are_refused(rule: Rule) -> None:
    with pytest.raises(InvalidInput, match=r"parents \(-1, -1\) is a tree"):
        rule(HALF, Proposal.sampled([0, 1], HALF, parents=[-1, -1]), FixedDraws(0.5), POSITION)


@RATIO_RULES
def test_point_proposals_are_refused_where_a_ratio_is_needed(rule: Rule) -> None:
    with pytest.raises(InvalidInput, match="needs a sampled proposal, got a point one"):
        rule(HALF, Proposal.point([0, 1]), FixedDraws(0.5), POSITION)


@ALL_RULES
@pytest.mark.parametrize("position", [-1, 1.5, None, "5", True], ids=repr)
def test_positions_that_are_no_index_are_refused(rule: Rule, position: Any) -> None:
    with pytest.raises(InvalidInput, match="position = "):
        rule(HALF, CHAIN, FixedDraws(0.5), position)


@ALL_RULES
@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_the_number_of_rows_must_fit_the_drafts(rule: Rule, n: int) -> None:
    for rows in (np.full((n, 2), 0.5), [[0.5, 0.5]] * n, [dense(HALF[0])] * n):
        with pytest.raises(InvalidDistribution, match=f"has {n} rows; 2 drafts need 3"):
            rule(rows, CHAIN, FixedDraws(0.5), POSITION)


BAD_P: dict[str, list[Any]] = {
    "NaN": [0.5, math.nan],
    "infinite": [math.inf, 0.5],
    "negative": [1.5, -0.5],
    "zero": [0.0, 0.0],
    "not normalised": [0.5, 0.4],
    "empty": [],
    "text": ["a", "b"],
    "wider": [0.5, 0.25, 0.25],
}


@ALL_RULES
@pytest.mark.parametrize("row", BAD_P.values(), ids=BAD_P)
def test_rows_that_are_no_distribution_are_refused_wherever_they_stand(rule: Rule, row: list[Any]) -> None:
    for i in range(3):
        rows: list[Any] = [[0.5, 0.5]] * 3
        rows[i] = row
        with pytest.raises((InvalidDistribution, DrafterError)):
            rule(rows, CHAIN, FixedDraws(0.0), POSITION)
        if len(row) == 2 and row != ["a", "b"]:
            with pytest.raises(InvalidDistribution):
                rule(np.array(rows), CHAIN, FixedDraws(0.0), POSITION)


@ALL_RULES
@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 1)])
def test_arrays_of_another_shape_are_refused(rule: Rule, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidDistribution, match="shape"):
        rule(np.full(shape, 0.5), CHAIN, FixedDraws(0.5), POSITION)


@ALL_RULES
def test_float32_rows_pass_and_sums_are_checked_no_finer(rule: Rule) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert p.dtype == np.float32
    assert rule(p, Proposal.sampled([0, 1], p[:2]), FixedDraws(0.5), POSITION).num_accepted in (0, 2)


@RATIO_RULES
@pytest.mark.parametrize("q", [[0.0, 1.0], [math.nan, 1.0]], ids=repr)
def test_a_draft_that_q_cannot_have_drawn_is_the_drafters_fault(rule: Rule, q: list[float]) -> None:
    first = Distribution(np.array([1.0, 0.0]), 2)
    second = Distribution(np.array(q), 2)
    with pytest.raises(DrafterError, match=r"draft 1 is token 0, but q\[1\] gives it"):
        rule(HALF, Proposal.sampled([0, 0], [first, second]), FixedDraws(0.5), POSITION)


@ALL_RULES
def test_a_draft_outside_the_targets_vocabulary_is_the_drafters_fault(rule: Rule) -> None:
    q = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    with pytest.raises(DrafterError, match=r"draft 1 is token 2, but the target's ids are 0 \.\. 1"):
        rule(HALF, Proposal.sampled([0, 2], q), FixedDraws(0.5), POSITION)


@RATIO_RULES
def test_nan_in_a_distribution_that_was_not_checked_is_no_acceptance(rule: Rule) -> None:
    rows = [Distribution(np.array([math.nan, 1.0]), 2)] * 3
    with pytest.raises(InvalidDistribution, match=r"target_probs\[0\] gives token 0 the probability nan"):
        rule(rows, CHAIN, FixedDraws(0.5), POSITION)


cell = st.one_of(st.floats(), st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), st.none(), st.text(max_size=1))
row = st.one_of(st.sampled_from([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]), st.lists(cell, max_size=3))


@given(st.lists(row, max_size=4), st.lists(row, max_size=3), st.lists(st.integers(0, 3), max_size=3))
@settings(max_examples=300, derandomize=True)
@ALL_RULES
def test_malformed_input_is_refused_or_decided(rule: Rule, p: Any, q: Any, x: Any) -> None:
    try:
        verdict = rule(p, Proposal.sampled(x, q), KeyedDraws(0, POSITION), POSITION)
    except PacelineError:
        return
    assert len(verdict.tokens) == verdict.num_accepted + 1 <= len(x) + 1
    assert all(0 <= t < len(p[0]) and p[i][t] > 0.0 for i, t in enumerate(verdict.tokens))
