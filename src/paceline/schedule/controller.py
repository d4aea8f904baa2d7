"""Decides draft lengths while requests run: what it measured, what it believes, and why it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from ..types import FORCED, Proposal
from .adaptive import MARGIN, PRIORS, REQUEST_MEMORY, Acceptance, Ask, Plan, allocate
from .cost import CostTable, Share

__all__ = ["MAX_DRAFTS", "Candidate", "Controller", "FixedLengths"]

MAX_DRAFTS = 16
"""Most drafts of one request in one step."""
CHEAP = 0.02  # share of a forward up to which drafting is as good as free
RATE, FALL = 0.1, 0.3  # of what is learned of a step's times, where they rise and where they fall
QUIET = 8  # steps without drafts behind which a request is asked about in every
SELDOM = 4  # of its steps only, where asking alone takes more than
BRIEF = 0.005  # of a forward
PLAIN_SEEN = 4  # one in so many forwards without drafts is compared with what it should have taken
FIRST = 4  # drafts of a drafter whose cost nobody knows yet
PROBE_AFTER = 32  # steps without drafts, then one draft of a drafter that costs time,
PROBE_SHARE = 0.02  # as long as that is all that such attempts take of the forwards' time,
PROBE_MEMORY = 0.9999  # of which so much is left at the next forward
HORIZON = 64  # steps that are to pay for what a drafter must read before its first draft
MOST_SOURCES = 256  # that are told apart: a drafter of one's own may say anything
WATCHED = 4  # proposals of one request whose tokens are compared with the text


@dataclass(slots=True)
class Candidate:
    """A decoding request in a step.

    share: (1, tokens cached). most: drafts it may have. fixed: whether the request says itself how many; it is then
    given them. proposal: what was drafted, once it was. drafter: who drafted it, and the source of its drafts where the
    proposal does not say. has_grammar: whether something may be forced, which no step should miss. greedy: whether its
    temperature is 0; drafts are kept more often then.
    """

    request_id: int
    share: Share
    most: int
    fixed: bool
    proposal: Proposal | None = None
    drafter: str = ""
    has_grammar: bool = False
    greedy: bool = False

    @property
    def has_guesses(self) -> bool:
        """Whether anything was drafted that is not forced."""
        return self.proposal is not None and self.proposal.num_guessed > 0

    @property
    def num_forced(self) -> int:
        """Drafts in front that are forced, where there are no others."""
        return 0 if self.proposal is None or self.has_guesses else len(self.proposal)


@dataclass(slots=True)
class _Watched:
    """A point proposal and where it stands: whether it is verified or not, the text will show how good it was."""

    position: int
    tokens: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Standing:
    """What is known of one request."""

    greedy: bool
    estimates: dict[str, Acceptance] = field(default_factory=dict)
    watched: list[_Watched] = field(default_factory=list)
    quiet: int = 0  # steps without verified drafts
    # By drafter:
    source: dict[str, str] = field(default_factory=dict)  # of its last drafts but forced ones: what to expect of more
    idle: dict[str, int] = field(default_factory=dict)  # steps in which it was not asked
    read: dict[str, int] = field(default_factory=dict)  # tokens that were cached when it was


class FixedLengths:
    """Everybody gets what they may have: the controller of engines that leave nothing to one."""

    def budgets(self, drafter: str, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """As many as each may have, of the first drafter that has any."""
        return [0 if candidate.has_guesses else candidate.most for candidate in candidates]

    def lengths(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """All that were drafted."""
        return [len(candidate.proposal or ()) for candidate in candidates]

    def observe_forward(self, shares: Sequence[Share], others: Sequence[Share], seconds: float) -> None:
        """Nothing to learn."""

    def observe_drafting(
        self, drafter: str, candidates: Sequence[Candidate], budgets: Sequence[int], seconds: float
    ) -> None:
        """Nothing to learn."""

    def observe_step(self, rest: float) -> None:
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
        # By drafter, and the bits of how many requests it was asked for: seconds of drafting in one step. By drafter:
        # seconds for each of the drafts behind one another, and for each token that was committed while it was not
        # asked and that it reads first; and seconds spent on probes.
        self._per_step: dict[tuple[str, int], float] = {}
        self._per_depth: dict[str, float] = {}
        self._per_read: dict[str, float] = {}
        self._for_nothing: dict[str, float] = {}  # its last call that brought no drafts
        self._probing: dict[str, float] = {}
        self._probed: set[str] = set()  # in this step
        self._warm: set[str] = set()  # whoever was asked before
        self._forwards = 0.0  # seconds of forwards
        self._plain = 0  # forwards of one token each
        self._pool: dict[tuple[str, bool], Acceptance] = {}  # by source, and whether drafts were judged greedily
        self._standings: dict[int, _Standing] = {}
        self._idle: dict[str, int] = {}  # by drafter, of requests that went since the last one came

    def budgets(self, drafter: str, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """How many drafts to ask `drafter` for, before they are drawn. others: what else is in the forward.

        A drafter that costs time is asked for whom it promises more than what others have drafted so far.
        """
        most = max((candidate.most for candidate in candidates), default=0)
        free = super().budgets(drafter, candidates, others)
        asking = self._asking(drafter, len(candidates))
        if not most or asking is None:
            # A drafter's first call teaches nothing (observe_drafting), so one draft will do.
            first = FIRST if drafter in self._warm else 1
            return [n if c.fixed else min(n, first) for c, n in zip(candidates, free, strict=True)]
        share = asking / self.costs.step_seconds([c.share for c in candidates])
        if share < BRIEF:
            return free
        if share < CHEAP:
            return [0 if self._rests(c) else n for c, n in zip(candidates, free, strict=True)]
        hoped = [self._hoped(drafter, candidate) for candidate in candidates]
        have = [h if c.fixed and n else self._drafted(c) for c, n, h in zip(candidates, free, hoped, strict=True)]
        # Whoever has drafts that were drawn keeps them, whatever they are.
        better = [
            sum(then.chances) > sum(now.chances) and not _is_drawn(c)
            for c, now, then in zip(candidates, have, hoped, strict=True)
        ]
        asks = [then if one else now for now, then, one in zip(have, hoped, better, strict=True)]
        without, plan = self._allocate(have, others), self._allocate(asks, others)
        pays = plan.rate > MARGIN * without.rate
        drafts = [
            n if pays and one and n > c.num_forced else 0
            for c, n, one in zip(candidates, plan.drafts, better, strict=True)
        ]
        if pays:
            self._tell(candidates, others, asks, plan, [drafter if one else None for one in better])
        probes = self._probes(drafter, candidates, [a or b for a, b in zip(drafts, without.drafts, strict=True)])
        return [n if c.fixed else d + p for c, n, d, p in zip(candidates, free, drafts, probes, strict=True)]

    def lengths(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """How many of the drafts to verify, now that they are there. What was sampled is verified whole."""
        if self.listener is None and not any(c.proposal is not None and len(c.proposal) for c in candidates):
            return [0] * len(candidates)
        asks = [self._drafted(candidate) for candidate in candidates]
        plan = self._allocate(asks, others)
        self._tell(candidates, others, asks, plan, [None] * len(asks))
        self._told = False
        # Whatever a drafter says of its sources: what was sampled, or asked for by number, is never cut.
        return [len(c.proposal or ()) if _is_whole(c) else n for c, n in zip(candidates, plan.drafts, strict=True)]

    def observe_forward(self, shares: Sequence[Share], others: Sequence[Share], seconds: float) -> None:
        """A forward of the target, of decoding sequences and `others`, took `seconds`."""
        self._forwards = self._forwards * PROBE_MEMORY + seconds
        for drafter in self._probing:
            self._probing[drafter] *= PROBE_MEMORY
        if others or not shares:
            return
        is_plain = sum(tokens for tokens, _ in shares) == len(shares)
        self._plain += is_plain
        if not is_plain or self._plain % PLAIN_SEEN == 1:
            self.costs.observe(shares, seconds)

    def observe_drafting(
        self, drafter: str, candidates: Sequence[Candidate], budgets: Sequence[int], seconds: float
    ) -> None:
        """`drafter` took `seconds` for the proposals that these candidates now have.

        Where it first had to read what was committed since it was last asked, that says nothing of its drafts.
        """
        asked = [candidate for candidate, budget in zip(candidates, budgets, strict=True) if budget]
        drafted = [c.proposal.num_guessed for c in asked if c.proposal is not None and c.drafter == drafter]
        depth = max(drafted, default=0)
        unread = sum(self._unread(drafter, candidate) for candidate in asked)
        for candidate in asked:
            self._standing(candidate).read[drafter] = candidate.share[1]
        if drafter in self._probed:
            self._probed.remove(drafter)
            self._probing[drafter] = self._probing.get(drafter, 0.0) + seconds
        if asked and drafter not in self._warm:
            # The very first call of all may take any time: it compiles, and reads weights from the disk.
            self._warm.add(drafter)
        elif depth and unread > len(asked) * (MAX_DRAFTS + 1):
            reading = max(seconds - self._per_depth.get(drafter, 0.0) * depth, 0.0)
            self._per_read[drafter] = _learned(self._per_read.get(drafter, 0.0), reading / unread)
        elif depth:
            self._learn_drafting(drafter, len(asked), len(candidates), seconds, depth)
        elif asked and not any(len(c.proposal or ()) for c in asked if c.drafter == drafter):
            # Had nothing: as good as wrong, and no cheaper.
            before, self._for_nothing[drafter] = self._for_nothing.get(drafter, 0.0), seconds
            if min(before, seconds) > self._per_step.get((drafter, len(asked).bit_length()), 0.0):
                self._learn_drafting(drafter, len(asked), len(candidates), min(before, seconds), 1)
                for candidate in asked:
                    self._estimate(self._standing(candidate), drafter).observe(0, kept=False)

    def _learn_drafting(self, drafter: str, asked: int, everybody: int, seconds: float, depth: int) -> None:
        key, whole = (drafter, asked.bit_length()), (drafter, everybody.bit_length())
        self._per_step[key] = _learned(self._per_step.get(key, 0.0), seconds)
        self._per_depth[drafter] = _learned(self._per_depth.get(drafter, 0.0), seconds / depth)
        if asked < everybody and whole in self._per_step:
            # All take at most as much for each: a slow first call, after which few are asked, is not believed for ever.
            self._per_step[whole] = min(self._per_step[whole], seconds * everybody / asked)

    def observe_step(self, rest: float) -> None:
        """All of a step but forward and drafting took `rest` seconds."""
        self._rest = _learned(self._rest, rest)

    def observe(self, candidate: Candidate, position: int, taken: Sequence[int], accepted: int, verified: int) -> None:
        """A step's outcome: `taken` tokens from `position` on, `accepted` of the `verified` first drafts kept."""
        standing, proposal = self._standing(candidate), candidate.proposal
        standing.quiet = 0 if verified else standing.quiet + 1
        if proposal is not None and proposal.tokens:
            sources = _sources(candidate)
            if candidate.has_guesses:
                standing.source[candidate.drafter] = _place(sources, len(proposal) - 1)[0]
            if proposal.kind == "sampled":
                for i in range(min(accepted + 1, verified)):
                    source, place = _place(sources, i)
                    self._estimate(standing, source).observe(place, i < accepted)
            else:
                standing.watched.append(_Watched(position, proposal.tokens, sources))
                del standing.watched[:-WATCHED]
        if standing.watched:
            standing.watched = [w for w in standing.watched if self._compare(standing, w, position, taken)]

    def forget(self, request_id: int) -> None:
        """The request is over, or waits. The next to come goes on counting idle steps, for answers may be short."""
        standing = self._standings.pop(request_id, None)
        for drafter, steps in standing.idle.items() if standing is not None else ():
            self._idle[drafter] = max(self._idle.get(drafter, 0), steps)

    def _asking(self, drafter: str, requests: int) -> float | None:
        """Seconds of a call for so many, or at least for fewer; None where nobody knows."""
        known = (self._per_step.get((drafter, bits)) for bits in range(requests.bit_length(), 0, -1))
        return next((seconds for seconds in known if seconds is not None), None)

    # --- beliefs ------------------------------------------------------------------------------------

    def _standing(self, candidate: Candidate) -> _Standing:
        known = self._standings.get(candidate.request_id)
        if known is None:
            known = self._standings[candidate.request_id] = _Standing(candidate.greedy, idle=self._idle)
            self._idle = {}
        return known

    def _estimate(self, standing: _Standing, source: str) -> Acceptance:
        known = standing.estimates.get(source)
        if known is None:
            is_new = (source, standing.greedy) not in self._pool and source not in PRIORS
            if is_new and source and len(self._pool) >= MOST_SOURCES:
                return self._estimate(standing, "")
            pool = self._pool.setdefault((source, standing.greedy), Acceptance(source=source))
            known = standing.estimates[source] = Acceptance(REQUEST_MEMORY, pool)
        return known

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
        standing, single = self._standing(candidate), list[float]()
        for source, size in sources:
            if (n := min(size, candidate.most - len(single))) > 0:
                single += self._estimate(standing, source).expected(n)
        return list(accumulate(single, mul))

    def _hoped(self, drafter: str, candidate: Candidate) -> Ask:
        """Of drafts that have not been drawn."""
        source = self._standing(candidate).source.get(drafter, drafter)
        forced = candidate.num_forced
        chances = self._chances(candidate, [(FORCED, forced), (source, max(candidate.most - forced, 0))])
        if candidate.fixed:
            return _settled(candidate, chances)
        first, each = self._to_read(drafter, candidate) / HORIZON, self._per_depth[drafter]
        seconds = [first + each * n for n in range(1, len(chances) - forced + 1)]
        return Ask(candidate.share, 1.0, chances, [0.0] * forced + seconds)

    def _rests(self, candidate: Candidate) -> bool:
        """Whether a request in which nothing was worth verifying for long need not be asked about in this step."""
        if candidate.fixed or candidate.has_grammar or candidate.share[1] % SELDOM == 0:
            return False
        return self._standing(candidate).quiet >= QUIET

    def _unread(self, drafter: str, candidate: Candidate) -> int:
        """Tokens that were committed since `drafter` was asked."""
        return candidate.share[1] - self._standing(candidate).read.get(drafter, 0)

    def _to_read(self, drafter: str, candidate: Candidate) -> float:
        """Seconds of reading before `drafter` can draft for it."""
        return self._per_read.get(drafter, 0.0) * self._unread(drafter, candidate)

    def _probes(self, drafter: str, candidates: Sequence[Candidate], drafts: list[int]) -> list[int]:
        """1 for each request for which `drafter` should be tried although it does not seem to pay, else 0.

        drafts: how many each has, of it or of others; whoever has some is not probed, and begins to count anew.
        """
        probes = [0] * len(candidates)
        left = PROBE_SHARE * self._forwards - self._probing.get(drafter, 0.0)
        for i, candidate in enumerate(candidates):
            idle = self._standing(candidate).idle
            idle[drafter] = 0 if drafts[i] or candidate.fixed else idle.get(drafter, 0) + 1
            cost = self._to_read(drafter, candidate) + self._per_depth[drafter]
            may = candidate.most and not _is_drawn(candidate)
            if idle[drafter] >= PROBE_AFTER and cost <= left and may:
                idle[drafter], probes[i], left = 0, 1, left - cost
                self._probed.add(drafter)
        return probes

    def _drafted(self, candidate: Candidate) -> Ask:
        """Of drafts that are there."""
        proposal = candidate.proposal
        if proposal is None or not len(proposal):
            return Ask(candidate.share)
        chances = self._chances(candidate, _sources(candidate))[: len(proposal)]
        return _settled(candidate, chances) if _is_whole(candidate) else Ask(candidate.share, 1.0, chances)

    def _allocate(self, asks: list[Ask], others: Sequence[Share]) -> Plan:
        return allocate(asks, self.costs, others, self._rest)

    def _tell(
        self,
        candidates: Sequence[Candidate],
        others: Sequence[Share],
        asks: list[Ask],
        plan: Plan,
        drafters: list[str | None],
    ) -> None:
        """The step's decision and its reasons, to whoever listens; once, where it is made in two parts the first.

        drafters: who is going to draft; None where somebody has.
        """
        if self.listener is None or not candidates or self._told:
            return
        self._told = True
        plain = self._allocate([Ask(candidate.share) for candidate in candidates], others)
        total, lines = 0, []
        for candidate, ask, n, drafter in zip(candidates, asks, plan.drafts, drafters, strict=True):
            settled = ask.share[0] - candidate.share[0]
            chances = " ".join(f"{chance:.2f}" for chance in ask.chances) or "-"
            how = f"{settled}, settled before," if settled else f"{n} of {len(ask.chances)}"
            what = "" if settled else f", chances {chances}"
            lines.append(f"  request {candidate.request_id}: {how} from {drafter or _names(candidate)}{what}")
            total += settled or n
        first = f"{total} draft{'' if total == 1 else 's'}: {_rate(plan.tokens, plan.seconds)}"
        self.listener("\n".join([f"{first}; without: {_rate(plain.tokens, plain.seconds)}", *lines]))


