"""What a drafter offers and what a rule decides. Importable from `paceline.types`, with all other nouns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

from .errors import InvalidInput

FORCED = "forced"
"""The source of drafts that a grammar forces, in Proposal.sources."""


@dataclass(frozen=True, eq=False, slots=True)
class Proposal:
    """Draft tokens for one request in one step, as a tree in which parents precede children.

    tokens: node i's token. parents: node i's parent, -1 for a child of the root (the last committed token).
    kind: "point" or "sampled". q: for "sampled", ``q[parents[i] + 1]`` is the distribution node i was
    drawn from (an array [rows, V] or a sequence of Distribution); None for "point".
    replacement: whether siblings were drawn with replacement. sources: (name, number of drafts) in order, where
    drafts of different quality stand behind one another; whoever estimates acceptance keeps them apart. It has no part
    in any rule.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    kind: Literal["point", "sampled"]
    q: Sequence[Any] | NDArray[Any] | None = None
    replacement: bool = True
    sources: tuple[tuple[str, int], ...] = ()

    @classmethod
    def point(
        cls,
        tokens: Iterable[int],
        parents: Iterable[int] | None = None,
        sources: tuple[tuple[str, int], ...] = (),
    ) -> Proposal:
        """Tokens chosen without a distribution to answer for. `parents` defaults to a chain."""
        toks, pars = _tree(tokens, parents)
        return cls(toks, pars, "point", sources=sources)

    @classmethod
    def sampled(
        cls,
        tokens: Iterable[int],
        q: Sequence[Any] | NDArray[Any],
        parents: Iterable[int] | None = None,
        replacement: bool = True,
        sources: tuple[tuple[str, int], ...] = (),
    ) -> Proposal:
        """Tokens really drawn from the rows of `q`. `parents` defaults to a chain.

        Raises InvalidInput where q has too few rows for the tree.
        """
        toks, pars = _tree(tokens, parents)
        needed = max(pars, default=-2) + 2
        if q is None or len(q) < needed:
            have = "no q" if q is None else f"{len(q)} rows of q"
            raise InvalidInput(f"a sampled proposal with parents {pars} needs {needed} rows of q, got {have}")
        return cls(toks, pars, "sampled", q, replacement, sources)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_guessed(self) -> int:
        """Drafts that are not known to be forced. What was cut off is not counted, though sources still tell it."""
        return max(0, len(self.tokens) - sum(size for source, size in self.sources if source == FORCED))

    @property
    def is_chain(self) -> bool:
        """True when node i's parent is node i - 1 throughout; the empty proposal is a chain."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def first(self, n: int) -> Proposal:
        """The first n nodes; parents precede children, so this is again a tree."""
        if n >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:n], parents=self.parents[:n])


def _tree(tokens: Iterable[int], parents: Iterable[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        toks = tuple(operator.index(t) for t in tokens)
        pars = tuple(range(-1, len(toks) - 1)) if parents is None else tuple(operator.index(p) for p in parents)
    except TypeError as error:
        raise InvalidInput(f"draft tokens and parents are integers ({error})") from None
    if len(pars) != len(toks):
        raise InvalidInput(f"{len(toks)} draft tokens but {len(pars)} parents")
    for i, (token, parent) in enumerate(zip(toks, pars, strict=True)):
        if token < 0:
            raise InvalidInput(f"draft token {i} is {token}; token ids start at 0")
        if not -1 <= parent < i:
            raise InvalidInput(f"parents[{i}] = {parent}; a parent precedes its child and the root is -1")
    return toks, pars


NOTHING = Proposal.point(())
"""No drafts: what most steps of most texts come to."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification rule decided; never edited afterwards.

    tokens: the decided tokens, before any cut at a stop; the last one is recovered or bonus.
    num_accepted: drafts kept. path: node indices of the kept drafts. kind: of the last token.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    path: tuple[int, ...]
    kind: Literal["recovered", "bonus"]
