"""The arithmetic of speculation: tokens per step, seconds per step, and where it breaks even.

Two ways to tokens per step. The formula for i.i.d. acceptance needs one number and is what textbooks draw. Walking
needs the record of real steps, asks of each place in the text how many drafts would have been kept there, and steps
over it again with another draft length. They differ: a step begins where the one before it failed, at hard places.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from ..errors import InvalidInput, InvalidParams
from ..schedule import CostTable

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SAMPLES = 256  # of the walked steps, which stand for those of a batch


# --- acceptance that is the same everywhere ----------------------------------------------------------


def iid_tokens(acceptance: float, length: int) -> float:
    """Expected tokens of a step with `length` drafts, each kept with the same chance if all before it were.

    (1 - a^(g+1)) / (1 - a), as the sum 1 + a + ... + a^g, which also holds at a = 1.
    Raises InvalidParams for an acceptance outside [0, 1] or a negative length.
    """
    if not 0 <= acceptance <= 1:
        raise InvalidParams(f"acceptance = {acceptance!r}; allowed: 0 to 1")
    if length < 0:
        raise InvalidParams(f"draft length = {length!r}; allowed: 0 or more")
    return sum(acceptance**i for i in range(length + 1))


def speedup(acceptance: float, length: int, cost_ratio: float) -> float:
    """Against plain decoding, where a draft costs `cost_ratio` of a target step and verifying costs one step.

    Raises InvalidParams for a negative cost ratio, and what iid_tokens refuses.
    """
    if not 0 <= cost_ratio < float("inf"):
        raise InvalidParams(f"cost ratio = {cost_ratio!r}; allowed: 0 or more")
    return iid_tokens(acceptance, length) / (length * cost_ratio + 1)


def best_length(acceptance: float, cost_ratio: float, most: int) -> int:
    """The draft length of 0 to `most` with the largest speedup, the shortest of equals."""
    return max(range(most + 1), key=lambda length: speedup(acceptance, length, cost_ratio))


def break_even_acceptance(length: int, cost_ratio: float) -> float | None:
    """The acceptance at which `length` drafts (1 or more) gain and lose nothing; None where even 1 is too little."""
    if speedup(1.0, length, cost_ratio) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(middle, length, cost_ratio) < 1 else (low, middle)
    return high


# --- acceptance as it was ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """A step of one request: drafts verified, drafts kept, tokens emitted (kept + 1, fewer where the answer ended)."""

    drafted: int
    kept: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Walked:
    """A step as it would have been: drafts verified, tokens emitted."""

    drafts: int
    tokens: int


def walk(records: Sequence[Record], asked: int, length: int) -> list[Walked]:
    """Step over a request's text again with `length` drafts a step. records: its steps with `asked` drafts, in order.

    Exact for length = asked; and for less, if what the drafter says depends on the text before alone, up to what the
    records do not show: what it would have drafted where a fully kept draft was followed by a bonus token. That counts
    as kept if the draft behind it was. Raises InvalidInput for a length above asked.
    """
    if not 0 <= length <= asked:
        raise InvalidInput(f"draft length = {length}; allowed: 0 to {asked}, with which the steps were recorded")
    kept, drafts = _places(records, asked)
    steps, place = [], 0
    while place < len(kept):
        verified = min(length, drafts[place])
        tokens = min(min(kept[place], verified) + 1, len(kept) - place)
        steps.append(Walked(verified, tokens))
        place += tokens
    return steps


def _places(records: Sequence[Record], asked: int) -> tuple[list[int], list[int]]:
    """For each place in the text: drafts that would be kept by a step from there, and drafts there would be."""
    kept: list[int] = []  # from the last place to the first
    drafts: list[int] = []
    for record in reversed(records):
        following = (kept[-1], drafts[-1]) if kept else (0, 0)
        here = (0, record.drafted - record.kept)
        behind = record.emitted > record.kept
        if behind and record.drafted and record.kept == record.drafted:
            # A bonus token, for which nothing had been drafted.
            guess = (following[0] + 1 if following[0] else 0, following[1] + 1)
            kept.append(guess[0])
            drafts.append(guess[1])
            here = guess if record.drafted == asked else (0, 0)
        elif behind:
            kept.append(0)
            drafts.append(here[1])
        for i in range(min(record.kept, record.emitted)):
            kept.append(here[0] + i + 1)
            drafts.append(here[1] + i + 1)
    return kept[::-1], drafts[::-1]


def tokens_per_step(steps: Sequence[Walked]) -> float:
    """Their mean; 0.0 of none."""
    return fmean(step.tokens for step in steps) if steps else 0.0


def mean_acceptance(records: Iterable[Record]) -> float:
    """Drafts kept, of those that were judged: kept, or the first one rejected. 0.0 where none was."""
    kept = judged = 0
    for record in records:
        kept += record.kept
        judged += record.kept + (record.kept < record.drafted)
    return kept / judged if judged else 0.0


def acceptance_by_position(records: Sequence[Record]) -> list[float]:
    """How often draft i was kept, given that all before it were; up to the last position that was ever judged."""
    rates: list[float] = []
    for i in range(max((record.drafted for record in records), default=0)):
        judged = [record.kept > i for record in records if record.drafted > i and record.kept >= i]
        if not judged:
            break
        rates.append(fmean(judged))
    return rates


def reach_by_position(records: Sequence[Record]) -> list[float]:
    """The share of all steps in which draft i was there and kept: 1 + the sum of the first g is their tokens a step.

    That of shorter drafts is more, for their steps begin elsewhere; see walk.
    """
    most = max((record.drafted for record in records), default=0)
    return [fmean(record.kept > i for record in records) for i in range(most)]


# --- seconds -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """A step that was measured. depth: the longest draft. tokens: emitted by all of the batch. Seconds by stage."""

    batch: int
    asked: int | None
    depth: int
    tokens: int
    forward: float
    drafting: float
    rest: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward + self.drafting + self.rest


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of a step beside the target's forward.

    drafting: (draft_step + draft_depth * depth) * (1 + draft_share * (batch - 1)), a share of 0 being requests that
    draft together at no cost, 1 one after the other. rest: rest_request * batch + rest_token * tokens.
    """

    draft_step: float = 0.0
    draft_depth: float = 0.0
    draft_share: float = 1.0
    rest_request: float = 0.0
    rest_token: float = 0.0

    def drafting(self, batch: int, depth: float) -> float:
        """Of a step in which somebody may draft."""
        return (self.draft_step + self.draft_depth * depth) * (1 + self.draft_share * (batch - 1))

    def rest(self, batch: int, tokens: float) -> float:
        """Scheduling, distributions, draws, bookkeeping, text."""
        return self.rest_request * batch + self.rest_token * tokens


