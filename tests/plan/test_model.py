"""The arithmetic of planning, against simulations that know nothing of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidInput, InvalidParams
from paceline.plan.model import (
    BATCHES,
    Overheads,
    Record,
    Speed,
    Timed,
    Walked,
    acceptance_by_position,
    best_length,
    break_even_acceptance,
    first_true,
    fit_overheads,
    iid_tokens,
    mean_acceptance,
    reach_by_position,
    speedup,
    surface,
    tokens_per_step,
    walk,
)
from paceline.schedule import CostTable

ASKED = 16


# --- the formula --------------------------------------------------------------------------------------


def enumerated_tokens(acceptance: float, length: int) -> float:
    """Every outcome of `length` coins with its probability: tokens are the heads before the first tail, and one."""
    total = 0.0
    for coins in itertools.product((True, False), repeat=length):
        chance = 1.0
        for kept in coins:
            chance *= acceptance if kept else 1 - acceptance
        total += chance * (len(list(itertools.takewhile(bool, coins))) + 1)
    return total


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.4, 0.75, 0.999, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_tokens_are_those_of_every_outcome_together(acceptance: float, length: int) -> None:
    """Catches a formula that is off by a draft, leaves out the bonus token, or divides by zero at 1."""
    assert iid_tokens(acceptance, length) == pytest.approx(enumerated_tokens(acceptance, length), rel=1e-12)


@given(st.floats(0, 0.99), st.integers(0, 40), st.floats(0, 3))
def test_speedup_is_the_formula_as_it_is_written(a: float, g: int, c: float) -> None:
    assert speedup(a, g, c) == pytest.approx((1 - a ** (g + 1)) / ((1 - a) * (g * c + 1)), rel=1e-9)


def test_the_limit_at_one() -> None:
    """Catches 0 / 0, and cancellation just below 1."""
    for g, c in ((0, 0.3), (1, 0.0), (4, 0.1), (16, 2.0)):
        assert speedup(1.0, g, c) == (g + 1) / (g * c + 1)
        assert speedup(1 - 1e-15, g, c) == pytest.approx((g + 1) / (g * c + 1), rel=1e-12)


def test_below_an_acceptance_of_0_4_it_does_not_always_lose() -> None:
    """The rule of thumb that it does is false: four drafts at a tenth of a step each gain 18 % at 0.4."""
    assert round(speedup(0.4, 4, 0.1), 2) == 1.18
    assert speedup(0.2, 1, 0.1) > 1.09
    even = break_even_acceptance(4, 0.1)
    assert even is not None
    assert 0.28 < even < 0.29


def test_speedup_is_that_of_simulated_decoding() -> None:
    """100,000 tokens, coin by coin and second by second."""
    rng = random.Random(5)
    for a, g, c in ((0.4, 4, 0.1), (0.8, 6, 0.3), (0.9, 2, 0.02)):
        tokens, seconds = 0, 0.0
        while tokens < 100_000:
            kept = 0
            while kept < g and rng.random() < a:
                kept += 1
            tokens, seconds = tokens + kept + 1, seconds + 1.0 + g * c
        assert tokens / seconds == pytest.approx(speedup(a, g, c), rel=0.02)


@given(st.floats(0, 1), st.floats(0.001, 2), st.integers(0, 24))
def test_some_length_gains_if_and_only_if_acceptance_is_above_the_cost(a: float, c: float, most: int) -> None:
    best = best_length(a, c, most)
    assert speedup(a, best, c) == max(speedup(a, g, c) for g in range(most + 1))
    if most and abs(a - c) > 1e-9:
        assert (best > 0) == (a > c)


@given(st.integers(1, 30), st.floats(0, 1.5))
def test_break_even_is_where_the_map_crosses_one(length: int, c: float) -> None:
    at = break_even_acceptance(length, c)
    if at is None:
        assert speedup(1.0, length, c) < 1
        return
    assert speedup(at, length, c) == pytest.approx(1, abs=1e-9)
    if at > 1e-6:
        assert speedup(at * 0.999, length, c) < 1


@pytest.mark.parametrize(
    ("acceptance", "length", "cost", "message"),
    [
        (1.1, 1, 0.1, "acceptance = 1.1"),
        (-0.1, 1, 0.1, "acceptance"),
        (float("nan"), 1, 0.1, "acceptance = nan"),
        (0.5, -1, 0.1, "draft length = -1"),
        (0.5, 1, -0.1, "cost ratio = -0.1"),
        (0.5, 1, float("inf"), "cost ratio"),
    ],
)
def test_what_cannot_be_is_refused(acceptance: float, length: int, cost: float, message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        speedup(acceptance, length, cost)


def test_the_map_holds_every_cell() -> None:
    found = surface(0.1, range(5), [0.0, 0.4, 1.0])
    assert found["speedups"][4] == [speedup(0.0, 4, 0.1), speedup(0.4, 4, 0.1), 5 / 1.4]
    assert found["speedups"][0] == [1.0, 1.0, 1.0]
    assert found["best"] == [0, 2, 4]
    assert found["break_even"][1] == pytest.approx(0.1)


# --- walking ------------------------------------------------------------------------------------------


def stepped(hits: Sequence[bool], length: int) -> list[Record]:
    """Decode a text with a drafter whose draft for place i is right if hits[i]: the last steps as an engine's are."""
    records, place = [], 0
    while place < len(hits):
        drafted = min(length, len(hits) - place - 1)
        kept = 0
        while kept < drafted and hits[place + kept]:
            kept += 1
        records.append(Record(drafted, kept, kept + 1))
        place += kept + 1
    return records


