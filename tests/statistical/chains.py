"""The shipped rules and keyed draws in a loop without an engine: draft from q, verify, commit, again.

Twenty lines stand for the engine so that hundreds of thousands of sequences are affordable; tests/conformance holds
the engine itself to the same laws, and test_engine_law.py samples from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from paceline.rng import KeyedDraws, counter_words, uniforms
from paceline.types import Distribution, Draws, Proposal, Role, Verdict
from paceline.verify import verify_block, verify_point, verify_rejection
from tests.verify.tables import Rule, Tables, prefixes, probability

Tokens = tuple[int, ...]
MakeDraws = Callable[[int, int], Draws]
RULES: dict[str, Rule] = {
    "rejection": verify_rejection,
    "block": verify_block,
    "coupled": verify_point,
    "point": verify_point,
}


@dataclass(eq=False)
class Model:
    """The rows of tables, made once each."""

    tables: Tables
    rows: dict[tuple[bool, Tokens], Distribution] = field(default_factory=dict)

    def row(self, target: bool, tokens: Tokens) -> Distribution:
        """p (target) or q after `tokens`."""
        row = self.rows.get((target, tokens))
        if row is None:
            row = Distribution.of(self.tables.p(tokens) if target else self.tables.q(tokens))
            self.rows[target, tokens] = row
        return row

    def law(self, length: int) -> dict[Tokens, float]:
        """The joint law of the first `length` tokens under p."""
        return {t: probability(self.tables.p, t) for t in prefixes(self.tables.vocab_size, length)}


def step(way: str, model: Model, tokens: Tokens, K: int, draws: Draws) -> tuple[Tokens, Verdict]:
    """One step after the committed `tokens`: (the K drafts, what was decided)."""
    n = len(tokens)
    role = Role.TARGET if way == "coupled" else Role.DRAFT
    x, q = tokens, []
    for i in range(K):
        q.append(model.row(False, x))
        token = int(np.argmax(q[i].probs)) if way == "point" else draws.pick(q[i].probs, n + i, role, node=i)
        x = (*x, token)
    drafts = x[n:]
    p = [model.row(True, x[: n + i]) for i in range(K + 1)]
    proposal = Proposal.point(drafts) if way == "point" else Proposal.sampled(drafts, q)
    return drafts, RULES[way](p, proposal, draws, n)


def sequence(way: str, model: Model, K: int, length: int, seed: int, make_draws: MakeDraws = KeyedDraws) -> Tokens:
    """The first `length` tokens of one request; steps are made until they are all there."""
    tokens: Tokens = ()
    while len(tokens) < length:
        tokens += step(way, model, tokens, K, make_draws(seed, len(tokens)))[1].tokens
    return tokens[:length]


def sequences(
    way: str, model: Model, K: int, length: int, seeds: Iterable[int], make_draws: MakeDraws = KeyedDraws
) -> Counter[Tokens]:
    """How often each sequence came out, one request per seed."""
    return Counter(sequence(way, model, K, length, seed, make_draws) for seed in seeds)


# --- draws that are wrong, as they were elsewhere ---------------------------------------------------


class KeyedByPosition(KeyedDraws):
    """Noise of (seed, role, position, token) alone: the next step meets noise that the last one selected.

    In a chain the node must be left out too, because position - node is the step start.
    """

    def __init__(self, seed: int, step_start: int) -> None:
        super().__init__(seed, 0)

    def accept(self, probability, position, node=0):
        return super().accept(probability, position)

    def pick(self, weights, position, role, *, ids=None, node=0):
        return super().pick(weights, position, role, ids=ids)


class DraftNoiseAgain(KeyedDraws):
    """The recovered token is drawn with the noise that its draft was drawn with (vllm#54282)."""

    def pick(self, weights, position, role, *, ids=None, node=0):
        return super().pick(weights, position, Role.DRAFT if role is Role.RECOVER else role, ids=ids, node=node)


class AcceptNoiseAgain(KeyedDraws):
    """The recovered token is the inverse CDF at the uniform that has just rejected its draft (vllm-ascend#16370)."""

    def pick(self, weights, position, role, *, ids=None, node=0):
        if role is not Role.RECOVER:
            return super().pick(weights, position, role, ids=ids, node=node)
        words = (0, *counter_words(position, self.step_start, Role.ACCEPT, node))
        u = uniforms(words, (self.seed & 0xFFFFFFFF, self.seed >> 32))[0]
        cdf = np.cumsum(weights) / np.sum(weights)
        index = int(np.searchsorted(cdf, u, side="right"))
        return index if ids is None else int(ids[index])


class AcceptsAtZero(KeyedDraws):
    """The uniform of every accept is 0, so that any draft the target can emit at all is kept (vllm-ascend#13766)."""

    def accept(self, probability, position, node=0):
        return probability > 0.0
