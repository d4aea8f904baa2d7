"""The battery that every mutant meets: small checks, each well under a second, most of them exact.

rules/...   the law of one step of a pure rule, every draw followed, and its expected accepted length
law/...     the law of whole requests through the engine, every draw followed
drawn/...   the law of several steps with real noise, the drafter in the loop (a G-test)
keys, coins random numbers at their documented address; strict comparison
the others  one deterministic run each: streams, memory, stops, counters, faults

A check returns where the code is right and raises AssertionError, or a typed error, where it is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
from scipy.stats import chi2

from paceline.rng import KeyedDraws
from paceline.types import Distribution, Proposal, Role
from paceline.verify import speculative_step_verification, verify_block, verify_point, verify_rejection
from paceline.verify.block import keep_prefix
from tests.verify.tables import (
    POSITION,
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

from .enumerator import Branches, enumerate_outcomes
from .mutants_reference import Tokens, g_statistic, noise, race

TOLERANCE = 1e-12
ALPHA = 1e-6  # chance that a G-test below calls right code wrong; its seeds are fixed, so it is drawn once
MAX_LEAVES = 1_000  # right code needs 135; a mutant may have no end
RULES: dict[str, Rule] = {"rejection": verify_rejection, "block": verify_block, "point": verify_point}

CHECKS: dict[str, Callable[[], None]] = {}


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return register


# --- pure rules ---------------------------------------------------------------------------------------


def rule_is_exact(name: str) -> None:
    """One step emits p and keeps as many drafts as theory says, over tables that have broken rules before."""
    for pair, V, K in (("random", 3, 1), ("zeros in both", 3, 2), ("p = q", 2, 2), ("mixed", 2, 3), ("random", 3, 2)):
        model = tables(pair, V, 3)
        tokens: dict[Tokens, float] = {}
        tau = 0.0
        run = partial(one_verdict, name, model, K, sparse if K % 2 else dense)
        for (emitted, accepted), weight in enumerate_outcomes(run, MAX_LEAVES).items():
            tokens[emitted] = tokens.get(emitted, 0.0) + weight
            tau += accepted * weight
        off = error(tokens, model, K + 1)
        assert off <= TOLERANCE, f"{pair}, V={V}, K={K}: the law is off by {off:.2g}"
        wanted = accepted_length(name, model, K)
        assert abs(tau - wanted) <= TOLERANCE, f"{pair}, V={V}, K={K}: {tau:.4f} drafts kept, {wanted:.4f} can be"


def one_verdict(name: str, model: Tables, K: int, form: Any, branches: Branches) -> tuple[Tokens, int]:
    verdict = one_step(RULES[name], model, K, branches(), form, point=name == "point")
    n = verdict.num_accepted
    assert len(verdict.tokens) == n + 1, f"{len(verdict.tokens)} tokens with {n} accepted"
    return verdict.tokens, n


def accepted_length(name: str, model: Tables, K: int) -> float:
    if name != "point":
        return expected_tau(model, K, name)
    # A draft chosen whatever p is survives with p's own probability of it.
    drafts = itertools.chain.from_iterable(prefixes(model.vocab_size, length) for length in range(1, K + 1))
    return sum(probability(model.q, x) * probability(model.p, x) for x in drafts)


@cache
def tables(pair: str, vocab_size: int, seed: int) -> Tables:
    return Tables(pair, vocab_size, seed)


for rule_name in RULES:
    CHECKS[f"rules/{rule_name}"] = partial(rule_is_exact, rule_name)


@check("rounding")
def certain_prefixes_are_kept() -> None:
    """b = 1 must give h = 1 whatever dust the residual holds, or p = q loses drafts now and then."""
    for r in (0.0, 1e-300, 1e-17, 1.2e-16, 3.5e-16, 0.3):
        h = keep_prefix(1.0, np.float64(r))
        assert h == 1.0, f"b = 1, r = {r}: h = {h!r}"
    row = dense(np.array([0.25, 0.75]))
    verdict = verify_rejection([row, row], Proposal.sampled([0], [row]), Unlucky(1, POSITION), POSITION)
    assert verdict.num_accepted == 0
    assert verdict.tokens[0] in (0, 1), f"nothing was recovered from p: {verdict}"


class Unlucky(KeyedDraws):
    """Rejects whatever may be rejected but for rounding."""

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        return False


class Coin:
    """random() from a list, for the taught functions."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


