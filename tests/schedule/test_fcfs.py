"""First come, first served: pure planning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.schedule import Turn, admit, plan, prefill_chunk


def test_decoding_and_prefilling_share_a_step() -> None:
    assert plan([1, 30, 1], [4, 4, 4], 64) == [
        Turn(decode=True, drafts=4),
        Turn(prefill=29),
        Turn(decode=True, drafts=4),
    ]


def test_a_prompt_is_cut_at_the_same_places_in_any_company() -> None:
    """mlx-lm PR #1109: another prefill split flips near ties, so it must not depend on drafts or neighbours."""

    def chunks(length: int, others: list[int]) -> list[int]:
        sizes, uncached = [], length
        while uncached > 1:
            turn = plan([*others, uncached], [9] * (len(others) + 1), 64)[-1]
            if turn.prefill:
                sizes.append(turn.prefill)
            uncached -= turn.prefill
            others = [max(1, n - prefill_chunk(64)) for n in others]
        return sizes

    assert chunks(100, []) == [32, 32, 32, 3]
    assert chunks(100, [1, 1, 1]) == chunks(100, [50, 1, 77]) == chunks(100, [])


def test_later_short_prompts_do_not_overtake() -> None:
    assert plan([40, 40, 3], [0, 0, 0], 64) == [Turn(prefill=32), Turn(), Turn()]


def test_drafts_are_trimmed_to_the_decoding_half() -> None:
    assert [t.drafts for t in plan([1, 1], [100, 100], 64)] == [30, 0]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=16),
    st.integers(32, 600),
)
def test_budget_order_and_no_starvation(requests: list[tuple[int, int]], budget: int) -> None:
    turns = plan([n for n, _ in requests], [w for _, w in requests], budget)
    total = 0
    for (uncached, wanted), turn in zip(requests, turns, strict=True):
        total += turn.prefill + (1 + turn.drafts if turn.decode else 0)
        assert turn.decode == (uncached == 1)
        assert 0 <= turn.drafts <= (wanted if turn.decode else 0)
        assert 0 <= turn.prefill <= uncached - 1
    assert total <= budget
    # Whoever decodes does so in every step; the first that prefills does so too.
    first = next((t for (n, _), t in zip(requests, turns, strict=True) if n > 1), None)
    assert first is None or first.prefill > 0


def test_admission_keeps_the_order() -> None:
    assert admit([10, 10, 10], 2, 100) == 2
    assert admit([10, 90, 5], 9, 50) == 1  # the third would fit, but waits its turn
    assert admit([], 4, 10) == 0
    assert admit([5], 0, 10) == 0


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 8), st.integers(0, 200))
def test_admitted_requests_fit(needs: list[int], slots: int, tokens: int) -> None:
    n = admit(needs, slots, tokens)
    assert n <= slots
    assert sum(needs[:n]) <= tokens
