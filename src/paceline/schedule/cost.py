"""What a target forward costs on this machine: a measured table, refined while it is used.

A table and not a line, because the curve has cliffs: kernels change with the number of tokens, and a forward of one
token can be dearer than one of two.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, Self

import numpy as np

from ..errors import InvalidInput
from ..types import Backend, FloatArray, Segment

__all__ = ["CostTable", "Share"]

Share = tuple[int, int]
"""One sequence's part of a forward: new tokens, and tokens cached before them."""

WIDTHS = (1, 5, 2, 8, 16, 3, 4, 32, 6, 12, 24, 64)  # in the order in which they are measured
CONTEXTS = (64, 512)
SEQUENCES = 4  # at once, when the cost of a further sequence is measured
DRIFT_RATE = 0.1  # of the machine as a whole, which cancels wherever widths are compared
WIDTH_RATE = 0.03  # of one width against the others
FURTHER = 4  # tokens over which the context's part in a further one is taken
CROWD_MEMORY = 0.98
CROWD_WEIGHT = 0.1  # of the table against what crowds show: one step that drafts have made a third as long again
STEEPEST = 4.0


class _Crowd:
    """What forwards of about so many sequences showed of tokens beyond the first of each."""

    def __init__(self) -> None:
        self._sequences, self._table, self._seconds = 0, 0.0, 0.0  # of the last forward
        self._products = self._squares = CROWD_WEIGHT

    @property
    def steepness(self) -> float:
        """How often as dear they are as the table says."""
        return min(max(self._products / self._squares, 1.0 / STEEPEST), STEEPEST)

    def observe(self, sequences: int, table: float, seconds: float) -> None:
        """A forward took `seconds` where the table alone says `table`, both in forwards of one token for each sequence.

        Compared with the last one of as many sequences: what the machine is busy with and contexts move both alike.
        """
        if sequences == self._sequences:
            expected, seen = table - self._table, seconds - self._seconds
            most = 1.0 + STEEPEST * abs(expected)  # what is beyond it is an interruption
            seen = min(max(seen, -most), most)
            self._products = CROWD_MEMORY * self._products + (1 - CROWD_MEMORY) * CROWD_WEIGHT + expected * seen
            self._squares = CROWD_MEMORY * self._squares + (1 - CROWD_MEMORY) * CROWD_WEIGHT + expected * expected
        self._sequences, self._table, self._seconds = sequences, table, seconds


