"""Decides draft lengths while requests run: what it measured, what it believes, and why it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from ..types import Proposal
from .adaptive import REQUEST_MEMORY, Acceptance, Ask, Plan, allocate
from .cost import CostTable, Share

__all__ = ["MAX_DRAFTS", "Candidate", "Controller", "FixedLengths"]

MAX_DRAFTS = 16
"""Most drafts of one request in one step."""
CHEAP = 0.02  # share of a forward up to which drafting is as good as free
RATE, FALL = 0.1, 0.3  # of what is learned of a step's times, where they rise and where they fall
PROBE_AFTER = 32  # steps without drafts, then one draft of a drafter that costs time
WATCHED = 4  # proposals of one request whose tokens are compared with the text


@dataclass(slots=True)
class Candidate:
    """A decoding request in a step.

    share: (1, tokens cached). most: drafts it may have. fixed: whether the request says itself how many; it is then
    given them. name: the source of its drafts where the proposal does not say. proposal: what was drafted, once it was.
    """

    request_id: int
    share: Share
    most: int
    fixed: bool
    name: str
    proposal: Proposal | None = None


@dataclass(slots=True)
class _Watched:
    """A point proposal and where it stands: whether it is verified or not, the text will show how good it was."""

    position: int
    tokens: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Standing:
    """What is known of one request."""

    estimates: dict[str, Acceptance] = field(default_factory=dict)
    watched: list[_Watched] = field(default_factory=list)
    source: str | None = None  # of the last drafts but forced ones: what to expect of the next
    idle: int = 0  # steps without drafts


class FixedLengths:
    """Everybody gets what they may have: the controller of engines that leave nothing to one."""

    def budgets(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """As many as each may have."""
        return [candidate.most for candidate in candidates]

    def lengths(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """All that were drafted."""
        return [len(candidate.proposal or ()) for candidate in candidates]

    def observe_forward(self, shares: Sequence[Share], seconds: float) -> None:
        """Nothing to learn."""

    def observe_step(self, depth: int, drafting: float, rest: float) -> None:
        """Nothing to learn."""

    def observe(self, candidate: Candidate, position: int, taken: Sequence[int], accepted: int, verified: int) -> None:
        """Nothing to learn."""

    def forget(self, request_id: int) -> None:
        """Nothing to forget."""


class Controller(FixedLengths):
    """Draft lengths of one engine.

    costs: of the target's forwards. What drafting costs is learned from the steps; a drafter that costs next to nothing
    is asked in any case, and its drafts are cut to what pays. As long as they are point proposals, those that were cut
    are compared with the text that comes all the same, so that nothing need be tried out.

    listener: called with every step's decision and its reasons, as text, when it is set.
    """

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.listener: Callable[[str], None] | None = None
        self._told = False  # of this step
        self._rest = 0.0  # seconds of a step beside forward and drafting
        self._per_depth = 0.0  # seconds of drafting, for each of the drafts behind one another
        self._pool: dict[str, Acceptance] = {}
        self._standings: dict[int, _Standing] = {}

    def budgets(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """How many drafts to ask for, before they are drawn. others: what else is in the forward."""
        most = max((candidate.most for candidate in candidates), default=0)
        if not most or self._per_depth * most < CHEAP * self.costs.seconds(1, candidates[0].share[1]):
            return [candidate.most for candidate in candidates]
        drafts = self._allocated(candidates, others, [self._expected(candidate) for candidate in candidates])
        for i, candidate in enumerate(candidates):
            standing = self._standing(candidate.request_id)
            standing.idle = 0 if drafts[i] else standing.idle + 1
            if standing.idle >= PROBE_AFTER and candidate.most:
                standing.idle, drafts[i] = 0, 1
        return drafts

    def lengths(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """How many of the drafts to verify, now that they are there. What was sampled is verified whole."""
        if self.listener is None and not any(c.proposal is not None and len(c.proposal) for c in candidates):
            return [0] * len(candidates)
        lengths = self._allocated(candidates, others, [self._drafted(candidate) for candidate in candidates])
        self._told = False
        # Whatever a drafter says of its sources: what was sampled, or asked for by number, is never cut.
        return [len(c.proposal or ()) if _is_whole(c) else n for c, n in zip(candidates, lengths, strict=True)]

    def observe_forward(self, shares: Sequence[Share], seconds: float) -> None:
        """A forward of the target took `seconds`."""
        self.costs.observe(shares, seconds)

    def observe_step(self, depth: int, drafting: float, rest: float) -> None:
        """A step took `drafting` seconds for `depth` drafts behind one another, and `rest` for all but the forward."""
        if depth:
            self._per_depth = _learned(self._per_depth, drafting / depth)
        self._rest = _learned(self._rest, rest)

    def observe(self, candidate: Candidate, position: int, taken: Sequence[int], accepted: int, verified: int) -> None:
        """A step's outcome: `taken` tokens from `position` on, `accepted` of the `verified` first drafts kept."""
        standing, proposal = self._standing(candidate.request_id), candidate.proposal
        if proposal is not None and len(proposal):
            standing.source = _place(_sources(proposal, candidate.name), len(proposal) - 1)[0]
        if proposal is not None and proposal.kind == "sampled":
            for i in range(min(accepted + 1, verified)):
                source, place = _place(_sources(proposal, candidate.name), i)
                self._estimate(standing, source).observe(place, i < accepted)
        elif proposal is not None and len(proposal):
            standing.watched.append(_Watched(position, proposal.tokens, _sources(proposal, candidate.name)))
            del standing.watched[:-WATCHED]
        standing.watched = [w for w in standing.watched if self._compare(standing, w, position, taken)]

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._standings.pop(request_id, None)

    # --- beliefs ------------------------------------------------------------------------------------

    def _standing(self, request_id: int) -> _Standing:
        return self._standings.setdefault(request_id, _Standing())

    def _estimate(self, standing: _Standing, source: str) -> Acceptance:
        if source not in standing.estimates:
            pool = self._pool.setdefault(source, Acceptance())
            standing.estimates[source] = Acceptance(REQUEST_MEMORY, pool)
        return standing.estimates[source]

    def _compare(self, standing: _Standing, watched: _Watched, position: int, taken: Sequence[int]) -> bool:
        """Judge a proposal by the tokens that came; whether it can still be judged further."""
        for k, token in enumerate(taken):
            i = position + k - watched.position
            if i >= len(watched.tokens):
                return False
            source, place = _place(watched.sources, i)
            kept = watched.tokens[i] == token
            self._estimate(standing, source).observe(place, kept)
            if not kept:
                return False
        return position + len(taken) - watched.position < len(watched.tokens)

    def _chances(self, candidate: Candidate, sources: Iterable[tuple[str, int]]) -> list[float]:
        standing = self._standing(candidate.request_id)
        single = [self._estimate(standing, source).at(i) for source, size in sources for i in range(size)]
        return list(accumulate(single[: candidate.most], mul))

    def _expected(self, candidate: Candidate) -> Ask:
        """Of drafts that have not been drawn."""
        source = self._standing(candidate.request_id).source or candidate.name
        chances = self._chances(candidate, [(source, candidate.most)])
        if candidate.fixed:
            return _settled(candidate, chances)
        return Ask(candidate.share, 1.0, chances, [self._per_depth * n for n in range(1, len(chances) + 1)])

    def _drafted(self, candidate: Candidate) -> Ask:
        """Of drafts that are there."""
        proposal = candidate.proposal
        if proposal is None or not len(proposal):
            return Ask(candidate.share)
        chances = self._chances(candidate, _sources(proposal, candidate.name))[: len(proposal)]
        return _settled(candidate, chances) if _is_whole(candidate) else Ask(candidate.share, 1.0, chances)

    def _allocated(self, candidates: Sequence[Candidate], others: Sequence[Share], asks: list[Ask]) -> list[int]:
        plan = allocate(asks, self.costs, others, self._rest)
        if self.listener is not None and candidates and not self._told:
            self._told = True
            self.listener(self._reasons(candidates, asks, plan))
        # One that is settled has nothing left to allocate: all its tokens are in its share.
        return [n or ask.share[0] - c.share[0] for c, ask, n in zip(candidates, asks, plan.drafts, strict=True)]

    def _reasons(self, candidates: Sequence[Candidate], asks: list[Ask], plan: Plan) -> str:
        """A step's decision as text: what it expects, and of what chances."""
        lines = [
            f"{sum(plan.drafts)} drafts: {_rate(plan.tokens, plan.seconds)}; without: "
            f"{_rate(plan.plain_tokens, plan.plain_seconds)}"
        ]
        for candidate, ask, n in zip(candidates, asks, plan.drafts, strict=True):
            sources = _sources(candidate.proposal, candidate.name) if candidate.proposal is not None else ()
            chances = " ".join(f"{chance:.2f}" for chance in ask.chances)
            names = "+".join(source for source, size in sources if size) or candidate.name
            lines.append(
                f"  request {candidate.request_id}: {n} of {len(ask.chances)} from {names}, chances {chances or '-'}"
            )
        return "\n".join(lines)