def fit_overheads(steps: Sequence[Timed]) -> Overheads:
    """From measured steps, of which some are of one request; medians, so that a disturbed step does not matter."""
    alone = [step for step in steps if step.batch == 1]
    drafting = [step for step in alone if step.asked]
    step, depth = _line([(s.depth, s.drafting) for s in drafting])
    request, token = _line([(s.tokens, s.rest) for s in alone])
    single = Overheads(step, depth, 0.0, request, token)
    shares = []
    for batch in sorted({s.batch for s in steps if s.batch > 1 and s.asked}):
        times = [
            s.drafting / alone_seconds
            for s in steps
            if s.batch == batch and s.asked and (alone_seconds := single.drafting(1, s.depth)) > 0
        ]
        shares += [max(median(times) - 1, 0.0) / (batch - 1)] if times else []
    return Overheads(step, depth, fmean(shares) if shares else 1.0, request, token)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(at 0, slope), neither negative, through the medians of y at each x, weighted by how many there are."""
    if not points:
        return 0.0, 0.0
    groups: dict[float, list[float]] = {}
    for at, value in points:
        groups.setdefault(at, []).append(value)
    x, y = np.array(list(groups)), np.array([median(values) for values in groups.values()])
    weight = np.array([len(values) for values in groups.values()])
    middle_x, middle_y = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = float(np.sum(weight * (x - middle_x) ** 2))
    if not spread:  # one x only: what is proportional cannot be told from what is not
        return (0.0, float(middle_y / middle_x)) if middle_x else (float(middle_y), 0.0)
    slope = float(np.sum(weight * (x - middle_x) * (y - middle_y))) / spread
    if slope < 0:
        return float(middle_y), 0.0
    start = float(middle_y - slope * middle_x)
    if start < 0:
        return 0.0, float(np.sum(weight * x * y) / np.sum(weight * x * x))
    return start, slope


# --- speed -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a draft length is expected to do at a batch size.

    tokens_per_step: of one request. seconds: of a step. ratio: to plain decoding at the same batch size.
    beyond: what of "batch", "width" and "context" lies outside of what was measured.
    """

    length: int
    batch: int
    tokens_per_step: float
    seconds: float
    ratio: float
    beyond: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch, prompts left out."""
        return self.batch * self.tokens_per_step / self.seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """Everything that a prediction is made of.

    walks[g]: the steps with g drafts, of all prompts. context: tokens cached before a step, on average.
    measured_batch: the largest batch at which steps were timed.
    """

    costs: CostTable
    overheads: Overheads
    walks: Sequence[Sequence[Walked]]
    context: int
    measured_batch: int = 1

    @property
    def most(self) -> int:
        """The longest draft it knows of."""
        return len(self.walks) - 1

    def predict(self, length: int, batch: int) -> Prediction:
        """Tokens and seconds of a step. Raises InvalidInput for a length that was not walked."""
        if not 0 <= length <= self.most or not self.walks[length]:
            raise InvalidInput(f"draft length = {length}; allowed: 0 to {self.most}, of prompts that had an answer")
        tokens, seconds, widest = self._step(length, batch)
        ratio = 1.0
        if length:
            plain_tokens, plain_seconds, _ = self._step(0, batch)
            ratio = (tokens / seconds) / (plain_tokens / plain_seconds)
        limits = {
            "batch": batch > self.measured_batch,
            "width": widest > self.costs.widths[-1],
            "context": self.context > self.costs.contexts[-1],
        }
        return Prediction(length, batch, tokens, seconds, ratio, tuple(name for name, out in limits.items() if out))

    def _step(self, length: int, batch: int) -> tuple[float, float, int]:
        """Tokens of one request, seconds, and the most tokens in a forward.

        A batch's requests are at unrelated places: batches are drawn at random, the same ones every time.
        """
        steps = self.walks[length]
        tokens = tokens_per_step(steps)
        drafts = sorted(step.drafts for step in steps)
        number = max(SAMPLES // batch, 4)
        chosen = [drafts[(2 * i + 1) * len(drafts) // (2 * number * batch)] for i in range(number * batch)]
        random.Random(0).shuffle(chosen)
        batches = Counter(tuple(sorted(chosen[i::number])) for i in range(number))
        forward = sum(
            times * self.costs.step_seconds([(n + 1, self.context) for n in one]) for one, times in batches.items()
        )
        drafting = self.overheads.drafting(batch, _mean_of_largest(drafts, batch)) if length else 0.0
        widest = max(sum(one) + batch for one in batches)
        return tokens, forward / number + drafting + self.overheads.rest(batch, batch * tokens), widest

    def best(self, batch: int) -> Prediction:
        """The fastest draft length, 0 included; the shortest of equals."""
        return max((self.predict(length, batch) for length in range(self.most + 1)), key=lambda p: p.ratio)

    def break_even(self, length: int | None = None, most: int = BATCHES[-1]) -> int | None:
        """The smallest batch, up to `most`, at which `length` drafts no longer gain; None where they do throughout.

        length: None asks it of the best length at each batch size.
        """

        def loses(batch: int) -> bool:
            return (self.best(batch) if length is None else self.predict(length, batch)).ratio <= 1.0

        return first_true(loses, [batch for batch in BATCHES if batch <= most])


def _mean_of_largest(values: Sequence[int], number: int) -> float:
    """The expected largest of `number` independent draws from `values`, which ascend."""
    shares = np.arange(len(values) + 1) / len(values)
    return float(np.dot(np.diff(shares**number), values))


def first_true(holds: Callable[[int], bool], points: Sequence[int]) -> int | None:
    """The smallest whole number at which `holds`, looked for between the first of `points` at which it does and the
    one before that. None where it holds at none of them."""
    before = points[0] - 1
    for point in points:
        if holds(point):
            return next(n for n in range(before + 1, point + 1) if n == point or holds(n))
        before = point
    return None


def surface(cost_ratio: float, lengths: Sequence[int], acceptances: Sequence[float]) -> dict[str, Any]:
    """The map of speedup over acceptance and draft length, as a report holds it: speedups[length][acceptance]."""
    most = max(lengths)
    return {
        "cost_ratio": cost_ratio,
        "lengths": list(lengths),
        "acceptances": list(acceptances),
        "speedups": [[speedup(a, length, cost_ratio) for a in acceptances] for length in lengths],
        "break_even": [break_even_acceptance(length, cost_ratio) for length in lengths],
        "best": [best_length(a, cost_ratio, most) for a in acceptances],
    }
