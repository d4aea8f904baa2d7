"""The G-test against a law that is known exactly, and what it can see.

alpha is the chance of a false alarm per test, power the chance to notice a law that is `detectable_tv` away, in the
worst case of how the difference lies. Both are stated by whoever calls. Seeds are fixed, so a run always gives
the same verdict; PACELINE_TEST_SEED=<integer> draws new ones, for runs that are repeated to gather evidence.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

ALPHA, POWER = 1e-6, 0.999
LEAST_EXPECTED = 5.0
"""Cells that expect fewer are pooled, so that the statistic follows its chi-squared law."""

Law = Mapping[Any, float]


@dataclass(frozen=True, slots=True)
class GTest:
    """statistic: 2 sum o ln(o / e). p_value: of that or more under the law; 0 where the impossible happened."""

    statistic: float
    dof: int
    n: int
    impossible: Any = None

    @property
    def p_value(self) -> float:
        if self.impossible is not None:
            return 0.0
        return float(chi2.sf(self.statistic, self.dof)) if self.dof else 1.0

    def __add__(self, other: GTest) -> GTest:
        impossible = self.impossible if self.impossible is not None else other.impossible
        return GTest(self.statistic + other.statistic, self.dof + other.dof, self.n + other.n, impossible)


def g_test(counts: Mapping[Any, int], law: Law) -> GTest:
    """Counts of outcomes against their law. An outcome of probability 0 that was seen is reported as such."""
    n = sum(counts.values())
    impossible = next((o for o in counts if counts[o] and not law.get(o, 0.0) > 0.0), None)
    cells = pooled([(counts.get(o, 0), n * p) for o, p in law.items() if p > 0.0])
    statistic = 2.0 * sum(o * math.log(o / e) for o, e in cells if o)
    return GTest(max(statistic, 0.0), max(len(cells) - 1, 0), n, impossible)


def pooled(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """(observed, expected) with the rarest put together until each cell expects LEAST_EXPECTED."""
    cells = sorted(cells, key=lambda cell: cell[1])
    while len(cells) > 1 and cells[0][1] < LEAST_EXPECTED:
        (o1, e1), (o2, e2), *rest = cells
        cells = sorted([(o1 + o2, e1 + e2), *rest], key=lambda cell: cell[1])
    return cells


def g_test_given(counts: Mapping[Hashable, Mapping[Any, int]], law: Callable[[Any], Law]) -> GTest:
    """Counts of outcomes by what they are conditioned on, against their conditional laws law(condition)."""
    return sum((g_test(seen, law(condition)) for condition, seen in counts.items()), GTest(0.0, 0, 0))


def count(pairs: Iterable[tuple[Hashable, Any]]) -> dict[Hashable, Counter[Any]]:
    """(condition, outcome) pairs as counts by condition."""
    counts: dict[Hashable, Counter[Any]] = {}
    for condition, outcome in pairs:
        counts.setdefault(condition, Counter())[outcome] += 1
    return counts


def noncentrality(dof: int, alpha: float, power: float) -> float:
    """What a chi-squared statistic needs to exceed its alpha quantile with probability `power`."""
    edge = chi2.isf(alpha, dof)
    return float(brentq(lambda x: ncx2.sf(edge, dof, x) - power, 1e-3, 1e5))


def detectable_tv(n: int, cells: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The total variation that n samples over `cells` cells show with `power`.

    A law at distance TV has the noncentrality n sum (r - p)^2 / p >= 4 n TV^2, by Cauchy-Schwarz.
    """
    return math.sqrt(noncentrality(cells - 1, alpha, power) / (4.0 * n))


def seeds(test: str, n: int) -> range:
    """n request seeds that no other test uses."""
    base = os.environ.get("PACELINE_TEST_SEED", "0")
    digest = hashlib.blake2b(f"{base} {test}".encode(), digest_size=7).digest()
    first = int.from_bytes(digest, "big")
    return range(first, first + n)
