"""TokenCounts against counting by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paceline.errors import InvalidInput, InvariantError
from paceline.params import SamplingParams
from paceline.sampling import TokenCounts, distribution


def as_dict(counts: TokenCounts) -> dict[int, int]:
    ids, n = counts.arrays()
    assert ids.dtype == n.dtype == np.int64
    assert len(set(ids.tolist())) == ids.size
    return dict(zip(ids.tolist(), n.tolist(), strict=True))


def test_prompt_is_seen_but_not_counted():
    counts = TokenCounts([5, 5, 9])
    assert as_dict(counts) == {5: 0, 9: 0}
    assert counts.seen(5)
    assert not counts.seen(4)
    assert counts.output_count(5) == 0


def test_output_is_counted_per_token():
    counts = TokenCounts([5])
    counts.add([7, 5, 7])
    counts.add([])
    assert as_dict(counts) == {5: 1, 7: 2}
    assert counts.output_count(7) == 2
    assert counts.output_count(8) == 0


def test_a_step_of_four_counts_like_four_steps_of_one():
    """sglang#33643, sglang PR #22049: only the last token of a step was counted."""
    at_once, one_by_one = TokenCounts([1, 2]), TokenCounts([1, 2])
    at_once.add([3, 3, 1, 4])
    for token in (3, 3, 1, 4):
        one_by_one.add([token])
    assert as_dict(at_once) == as_dict(one_by_one) == {1: 1, 2: 0, 3: 2, 4: 1}


def test_drafts_leave_the_committed_counts_alone():
    counts = TokenCounts([1])
    counts.add([2])
    row = counts.with_drafts([2, 3, 3, 1])
    assert as_dict(row) == {1: 1, 2: 2, 3: 2}
    assert (row.output_count(3), row.output_count(2), row.output_count(1)) == (2, 2, 1)
    assert row.seen(3)
    assert not row.seen(4)
    assert as_dict(counts) == {1: 0, 2: 1}
    assert not counts.seen(3)


def test_drafts_on_drafts_and_added_drafts():
    counts = TokenCounts([1])
    first = counts.with_drafts([2])
    second = first.with_drafts([2, 5])
    assert as_dict(first) == {1: 0, 2: 1}
    assert as_dict(second) == {1: 0, 2: 2, 5: 1}
    first.add([1])
    assert as_dict(first) == {1: 1, 2: 1}
    assert as_dict(second) == {1: 0, 2: 2, 5: 1}
    assert as_dict(counts) == {1: 0}


def test_drafts_of_an_older_step_are_refused():
    counts = TokenCounts([1])
    row = counts.with_drafts([2])
    further = row.with_drafts([3])
    counts.add([4, 5])
    for stale in (row, further, row.with_drafts([6])):
        for use in (stale.arrays, lambda s=stale: s.seen(1), lambda s=stale: s.output_count(1)):
            with pytest.raises(InvariantError, match="2 more tokens"):
                use()
    assert as_dict(counts.with_drafts([2])) == {1: 0, 2: 1, 4: 1, 5: 1}


@pytest.mark.parametrize("make", [
    lambda: TokenCounts([0, -1]), lambda: TokenCounts([]).add([-1]), lambda: TokenCounts([]).with_drafts([3, -1]),
])  # fmt: skip
def test_a_placeholder_is_not_a_token(make):
    """vllm#46899: -1 that marks an empty place must not be counted as a token."""
    with pytest.raises(InvalidInput, match="-1"):
        make()


def test_long_histories():
    random = np.random.default_rng(0)
    prompt, output = random.integers(0, 3000, 2000).tolist(), random.integers(0, 3000, 5000).tolist()
    counts = TokenCounts(prompt)
    for start in range(0, 5000, 7):
        counts.add(output[start : start + 7])
    assert as_dict(counts) == dict.fromkeys(prompt, 0) | Counter(output)
    drafts = random.integers(0, 6000, 50).tolist()
    assert as_dict(counts.with_drafts(drafts)) == dict.fromkeys(prompt, 0) | Counter(output + drafts)


def test_a_row_after_drafts_equals_the_row_after_commits():
    """vllm#22987, vllm#18902: row i is what plain decoding would see after the drafts before it."""
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    logits = np.random.default_rng(1).normal(size=50) * 2
    drafts = [3, 8, 3, 49]
    counts = TokenCounts([1, 2, 3])
    counts.add([8, 1])
    for i in range(5):
        plain = TokenCounts([1, 2, 3])
        plain.add([8, 1, *drafts[:i]])
        expected = distribution(logits, params, plain)
        got = distribution(logits, params, counts.with_drafts(drafts[:i]))
        assert np.array_equal(got.probs, expected.probs)
