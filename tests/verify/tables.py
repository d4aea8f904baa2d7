"""Tiny language models as tables, and the closed forms the exact laws are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paceline.types import Distribution, Draws, Proposal, Role, Verdict

POSITION = 5
Rule = Callable[[Any, Proposal, Draws, int], Verdict]
Row = np.ndarray[Any, np.dtype[np.float64]]


def draw_row(rng: np.random.Generator, kind: str, vocab_size: int) -> Row:
    """One random distribution of a kind that has broken rules before."""
    if kind == "one_hot":
        return np.eye(vocab_size)[rng.integers(vocab_size)]
    if kind == "uniform":
        return np.full(vocab_size, 1.0 / vocab_size)
    if kind == "dyadic":  # multiples of 1/8: exact in binary, with many ties
        return np.bincount(rng.integers(vocab_size, size=8), minlength=vocab_size) / 8.0
    row = rng.dirichlet(np.ones(vocab_size))
    if kind == "zeros":
        row[rng.permutation(vocab_size)[: rng.integers(1, vocab_size)]] = 0.0
        row /= row.sum()
    return row


PAIRS: dict[str, tuple[str, str]] = {
    "random": ("random", "random"),
    "zeros in p": ("zeros", "random"),
    "zeros in q": ("random", "zeros"),
    "zeros in both": ("zeros", "zeros"),
    "p = q": ("random", "="),
    "p = q with zeros": ("zeros", "="),
    "one-hot p": ("one_hot", "random"),
    "one-hot q": ("random", "one_hot"),
    "one-hot both": ("one_hot", "one_hot"),
    "disjoint": ("random", "disjoint"),
    "dyadic": ("dyadic", "dyadic"),
    "uniform q": ("random", "uniform"),
    "mixed": ("any", "any"),
}
KINDS = ("random", "zeros", "one_hot", "uniform", "dyadic")


class Tables:
    """p(. | prefix) and q(. | prefix) for every prefix, drawn once per (pair, V, seed)."""

    def __init__(self, pair: str, vocab_size: int, seed: int = 0) -> None:
        self.pair = pair
        self.vocab_size = vocab_size
        self._seed = (list(PAIRS).index(pair), vocab_size, seed)
        self._rows: dict[tuple[int, ...], tuple[Row, Row]] = {}

    def p(self, prefix: tuple[int, ...]) -> Row:
        return self._both(prefix)[0]

    def q(self, prefix: tuple[int, ...]) -> Row:
        return self._both(prefix)[1]

    def _both(self, prefix: tuple[int, ...]) -> tuple[Row, Row]:
        if prefix not in self._rows:
            rng = np.random.default_rng([*self._seed, len(prefix), *prefix])
            p_kind, q_kind = (rng.choice(KINDS) if k == "any" else k for k in PAIRS[self.pair])
            p = draw_row(rng, p_kind, self.vocab_size)
            if q_kind == "disjoint":  # the supports share no token
                mine = rng.permutation(self.vocab_size)[: rng.integers(1, self.vocab_size)]
                p, q = p.copy(), draw_row(rng, "random", self.vocab_size)
                q[mine] = 0.0
                p[q > 0.0] = 0.0
                p, q = p / p.sum(), q / q.sum()
            else:
                q = p.copy() if q_kind == "=" else draw_row(rng, q_kind, self.vocab_size)
            self._rows[prefix] = (p, q)
        return self._rows[prefix]


class Constant(Tables):
    """p and q that do not depend on the prefix."""

    def __init__(self, p: list[float], q: list[float]) -> None:
        super().__init__("random", len(p))
        self._pair = (np.array(p), np.array(q))

    def _both(self, prefix: tuple[int, ...]) -> tuple[Row, Row]:
        return self._pair


def dense(row: Row) -> Distribution:
    return Distribution(row, row.size)


def sparse(row: Row) -> Distribution:
    ids = np.flatnonzero(row)
    return Distribution(row[ids], row.size, ids)


def one_step(
    rule: Rule, model: Tables, K: int, draws: Draws, form: Callable[[Row], Any] = dense, point: bool = False
) -> Verdict:
    """Draft K tokens from q with the same draws, then verify them: the drafter is in the loop."""
    x: tuple[int, ...] = ()
    q = []
    for i in range(K):
        row = model.q(x)
        q.append(form(row))
        x = (*x, draws.pick(row, POSITION + i, Role.DRAFT, node=i))
    p = [form(model.p(x[:i])) for i in range(K + 1)]
    return rule(p, Proposal.point(x) if point else Proposal.sampled(x, q), draws, POSITION)


def prefixes(vocab_size: int, length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(vocab_size), repeat=length)


def probability(row: Callable[[tuple[int, ...]], Row], tokens: tuple[int, ...], start: int = 0) -> float:
    """prod_i row(tokens[:i])[tokens[i]] for i >= start."""
    return math.prod(float(row(tokens[:i])[tokens[i]]) for i in range(start, len(tokens)))


def completed(law: dict[tuple[int, ...], float], model: Tables, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens when every emitted prefix is continued by plain sampling."""
    whole: dict[tuple[int, ...], float] = {}
    for tokens, weight in law.items():
        for rest in prefixes(model.vocab_size, length - len(tokens)):
            full = (*tokens, *rest)
            whole[full] = whole.get(full, 0.0) + weight * probability(model.p, full, len(tokens))
    return whole


def error(law: dict[tuple[int, ...], float], model: Tables, length: int) -> float:
    """Largest |completed law - prod p| over all token strings of `length`."""
    whole = completed(law, model, length)
    return max(
        abs(whole.get(tokens, 0.0) - probability(model.p, tokens)) for tokens in prefixes(model.vocab_size, length)
    )


def expected_tau(model: Tables, K: int, rule: str) -> float:
    """E[accepted] in closed form: sum over i and x_1..i of Q(x_1..i) P(tau >= i | x_1..i).

    rejection: the chance to pass is the product of min(1, p/q). block: the running b. bound: no rule
    that emits p can keep a prefix more often than min(P, Q).
    """
    total = 0.0
    for length in range(1, K + 1):
        for x in prefixes(model.vocab_size, length):
            Q = probability(model.q, x)
            if Q == 0.0:
                continue
            ratios = [float(model.p(x[:i])[x[i]] / model.q(x[:i])[x[i]]) for i in range(length)]
            if rule == "rejection":
                total += Q * math.prod(min(1.0, r) for r in ratios)
            elif rule == "block":
                b = 1.0
                for r in ratios:
                    b = min(1.0, b * r)
                total += Q * b
            else:
                total += min(Q, probability(model.p, x))
    return total
