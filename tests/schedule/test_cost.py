"""The cost table: interpolation, refinement, and measuring with a clock that only a fake backend moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.toy import ToyBackend
from paceline.errors import InvalidInput
from paceline.schedule.cost import CostTable
from paceline.types import Segment

TABLE = CostTable([1, 2, 4, 8], [0, 100], [[10, 11, 13, 17], [12, 13.5, 16.5, 22.5]], per_sequence=0.5)


def test_entries_and_what_lies_between_and_beyond() -> None:
    assert TABLE.seconds(1, 0) == 10
    assert TABLE.seconds(4, 100) == 16.5
    assert TABLE.seconds(3, 0) == 12
    assert TABLE.seconds(6, 0) == 15
    assert TABLE.seconds(1, 50) == 11
    assert TABLE.seconds(1, 300) == 16
    assert TABLE.seconds(12, 0) == 21


def test_a_batch_costs_its_tokens_its_contexts_and_its_sequences() -> None:
    assert TABLE.step_seconds([(1, 0), (1, 0)]) == 11 + 0.5
    assert TABLE.step_seconds([(1, 100), (3, 100)]) == 13 + 2 + (2 + 2 * 0.5) + 0.5
    assert TABLE.step_seconds([(1, 100), (3, 0), (4, 0)]) == 17 + 2 + 1.0


def test_the_curve_is_the_same_step_with_more_tokens() -> None:
    assert TABLE.curve([(1, 0), (1, 0)], 3) == [11.5, 12.5, 13.5, 14.5]


def test_a_cliff_stays_a_cliff() -> None:
    """A kernel that changes at 5 tokens: a line through the points would hide it."""
    cliff = CostTable([1, 4, 5, 8], [0], [[10, 10, 20, 20]])
    assert cliff.curve([(1, 0)], 7) == [10, 10, 10, 10, 20, 20, 20, 20]


def test_a_further_token_pays_for_its_context_too() -> None:
    """Behind a long text a draft is dearer than the first tokens of it: it attends to as much as the others."""
    table = CostTable([1, 5], [0, 100], [[10, 14], [12, 24]])
    assert table.curve([(1, 0)], 2) == [10, 11, 12]
    assert table.curve([(1, 100)], 2) == [12, 15, 18]
    assert table.curve([(1, 100), (1, 0)], 1) == [13, 13 + 1 + 1]


def test_what_further_tokens_cost_a_crowd_is_seen() -> None:
    """llama.cpp looks through the cells of all sequences for every token: at 16 sequences a draft took 1.7 times what
    was measured with one. A busier machine, or longer contexts, are not taken for that."""
    table = CostTable([1, 16, 32, 64], [0, 100], [[10, 40, 70, 130], [10, 40, 70, 130]])
    rng = np.random.default_rng(0)
    for step in range(200):
        drafts = int(rng.integers(0, 20)) if step % 2 else 0
        busy = 1.0 + step / 200
        table.observe([(1 + drafts, step), *[(1, step)] * 15], busy * (40 + 2 * 1.7 * drafts) * rng.uniform(0.95, 1.05))
    low, *_, high = table.curve([(1, 0)] * 16, 10)
    assert (high - low) / low == pytest.approx(1.7 * 2 * 10 / 40, rel=0.1)
    assert table.curve([(1, 0)], 16)[16] / table.curve([(1, 0)], 16)[0] == pytest.approx(41 * 40 / 41 / 10, rel=0.05)
    low, *_, high = table.curve([(1, 0)] * 3, 10)
    assert (high - low) / low == pytest.approx(20 / 14, rel=0.1), "a few sequences are no crowd of sixteen"


def test_a_few_drafts_are_enough_to_see_what_a_crowd_pays() -> None:
    """Four drafts in every second step, each a fiftieth of the step: the table must not outweigh what they show."""
    table = CostTable([1, 16, 32, 64], [0], [[10, 40, 53, 79]])
    rng = np.random.default_rng(0)
    for step in range(300):
        drafts = 4 * (step % 2)
        table.observe([(1 + drafts, 0), *[(1, 0)] * 15], (40 + 13 / 16 * 1.7 * drafts) * rng.uniform(0.98, 1.02))
    low, *_, high = table.curve([(1, 0)] * 16, 8)
    assert (high - low) / 8 == pytest.approx(1.7 * 13 / 16, rel=0.25)


def test_what_a_crowd_showed_fades() -> None:
    table = CostTable([1, 16, 32, 64], [0], [[10, 40, 70, 130]])

    def slope() -> float:
        return table.curve([(1, 0)] * 16, 1)[1] - table.curve([(1, 0)] * 16, 1)[0]

    for step in range(100):
        drafts = 16 * (step % 2)
        table.observe([(1 + drafts, 0), *[(1, 0)] * 15], 40 + 4.0 * drafts)
    assert slope() == pytest.approx(4.0, rel=0.1)
    for _ in range(1000):
        table.observe([(1, 0)] * 16, 40.0)
    assert slope() == pytest.approx(30 / 16, rel=0.1), "nobody looks any more, so it may be as it was"


@pytest.mark.parametrize(("drafts", "seen"), [(4, 2.5), (4, 1e6), (4, 0.0), (0, 2.5), (0, 1e6), (0, 0.0)])
def test_one_interrupted_forward_says_little_of_a_crowd(drafts: int, seen: float) -> None:
    """A step that took 2.5 times as long made a draft 2.8 times as dear, for hundreds of steps."""
    table = CostTable([1, 16, 32, 64], [0], [[10, 40, 53, 79]])
    for step in range(40):
        n = 4 * (step % 2)
        seconds = 40 + 13 / 16 * n
        table.observe([(1 + n, 0), *[(1, 0)] * 15], seconds * seen if (step // 2, n) == (10, drafts) else seconds)
    low, *_, high = table.curve([(1, 0)] * 16, 8)
    assert (high - low) / low == pytest.approx(13 / 2 / 40, rel=0.5)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_nothing_makes_a_draft_free_or_priceless(seconds: float) -> None:
    table = CostTable([1, 16, 32, 64], [0], [[10, 40, 70, 130]])
    for step in range(400):
        table.observe([(1 + 16 * (step % 2), 0), *[(1, 0)] * 15], seconds if step % 2 else 40.0)
    low, high = table.curve([(1, 0)] * 16, 1)
    assert 30 / 16 / 40 / 4.01 <= (high - low) / low <= 30 / 16 / 40 * 4.01


def test_what_was_seen_stays_where_all_steps_are_alike() -> None:
    """Nothing new is learned from them, but nothing is forgotten either."""
    table = CostTable([1, 16, 32, 64], [0], [[10, 40, 70, 130]])
    for step in range(100):
        drafts = 16 * (step % 2)
        table.observe([(1 + drafts, 0), *[(1, 0)] * 15], 40 + 4.0 * drafts)
    before = table.curve([(1, 0)] * 16, 16)
    for _ in range(1000):
        table.observe([(2, 0)] * 16, 104.0)
    after = table.curve([(1, 0)] * 16, 16)
    assert after == pytest.approx(before, rel=0.02), "what sixteen plain tokens cost, too"


def test_many_drafts_of_a_crowd_are_learned_from() -> None:
    """Steps wider than the table were priced by it and never corrected: sixteen requests drafted at a loss for ever."""
    believed, real = 2.4, 4.1
    table = CostTable([1, 16, 64], [0], [[10, 71, 71 + 48 * believed]])
    for step in range(100):
        each = 5 * (step % 2)
        table.observe([(1 + each, 0)] * 16, 71 + real * 16 * each)
    plain, wide = table.curve([(1, 0)] * 16, 0)[0], table.curve([(1, 0)] * 16, 80)[80]
    assert wide / plain == pytest.approx((71 + 80 * real) / 71, rel=0.05)


def test_a_step_costs_the_same_however_it_is_asked_for() -> None:
    table = CostTable([1, 5, 16, 64], [0, 100], [[10, 12, 20, 60], [12, 18, 29, 90]])
    for step in range(50):
        each = step % 3
        table.observe([(1 + each, 50)] * 4, 20.0 + 30 * each)
    assert table.step_seconds([(5, 50), (1, 50), (1, 50), (1, 50)]) == pytest.approx(table.curve([(1, 50)] * 4, 4)[4])
    for width in (2, 5, 11, 70):
        assert table.seconds(width, 300) == pytest.approx(table.curve([(1, 300)], width - 1)[-1])


def test_beside_a_prompt_drafts_pay_for_their_own_context_and_crowd() -> None:
    """Behind 4,000 tokens a draft was charged for 2,000, because a prompt that was just begun stood beside it."""
    table = CostTable([1, 5, 64], [0, 100], [[10, 14, 73], [12, 24, 83]])
    for step in range(50):
        table.observe([(1 + step % 2, 0), (1, 0)], 11 + 5 * (step % 2))  # two sequences are dear
    alone, beside = table.curve([(1, 4000)], 1), table.curve([(1, 4000)], 1, [(50, 0)])
    assert beside == pytest.approx(alone), "this machine takes as long for a token at all widths"


def test_a_flat_curve_with_noise_in_it_never_falls_below_what_was_measured() -> None:
    """Farther than measured, a straight line through two noisy numbers ended below nothing."""
    table = CostTable([1, 5, 64], [64, 512], [[10.0, 10.5, 10.4], [9.95, 10.5, 10.3]])
    for width in (1, 4, 64, 512, 100_000):
        for context in (0, 64, 512, 8_000, 1_000_000):
            assert table.seconds(width, context) >= 9.9
    assert table.seconds(65, 0) == table.seconds(64, 0) == 10.4, "no cliff where the table ends"
    curve = table.curve([(1, 8_000)] * 16, 64, [(100_000, 8_000)])
    assert min(curve) >= 9.9
    assert curve == sorted(curve)


def test_a_farther_context_is_never_cheaper() -> None:
    table = CostTable([1, 4], [3, 4, 9], [[10.0, 20.0], [12.0, 26.0], [11.0, 19.0]])
    for width in (1, 4, 9):
        prices = [table.seconds(width, context) for context in (0, 3, 4, 5, 9, 10, 100, 10_000)]
        assert prices == sorted(prices)


def test_a_table_without_the_width_of_one_token() -> None:
    """Before the first width it was a straight line too, down to nothing and below."""
    table = CostTable([3, 4], [50, 60], [[10, 20], [11, 23]])
    for shares in ([(1, 0)] * 2, [(1, 0)], [(2, 55)]):
        table.observe(shares, 5.0)
        assert 0 < table.step_seconds(shares) < 20


def test_plain_steps_of_a_crowd_leave_the_curve_alone() -> None:
    """One width that is dearer with many sequences than with one must not make the next widths look cheap."""
    table = CostTable([1, 16, 32], [0], [[10, 40, 70]])
    for _ in range(500):
        table.observe([(1, 0)] * 16, 50.0)
    low, *_, high = table.curve([(1, 0)] * 16, 16)
    assert high / low == pytest.approx(70 / 40, rel=0.02)


@pytest.mark.parametrize(
    ("widths", "contexts", "table", "message"),
    [
        ([1, 1], [0], [[1, 1]], "widths"),
        ([2, 1], [0], [[1, 1]], "widths"),
        ([], [0], [[]], "widths"),
        ([1], [5, 2], [[1], [1]], "contexts"),
        ([1, 2], [0], [[1]], "shape"),
        ([1, 2], [0], [[1, 0]], "above 0"),
        ([1, 2], [0], [[1, float("nan")]], "above 0"),
    ],
)
def test_what_is_no_table_is_refused(widths: Any, contexts: Any, table: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CostTable(widths, contexts, table)


@given(st.lists(st.floats(1e-4, 1.0), min_size=4, max_size=4), st.floats(0, 1e-3))
def test_json_and_back(seconds: list[float], per_sequence: float) -> None:
    table = CostTable([1, 7], [3, 500], [seconds[:2], seconds[2:]], per_sequence)
    back = CostTable.from_json(table.to_json())
    assert back.to_json() == table.to_json()
    assert back.seconds(4, 77) == table.seconds(4, 77)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"widths": [1]}',
        '{"widths":1,"contexts":2,"seconds":3,"per_sequence":4}',
        '{"widths": [1, 1e999], "contexts": [0], "seconds": [[1, 2]], "per_sequence": 0}',
        '{"widths": [1, 2], "contexts": [0], "seconds": [[1, 2]], "per_sequence": NaN}',
        '{"widths": [1, 2], "contexts": [0], "seconds": [[1, 2]], "per_sequence": -1}',
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="a cost table"):
        CostTable.from_json(text)


def test_a_slower_machine_moves_all_widths_alike() -> None:
    table = CostTable([1, 4], [0], [[10.0, 20.0]])
    for _ in range(100):
        table.observe([(1, 0)], 15.0)
    assert table.seconds(1, 0) == pytest.approx(15.0, rel=0.02)
    assert table.seconds(4, 0) / table.seconds(1, 0) == pytest.approx(2.0), "nothing was seen of any other width"


def test_a_wrong_table_is_put_right_by_use() -> None:
    table = CostTable([1, 4], [0], [[10.0, 40.0]])
    for _ in range(400):
        table.observe([(1, 0)], 10.0)
        table.observe([(4, 0)], 20.0)
    assert table.seconds(1, 0) == pytest.approx(10.0, rel=0.1)
    assert table.seconds(4, 0) == pytest.approx(20.0, rel=0.1)
    assert table.seconds(3, 0) == pytest.approx(10 + 2 / 3 * 10, rel=0.1), "and with it what lies beside it"


def test_a_machine_that_slows_down_while_all_steps_have_drafts_is_no_dear_width() -> None:
    """Eight tokens stayed 17 % dearer than they are: once no drafts were made, nobody measured them again."""
    table = CostTable([1, 8], [0], [[10.0, 20.0]])
    for _ in range(200):
        table.observe([(8, 0)], 40.0)
    for _ in range(200):
        table.observe([(1, 0)], 20.0)
    assert table.seconds(8, 0) / table.seconds(1, 0) == pytest.approx(2.0, rel=0.02)


def test_one_interrupted_forward_hardly_counts() -> None:
    table = CostTable([1, 4], [0], [[10.0, 20.0]])
    table.observe([(1, 0)], 5000.0)
    assert table.seconds(1, 0) < 12.0


class Timed(ToyBackend):
    """A toy whose forwards take made-up time."""

    def __init__(self, cost: Any, **options: Any) -> None:
        super().__init__(**options)
        self.now, self.cost, self.forwards = 0.0, cost, 0

    def forward(self, batch: Sequence[Segment]) -> list[Any]:
        self.now += self.cost(sum(len(s.tokens) for s in batch), max(s.start for s in batch), len(batch))
        self.forwards += 1
        return super().forward(batch)


def knee(tokens: int, context: int, sequences: int) -> float:
    return max(1.0, tokens / 12) * 0.004 + 1e-6 * context + 0.0005 * (sequences - 1)


def test_measuring_finds_the_curve() -> None:
    backend = Timed(knee, max_len=1200, max_seqs=4, max_step_tokens=256)
    table = CostTable.measure(backend, budget_seconds=4.0, clock=lambda: backend.now)
    for width in (1, 2, 3, 5, 8, 12, 16, 32):
        for context in (64, 300, 900):
            assert table.seconds(width, context) == pytest.approx(knee(width, context, 1), rel=0.02)
    assert table.per_sequence == pytest.approx(0.0005, rel=0.1)
    backend.check()
    assert backend.slots_in_use == 0


@pytest.mark.parametrize("seconds", [0.5, 3.0, 60.0])
def test_a_slow_model_gets_a_coarser_table_and_not_a_longer_wait(seconds: float) -> None:
    backend = Timed(lambda tokens, context, sequences: seconds * (1 + 0.1 * tokens), max_len=1200, max_step_tokens=256)
    table = CostTable.measure(backend, budget_seconds=2.0, clock=lambda: backend.now)
    assert table.widths.size >= 2
    assert backend.now <= 2.0 + 8 * seconds * 7.4
    assert table.seconds(5, 0) > table.seconds(1, 0)
    assert backend.slots_in_use == 0


def test_an_instant_model_ends_the_measurement() -> None:
    backend = Timed(lambda *_: 0.0, max_len=1200)
    CostTable.measure(backend, clock=lambda: backend.now)
    assert backend.forwards < 5000


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 80), st.integers(1, 3), st.integers(8, 64))
def test_small_memories_can_be_measured(max_len: int, max_seqs: int, max_step_tokens: int) -> None:
    backend = Timed(knee, max_len=max_len, max_seqs=max_seqs, max_step_tokens=max_step_tokens)
    table = CostTable.measure(backend, budget_seconds=0.5, clock=lambda: backend.now)
    assert np.isfinite(table.table).all()
    backend.check()
    assert backend.slots_in_use == 0


def test_a_clock_that_stands_still_does_no_harm() -> None:
    """The drift went to zero, and then something was divided by it."""
    table = CostTable([1, 2], [0], [[1.0, 2.0]])
    for _ in range(20_000):
        table.observe([(1, 0)], 0.0)
    assert table.seconds(1, 0) > 0


def test_endless_forwards_are_refused() -> None:
    with pytest.raises(InvalidInput, match="durations"):
        CostTable([1, 2], [0, 9], [[1.0, np.inf], [1.0, 2.0]])
