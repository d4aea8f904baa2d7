"""Prompt lookup: what followed the last time these tokens stood here?

Saxena 2023, "Prompt Lookup Decoding": text that repeats its prompt or itself (edited code, quoted passages,
lists) is drafted by copying, without any model. The proposal is a point proposal, so every rule keeps it
exact and a wrong guess costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ..errors import InvariantError, PacelineError
from ..params import integer
from ..types import FORCED, NOTHING, DraftContext, Proposal

__all__ = ["LookupDrafter"]

LONGEST = 12
"""Longer matches are not told apart (docs/decisions/0010-acceptance-by-match-length.md)."""


class LookupDrafter:
    """Copies what followed the most recent earlier occurrence of the longest matching suffix.

    max_ngram, min_ngram: the longest and shortest suffix, in tokens, that is looked for; 1 <= min_ngram <=
    max_ngram. A single matching token is right too rarely to pay for K drafts, hence the 2
    (docs/decisions/0001-shortest-lookup-match.md).

    Each request has a hash index from n-gram to the place behind its last occurrence. A committed token
    costs O(max_ngram) and a proposal O(max_ngram + budget), whatever the length of the context; memory is
    O(max_ngram) per token. Keys are the tokens themselves, so two n-grams are never confused.

    How often a draft is right depends on how many tokens match in front of it, drafts before it included, more than on
    anything else: "lookup:N" is the source of a draft behind N of them (LONGEST: or more).
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self.min_ngram = integer("min_ngram", min_ngram, 1)
        self.max_ngram = integer("max_ngram", max_ngram, self.min_ngram)
        self._histories: dict[int, _History] = {}

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """contexts[i].start, and behind it what followed the last time that text stood there, if it did.

        budgets[i] tokens together, or `start` alone. Raises InvariantError where a context is not what was observed.
        """
        proposals: list[Proposal | PacelineError] = []
        for context, budget in zip(contexts, budgets, strict=True):
            history = self._histories.get(context.request_id)
            observed = history.tokens if history else []
            if len(observed) != len(context.tokens) or observed[-1:] != list(context.tokens[-1:]):
                raise InvariantError(
                    f"drafter lookup, request {context.request_id}: {len(context.tokens)} tokens are "
                    f"committed but {len(observed)} were observed; observe() every committed block once"
                )
            start = context.start[:budget]
            size, behind = history.continuation(start, budget - len(start)) if history else (0, [])
            if not start and not behind:
                proposals.append(NOTHING)
                continue
            sources = ((FORCED, len(start)), *_sources(size, len(behind)))
            proposals.append(Proposal.point((*start, *behind), sources=sources))
        return proposals

    def observe(self, request_id: int, committed: Sequence[int], hidden: NDArray[Any] | None = None) -> None:
        """Index newly committed tokens; the first call starts the request."""
        history = self._histories.get(request_id)
        if history is None:
            history = self._histories[request_id] = _History(self.max_ngram, self.min_ngram)
        for token in committed:
            history.append(token)

    def release(self, request_id: int) -> None:
        """Forget the request."""
        self._histories.pop(request_id, None)

    def close(self) -> None:
        """Forget all requests."""
        self._histories.clear()


_SOURCES = tuple((f"{LookupDrafter.name}:{size}", 1) for size in range(LONGEST))


def _sources(size: int, count: int) -> tuple[tuple[str, int], ...]:
    """Of `count` drafts, the first of them behind a match of `size` tokens."""
    rest = size + count - LONGEST
    if rest <= 0:
        return _SOURCES[size : size + count]
    return (*_SOURCES[size:], (f"{LookupDrafter.name}:{LONGEST}", min(rest, count)))


class _History:
    """One request's tokens, and for every n-gram in them that something followed, what place that was."""

    __slots__ = ("_behind", "_max", "_min", "tokens")

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max, self._min = max_ngram, min_ngram
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        # Only now do the n-grams that end the text have something behind them. Before, they would have
        # been found as their own most recent occurrence.
        place = len(self.tokens)
        for size in range(self._min, min(self._max, place) + 1):
            self._behind[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)

    def continuation(self, start: tuple[int, ...], count: int) -> tuple[int, list[int]]:
        """`count` tokens that followed where the text, with `start` behind it, matches, and how many match there.

        The longest suffix up to max_ngram is looked up; that it matches farther back is counted up to LONGEST.
        A copy that reaches the end goes on into `start` and then into itself: the text had then repeated with
        period end - place, and the guess is that it goes on doing so.
        """
        end = len(self.tokens) + len(start)
        tail = (*self.tokens[-self._max :], *start)
        for size in range(min(self._max, end), self._min - 1, -1):
            place = self._behind.get(tail[len(tail) - size :])
            if place is not None:
                drafts = [*self.tokens[place : place + count], *start][:count]
                while len(drafts) < count:
                    drafts.append(drafts[place - end])
                return self._matching(place, start, size), drafts
        return 0, []

    def _matching(self, place: int, start: tuple[int, ...], size: int) -> int:
        """How many tokens in front of `place` are as those at the end, of which `size` are known to be."""
        tokens, split = self.tokens, len(self.tokens)
        while size < min(LONGEST, place):
            i = split + len(start) - 1 - size
            if tokens[place - 1 - size] != (tokens[i] if i < split else start[i - split]):
                break
            size += 1
        return size