class CostTable:
    """Seconds of one forward, by new tokens and by context.

    widths: new tokens, ascending. contexts: cached tokens, ascending. table: seconds, float64[contexts, widths], of one
    sequence alone. per_sequence: seconds that each further sequence adds to a forward of the same number of tokens.

    Between entries it is linear, and so it is beyond them, but never falls there. Raises InvalidInput for a table of
    another shape, or with entries that are no durations.
    """

    def __init__(self, widths: Sequence[int], contexts: Sequence[int], table: Any, per_sequence: float = 0.0) -> None:
        self.widths = np.array(widths, dtype=np.int64)
        self.contexts = np.array(contexts, dtype=np.int64)
        self.table: FloatArray = np.array(table, dtype=np.float64)
        self.per_sequence = float(per_sequence)
        for name, values in (("widths", self.widths), ("contexts", self.contexts)):
            if values.ndim != 1 or not values.size or (np.diff(values) <= 0).any() or values[0] < 0:
                raise InvalidInput(f"{name} = {values.tolist()}; a cost table needs them ascending")
        durations = (self.table > 0) & (self.table < np.inf)
        if self.table.shape != (self.contexts.size, self.widths.size) or not durations.all():
            raise InvalidInput(
                f"a cost table of {self.contexts.size} contexts and {self.widths.size} widths needs as many durations "
                f"above 0, got shape {self.table.shape}"
            )
        if not 0.0 <= self.per_sequence < np.inf:
            raise InvalidInput(f"per_sequence = {per_sequence}; a cost table needs a duration")
        self._drift = 1.0
        self._factors = [1.0] * self.widths.size
        self._crowds: dict[int, _Crowd] = {}  # by the bits of how many sequences
        # Plain lists: a step asks for a few numbers, and numpy would take longer over them than the decision is worth.
        self._known: list[int] = self.widths.tolist()
        self._least: list[float] = self.table[0].tolist()
        self._growth: list[list[float]] = (self.table - self.table[0]).T.tolist()  # by width, then context
        self._behind: list[int] = self.contexts.tolist()

    def seconds(self, new_tokens: int, context: int) -> float:
        """One forward of one sequence."""
        return self.curve([(new_tokens, context)], 0)[0]

    def step_seconds(self, shares: Sequence[Share]) -> float:
        """One forward of several sequences together."""
        return self.curve(shares, 0)[0]

    def curve(self, shares: Sequence[Share], most: int, others: Sequence[Share] = ()) -> list[float]:
        """most + 1 durations: the forward of `shares`, with 0, 1, ... further tokens in it, whosever they are.

        A further token pays for the mean of the sequences' contexts; of several sequences it is as much dearer as was
        seen. others: what else is read by the same forward. Its own time is left out, but a further token costs what it
        adds to a forward that is as wide as both together.
        """
        first, steep = self._forward(shares)
        total = sum(width for width, _ in shares) + sum(width for width, _ in others)
        context = sum(cached for _, cached in shares) // max(len(shares), 1)
        each = max(self._context(1 + FURTHER, context) - self._context(1, context), 0.0) / FURTHER if most else 0.0
        least = self._tokens(total)
        return [
            max(first + steep * (self._tokens(total + n) - least + each * n), 1e-9) * self._drift
            for n in range(most + 1)
        ]

    def observe(self, shares: Sequence[Share], seconds: float) -> None:
        """A forward of these shares and of nothing else took `seconds`.

        The shares are decoding sequences': prompts have no rows of logits, and would teach what drafts do not cost.
        What a forward took beyond all measure says nothing of the next one.
        """
        count, total = len(shares), sum(width for width, _ in shares)
        surprise = min(max(seconds / self.step_seconds(shares), 0.5), 2.0)
        if count > 1:
            narrow, table = self._alone([(1, cached) for _, cached in shares]), self._alone(shares)
            crowd = self._crowds.setdefault(count.bit_length(), _Crowd())
            crowd.observe(count, table / narrow, seconds / (narrow * self._drift))
        self._drift = max(self._drift * (1.0 + DRIFT_RATE * (surprise - 1.0)), 1e-9)
        i = bisect_left(self._known, total)
        # Of the first width there is nothing to learn but the drift: what both claimed would be lost to the others.
        if count == 1 and 0 < i < len(self._known) and self._known[i] == total:
            self._factors[i] *= 1.0 + WIDTH_RATE * (surprise - 1.0)

    def _forward(self, shares: Sequence[Share]) -> tuple[float, float]:
        """Seconds of a forward, drift left out, and how often as dear as the table says further tokens are in it."""
        table = self._alone(shares)
        crowd = self._crowds.get(len(shares).bit_length()) if len(shares) > 1 else None
        if crowd is None:
            return table, 1.0
        narrow = self._alone([(1, cached) for _, cached in shares])
        return max(narrow + crowd.steepness * (table - narrow), 1e-9), crowd.steepness

    def _alone(self, shares: Sequence[Share]) -> float:
        """By the table alone: the tokens cost together what one sequence's would, and each pays for its own context."""
        tokens = self._tokens(sum(width for width, _ in shares))
        return tokens + self.per_sequence * max(len(shares) - 1, 0) + sum(self._context(*share) for share in shares)

    def _tokens(self, width: int) -> float:
        """Seconds of `width` tokens behind the least context."""
        i, share = _place(self._known, width)
        low = self._least[i] * self._factors[i]
        if share == 0.0:
            return low
        rise = self._least[i + 1] * self._factors[i + 1] - low
        return low + (max(rise, 0.0) if share > 1.0 else rise) * share

    def _context(self, width: int, context: int) -> float:
        """What a context adds to one sequence's tokens."""
        if len(self._behind) == 1:
            return 0.0
        i, share = _place(self._known, width)
        j, farther = _place(self._behind, context)
        low = _between(self._growth[i], j, farther)
        added = low if share == 0.0 else low + (_between(self._growth[i + 1], j, farther) - low) * share
        return max(added, 0.0)

    # --- measuring ----------------------------------------------------------------------------------

    @classmethod
    def measure(
        cls,
        backend: Backend,
        *,
        budget_seconds: float = 2.0,
        progress: Callable[[float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> Self:
        """Time forwards of `backend`, which nobody else uses meanwhile, for about budget_seconds.

        progress(share of the budget spent) follows. A slow model gets a coarser table: widths in the order of WIDTHS
        as far as time allows, at least the first two.
        """
        return cls(*_Measurement(backend, budget_seconds, progress or (lambda share: None), clock).run())

    def fits(self, backend: Backend, *, clock: Callable[[], float] = perf_counter) -> bool:
        """Whether a wide forward of `backend` is as much dearer than a narrow one as the table says, up to a third."""
        check = _Measurement(backend, 1e9, lambda share: None, clock)
        slot = backend.acquire()
        try:
            context = check.contexts[0]
            check.fill(slot, context)
            narrow, wide = 1, max(width for width in check.widths if width <= 8)
            times = [[check.forward(slot, width) for width in (narrow, wide)] for _ in range(4)]
        finally:
            backend.release(slot)
        now = median(b for _, b in times[1:]) / median(a for a, _ in times[1:])
        return 0.67 < now * self.seconds(narrow, context) / self.seconds(wide, context) < 1.5

    def to_json(self) -> str:
        """Everything that was measured; refinements are not kept."""
        return json.dumps(
            {
                "widths": self.widths.tolist(),
                "contexts": self.contexts.tolist(),
                "seconds": self.table.tolist(),
                "per_sequence": self.per_sequence,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The table that to_json() wrote. Raises InvalidInput where it is something else."""
        try:
            data = json.loads(text)
            return cls(data["widths"], data["contexts"], data["seconds"], data["per_sequence"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"not a cost table ({type(error).__name__}: {error})") from None


class _Measurement:
    """One run of CostTable.measure."""

    def __init__(
        self, backend: Backend, budget: float, progress: Callable[[float], None], clock: Callable[[], float]
    ) -> None:
        info = backend.info
        self.backend, self.clock, self.progress = backend, clock, progress
        self.budget, self.started = budget, clock()
        room = min(info.max_len, info.kv_tokens) - 1
        widest = max(min(info.max_step_tokens, room // 2), 1)
        self.widths = [width for width in WIDTHS if width <= widest]
        self.contexts = [context for context in CONTEXTS if context + max(self.widths) <= room] or [1]
        self.vocab_size = info.vocab_size

    def run(self) -> tuple[list[int], list[int], list[list[float]], float]:
        """The arguments of CostTable."""
        slot = self.backend.acquire()
        try:
            least, *more = self.contexts
            self.fill(slot, least)
            # Half the time for the first context, whose widths matter most; then a few of them farther on.
            first = self._rounds(slot, self.widths, 0.5 if more else 0.9)
            widths = sorted(first)
            table = [[first[width] for width in widths]]
            per_sequence = self._per_sequence(slot, first)
            for context in more:
                if self._spent() > 0.7:
                    break
                self.fill(slot, context)
                few = [width for width in WIDTHS[:4] if width in first]
                farther = self._rounds(slot, few, 0.95)
                added = [farther[width] - first[width] for width in sorted(farther)]
                growth = [_between(added, *_place(sorted(farther), width)) for width in widths]
                table.append([at_first + max(more, 0.0) for at_first, more in zip(table[0], growth, strict=True)])
            return widths, self.contexts[: len(table)], table, per_sequence
        finally:
            self.backend.release(slot)

    def _rounds(self, slot: int, widths: Sequence[int], until: float) -> dict[int, float]:
        """Median seconds by width, of as many rounds as fit: interleaved, so that a busy moment hurts all alike."""
        times: dict[int, list[float]] = {}
        for n in count():
            for width in widths:
                if self._spent() > until and (n or len(times) >= 2):
                    return {width: median(some) for width, some in times.items()}
                self.forward(slot, 1)  # what a forward finds in the caches is what a step left there
                times.setdefault(width, []).append(self.forward(slot, width))
                self.progress(min(self._spent(), 1.0))
            if n == 30:
                return {width: median(some) for width, some in times.items()}
        raise AssertionError("count() has no end")

    def _per_sequence(self, slot: int, alone: dict[int, float]) -> float:
        """What each of several sequences adds, one token each."""
        most = min(SEQUENCES, self.backend.info.max_slots, max(alone))
        context = self.backend.length(slot)
        if most < 2 or most not in alone or (most + 1) * (context + 1) > self.backend.info.kv_tokens:
            return 0.0
        forks = [self.backend.fork(slot) for _ in range(most - 1)]
        try:
            batch = [Segment(one, (self._token(context),), context, 1) for one in (slot, *forks)]
            times = []
            for _ in range(3):
                start = self.clock()
                self.backend.forward(batch)
                times.append(self.clock() - start)
                for one in (slot, *forks):
                    self.backend.truncate(one, context)
            return max(median(times) - alone[most], 0.0) / (most - 1)
        finally:
            for one in forks:
                self.backend.release(one)

    def forward(self, slot: int, width: int) -> float:
        """Seconds of one forward of `width` tokens, which are forgotten again."""
        start = self.backend.length(slot)
        tokens = tuple(self._token(start + i) for i in range(width))
        before = self.clock()
        self.backend.forward([Segment(slot, tokens, start, width)])
        seconds = self.clock() - before
        self.backend.truncate(slot, start)
        return max(seconds, 1e-9)

    def fill(self, slot: int, context: int) -> None:
        """Bring the slot to `context` tokens."""
        chunk = max(self.backend.info.max_step_tokens // 2, 1)
        while (start := self.backend.length(slot)) < context:
            tokens = tuple(self._token(i) for i in range(start, min(start + chunk, context)))
            self.backend.forward([Segment(slot, tokens, start, 0)])

    def _token(self, position: int) -> int:
        """Any text will do; the same token over and over might be a special case to a kernel."""
        return (position * 7919) % self.vocab_size

    def _spent(self) -> float:
        """Share of the budget."""
        return (self.clock() - self.started) / self.budget


def _place(known: list[int], x: int) -> tuple[int, float]:
    """Where x lies among ascending numbers: behind the i-th, by a share of the way to the next, which may be over 1."""
    if len(known) == 1:
        return 0, 0.0
    i = min(max(bisect_right(known, x) - 1, 0), len(known) - 2)
    return i, (x - known[i]) / (known[i + 1] - known[i])


def _between(values: list[float], i: int, share: float) -> float:
    return values[i] if share == 0.0 else values[i] + (values[i + 1] - values[i]) * share
