"""Tokens that a grammar forces are free drafts: propose them, and let another drafter go on behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from ..errors import PacelineError
from ..types import FORCED, NOTHING, Distribution, DraftContext, Drafter, Proposal
from .guarded import GuardedDrafter
from .none import NoDrafter

__all__ = ["ForcedDrafter"]


class ForcedDrafter:
    """Proposes what the request's grammar forces, and behind it what `inner` drafts (by default nothing).

    The inner drafter finds the forced tokens in context.start. One that takes no notice of them can be any: its
    drafts are then left out where something is forced, since they stand at the wrong places. Whether they are must
    not hang on which tokens were drawn (docs/decisions/0008-forced-tokens-are-never-matched-by-chance.md).

    It is not asked where the forced tokens alone spend the budget. Requests without a grammar are all its own.
    """

    def __init__(self, inner: Drafter | None = None) -> None:
        self.inner: Drafter = NoDrafter() if inner is None else inner
        self.name = "forced" if self.inner.name == NoDrafter.name else f"forced+{self.inner.name}"

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """Up to budgets[i] drafts for contexts[i], beginning with all forced ones that fit. Never raises."""
        answers: list[Proposal | PacelineError] = []
        asked: list[int] = []
        with_start: list[DraftContext] = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            try:
                start = tuple(context.history.forced(budget))[:budget] if budget > 0 else ()
            except PacelineError as error:
                answers.append(error)
                continue
            answers.append(Proposal.point(start, sources=((FORCED, len(start)),)) if start else NOTHING)
            if len(start) < budget:
                asked.append(i)
                with_start.append(replace(context, start=start) if start else context)
        if asked:
            guarded = GuardedDrafter(self.inner)
            drafted = guarded.propose(with_start, [budgets[i] for i in asked])
            for i, context, answer in zip(asked, with_start, drafted, strict=True):
                if _begins_with(answer, context.start):
                    answers[i] = answer
        return answers

    def observe(self, request_id: int, committed: Sequence[int], hidden: NDArray[Any] | None = None) -> None:
        """Pass on newly committed tokens."""
        self.inner.observe(request_id, committed, hidden)

    def release(self, request_id: int) -> None:
        """Pass on that a request is over."""
        self.inner.release(request_id)

    def close(self) -> None:
        """Close the inner drafter."""
        self.inner.close()

    def check(self, contexts: Sequence[DraftContext] = ()) -> None:
        """Raise what the inner drafter's check() raises, where it has one."""
        check = getattr(self.inner, "check", None)
        if check is not None:
            check(contexts)


def _begins_with(answer: Any, start: tuple[int, ...]) -> bool:
    """Whether an inner drafter put `start` in front of its own; True for errors and for what is malformed, which
    whoever admits proposals will name.

    A sampled proposal must have drawn it from one-hot rows. Tokens that equal `start` by chance would be kept when
    they do and dropped when they do not: whether they are judged by their q would depend on the tokens themselves.
    """
    size = len(start)
    if not size or not isinstance(answer, Proposal):
        return True
    try:
        if answer.tokens[:size] != start or answer.parents[:size] != tuple(range(-1, size - 1)):
            return False
        q = None if answer.kind == "point" else answer.q
        return q is None or all(Distribution.of(q[i]).prob(token) == 1.0 for i, token in enumerate(start))
    except Exception:
        return True
