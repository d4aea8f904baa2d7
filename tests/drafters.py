"""Small drafters for tests: each is a function from the committed tokens to drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.types import Distribution, DraftContext, Proposal

Tokens = tuple[int, ...]


class PointDrafter:
    """Proposes whatever `guess(tokens, budget)` returns, as a point chain; remembers what it was told."""

    name = "test-point"

    def __init__(self, guess: Callable[[Tokens, int], Sequence[int]]) -> None:
        self.guess = guess
        self.observed: dict[int, list[int]] = {}
        self.calls = 0

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        self.calls += 1
        answers: list[Proposal | PacelineError] = []
        for context, budget in zip(contexts, budgets, strict=True):
            assert self.observed[context.request_id] == list(context.tokens), "observe() missed tokens"
            answers.append(Proposal.point(self.guess(tuple(context.tokens), budget)))
        return answers

    def observe(self, request_id: int, committed: Sequence[int], hidden: Any = None) -> None:
        self.observed.setdefault(request_id, []).extend(committed)

    def release(self, request_id: int) -> None:
        self.observed.pop(request_id, None)

    def close(self) -> None:
        pass


class TableDrafter(PointDrafter):
    """Really samples its drafts from q = table(visible tokens), through the request's own draws.

    length(tokens, drafts so far, budget): whether to draft one more; must look at nothing else.
    """

    name = "test-table"

    def __init__(
        self,
        table: Callable[[Tokens], Sequence[float]],
        *,
        more: Callable[[Tokens, Tokens], bool] = lambda tokens, drafts: True,
    ) -> None:
        super().__init__(lambda tokens, budget: ())
        self.table, self.more = table, more

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        self.calls += 1
        return [self._draft(c, k) for c, k in zip(contexts, budgets, strict=True)]

    def _draft(self, context: DraftContext, budget: int) -> Proposal:
        tokens = tuple(context.tokens)
        drafts: list[int] = []
        q: list[Distribution] = []
        while len(drafts) < budget and self.more(tokens, tuple(drafts)):
            row = Distribution.of(np.asarray(self.table((*tokens, *drafts)), dtype=np.float64))
            position = len(tokens) + len(drafts)
            drafts.append(context.draws.pick(row.probs, position, context.role, ids=row.ids, node=len(drafts)))
            q.append(row)
        return Proposal.sampled(drafts, q)