def as_walked(records: Sequence[Record]) -> list[Walked]:
    return [Walked(record.drafted, record.emitted) for record in records]


def text(rng: random.Random, size: int, acceptance: float) -> list[bool]:
    """Easy and hard stretches, none of the easy ones longer than what was asked for."""
    hits: list[bool] = []
    while len(hits) < size:
        easy = rng.random() < 0.5
        run = list(itertools.takewhile(bool, (rng.random() < (0.9 if easy else acceptance) for _ in range(ASKED - 1))))
        hits += [*run, False]
    return hits[:size]


@given(st.integers(0, 10_000), st.integers(0, ASKED), st.floats(0, 0.9))
@settings(max_examples=200)
def test_walking_is_decoding_again(seed: int, length: int, acceptance: float) -> None:
    """Where the records show every draft, the walk is the very steps that shorter drafts make."""
    hits = text(random.Random(seed), 120, acceptance)
    walked = walk(stepped(hits, ASKED), ASKED, length)
    again = as_walked(stepped(hits, length))
    assert [step.tokens for step in walked] == [step.tokens for step in again]
    ends = 2 * ASKED  # close to the end the engine drafts less
    place = 0
    for mine, theirs in zip(walked, again, strict=True):
        # Behind a rejected draft the records show no others, so that a walk's step may verify fewer.
        assert mine.drafts <= theirs.drafts or place > len(hits) - ends
        assert mine.tokens - 1 <= mine.drafts
        place += mine.tokens


@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.7, 0.97, 1.0]))
def test_walking_as_it_was_changes_nothing(seed: int, acceptance: float) -> None:
    rng = random.Random(seed)
    records = stepped([rng.random() < acceptance for _ in range(150)], ASKED)
    assert walk(records, ASKED, ASKED) == as_walked(records)


def test_a_long_copy_is_walked_in_even_strides() -> None:
    """Catches records that end at their bonus token: 7 drafts would seem to make steps of 8 and of 1."""
    records = stepped([True] * 400, ASKED)
    steps = walk(records, ASKED, 7)
    assert tokens_per_step(steps[:-4]) == 8
    assert tokens_per_step(walk(records, ASKED, 0)) == 1


def test_what_was_never_drafted_is_not_walked() -> None:
    """A lookup that finds nothing: two empty steps, one of three drafts of which two are kept, one empty."""
    records = [Record(0, 0, 1), Record(0, 0, 1), Record(3, 2, 3), Record(0, 0, 1)]
    assert walk(records, ASKED, 8) == [Walked(0, 1), Walked(0, 1), Walked(3, 3), Walked(0, 1)]
    assert walk(records, ASKED, 1) == [Walked(0, 1), Walked(0, 1), Walked(1, 2), Walked(1, 1), Walked(0, 1)]


def test_a_short_proposal_is_not_made_longer() -> None:
    """Two drafts, both kept, then a bonus token: a step from their beginning had no third."""
    records = [Record(2, 2, 3), Record(2, 2, 3)]
    assert walk(records, ASKED, 5) == [Walked(2, 3), Walked(2, 3)]


