"""First come, first served: pure planning."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.schedule import Turn, parts, plan, prefill_chunk


def test_decoding_and_prefilling_share_a_step() -> None:
    assert plan([(5, 1, 4), (0, 30, 4), (9, 1, 4)], 64) == [
        Turn(decode=True, drafts=4),
        Turn(prefill=29),
        Turn(decode=True, drafts=4),
    ]


def test_a_prompt_is_cut_at_the_same_places_in_any_company() -> None:
    """mlx-lm PR #1109: another prefill split flips near ties, so it must not depend on drafts or neighbours."""

    def cuts(length: int, others: list[int], cached: int = 0) -> list[int]:
        """Where each of its chunks ends."""
        ends, uncached = [], length - cached
        while uncached > 1:
            turn = plan([*((0, n, 9) for n in others), (cached, uncached, 9)], 64)[-1]
            cached += turn.prefill
            uncached -= turn.prefill
            if turn.prefill:
                ends.append(cached)
            others = [max(1, n - prefill_chunk(64)) for n in others]
        return ends

    assert cuts(100, []) == [32, 64, 96, 99]
    assert cuts(100, [1, 1, 1]) == cuts(100, [50, 1, 77]) == cuts(100, [])
    # Nor on how much of it somebody else has computed already, who was cut at the same places.
    assert cuts(100, [], cached=16) == [32, 64, 96, 99]
    assert cuts(100, [], cached=64) == [96, 99]


def test_later_short_prompts_do_not_overtake() -> None:
    assert plan([(0, 40, 0), (0, 40, 0), (0, 3, 0)], 64) == [Turn(prefill=32), Turn(), Turn()]


def test_drafts_are_trimmed_to_the_decoding_half() -> None:
    assert [t.drafts for t in plan([(7, 1, 100), (7, 1, 100)], 64)] == [30, 0]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=16),
    st.integers(32, 600),
)
def test_budget_order_and_no_starvation(requests: list[tuple[int, int, int]], budget: int) -> None:
    turns = plan(requests, budget)
    total = 0
    for (_, uncached, wanted), turn in zip(requests, turns, strict=True):
        total += turn.prefill + (1 + turn.drafts if turn.decode else 0)
        assert turn.decode == (uncached == 1)
        assert 0 <= turn.drafts <= (wanted if turn.decode else 0)
        assert 0 <= turn.prefill <= uncached - 1
    assert total <= budget
    # Whoever decodes does so in every step; the first that prefills does so too.
    first = next((t for (_, n, _), t in zip(requests, turns, strict=True) if n > 1), None)
    assert first is None or first.prefill > 0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 60))
def test_forwards_stay_under_the_cap_and_split_nobody(rows: list[int], cap: int) -> None:
    cuts = parts(rows, cap)
    assert [i for cut in cuts for i in range(len(rows))[cut]] == list(range(len(rows)))
    for cut in cuts:
        part = rows[cut]
        assert sum(part) <= cap or sum(n > 0 for n in part) == 1
    # No more forwards than needed: two neighbours would not have fit together.
    for one, two in itertools.pairwise(cuts):
        assert sum(rows[one]) + rows[two][0] > cap
