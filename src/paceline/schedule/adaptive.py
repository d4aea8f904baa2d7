"""How many drafts each request gets in a step: as many as are worth their cost, none included.

A step that verifies drafts emits more tokens and takes longer. What is made as large as possible is the expected number
of tokens that the step emits for everybody, over the seconds it is expected to take:

    (n + sum of the chances that each draft is reached and kept) / (forward + drafting + the rest)

Where prompts are read by the same forward, their time is on neither side; see allocate().

The chance of a request's j-th draft is the product of its acceptances at positions 1 to j, so each further draft is
worth less than the one before it; going through all drafts of all requests from the most to the least likely, and
keeping the best prefix, finds the best allocation whatever the cost curve looks like, if drafts cost nothing to make.
Where they do, it is the best of those prefixes.

Non-anticipation: what is decided before a sampled draft is verified may depend on committed tokens and on drafts in
front of it, never on the draft itself. Estimates look at earlier steps only, so budgets for sampled drafts are settled
before they are drawn; point proposals may be cut afterwards too, which is exact under their rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import FORCED
from .cost import CostTable, Share

__all__ = ["Acceptance", "Ask", "Plan", "allocate"]

PRIOR_MEAN = 0.6  # acceptance of a drafter that nobody has seen yet
PRIOR_WEIGHT = 2.0
# Of a lookup behind so many matching tokens, and of what a grammar forces: measured (docs/decisions/0010), and on the
# low side, for what was not verified is compared with the text all the same: too little belief is soon made up for.
MATCHED = (0.30, 0.40, 0.48, 0.55, 0.60, 0.65, 0.68, 0.70, 0.72, 0.74, 0.80)
PRIORS = {FORCED: 0.99, **{f"lookup:{n}": mean for n, mean in enumerate(MATCHED, 2)}}
KNOWN_WEIGHT = 20.0
POOL_WEIGHT = 4.0  # how many observations of its own outweigh what other requests saw
REQUEST_MEMORY = 0.93  # of what a request saw, at each further observation at the same position
POOL_MEMORY = 0.995
POSITIONS = 16  # that are told apart; what lies behind counts for the last of them
MARGIN = 1.02  # drafting must promise that much more than not drafting: estimates are noisy, plain steps are not


class Acceptance:
    """How often a drafter's drafts are kept, by position in the proposal, given that all before them were.

    A Beta distribution at each position, whose counts fade. A draft behind a rejected one says nothing and is not
    counted (censoring); that is all there is to "at least", for a position is only ever compared with itself.

    memory: what is left of a count at the next observation of its position. parent: what to believe, and tell, where
    little was seen here; by default what is generally known of the source, or PRIOR_MEAN.
    """

    def __init__(self, memory: float = POOL_MEMORY, parent: Acceptance | None = None, source: str = "") -> None:
        self._memory, self._parent = memory, parent
        self._mean = PRIORS.get(source, PRIOR_MEAN)
        self._weight = POOL_WEIGHT if parent is not None else KNOWN_WEIGHT if source in PRIORS else PRIOR_WEIGHT
        self._kept: list[float] = []
        self._seen: list[float] = []

    def observe(self, i: int, kept: bool) -> None:
        """Draft i was judged, and kept or not; those before it were kept."""
        i = min(i, POSITIONS - 1)
        while len(self._seen) <= i:
            self._kept.append(0.0)
            self._seen.append(0.0)
        self._kept[i] = self._kept[i] * self._memory + kept
        self._seen[i] = self._seen[i] * self._memory + 1.0
        if self._parent is not None:
            self._parent.observe(i, kept)

    def expected(self, n: int) -> list[float]:
        """Acceptance at positions 0 to n - 1, each in (0, 1)."""
        priors = self._parent.expected(min(n, POSITIONS)) if self._parent is not None else None
        means: list[float] = []
        for i in range(min(n, POSITIONS)):
            # Where there is no parent, what is not known of a position follows what is known of the one before it.
            prior = priors[i] if priors is not None else means[-1] if means else self._mean
            known = i < len(self._seen)
            means.append((self._kept[i] + self._weight * prior) / (self._seen[i] + self._weight) if known else prior)
        return means + means[-1:] * (n - POSITIONS)


@dataclass(slots=True)
class Ask:
    """One request's part in the allocation.

    share: the tokens it forwards anyway, and those cached before. tokens: what it is expected to emit for them.
    chances: k numbers, that drafts 1 .. k are kept together with all before them, descending; k is the most it may
    have. draft_seconds: k numbers, what drawing the first 1 .. k of them costs; None where they cost nothing.
    """

    share: Share
    tokens: float = 1.0
    chances: Sequence[float] = ()
    draft_seconds: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What allocate() found: drafts for each request, and what to expect of the step with them, others left out."""

    drafts: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def allocate(
    asks: Sequence[Ask],
    costs: CostTable,
    others: Sequence[Share] = (),
    overhead: float = 0.0,
    *,
    margin: float = MARGIN,
) -> Plan:
    """Drafts for each of the decoding requests.

    others: what else is in the forward and emits nothing, such as prompts being read. It takes its time whatever is
    drafted, and dividing that time among more tokens saves none of it: drafts are weighed against the seconds of the
    asks alone, by what they add to the forward as it is. overhead: seconds of a step that are neither forward nor
    drafting. Requests draft side by side, one depth after the other, so drafting takes as long as the dearest of those
    that were chosen.
    """
    order = sorted((-chance, i, j) for i, ask in enumerate(asks) for j, chance in enumerate(ask.chances))
    forwards = costs.curve([ask.share for ask in asks], len(order), others)
    tokens = plain_tokens = sum(ask.tokens for ask in asks)
    seconds = plain_seconds = forwards[0] + overhead
    best, best_tokens, best_seconds, drafting = 0, tokens, seconds, 0.0
    for n, (chance, i, j) in enumerate(order, 1):
        dear = asks[i].draft_seconds
        drafting = drafting if dear is None else max(drafting, dear[j])
        tokens -= chance
        seconds = forwards[n] + overhead + drafting
        if tokens * best_seconds > best_tokens * seconds:
            best, best_tokens, best_seconds = n, tokens, seconds
    if best_tokens * plain_seconds < margin * plain_tokens * best_seconds:
        best, best_tokens, best_seconds = 0, plain_tokens, plain_seconds
    drafts = [0] * len(asks)
    for _, i, _ in order[:best]:
        drafts[i] += 1
    return Plan(drafts, best_tokens, best_seconds)