def test_an_answer_that_ends_inside_a_draft() -> None:
    """Five kept, three emitted: the stop came with the third."""
    assert walk([Record(0, 0, 1), Record(8, 5, 3)], ASKED, 4) == [Walked(0, 1), Walked(4, 3)]
    assert walk([], ASKED, 4) == []


@pytest.mark.parametrize("length", [-1, ASKED + 1])
def test_longer_than_recorded_cannot_be_walked(length: int) -> None:
    with pytest.raises(InvalidInput, match=f"draft length = {length}; allowed: 0 to 16"):
        walk([], ASKED, length)


def test_the_formula_promises_more_than_the_walk() -> None:
    """Steps begin at hard places: with equal acceptance overall, i.i.d. drafts would make longer steps."""
    rng = random.Random(1)
    hits = [place for _ in range(400) for place in (*(rng.random() < 0.15 for _ in range(4)), *([True] * 8))]
    records = stepped(hits, ASKED)
    for length in (3, 5):
        # What the formula is usually fed with: how often a draft is right, anywhere.
        assert tokens_per_step(walk(records, ASKED, length)) < 0.95 * iid_tokens(fmean(hits), length)


def test_acceptance_by_position_counts_what_was_judged() -> None:
    records = [Record(4, 4, 5), Record(4, 1, 2), Record(2, 0, 1), Record(0, 0, 1)]
    assert acceptance_by_position(records) == [2 / 3, 1 / 2, 1.0, 1.0]
    assert reach_by_position(records) == [2 / 4, 1 / 4, 1 / 4, 1 / 4]
    assert mean_acceptance(records) == 5 / 7
    assert (mean_acceptance([]), acceptance_by_position([]), reach_by_position([])) == (0.0, [], [])
    assert 1 + sum(reach_by_position(records)) == fmean(record.emitted for record in records)


# --- seconds ------------------------------------------------------------------------------------------

COSTS = CostTable([1, 2, 5, 17, 64], [0, 1000], [[10, 11, 14, 30, 120], [12, 13, 16, 33, 130]], per_sequence=0.5)
TRUE = Overheads(draft_step=0.2, draft_depth=0.3, draft_share=0.25, rest_request=0.1, rest_token=0.5)


def timed(batch: int, asked: int, depth: int, tokens: int, slow: float = 1.0) -> Timed:
    drafting = slow * TRUE.drafting(batch, depth) if asked else 0.0
    return Timed(batch, asked, depth, tokens, 1.0, drafting, slow * TRUE.rest(batch, tokens))