@check("taught")
def taught_step_is_exact_on_a_grid() -> None:
    """Probabilities in quarters: uniforms at the lower edges of quarters count the law out exactly."""
    p, q = np.array([[0.5, 0.25, 0.25], [0.25, 0.75, 0.0]]), np.array([[0.25, 0.5, 0.25]])
    edges = (0.0, 0.25, 0.5, 0.75)
    law: dict[Tokens, float] = {}
    for x in range(3):
        for coins in itertools.product(edges, repeat=2):
            emitted = tuple(speculative_step_verification([x], p, q, Coin(*coins)))
            law[emitted] = law.get(emitted, 0.0) + q[0, x] / 16
    first = [sum(weight for tokens, weight in law.items() if tokens[0] == v) for v in range(3)]
    assert first == p[0].tolist(), f"the first token follows {first}"
    second = [sum(law.get((x, y), 0.0) for x in range(3)) / 0.75 for y in range(3)]  # 3/4 of all drafts are kept
    assert second == p[1].tolist(), f"the bonus follows {second}"
    impossible = speculative_step_verification([1], [[1.0, 0.0]], [[0.5, 0.5]], Coin(0.0, 0.0))
    assert impossible == [0], f"u = 0 kept a draft with p = 0: {impossible}"


# --- real noise ---------------------------------------------------------------------------------------


@check("coins")
def comparison_is_strict() -> None:
    for seed, position, start, node in ((1, 5, 5, 0), (2**40, 9, 7, 2), (77, 1000, 998, 2)):
        draws = KeyedDraws(seed, start)
        u = noise(seed, position, Role.ACCEPT, start, node)
        assert not draws.accept(u, position, node), "u = probability was accepted"
        assert draws.accept(float(np.nextafter(u, 1.0)), position, node), "u just below probability was rejected"
    with mock.patch("paceline.rng._lane0", return_value=0.0):
        assert not KeyedDraws(1, 5).accept(0.0, 5), "u = 0 accepted a draft with p = 0"


@check("keys")
def noise_is_at_its_documented_address() -> None:
    weights = np.array([0.1, 0.0, 0.3, 0.2, 0.4])
    ids = np.flatnonzero(weights)
    addresses = itertools.product((1, 2**40 + 3), (7, 8), (5, 7), (0, 1, 3))
    for seed, position, start, node in addresses:
        draws = KeyedDraws(seed, start)
        for role in (Role.TARGET, Role.DRAFT, Role.RECOVER):
            where = (0, 0) if role == Role.TARGET else (start, node)
            wanted = race(weights, seed, position, role, *where)
            for row, names in ((weights, None), (weights[ids], ids)):
                token = draws.pick(row, position, role, ids=names, node=node)
                assert token == wanted, f"{draws}, {role.name}, position {position}, node {node}: {token}, not {wanted}"
        u = noise(seed, position, Role.ACCEPT, start, node)
        assert draws.accept(u + 1e-9, position, node), f"{draws}: accept at {position}, node {node} is another coin"
        assert not draws.accept(u - 1e-9, position, node), f"{draws}: accept at {position}, node {node} is another coin"


def drawn_law_is_right(name: str) -> None:
    """Two steps or more until three tokens are out, 5000 seeds; shifts of the law by 0.05 are seen for sure."""
    p, q = {"rejection": ((0.2, 0.4, 0.4), (0.6, 0.3, 0.1)), "block": ((1 / 3, 2 / 3), (2 / 3, 1 / 3))}[name]
    rows = [Distribution.of(p)] * 3
    q_row = Distribution.of(q)
    counts: dict[Tokens, int] = {}
    for seed in range(5000):
        tokens: Tokens = ()
        while len(tokens) < 3:
            start = POSITION + len(tokens)
            draws = KeyedDraws(seed, start)
            x = [draws.pick(q_row.probs, start + i, Role.DRAFT, node=i) for i in range(2)]
            tokens += RULES[name](rows, Proposal.sampled(x, [q_row] * 2), draws, start).tokens
        counts[tokens[:3]] = counts.get(tokens[:3], 0) + 1
    law = {x: p[x[0]] * p[x[1]] * p[x[2]] for x in prefixes(len(p), 3)}
    statistic, bound = g_statistic(counts, law), float(chi2.isf(ALPHA, len(law) - 1))
    assert statistic <= bound, f"G = {statistic:.1f}, above {bound:.1f}"


CHECKS["drawn/rejection"] = partial(drawn_law_is_right, "rejection")
CHECKS["drawn/block"] = partial(drawn_law_is_right, "block")
