"""The exact law of every rule, by following each draw: the emitted tokens follow p, whatever q is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from paceline.types import Draws, Proposal, Role, Verdict
from paceline.verify import verify_block, verify_point, verify_rejection

from ..conformance.enumerator import Branches, Law, enumerate_outcomes
from .tables import (
    PAIRS,
    POSITION,
    Constant,
    Row,
    Rule,
    Tables,
    dense,
    error,
    expected_tau,
    one_step,
    prefixes,
    probability,
    sparse,
)

RULES: dict[str, Rule] = {"rejection": verify_rejection, "block": verify_block, "point": verify_point}
GRID = [(V, K) for V in (2, 3, 4) for K in range(5)]
TOLERANCE = 1e-12


def array_row(row: Row) -> Row:
    return row


def law_of(name: str, model: Tables, K: int, form: object = dense) -> dict[tuple[tuple[int, ...], int], float]:
    """Law of (emitted tokens, accepted) of one step with the drafter in the loop."""

    def run(branches: Branches) -> tuple[tuple[int, ...], int]:
        verdict = one_step(RULES[name], model, K, branches(), form, point=name == "point")  # type: ignore[arg-type]
        assert len(verdict.tokens) == verdict.num_accepted + 1
        assert verdict.path == tuple(range(verdict.num_accepted))
        assert verdict.kind == ("bonus" if verdict.num_accepted == K else "recovered")
        return verdict.tokens, verdict.num_accepted

    return enumerate_outcomes(run)


def check(name: str, pair: str, V: int, K: int, form: object, seed: int) -> float:
    """Assert exactness; return E[accepted]."""
    model = Tables(pair, V, seed)
    law = law_of(name, model, K, form)
    tokens: Law = {}
    for (emitted, _), weight in law.items():
        tokens[emitted] = tokens.get(emitted, 0.0) + weight
    assert error(tokens, model, K + 1) <= TOLERANCE
    return sum(accepted * weight for (_, accepted), weight in law.items())


def check_all_rules(pair: str, V: int, K: int, seed: int) -> None:
    """Each rule emits p; accepted lengths equal their closed forms and stand in the right order."""
    form = sparse if (V + K) % 2 else dense
    tau = {name: check(name, pair, V, K, form, seed) for name in RULES}
    model = Tables(pair, V, seed)
    bound = expected_tau(model, K, "bound")
    assert tau["rejection"] == pytest.approx(expected_tau(model, K, "rejection"), abs=TOLERANCE)
    assert tau["block"] == pytest.approx(expected_tau(model, K, "block"), abs=TOLERANCE)
    assert tau["rejection"] <= tau["block"] + TOLERANCE
    assert tau["block"] <= bound + TOLERANCE
    assert tau["point"] <= bound + TOLERANCE
    if K == 1:  # one draft: both rules are the maximal coupling
        assert tau["rejection"] == pytest.approx(bound, abs=TOLERANCE)
        assert tau["block"] == pytest.approx(bound, abs=TOLERANCE)
    if pair.startswith("p = q"):
        assert tau["rejection"] == pytest.approx(K, abs=TOLERANCE)
        assert tau["block"] == pytest.approx(K, abs=TOLERANCE)


@pytest.mark.parametrize("V, K", GRID)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_rule_emits_p_and_keeps_what_theory_says(pair: str, V: int, K: int) -> None:
    check_all_rules(pair, V, K, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("V, K", GRID)
@pytest.mark.parametrize("pair", PAIRS)
def test_many_tables(pair: str, V: int, K: int) -> None:
    for seed in range(4, 16):
        check_all_rules(pair, V, K, seed)


@pytest.mark.parametrize("form", [dense, sparse, array_row], ids=["dense", "sparse", "array"])
@pytest.mark.parametrize("name", RULES)
def test_the_form_of_a_row_changes_nothing(name: str, form: object) -> None:
    model = Tables("zeros in both", 3, seed=3)
    wanted = law_of(name, model, 2, dense)
    assert law_of(name, model, 2, form) == pytest.approx(wanted, abs=TOLERANCE)


def test_accepted_length_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{'V=3, K=3':<18}{'rejection':>10}{'block':>8}{'bound':>8}   E[accepted], exact"]
    gains = []
    for pair in PAIRS:
        model = Tables(pair, 3, seed=3)
        rejection, block, bound = (expected_tau(model, 3, rule) for rule in ("rejection", "block", "bound"))
        assert rejection <= block + TOLERANCE
        assert block <= bound + TOLERANCE
        gains.append(block - rejection)
        lines.append(f"{pair:<18}{rejection:>10.4f}{block:>8.4f}{bound:>8.4f}")
    assert max(gains) > 0.01  # block is not the same rule under another name
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_the_worked_example_of_the_block_paper() -> None:
    # Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts.
    model = Constant([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    tau = {}
    for name in ("rejection", "block"):
        law = law_of(name, model, 2)
        tau[name] = sum(accepted * weight for (_, accepted), weight in law.items())
    assert tau["rejection"] == pytest.approx(10 / 9, abs=TOLERANCE)
    assert tau["block"] == pytest.approx(11 / 9, abs=TOLERANCE)
    assert expected_tau(model, 2, "bound") == pytest.approx(12 / 9, abs=TOLERANCE)


def best_tau(model: Tables, K: int) -> float:
    """max E[accepted] over *all* rules that keep a prefix, add one token and then continue with plain p.

    A linear programme: c(x, tau, y) is the mass of draft x, cut after tau, followed by y.
    """
    V = model.vocab_size
    drafts = list(prefixes(V, K))
    variables = list(itertools.product(drafts, range(K + 1), range(V)))
    rows, wanted = [], []
    for x in drafts:  # every draft is handled in some way
        rows.append([1.0 if v[0] == x else 0.0 for v in variables])
        wanted.append(probability(model.q, x))
    for z in prefixes(V, K + 1):  # and every string comes out with its probability under p
        row = []
        for x, tau, y in variables:
            emitted = (*x[:tau], y)
            row.append(probability(model.p, z, tau + 1) if z[: tau + 1] == emitted else 0.0)
        rows.append(row)
        wanted.append(probability(model.p, z))
    cost = [-float(tau) for _, tau, _ in variables]
    result = linprog(cost, A_eq=np.array(rows), b_eq=np.array(wanted), bounds=(0, None), method="highs")
    assert result.status == 0, result.message
    return -float(result.fun)


@pytest.mark.parametrize("V, K", [(2, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("pair", ["random", "zeros in both", "disjoint", "dyadic", "mixed"])
def test_no_rule_for_a_chain_keeps_more_than_block(pair: str, V: int, K: int) -> None:
    model = Tables(pair, V)
    assert expected_tau(model, K, "block") == pytest.approx(best_tau(model, K), abs=1e-7)


# --- point and coupled --------------------------------------------------------------------------------


@pytest.mark.parametrize("V, K", [(2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("pair", ["random", "zeros in p", "disjoint", "one-hot p", "mixed"])
def test_point_is_exact_for_each_fixed_draft(pair: str, V: int, K: int) -> None:
    model = Tables(pair, V)
    for x in prefixes(V, K):

        def run(branches: Branches, x: tuple[int, ...] = x) -> Verdict:
            rows = [dense(model.p(x[:i])) for i in range(K + 1)]
            return verify_point(rows, Proposal.point(x), branches(), POSITION)

        law: Law = {}
        tau = 0.0
        for verdict, weight in enumerate_outcomes(run).items():
            law[verdict.tokens] = law.get(verdict.tokens, 0.0) + weight
            tau += verdict.num_accepted * weight
        assert error(law, model, K + 1) <= TOLERANCE
        # A fixed draft is kept with p(x): the best any rule can do when q is one-hot there.
        assert tau == pytest.approx(sum(probability(model.p, x[:i]) for i in range(1, K + 1)), abs=TOLERANCE)


@pytest.mark.parametrize("pair", ["random", "zeros in both", "mixed", "p = q"])
def test_coupled_is_exact_for_every_draft_and_every_step(pair: str) -> None:
    # Steps until 3 tokens are out. The drafter draws with Role.TARGET; all its choices are followed.
    model = Tables(pair, 3, seed=3)
    K, length = 2, 3

    def run(branches: Branches) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while len(tokens) < length:
            tokens += coupled_step(model, K, tokens, branches(0, len(tokens)), branches.every_draft(0, len(tokens)))
        tokens = tokens[:length]
        drawn = branches.target_draws()
        assert all(drawn[i] == token for i, token in enumerate(tokens))  # the plain sampler's own stream
        return tokens

    law = enumerate_outcomes(run)
    assert error(law, model, length) <= TOLERANCE


def coupled_step(
    model: Tables, K: int, committed: tuple[int, ...], draws: Draws, draft_draws: Draws
) -> tuple[int, ...]:
    x: tuple[int, ...] = ()
    q = []
    for i in range(K):
        q.append(model.q((*committed, *x)))
        x = (*x, draft_draws.pick(q[-1], len(committed) + i, Role.TARGET, node=i))
    rows = [dense(model.p((*committed, *x[:i]))) for i in range(K + 1)]
    return verify_point(rows, Proposal.sampled(x, q), draws, len(committed)).tokens
