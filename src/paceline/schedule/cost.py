"""What a target forward costs on this machine: a measured table, refined while it is used.

A table and not a line, because the curve has cliffs: kernels change with the number of tokens, and a forward of one
token can be dearer than one of two.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from statistics import fmean, linear_regression, median
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
STEEPEST = 4.0
MEMORY = 0.98  # of what forwards showed, at the next one that shows something
PRIOR_WEIGHT = 0.1  # of the table against that: one step that drafts have made a third as long again
ALIKE = 0.01  # two forwards whose prices differ by less, in forwards of one token each, show nothing


class Steepness:
    """How dear tokens beyond each sequence's first are, against the table, in forwards of about as many sequences."""

    def __init__(self) -> None:
        self._sequences, self._table, self._seconds = 0, 0.0, 0.0  # of the last forward
        self._products = self._squares = PRIOR_WEIGHT

    @property
    def value(self) -> float:
        """1 where they cost what the table says."""
        return min(max(self._products / self._squares, 1.0 / STEEPEST), STEEPEST)

    def observe(self, sequences: int, table: float, seconds: float) -> None:
        """A forward took `seconds` where the table says `table`, both in forwards of one token for each sequence.

        Compared with the last one of as many sequences: what the machine is busy with and contexts move both alike.
        Plain forwards one after the other let fade what was seen, so that drafts are tried again.
        """
        expected, seen = table - self._table, seconds - self._seconds
        if sequences == self._sequences and (abs(expected) > ALIKE or table <= 1.0):
            most = STEEPEST * abs(expected)  # what is beyond it is an interruption
            seen = min(max(seen, -most), most)
            self._products = MEMORY * self._products + (1 - MEMORY) * PRIOR_WEIGHT + expected * seen
            self._squares = MEMORY * self._squares + (1 - MEMORY) * PRIOR_WEIGHT + expected * expected
        self._sequences, self._table, self._seconds = sequences, table, seconds


class CostTable:
    """Seconds of one forward, by new tokens and by context.

    widths: new tokens, ascending. contexts: cached tokens, ascending. table: seconds, float64[contexts, widths], of one
    sequence alone. per_sequence: seconds that each further sequence adds to a forward of the same number of tokens.

    Behind the least context, and behind less than that, a width costs its entry; between entries it is linear, and so
    it is beyond them, but never falls there. What a farther context adds is linear in the width: so much for the first
    token and so much for each further one, never less than behind a nearer one. Raises InvalidInput for a table of
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
        self._steepness: dict[int, Steepness] = {}  # by the bits of how many sequences
        growth = self.table - self.table[0]
        each = np.maximum(growth[:, -1] - growth[:, 0], 0.0) / max(self.widths[-1] - self.widths[0], 1)
        # Plain lists: a step asks for a few numbers, and numpy would take longer over them than the decision is worth.
        self._known: list[int] = self.widths.tolist()
        self._least: list[float] = self.table[0].tolist()
        self._behind: list[int] = self.contexts.tolist()
        first = np.maximum(growth[:, 0] - each * (self.widths[0] - 1), 0.0)
        self._first: list[float] = np.maximum.accumulate(first).tolist()
        self._further: list[float] = np.maximum.accumulate(each).tolist()

    def seconds(self, new_tokens: int, context: int) -> float:
        """One forward of one sequence."""
        return self.curve([(new_tokens, context)], 0)[0]

    def step_seconds(self, shares: Sequence[Share]) -> float:
        """One forward of several sequences together."""
        return self.curve(shares, 0)[0]

    def curve(self, shares: Sequence[Share], most: int, others: Sequence[Share] = ()) -> list[float]:
        """most + 1 durations: the forward of `shares`, with 0, 1, ... further tokens in it, whosever they are.

        A further token pays for the mean of the sequences' contexts, and is as much dearer than measured as was seen of
        so many sequences. others: what else is read by the same forward. Its own time is left out, but a further token
        costs what it adds to a forward that is as wide as both together.
        """
        table = self._alone(shares)
        narrow = self._narrow(shares) if any(width > 1 for width, _ in shares) else table
        known = self._steepness.get(len(shares).bit_length())
        steep = 1.0 if known is None else known.value
        first = narrow + steep * (table - narrow)
        total = sum(width for width, _ in shares) + sum(width for width, _ in others)
        context = sum(cached for _, cached in shares) // max(len(shares), 1)
        each = self._context(2, context) - self._context(1, context) if most else 0.0
        least = self._tokens(total)
        return [
            max(first + steep * (self._tokens(total + n) - least + each * n), 1e-9) * self._drift
            for n in range(most + 1)
        ]

    def observe(self, shares: Sequence[Share], seconds: float) -> None:
        """A forward of these shares and of nothing else took `seconds`.

        They are of sequences that decode: what others take, most of whose tokens have no logits, is not what drafts
        cost. What a forward took beyond all measure says nothing of the next one.
        """
        table, narrow = self._alone(shares), self._narrow(shares)
        known = self._steepness.setdefault(len(shares).bit_length(), Steepness())
        expected = max(narrow + known.value * (table - narrow), 1e-9)
        surprise = min(max(seconds / (expected * self._drift), 0.5), 2.0)
        known.observe(len(shares), table / narrow, seconds / (narrow * self._drift))
        self._drift = max(self._drift * (1.0 + DRIFT_RATE * (surprise - 1.0)), 1e-9)

    def _alone(self, shares: Sequence[Share]) -> float:
        """By the table alone: the tokens cost together what one sequence's would, and each pays for its own context."""
        tokens = self._tokens(sum(width for width, _ in shares))
        return tokens + self.per_sequence * max(len(shares) - 1, 0) + sum(self._context(*share) for share in shares)

    def _narrow(self, shares: Sequence[Share]) -> float:
        """The same with one token for each."""
        return self._alone([(1, cached) for _, cached in shares])

    def _tokens(self, width: int) -> float:
        """Seconds of `width` tokens behind the least context."""
        i, share = _place(self._known, width)
        low = self._least[i]
        if share == 0.0:
            return low
        rise = self._least[i + 1] - low
        return low + rise * (share if rise > 0.0 else min(share, 1.0))

    def _context(self, width: int, context: int) -> float:
        """What a context adds to one sequence's tokens."""
        if len(self._behind) == 1:
            return 0.0
        j, farther = _place(self._behind, context)
        first, further = _between(self._first, j, farther), _between(self._further, j, farther)
        return first + (width - 1) * further

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
                one, each = _line({width - 1: farther[width] - first[width] for width in farther})
                table.append([first[width] + one + each * (width - 1) for width in widths])
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


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Height at 0 and slope, neither below 0, of the line that goes best through x -> y."""
    slope, height = linear_regression(points.keys(), points.values()) if len(points) > 1 else (0.0, 0.0)
    return (max(height, 0.0), slope) if slope > 0.0 else (max(fmean(points.values()), 0.0), 0.0)


def _place(known: list[int], x: int) -> tuple[int, float]:
    """Where x lies among ascending numbers: behind the i-th, by a share of the way to the next, which may be over 1.

    What is before the first counts as the first.
    """
    if len(known) == 1:
        return 0, 0.0
    i = min(max(bisect_right(known, x) - 1, 0), len(known) - 2)
    return i, max((x - known[i]) / (known[i + 1] - known[i]), 0.0)


def _between(values: list[float], i: int, share: float) -> float:
    return values[i] if share == 0.0 else values[i] + (values[i + 1] - values[i]) * share
