"""The reference against numbers worked by hand, one transform at a time and then their order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.params import SamplingParams
from paceline.sampling import reference, reference_distribution

P4 = [0.4, 0.3, 0.2, 0.1]


def logits_of(probs) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs, dtype=np.float64))


def p_of(probs, prompt=(), output=(), **options) -> list[float]:
    """The distribution that options make of given probabilities, dense, rounded to 12 digits."""
    row = reference_distribution(logits_of(probs), SamplingParams(**options), prompt, output)
    return [round(x, 12) for x in row.dense().tolist()]


class TestTransforms:
    def test_plain_softmax(self):
        assert p_of(P4) == P4

    def test_bias_is_added_to_the_logit(self):
        assert p_of([0.5, 0.5], logit_bias={1: math.log(3)}) == [0.25, 0.75]

    def test_repetition_divides_positive_and_multiplies_the_rest(self):
        """sglang PR #22049: a multiplicative penalty acts on the logits, and leaves a logit of 0 at 0."""
        z = np.array([2.0, -2.0, 0.0, 2.0])
        assert reference.with_repetition(z, 2.0, {0, 1, 2}).tolist() == [1.0, -4.0, 0.0, 2.0]

    def test_repetition_counts_prompt_and_output(self):
        z = np.array([math.log(4)] * 3)
        row = reference_distribution(z, SamplingParams(repetition_penalty=2.0), [0], [1])
        assert row.dense() == pytest.approx([0.25, 0.25, 0.5], abs=1e-12)  # exp(ln 4 / 2) = 2 against 4

    def test_presence_counts_once_and_output_only(self):
        halves = p_of([1 / 3] * 3, prompt=[0, 0], output=[1, 1, 1], presence_penalty=math.log(2))
        assert halves == [0.4, 0.2, 0.4]

    def test_frequency_counts_every_time_and_output_only(self):
        quarters = p_of([1 / 3] * 3, prompt=[0, 0], output=[1, 2, 2], frequency_penalty=math.log(2))
        assert quarters == [round(x, 12) for x in (4 / 7, 2 / 7, 1 / 7)]

    def test_negative_penalties_favour_what_was_said(self):
        assert p_of([0.5, 0.5], output=[0], presence_penalty=-math.log(3)) == [0.75, 0.25]

    def test_temperature(self):
        assert p_of([0.25, 0.75], temperature=0.5) == [0.1, 0.9]
        assert p_of([0.1, 0.9], temperature=2.0) == [0.25, 0.75]

    @pytest.mark.parametrize("k, expected", [
        (0, P4), (-1, P4), (4, P4), (9, P4), (3, [4 / 9, 3 / 9, 2 / 9, 0]), (2, [4 / 7, 3 / 7, 0, 0]),
        (1, [1, 0, 0, 0]),
    ])  # fmt: skip
    def test_top_k(self, k, expected):
        assert p_of(P4, top_k=k) == [round(x, 12) for x in expected]

    @pytest.mark.parametrize("p, expected", [
        (1.0, P4), (0.95, P4), (0.85, [4 / 9, 3 / 9, 2 / 9, 0]), (0.65, [4 / 7, 3 / 7, 0, 0]),
        (0.35, [1, 0, 0, 0]), (1e-300, [1, 0, 0, 0]),
    ])  # fmt: skip
    def test_top_p_keeps_the_shortest_front_that_reaches_it(self, p, expected):
        assert p_of(P4, top_p=p) == [round(x, 12) for x in expected]

    @pytest.mark.parametrize("p, kept", [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
    def test_top_p_met_exactly_takes_no_more(self, p, kept):
        """Four equal logits weigh exactly 1 each, so these cuts have no rounding in them."""
        assert np.count_nonzero(p_of([0.25] * 4, top_p=p)) == kept

    @pytest.mark.parametrize("m, expected", [
        (0.0, P4), (0.2, P4), (0.3, [4 / 9, 3 / 9, 2 / 9, 0]), (0.6, [4 / 7, 3 / 7, 0, 0]), (1.0, [1, 0, 0, 0]),
    ])  # fmt: skip
    def test_min_p_is_a_share_of_the_largest(self, m, expected):
        assert p_of(P4, min_p=m) == [round(x, 12) for x in expected]

    def test_min_p_of_one_keeps_every_maximum(self):
        assert p_of([0.2, 0.4, 0.4], min_p=1.0) == [0.0, 0.5, 0.5]

    def test_ties_at_a_cut_keep_the_lower_id(self):
        tied = [0.2, 0.3, 0.2, 0.3]
        assert p_of(tied, top_k=3) == [0.25, 0.375, 0.0, 0.375]
        assert p_of(tied, top_k=1) == [0.0, 1.0, 0.0, 0.0]
        assert p_of(tied, top_p=0.29) == [0.0, 1.0, 0.0, 0.0]
        assert p_of(tied, top_p=0.7) == [0.25, 0.375, 0.0, 0.375]


class TestOrder:
    def test_bias_comes_before_repetition(self):
        z = np.array([1.0, 0.0])
        params = SamplingParams(logit_bias={0: 1.0}, repetition_penalty=2.0)
        row = reference_distribution(z, params, [0], [])
        assert row.dense()[0] == pytest.approx(1 / (1 + math.exp(-1)))  # (1 + 1) / 2, not 1 / 2 + 1

    def test_repetition_comes_before_presence(self):
        z = np.array([1.0, 0.0])
        params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.5)
        row = reference_distribution(z, params, [], [0])
        assert row.dense()[0] == pytest.approx(1 / (1 + math.exp(1)))  # 1 / 2 - 1.5, not (1 - 1.5) * 2 = -1 too

    def test_penalties_come_before_temperature(self):
        row = reference_distribution(np.zeros(2), SamplingParams(presence_penalty=1.0, temperature=0.5), [], [0])
        assert row.dense()[0] == pytest.approx(1 / (1 + math.exp(2)))

    def test_temperature_comes_before_the_filters(self):
        assert np.count_nonzero(p_of(P4, min_p=0.2, temperature=0.5)) == 3  # ratios are squared: .5625 .25 .0625

    def test_top_p_sees_what_top_k_left(self):
        """4/7 alone reaches 0.5; of the whole row 0.4 would not."""
        assert p_of(P4, top_k=2, top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
        assert np.count_nonzero(p_of(P4, top_p=0.5)) == 2

    def test_min_p_comes_after_top_p(self):
        """0.4 < 0.55 keeps two; had min-p gone first, 4/7 would have reached 0.55 alone."""
        assert p_of(P4, top_p=0.55, min_p=0.6) == [round(4 / 7, 12), round(3 / 7, 12), 0.0, 0.0]

    def test_greedy_looks_at_bias_and_penalties(self):
        assert p_of(P4, temperature=0.0) == [1, 0, 0, 0]
        assert p_of(P4, temperature=0.0, logit_bias={3: 5.0}) == [0, 0, 0, 1]
        assert p_of(P4, temperature=0.0, output=[0], presence_penalty=1.0) == [0, 1, 0, 0]


class TestShape:
    def test_dense_where_nothing_was_cut(self):
        for options in ({}, {"top_k": 4}, {"top_p": 0.95}, {"min_p": 0.2}):
            assert reference_distribution(logits_of(P4), SamplingParams(**options), [], []).ids is None

    def test_sparse_where_a_filter_cut(self):
        row = reference_distribution(logits_of([0.1, 0.4, 0.2, 0.3]), SamplingParams(top_k=2), [], [])
        assert row.ids is not None
        assert row.ids.dtype == np.int64
        assert row.ids.tolist() == [1, 3]
        assert row.vocab_size == 4

    def test_a_filter_never_keeps_a_token_of_mass_zero(self):
        row = reference_distribution(logits_of([0.5, 0.0, 0.5, 0.0]), SamplingParams(top_k=3), [], [])
        assert row.ids is not None
        assert row.ids.tolist() == [0, 2]

    def test_minus_infinity_is_mass_zero(self):
        assert p_of([0.5, 0.0, 0.5]) == [0.5, 0.0, 0.5]


def test_total_is_a_sum():
    random = np.random.default_rng(0)
    for size in (1, 2, 63, 64, 65, 1000):
        weights = random.random(size)
        assert reference.total_of(weights) == pytest.approx(math.fsum(weights), rel=1e-14)
