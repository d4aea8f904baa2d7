"""The reference against numbers worked by hand, one transform at a time and then their order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BadLogits, InvalidInput, NoLegalToken
from paceline.params import SamplingParams
from paceline.sampling import History, reference, reference_distribution

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


class TestConstraints:
    """Allowed ids, bad words, min_tokens and grammar come before everything that weighs what is left."""

    def test_allowed_ids(self):
        assert p_of(P4, allowed_token_ids=[1, 3]) == [0, 0.75, 0, 0.25]

    def test_bad_words_mask_their_last_token_where_the_others_stand(self):
        assert p_of(P4, output=[2, 1], bad_words=[[2, 1, 0]]) == [0, 0.5, round(1 / 3, 12), round(1 / 6, 12)]
        assert p_of(P4, output=[1, 2], bad_words=[[2, 1, 0]]) == P4
        assert p_of(P4, prompt=[2, 1], bad_words=[[2, 1, 0]]) == P4
        assert p_of(P4, bad_words=[[0]]) == [0, 0.5, round(1 / 3, 12), round(1 / 6, 12)]

    def test_min_tokens(self):
        for output, expected in (([], [0, 0.6, 0.4, 0]), ([1], [0, 0.6, 0.4, 0]), ([1, 1], [0.4, 0.3, 0.2, 0.1])):
            params = SamplingParams(min_tokens=2)
            row = reference_distribution(logits_of(P4), params, [1], output, end_ids={0, 3})
            assert row.dense() == pytest.approx(expected, abs=1e-12)

    def test_legal(self):
        legal = np.array([False, True, False, True])
        row = reference_distribution(logits_of(P4), SamplingParams(temperature=0.0), [], [], legal=legal)
        assert row.dense().tolist() == [0, 1, 0, 0]

    def test_processors_come_first(self):
        """A processor sees the model's row and may not bring back what a constraint forbids."""
        seen = []

        def raise_zero(tokens, logits):
            seen.append((tokens, np.exp(logits).round(12).tolist()))
            logits[0] = 100.0
            return logits

        params = SamplingParams(logits_processors=[raise_zero], allowed_token_ids=[1, 3], logit_bias={1: -100.0})
        row = reference_distribution(logits_of(P4), params, [2], [1])
        assert seen == [((2, 1), P4)]
        assert row.dense().argmax() == 3
        assert row.dense()[[0, 2]].tolist() == [0, 0]

    def test_stateful_processors_may_be_given_with_their_state(self):
        class Once:
            def __init__(self, called=False):
                self.called = called

            def __call__(self, tokens, logits):
                logits[0] = -np.inf if self.called else logits[0]
                self.called = True
                return logits

            def clone(self):
                return Once(self.called)

        one = Once()
        params = SamplingParams(logits_processors=[one])
        for _ in range(2):
            assert reference_distribution(logits_of(P4), params, [], []).dense()[0] > 0
        assert not one.called
        row = reference_distribution(logits_of(P4), params, [], [], processors=[Once(called=True)])
        assert row.dense()[0] == 0

    def test_filters_see_what_the_constraints_left(self):
        """A legal token always survives, even where all that top-k would have kept is illegal."""
        assert p_of(P4, allowed_token_ids=[2, 3], top_k=1) == [0, 0, 1, 0]
        assert p_of(P4, allowed_token_ids=[2, 3], top_p=0.6) == [0, 0, 1, 0]
        assert p_of(P4, allowed_token_ids=[3], min_p=1.0) == [0, 0, 0, 1]
        assert p_of(P4, allowed_token_ids=[3], logit_bias={3: -100.0}, output=[3], presence_penalty=2.0) == [0, 0, 0, 1]

    def test_nothing_legal(self):
        for options, more in [
            ({"allowed_token_ids": [1], "bad_words": [[1]]}, {}),
            ({"allowed_token_ids": [1]}, {"legal": np.array([True, False, True, True])}),
            ({"logits_processors": [lambda tokens, logits: logits - np.inf]}, {}),
        ]:
            with pytest.raises(NoLegalToken, match="leave no token"):
                reference_distribution(logits_of(P4), SamplingParams(**options), [], [], **more)

    def test_a_row_that_was_bad_itself_is_not_blamed_on_a_constraint(self):
        for logits, said in ((np.full(4, -np.inf), "all 4 logits"), (np.array([0, np.nan, 0, 0]), "NaN at token 1")):
            with pytest.raises(BadLogits, match=said) as refused:
                reference_distribution(logits, SamplingParams(allowed_token_ids=[1, 2]), [], [])
            assert type(refused.value) is BadLogits

    def test_texts_are_not_silently_left_out(self):
        with pytest.raises(InvalidInput, match="text 'x'"):
            p_of(P4, bad_words=["x"])


