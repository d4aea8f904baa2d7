"""The statistics against known values."""

from __future__ import annotations

import math
import random

import pytest

from paceline.bench.intervals import Estimate, estimate, percentile, pooled, t_quantile


@pytest.mark.parametrize(
    "df, known",
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)],
)
def test_t_is_the_table_s(df: float, known: float) -> None:
    """Catches a wrong density, or a one-sided quantile."""
    assert t_quantile(df) == pytest.approx(known, abs=2e-5)


def test_t_lies_between_its_neighbours_at_broken_df() -> None:
    """Catches a table that is rounded to whole degrees of freedom; Satterthwaite's are not whole."""
    assert t_quantile(3) < t_quantile(2.5) < t_quantile(2)
    with pytest.raises(ValueError, match="df = 0"):
        t_quantile(0)


def test_an_interval_by_hand() -> None:
    """Catches arithmetic means of ratios, and the standard deviation in place of the error of the mean."""
    found = estimate({0: [1.0], 1: [2.0], 2: [4.0]})
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    half = 4.30265 * math.log(2) / math.sqrt(3)  # the logs are 0, 1 and 2 times log 2
    assert found.low == pytest.approx(2.0 / math.exp(half), rel=1e-4)
    assert found.high == pytest.approx(2.0 * math.exp(half), rel=1e-4)


def test_repeats_of_a_prompt_are_no_further_prompts() -> None:
    """Catches intervals that shrink because the same prompt was run often."""
    once = estimate({unit: [ratio] for unit, ratio in enumerate((1.0, 1.5, 2.0))})
    often = estimate({unit: [ratio] * 50 for unit, ratio in enumerate((1.0, 1.5, 2.0))})
    assert once is not None
    assert often is not None
    assert often.as_json() == pytest.approx(once.as_json())


def test_with_fewer_than_three_prompts_the_repeats_count() -> None:
    """Catches a single unit with repeats that has no interval, as at high concurrency."""
    found = estimate({0: [1.0, 1.1, 1.2]})
    assert found is not None
    assert found.n == 3
    assert found.low is not None
    assert found.low < found.ratio
    alone = estimate({0: [1.3]})
    assert alone is not None
    assert (alone.ratio, alone.low, alone.high) == (pytest.approx(1.3), None, None)
    assert estimate({}) is None


def test_intervals_cover_what_they_promise() -> None:
    """Catches intervals that are too narrow. 2,000 cells of four prompts; coverage 0.95 has sd 0.005, so the band of
    plus or minus 0.02 raises a false alarm once in 16,000 runs; normal quantiles in place of t's give 0.85."""
    rng = random.Random(5)
    hits = 0
    for _ in range(2000):
        found = estimate({unit: [math.exp(rng.gauss(0.3, 0.2))] for unit in range(4)})
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= math.exp(0.3) <= found.high
    assert abs(hits / 2000 - 0.95) < 0.02


def test_the_mean_of_categories_has_the_same_weight_for_each() -> None:
    """Catches weights by number of prompts, and errors that are added without squaring."""
    parts = [Estimate(0.0, 0.3, 3, 4), Estimate(1.0, 0.4, 9, 10)]
    found = pooled(parts)
    assert found is not None
    assert (found.log, found.n) == (0.5, 14)
    assert found.error == pytest.approx(0.25)  # 0.5 / 2
    assert found.df == pytest.approx(0.25**2 / (0.3**4 / 3 + 0.4**4 / 9))
    same = pooled([Estimate(0.0, 0.0, 2, 3), Estimate(0.0, 0.0, 5, 6)])
    assert same is not None
    assert (same.low, same.high) == (1.0, 1.0)
    unknown = pooled([*parts, Estimate(0.0, None, 0, 1)])
    assert unknown is not None
    assert unknown.low is None
    assert pooled([]) is None


def test_percentiles_lie_between_neighbours() -> None:
    """Catches off-by-one indices."""
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile(list(range(101)), 0.95) == 95
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([1, 2], 1.0) == 2
    assert percentile([], 0.5) is None