def _learned(known: float, seen: float) -> float:
    """A duration after one more was seen: interruptions hardly count, and whatever came first is soon forgotten."""
    if not known:
        return seen
    return known + (FALL if seen < known else RATE) * (min(seen, 2.0 * known) - known)


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens:.2f} tokens in {seconds * 1e3:.1f} ms, {tokens / seconds:.0f} a second"


def _is_whole(candidate: Candidate) -> bool:
    """Whether all that was drafted is verified, whatever it costs."""
    return candidate.fixed or (candidate.proposal is not None and candidate.proposal.kind == "sampled")


def _settled(candidate: Candidate, chances: Sequence[float]) -> Ask:
    """Drafts that are verified in any case, all of them."""
    tokens, cached = candidate.share
    return Ask((tokens + len(chances), cached), 1.0 + sum(chances))


def _sources(proposal: Proposal, name: str) -> tuple[tuple[str, int], ...]:
    """Whose drafts they are, in order; the drafter's own where it does not say."""
    return proposal.sources or ((name, len(proposal)),)


def _place(sources: Sequence[tuple[str, int]], i: int) -> tuple[str, int]:
    """The source of draft i, and its position among that source's drafts."""
    for source, size in sources:
        if i < size:
            return source, i
        i -= size
    return sources[-1][0], i + sources[-1][1]
