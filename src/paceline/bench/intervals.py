"""What a handful of paired ratios says: a geometric mean with a 95 % interval.

Logarithms of ratios are taken as normal, and Student's t says how wide the interval is: with the three to ten prompts
that a cell of a benchmark has, a bootstrap over prompts comes out too narrow (of three values it can draw ten
different sets), t does not.

The prompt is the unit: the repeats of one prompt are averaged first. Where a cell has fewer than three units its
repeats are taken as the observations instead; the interval then covers the machine's noise, not the choice of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, variance

CONFIDENCE = 0.95
MIN_UNITS = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean logarithm with its standard error. error is None where one observation is all there is.

    df: degrees of freedom of the error, 0 without one. n: observations.
    """

    log: float
    error: float | None
    df: float
    n: int

    @property
    def ratio(self) -> float:
        """The geometric mean."""
        return math.exp(self.log)

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval."""
        return None if self.error is None else math.exp(self.log - t_quantile(self.df) * self.error)

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval."""
        return None if self.error is None else math.exp(self.log + t_quantile(self.df) * self.error)

    def as_json(self) -> dict[str, float | int | None]:
        """{"ratio", "low", "high", "n"}."""
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "n": self.n}


def estimate(ratios: Mapping[int, Sequence[float]]) -> Estimate | None:
    """Of unit -> its paired ratios (> 0), one for each repeat; None where there are none."""
    logs = {unit: [math.log(ratio) for ratio in repeats] for unit, repeats in ratios.items() if repeats}
    if len(logs) >= MIN_UNITS:
        values = [fmean(repeats) for repeats in logs.values()]
    else:
        values = [value for repeats in logs.values() for value in repeats]
    if not values:
        return None
    n = len(values)
    error = math.sqrt(variance(values) / n) if n > 1 else None
    return Estimate(fmean(values), error, n - 1, n)


def pooled(parts: Sequence[Estimate]) -> Estimate | None:
    """The geometric mean of independent estimates, each with the same weight; df after Satterthwaite."""
    if not parts:
        return None
    log, n = fmean(part.log for part in parts), sum(part.n for part in parts)
    errors = [(part.error, part.df) for part in parts if part.error is not None]
    if len(errors) < len(parts):
        return Estimate(log, None, 0, n)
    squares = sum(error**2 for error, _ in errors)
    spread = sum(error**4 / df for error, df in errors)
    df = squares**2 / spread if spread > 0 else min(df for _, df in errors)
    return Estimate(log, math.sqrt(squares) / len(parts), df, n)


@lru_cache(maxsize=256)
def t_quantile(df: float, confidence: float = CONFIDENCE) -> float:
    """t such that |T| < t with that probability, for Student's T with df > 0 degrees of freedom.

    T = sqrt(df) tan(a) turns the density into c cos(a)^(df - 1), which Simpson's rule integrates; bisection over a.
    """
    if df <= 0:
        raise ValueError(f"df = {df}; allowed: more than 0")
    scale = 2 * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if scale * _cosine_integral(angle, df - 1) < confidence else (low, angle)
    return math.sqrt(df) * math.tan((low + high) / 2)


def _cosine_integral(angle: float, power: float, intervals: int = 400) -> float:
    """Integral of cos(x)^power from 0 to angle."""
    step = angle / intervals
    weights = (1 if i in (0, intervals) else 4 if i % 2 else 2 for i in range(intervals + 1))
    total: float = sum(weight * math.cos(i * step) ** power for i, weight in enumerate(weights))
    return step / 3 * total


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of them lie, between neighbours linearly; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
