"""User functions and objects in front of every row: what they are given, and what is refused by their name."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from paceline.errors import InvalidParams, NoLegalToken, ProcessorError, UnsupportedOption
from paceline.params import SamplingParams
from paceline.sampling.processors import Processor, StatefulProcessor, cloned, run_processors


class Counter:
    """Bans a token on every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens, logits):
        self.calls += 1
        if self.calls % 2 == 0:
            logits[0] = -np.inf
        return logits

    def clone(self):
        return copy.copy(self)


def first(tokens, logits):
    logits[0] += 1.0
    return logits


def double(tokens, logits):
    return logits * 2


class TestRun:
    def test_in_order_with_the_tokens(self):
        seen = []

        def spy(tokens, logits):
            seen.append((tokens, logits.tolist(), logits.dtype))
            return logits

        row = run_processors((first, spy, double, spy), (4, 5), np.array([1.0, 2.0], dtype=np.float32))
        assert row.dtype == np.float64
        assert row.tolist() == [4.0, 4.0]
        assert seen == [((4, 5), [2.0, 2.0], np.float64), ((4, 5), [4.0, 4.0], np.float64)]

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_models_row_is_never_written(self, dtype):
        """vllm PR #30846: raw logprobs were wrong because a transform had changed the logits in place."""
        logits = np.array([1.0, 2.0], dtype=dtype)
        assert run_processors((first,), (), logits).tolist() == [2.0, 2.0]
        assert logits.tolist() == [1.0, 2.0]

    def test_no_processor_writes_into_what_another_keeps(self):
        """A processor that returns a row that it keeps would find it changed at its next call."""
        kept = np.array([1.0, 2.0])
        rows = []

        def constant(tokens, logits):
            return kept

        def keeps(tokens, logits):
            rows.append(logits)
            return logits

        result = run_processors((constant, keeps, first), (), np.zeros(2))
        result[:] = 9
        assert kept.tolist() == rows[0].tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("answer", [[3, 4], np.array([3, 4], np.int32), np.array([3, 4], np.float16)], ids=repr)
    def test_any_row_of_real_numbers_will_do(self, answer):
        row = run_processors((lambda tokens, logits: answer,), (), np.zeros(2))
        assert row.dtype == np.float64
        assert row.tolist() == [3.0, 4.0]

    def test_minus_infinity_forbids(self):
        def ban(tokens, logits):
            logits[0] = -np.inf
            return logits

        def nothing(tokens, logits):
            return logits - np.inf

        assert run_processors((ban,), (), np.zeros(3)).tolist() == [-np.inf, 0, 0]
        assert run_processors((nothing, lambda tokens, logits: np.ones(3)), (), np.zeros(3)).tolist() == [1, 1, 1]
        with pytest.raises(NoLegalToken, match="logits_processors leave no token"):
            run_processors((ban, nothing), (), np.zeros(3))


class TestRefused:
    @pytest.mark.parametrize("answer, said", [
        (None, "returned None"), (np.zeros(3), r"shape \(3,\)"), (np.zeros((1, 2)), r"shape \(1, 2\)"),
        (1.0, r"shape \(\)"), (np.zeros(2, complex), "complex"), (np.array([True, False]), "bool"),
        (["a", "b"], "dtype <U1"), ([[1], [1, 2]], "no array"), (np.array([None, None]), "object"),
        (np.array([1.0, np.nan]), "made NaN at token 1"), (np.array([np.inf, 1.0]), r"made \+inf at token 0"),
    ])  # fmt: skip
    def test_what_is_no_row_names_the_processor(self, answer, said):
        def wrong(tokens, logits):
            return answer

        with pytest.raises(ProcessorError, match=rf"logits_processors\[1\] = .*wrong.*{said}"):
            run_processors((first, wrong), (), np.zeros(2))

    def test_an_exception_names_the_processor_and_stays_the_cause(self):
        class Broken(Counter):
            def __call__(self, tokens, logits):
                raise KeyError("x")

        with pytest.raises(ProcessorError, match=r"logits_processors\[0\] = .*Broken raised KeyError: 'x'") as refused:
            run_processors((Broken(),), (), np.zeros(2))
        assert isinstance(refused.value.__cause__, KeyError)

    def test_a_caller_who_interrupts_is_not_a_broken_processor(self):
        def stop(tokens, logits):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_processors((stop,), (), np.zeros(2))

    @pytest.mark.parametrize("row", [[0, np.nan], [np.inf, 0], [-np.inf, -np.inf]], ids=repr)
    def test_no_processor_is_blamed_for_the_models_own_row(self, row):
        def never(tokens, logits):
            raise AssertionError

        assert np.array_equal(run_processors((never,), (), np.array(row)), row, equal_nan=True)


class TestClones:
    """sglang#21724, mlx-engine#112: one stateful object was shared by drafts and verified rows."""

    def test_functions_stay_and_objects_are_cloned(self):
        counter = Counter()
        one, two = cloned((first, counter))
        assert one is first
        assert two is not counter
        run_processors((two,), (), np.zeros(2))
        assert (counter.calls, two.calls) == (0, 1)
        assert isinstance(counter, StatefulProcessor)
        assert isinstance(first, Processor)
        assert not isinstance(first, StatefulProcessor)

    @pytest.mark.parametrize("answer", [None, 5, first, Counter], ids=repr)
    def test_a_clone_is_a_processor_with_clone(self, answer):
        class Odd(Counter):
            def clone(self):
                return answer

        with pytest.raises(ProcessorError, match=r"logits_processors\[0\] = .*Odd: clone\(\) returned"):
            cloned((Odd(),))

    def test_a_clone_that_is_the_object_itself_would_share_its_state(self):
        class Shared(Counter):
            def clone(self):
                return self

        with pytest.raises(ProcessorError, match=r"clone\(\) returned itself"):
            cloned((Shared(),))

    def test_a_clone_that_raises(self):
        class Stuck(Counter):
            def clone(self):
                raise RuntimeError("stuck")

        with pytest.raises(ProcessorError, match=r"Stuck: clone\(\) raised RuntimeError: stuck"):
            cloned((Stuck(),))


class TestAtConstruction:
    def test_functions_and_objects_with_clone(self):
        counter = Counter()
        assert SamplingParams(logits_processors=[first, counter]).logits_processors == (first, counter)
        assert SamplingParams(logits_processors=[]).logits_processors is None

    @pytest.mark.parametrize("one", [Counter().__call__, abs, np.negative], ids=["method", "builtin", "ufunc"])
    def test_what_may_keep_state_that_nobody_can_take_back(self, one):
        """Neither a plain function nor an object with clone(): refused by name, with what to do."""
        with pytest.raises(UnsupportedOption, match=r"logits_processors\[0\] = .*give it clone\(\)"):
            SamplingParams(logits_processors=[one])

    @pytest.mark.parametrize("value", [first, "x", 5, [5], [Counter], [None]], ids=repr)
    def test_what_is_no_processor(self, value):
        with pytest.raises(InvalidParams, match="logits_processors"):
            SamplingParams(logits_processors=value)