def _learned(known: float, seen: float) -> float:
    """A duration after one more was seen: interruptions hardly count, and whatever came first is soon forgotten."""
    if not known:
        return seen
    return known + (FALL if seen < known else RATE) * (min(seen, 2.0 * known) - known)


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens:.2f} tokens in {seconds * 1e3:.1f} ms, {tokens / seconds:.0f} a second"


def _is_drawn(candidate: Candidate) -> bool:
    """Whether its drafts were drawn: then what they are must not say what becomes of them."""
    return candidate.proposal is not None and candidate.proposal.kind == "sampled" and len(candidate.proposal) > 0


def _is_whole(candidate: Candidate) -> bool:
    """Whether all that was drafted is verified, whatever it costs."""
    return candidate.fixed or _is_drawn(candidate)


def _settled(candidate: Candidate, chances: Sequence[float]) -> Ask:
    """Drafts that are verified in any case, all of them."""
    tokens, cached = candidate.share
    return Ask((tokens + len(chances), cached), 1.0 + sum(chances))


def _sources(candidate: Candidate) -> tuple[tuple[str, int], ...]:
    """Whose drafts a candidate has, in order; its drafter's where the proposal does not say."""
    proposal = candidate.proposal
    assert proposal is not None
    return proposal.sources or ((candidate.drafter, len(proposal)),)


def _names(candidate: Candidate) -> str:
    """Whose drafts a candidate has, for people."""
    proposal = candidate.proposal
    sources = _sources(candidate) if proposal is not None else ()
    starts = accumulate((size for _, size in sources), initial=0)
    # The numbers may be of drafts that were cut since.
    names = [s for (s, size), start in zip(sources, starts, strict=False) if size and start < len(proposal or ())]
    return "+".join([*names[:2], "..."] if len(names) > 3 else names) or "nobody"


def _place(sources: Sequence[tuple[str, int]], i: int) -> tuple[str, int]:
    """The source of draft i, and its position among that source's drafts."""
    for source, size in sources:
        if i < size:
            return source, i
        i -= size
    return sources[-1][0], i + sources[-1][1]