def test_overheads_are_found_again() -> None:
    """Also beside a step that was ten times as slow as it should be."""
    steps = [timed(1, 16, depth, 1 + depth // 2) for depth in (0, 3, 16) for _ in range(5)]
    steps += [timed(4, 16, depth, 4 + depth) for depth in (5, 16) for _ in range(5)]
    steps += [timed(1, 16, 3, 2, slow=10.0)]
    found = fit_overheads(steps)
    for name in ("draft_step", "draft_depth", "draft_share", "rest_request", "rest_token"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name)), name


def test_overheads_are_never_negative() -> None:
    falling = [Timed(1, 16, 0, 1, 1.0, 3.0, 2.0), Timed(1, 16, 8, 9, 1.0, 1.0, 1.0)]
    found = fit_overheads(falling)
    assert (found.draft_step, found.draft_depth, found.rest_token) == (2.0, 0.0, 0.0)
    steep = [Timed(1, 16, 4, 5, 1.0, 1.0, 1.0), Timed(1, 16, 8, 9, 1.0, 9.0, 9.0)]
    assert fit_overheads(steep).draft_step == 0.0
    assert fit_overheads([]) == Overheads(0.0, 0.0, 1.0, 0.0, 0.0)
    one = fit_overheads([Timed(1, 4, 4, 2, 1.0, 8.0, 1.0)])
    assert (one.draft_step, one.draft_depth) == (0.0, 2.0)


def speed(hits: Sequence[bool], *, context: int = 500, costs: CostTable = COSTS, batch: int = 4) -> Speed:
    records = stepped(hits, ASKED)
    return Speed(costs, TRUE, [walk(records, ASKED, g) for g in range(ASKED + 1)], context, batch)


def test_prediction_for_one_request_is_the_sum_over_its_steps() -> None:
    """Against decoding it step by step with a clock."""
    rng = random.Random(3)
    plan = speed([rng.random() < 0.6 for _ in range(3000)])
    for length in (0, 1, 4, 16):
        tokens, seconds = 0, 0.0
        for step in plan.walks[length]:
            tokens += step.tokens
            seconds += COSTS.seconds(step.drafts + 1, 500) + TRUE.rest(1, step.tokens)
            seconds += TRUE.drafting(1, step.drafts) if length else 0.0
        assert plan.predict(length, 1).tokens_per_second == pytest.approx(tokens / seconds, rel=0.01)


def test_prediction_for_a_batch_is_that_of_simulated_batches() -> None:
    """Requests at random places of the text step together, 2,000 times."""
    rng = random.Random(4)
    hits = [rng.random() < (0.9 if i // 50 % 2 else 0.2) for i in range(3000)]
    plan = speed(hits)
    for length, batch in ((4, 3), (2, 8)):
        tokens, seconds = 0, 0.0
        for _ in range(2000):
            together = rng.choices(plan.walks[length], k=batch)
            emitted = sum(step.tokens for step in together)
            tokens += emitted
            seconds += COSTS.step_seconds([(step.drafts + 1, 500) for step in together])
            seconds += TRUE.drafting(batch, max(step.drafts for step in together)) + TRUE.rest(batch, emitted)
        assert plan.predict(length, batch).tokens_per_second == pytest.approx(tokens / seconds, rel=0.02)


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_some_steps_draft_a_lot_and_others_nothing(batch: int) -> None:
    """A lookup's steps on a curve with a cliff: the forward of the average step is not the average forward."""
    cliff = CostTable([1, 8, 9, 64, 700], [0], [[10, 11, 30, 60, 700]], per_sequence=0.1)
    steps = [Walked(16, 9), Walked(0, 1), Walked(0, 1), Walked(3, 2)] * 50
    plan = Speed(cliff, TRUE, [[Walked(0, 1)] * 600, steps], 0)
    rng = random.Random(batch)
    seconds = 0.0
    for _ in range(4000):
        together = rng.choices(steps, k=batch)
        seconds += cliff.step_seconds([(step.drafts + 1, 0) for step in together]) / 4000
        seconds += TRUE.drafting(batch, max(step.drafts for step in together)) / 4000
        seconds += TRUE.rest(batch, sum(step.tokens for step in together)) / 4000
    assert plan.predict(1, batch).seconds == pytest.approx(seconds, rel=0.04)


def test_break_even_batch_is_the_first_that_does_not_gain() -> None:
    """Every batch size, one after the other; wide steps are dear here, so that it comes soon."""
    dear = CostTable([1, 4, 16, 64], [0], [[10, 10.5, 22, 100]])
    rng = random.Random(6)
    plan = speed([rng.random() < 0.7 for _ in range(2000)], costs=dear)
    losing = [b for b in range(1, 65) if plan.best(b).length == 0]
    assert losing
    assert 1 < losing[0] < 64
    assert plan.break_even() == losing[0]
    assert plan.break_even(16) == next(b for b in range(1, 65) if plan.predict(16, b).ratio <= 1)
    assert plan.predict(0, 8).ratio == 1.0
    assert plan.best(1).ratio == max(plan.predict(g, 1).ratio for g in range(ASKED + 1)) > 1


def test_what_lies_outside_of_what_was_measured_is_said() -> None:
    plan = speed([True] * 300, context=500)
    assert plan.predict(4, 4).beyond == ()
    assert plan.predict(16, 4).beyond == ("width",)
    assert plan.predict(0, 8).beyond == ("batch",)
    assert speed([True] * 300, context=2000).predict(0, 64).beyond == ("batch", "context")


def test_lengths_that_were_not_walked_are_refused() -> None:
    with pytest.raises(InvalidInput, match="draft length = 17; allowed: 0 to 16"):
        speed([True] * 50).predict(17, 1)


def test_first_true_looks_between_its_points() -> None:
    for wanted in range(1, 65):
        assert first_true(lambda n, wanted=wanted: n >= wanted, BATCHES) == wanted  # type: ignore[misc]
    assert first_true(lambda n: False, BATCHES) is None