class Legal:
    """A grammar that allows random tokens, by what stands before; None for no constraint."""

    def __init__(self, output, vocab_size, seed):
        self.output, self.vocab_size, self.seed = output, vocab_size, seed

    def legal(self, drafts=()):
        random = np.random.default_rng([self.seed, *self.output, *drafts])
        return None if random.random() < 0.2 else random.random(self.vocab_size) < 0.6


class TestHistory:
    """The compiled road with every option, on every row, against the page that says what they mean."""

    @given(data=st.data())
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_every_row_of_a_step_equals_the_reference(self, data):
        """vllm#22987, vllm#18902, sglang#28179, sglang#33643: rows after drafts lacked options or history."""
        size = data.draw(st.integers(1, 12))
        ids = st.integers(0, size - 1)
        dtype = data.draw(st.sampled_from([np.float32, np.float64]))
        value = st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 1.0, 2.5]) | st.floats(-9, 9, width=32)
        logits = np.array(data.draw(st.lists(value, min_size=size, max_size=size)), dtype=dtype)
        prompt, output, drafts = (data.draw(st.lists(ids, min_size=n, max_size=6)) for n in (1, 0, 0))
        runs = data.draw(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=3))
        end_ids = frozenset(data.draw(st.sets(ids, max_size=2)))
        params = random_params(data, size, ids)
        grammar = Legal(output, size, data.draw(st.integers(0, 9))) if data.draw(st.booleans()) else None
        history = History(
            params, [*prompt, *output], len(prompt), size, end_ids=end_ids, bad_words=runs, grammar=grammar
        )
        for n in data.draw(st.permutations(range(len(drafts) + 1))):  # no row depends on which was asked for before
            legal = grammar.legal(drafts[:n]) if grammar else None
            more = {"processors": (), "bad_words": runs, "end_ids": end_ids, "legal": legal}
            expected = outcome(reference_distribution, logits, params, prompt, [*output, *drafts[:n]], **more)
            assert outcome(history.distribution, logits, drafts[:n]) == expected

    def test_an_overflow_is_not_blamed_on_the_constraints(self):
        """Legal tokens there were; what an absurd penalty made of them is another error."""
        params = SamplingParams(repetition_penalty=1e-320, allowed_token_ids=[0, 1])
        more = {"processors": (), "bad_words": (), "end_ids": ()}
        expected = outcome(reference_distribution, np.ones(3), params, [1], [], **more)
        assert outcome(History(params, [1], 1, 3).distribution, np.ones(3)) == expected == BadLogits

    def test_a_commit_of_four_is_four_commits(self):
        """sglang#33643: counts, and masks, after a step of four tokens."""
        params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=5)
        logits = np.random.default_rng(0).normal(size=6)
        tokens = [0, 1]
        history = History(params, tokens, 2, 6, end_ids=frozenset({5}), bad_words=[(3, 4)])
        drafts = [2, 2, 3, 1, 3]
        for i, token in enumerate(drafts):
            ahead = history.distribution(logits, drafts[i:])
            tokens.append(token)
            history.commit(token)
            after = history.distribution(logits, drafts[i + 1 :])
            assert np.array_equal(ahead.dense(), after.dense())
        expected = reference_distribution(logits, params, [0, 1], drafts, bad_words=[(3, 4)], end_ids={5})
        assert np.array_equal(history.distribution(logits).dense(), expected.dense())
        assert expected.dense()[4] == 0


def outcome(call, *args, **options):
    """A distribution as comparable lists, or the type of the error."""
    try:
        row = call(*args, **options)
    except BadLogits as bad:
        return type(bad)
    return None if row.ids is None else row.ids.tolist(), row.probs.tolist()


def random_params(data, size, ids) -> SamplingParams:
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    return SamplingParams(
        temperature=pick(0.0, 0.7, 1.0, 3.0), top_k=data.draw(st.integers(-1, size)), top_p=pick(1e-9, 0.5, 0.9, 1.0),
        min_p=pick(0.0, 0.2, 1.0), presence_penalty=pick(-2.0, 0.0, 0.3), frequency_penalty=pick(0.0, 0.7),
        repetition_penalty=pick(0.5, 1.0, 1.2), min_tokens=data.draw(st.integers(0, 12)),
        logit_bias=data.draw(st.none() | st.dictionaries(ids, st.sampled_from([-100.0, 0.25, 100.0]), max_size=3)),
        allowed_token_ids=data.draw(st.none() | st.lists(ids, min_size=1)),
    )  # fmt: skip


def test_total_is_a_sum():
    random = np.random.default_rng(0)
    for size in (1, 2, 63, 64, 65, 1000):
        weights = random.random(size)
        assert reference.total_of(weights) == pytest.approx(math.fsum(weights), rel=1e-14)
