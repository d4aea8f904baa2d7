"""From runs to the lines of a comparison: speeds, paired ratios with their intervals, and what looks wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import Any

from ..errors import InvalidParams
from ..types import SpeculationStats
from .intervals import Estimate, estimate, pooled
from .runs import Run

MEAN = "mean"
"""The category of a line that is the mean over all categories, each with the same weight."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A contender in one category at one temperature and concurrency, against the baseline.

    tokens_per_second: all tokens / all seconds, prompts included; decode_...: without the prompts. ratio: geometric
    mean of the paired ratios of tokens_per_second, with its 95 % interval; None for the baseline itself. same_text:
    runs whose texts are all equal to the baseline's. disturbed: runs beside other load that even the guard's tries
    did not escape. acceptance_at[i]: accepted / drafted at draft position i. error: why a peer has no numbers.
    """

    temperature: float
    concurrency: int
    category: str
    contender: str
    runs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    tokens_per_step: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    acceptance_at: tuple[float, ...] = ()
    ratio: dict[str, float | int | None] | None = None
    decode_ratio: dict[str, float | int | None] | None = None
    same_text: int | None = None
    disturbed: int = 0
    preemptions: int = 0
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


Pairs = list[tuple[Run, Run]]


class Comparison:
    """All cells of runs that were made in turn. baseline: the contender that all others are compared with."""

    def __init__(self, runs: Sequence[Run], contenders: Sequence[str], baseline: str) -> None:
        if baseline not in contenders:
            raise InvalidParams(f"baseline = {baseline!r}; allowed: {', '.join(contenders)}")
        self.runs, self.contenders, self.baseline = runs, contenders, baseline
        self.cells: list[Cell] = []
        self.warnings: list[str] = []
        for concurrency, temperature in _ordered((r.concurrency, r.temperature) for r in runs):
            categories = self._categories(temperature, concurrency)
            for contender in contenders:
                self._row(temperature, concurrency, categories, contender)
        disturbed = sum(r.load is not None and r.load.disturbed for r in runs)
        if disturbed:
            self.warnings.append(f"{disturbed} of {len(runs)} runs were beside other load; their cells are marked *")

    def _categories(self, temperature: float, concurrency: int) -> list[str]:
        """Those in which everybody had a turn: all, but for the one in which a measurement was interrupted."""
        key = (temperature, concurrency)
        known = _ordered((r.category, r.contender) for r in self.runs if (r.temperature, r.concurrency) == key)
        # A peer that failed has no run behind its error; one that refused may have some, at other temperatures.
        last = {r.contender: r for r in self.runs}
        ended = [r for r in self.runs if r.error and (r is last[r.contender] or (r.temperature, r.concurrency) == key)]
        due = set(self.contenders) - {r.contender for r in ended}
        return [c for c in _ordered(category for category, _ in known) if all((c, name) in known for name in due)]

    def _row(self, temperature: float, concurrency: int, categories: Sequence[str], contender: str) -> None:
        """The cells of one contender in every category, and their mean."""
        cells, totals, decodes = [], [], []
        for category in categories:
            mine = self._of(temperature, concurrency, category, contender)
            pairs = _paired(mine, self._of(temperature, concurrency, category, self.baseline))
            total = None if contender == self.baseline else _ratio(pairs, lambda run: run.rate)
            decode = None if contender == self.baseline else _ratio(pairs, lambda run: run.decode_rate)
            cell = _cell(temperature, concurrency, category, contender, mine, pairs, total, decode)
            cells.append(cell)
            totals.append(total)
            decodes.append(decode)
            self._judge(cell, pairs, total if decode is None else decode)
        self.cells += cells
        if len(categories) > 1:
            self.cells.append(_mean(cells, _pooled(totals), _pooled(decodes)))

    def _of(self, temperature: float, concurrency: int, category: str, contender: str) -> list[Run]:
        key = (temperature, concurrency, category, contender)
        return [r for r in self.runs if (r.temperature, r.concurrency, r.category, r.contender) == key]

    def _judge(self, cell: Cell, pairs: Pairs, ratio: Estimate | None) -> None:
        where = f"{cell.contender}, {cell.category}, temperature {cell.temperature:g}, {cell.concurrency} at once"
        if cell.error:
            self.warnings.append(f"{where}: {cell.error}")
        if cell.preemptions:
            self.warnings.append(f"{where}: {cell.preemptions} preemptions; give it more --kv-tokens")
        if cell.temperature == 0 and cell.concurrency == 1 and len(pairs) > 1 and cell.same_text == 0:
            self.warnings.append(
                f"{where}: none of its {len(pairs)} texts is that of {self.baseline}; "
                "see whether it answers the same prompt"
            )
        if self.baseline == "plain" and ratio is not None:
            explained = _ratio(pairs, lambda run: run.decode_rate or run.rate, by_steps=True)
            if explained is not None and explained.low is not None and explained.low > 1:
                self.warnings.append(
                    f"{where}: {ratio.ratio:.2f} times as fast at {cell.tokens_per_step:.2f} tokens per step, which do "
                    "not explain it; look for something unequal (other load, a slow path for single tokens)"
                )


def _ordered(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _paired(mine: Sequence[Run], theirs: Sequence[Run]) -> Pairs:
    """(mine, theirs) of the same unit and repeat, where both have results."""
    others = {(r.unit, r.repeat): r for r in theirs if r.results}
    return [(r, others[r.unit, r.repeat]) for r in mine if r.results and (r.unit, r.repeat) in others]


def _ratio(pairs: Pairs, rate: Callable[[Run], float | None], *, by_steps: bool = False) -> Estimate | None:
    """Mean of the paired ratios; by_steps: each over its own tokens per step. Pairs without tokens have none."""
    ratios: dict[int, list[float]] = {}
    for mine, theirs in pairs:
        above, below = rate(mine), rate(theirs)
        if not above or not below:
            continue
        ratio = above / below
        if by_steps:
            stats = mine.stats
            if stats is None or stats.tokens_per_step <= 0:
                return None
            ratio /= stats.tokens_per_step
        ratios.setdefault(mine.unit, []).append(ratio)
    return estimate(ratios)


def _pooled(parts: Sequence[Estimate | None]) -> Estimate | None:
    known = [part for part in parts if part is not None]
    return pooled(known) if len(known) == len(parts) else None


def _cell(
    temperature: float,
    concurrency: int,
    category: str,
    contender: str,
    runs: Sequence[Run],
    pairs: Pairs,
    total: Estimate | None,
    decode: Estimate | None,
) -> Cell:
    good = [r for r in runs if r.results]
    counts = _counts(good)
    return Cell(
        temperature,
        concurrency,
        category,
        contender,
        runs=len(good),
        tokens=sum(r.tokens for r in good),
        seconds=sum(r.seconds for r in good),
        tokens_per_second=_over(sum(r.tokens for r in good), sum(r.seconds for r in good)),
        decode_tokens_per_second=_decode_rate(good),
        tokens_per_step=counts.tokens_per_step if counts and counts.steps else None,
        drafted=counts.drafted if counts else None,
        accepted=counts.accepted if counts else None,
        acceptance_at=_acceptance_at(counts),
        ratio=total.as_json() if total else None,
        decode_ratio=decode.as_json() if decode else None,
        same_text=sum(_texts(mine) == _texts(theirs) for mine, theirs in pairs) if pairs else None,
        disturbed=sum(r.load is not None and r.load.disturbed for r in good),
        preemptions=sum(result.preemptions for r in good for result in r.results),
        error=next((r.error for r in runs if r.error), None if good else "no runs"),
    )


def _mean(cells: Sequence[Cell], total: Estimate | None, decode: Estimate | None) -> Cell:
    """Speeds are geometric means too, so that ratios of them are ratios of the mean."""
    first = cells[0]
    return Cell(
        first.temperature,
        first.concurrency,
        MEAN,
        first.contender,
        runs=sum(c.runs for c in cells),
        tokens=sum(c.tokens for c in cells),
        seconds=sum(c.seconds for c in cells),
        tokens_per_second=_geometric([c.tokens_per_second for c in cells]),
        decode_tokens_per_second=_geometric([c.decode_tokens_per_second for c in cells]),
        tokens_per_step=_geometric([c.tokens_per_step for c in cells]),
        drafted=_sum([c.drafted for c in cells]),
        accepted=_sum([c.accepted for c in cells]),
        ratio=total.as_json() if total else None,
        decode_ratio=decode.as_json() if decode else None,
        same_text=_sum([c.same_text for c in cells]),
        disturbed=sum(c.disturbed for c in cells),
        preemptions=sum(c.preemptions for c in cells),
        error=next((c.error for c in cells if c.error), None),
    )


def _counts(runs: Sequence[Run]) -> SpeculationStats | None:
    known = [stats for stats in (r.stats for r in runs) if stats is not None]
    return SpeculationStats.sum(known) if known and len(known) == len(runs) else None


def _acceptance_at(stats: SpeculationStats | None) -> tuple[float, ...]:
    if stats is None:
        return ()
    return tuple(a / d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True) if d)


def _texts(run: Run) -> list[str]:
    return [result.text for result in run.results]


def _decode_rate(runs: Sequence[Run]) -> float | None:
    if not runs or any(r.concurrency != 1 for r in runs):
        return None
    results = [result for r in runs for result in r.results]
    if any(r.decode_seconds is None or r.decode_tokens is None for r in results):
        return None
    return _over(sum(r.decode_tokens or 0 for r in results), sum(r.decode_seconds or 0.0 for r in results))


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _geometric(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return geometric_mean(known) if len(known) == len(values) else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def steps(runs: Sequence[Run], contenders: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Where the time of a decoding step goes: a row for each contender and temperature, prompts left out.

    Microseconds a step, medians over the repeats; share_outside: of all but the target's forward, with its range.
    """
    for temperature in _ordered(r.temperature for r in runs):
        for contender in contenders:
            mine = [r for r in runs if (r.temperature, r.contender) == (temperature, contender)]
            repeats = [_counts([r for r in mine if r.repeat == i]) for i in _ordered(r.repeat for r in mine)]
            known = [stats for stats in repeats if stats is not None and stats.steps]
            if known:
                yield {"temperature": temperature, "contender": contender, **_step_row(known)}


def _step_row(repeats: Sequence[SpeculationStats]) -> dict[str, Any]:
    def outside(stats: SpeculationStats) -> float:
        rest = stats.draft_seconds + stats.verify_seconds + stats.other_seconds
        return rest / (rest + stats.forward_seconds)

    shares = [outside(stats) for stats in repeats]
    stages = ("draft", "forward", "verify", "other")
    return {
        "steps": sum(stats.steps for stats in repeats),
        "drafts_per_step": median(stats.drafted / stats.steps for stats in repeats),
        "tokens_per_step": median(stats.tokens_per_step for stats in repeats),
        **{f"{s}_us": median(1e6 * getattr(x, f"{s}_seconds") / x.steps for x in repeats) for s in stages},
        "share_outside": median(shares),
        "share_outside_low": min(shares),
        "share_outside_high": max(shares),
    }
