"""Prompt lookup against a reference that scans, and its cost in counted operations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from paceline.draft import LookupDrafter
from paceline.draft.lookup import LONGEST, _History
from paceline.errors import InvalidParams, InvariantError
from paceline.params import SamplingParams
from paceline.types import Drafter

from .fakes import CountingList, context_of, proposed


def propose(
    drafter: LookupDrafter, tokens: Sequence[int], budget: int, request_id: int = 0, start: tuple[int, ...] = ()
) -> list[int]:
    proposal = proposed(drafter.propose([context_of(tokens, request_id, start=start)], [budget])[0])
    assert proposal.kind == "point"
    assert proposal.q is None
    assert proposal.is_chain
    return list(proposal.tokens)


def fresh(tokens: Sequence[int], budget: int, start: tuple[int, ...] = (), **options: int) -> list[int]:
    drafter = LookupDrafter(**options)
    drafter.observe(0, tokens)
    return propose(drafter, tokens, budget, start=start)


def scan(tokens: Sequence[int], budget: int, max_ngram: int, min_ngram: int, start: tuple[int, ...] = ()) -> list[int]:
    """`start` and what may follow it: longest suffix first, nearest occurrence that a committed token follows first,
    copying one token at a time."""
    text = [*tokens, *start[:budget]]
    n, room = len(text), budget - len(start[:budget])
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size <= n and text[end - size : end] == text[n - size :]:
                for i in range(room):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return text[len(tokens) :]


class LookupMachine(RuleBasedStateMachine):
    """Any prompts and blocks, several requests, released and begun anew."""

    @initialize(max_ngram=st.integers(1, 4), min_ngram=st.integers(1, 4))
    def build(self, max_ngram: int, min_ngram: int) -> None:
        self.sizes = max(max_ngram, min_ngram), min(max_ngram, min_ngram)
        self.drafter = LookupDrafter(*self.sizes)
        self.texts: dict[int, list[int]] = {}

    @rule(request=st.integers(0, 2), block=st.lists(st.integers(0, 2), max_size=8))
    def commit(self, request: int, block: list[int]) -> None:
        self.drafter.observe(request, block)
        self.texts.setdefault(request, []).extend(block)

    @rule(request=st.integers(0, 2))
    def end(self, request: int) -> None:
        self.drafter.release(request)
        self.texts.pop(request, None)

    @rule(
        budgets=st.lists(st.integers(0, 6), min_size=3, max_size=3),
        starts=st.lists(st.lists(st.integers(0, 2), max_size=7).map(tuple), min_size=3, max_size=3),
    )
    def compare(self, budgets: list[int], starts: list[tuple[int, ...]]) -> None:
        """Settled drafts are continued and leave no trace: the next comparison has others, or none."""
        ids = sorted(self.texts)
        contexts = [context_of(self.texts[i], i, start=start) for i, start in zip(ids, starts, strict=False)]
        answers = self.drafter.propose(contexts, budgets[: len(ids)])
        for i, answer, budget, start in zip(ids, answers, budgets, starts, strict=False):
            assert list(proposed(answer).tokens) == scan(self.texts[i], budget, *self.sizes, start)


LookupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLookupMachine = LookupMachine.TestCase


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 8),
    st.lists(st.integers(0, 3), max_size=5).map(tuple),
)
def test_default_sizes_equal_the_scan(tokens: list[int], budget: int, start: tuple[int, ...]) -> None:
    assert fresh(tokens, budget) == scan(tokens, budget, 3, 2)
    assert fresh(tokens, budget, start) == scan(tokens, budget, 3, 2, start)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=60),
    st.integers(1, 20),
    st.lists(st.integers(0, 1), max_size=5).map(tuple),
    st.integers(1, 15),
)
def test_sources_say_how_many_tokens_match(tokens: list[int], budget: int, start: tuple[int, ...], size: int) -> None:
    """In front of every draft, the drafts before it included; they are what its chance hangs on."""
    drafter = LookupDrafter(max_ngram=size, min_ngram=1)
    drafter.observe(0, tokens)
    proposal = proposed(drafter.propose([context_of(tokens, 0, start=start)], [budget])[0])
    assert sum(count for _, count in proposal.sources) == len(proposal)
    names = [name for name, count in proposal.sources for _ in range(count)]
    settled = len(start[:budget])
    assert names[:settled] == ["forced"] * settled
    text = [*tokens, *proposal.tokens]
    for i in range(len(tokens) + settled, len(text)):
        said = int(names[i - len(tokens)].removeprefix("lookup:"))
        places = range(1, i)
        assert said <= LONGEST
        # Some earlier place matches that far back, and is followed by this very token.
        assert any(p >= said and text[p - said : p] == text[i - said : i] and text[p] == text[i] for p in places)
    if len(proposal) > settled:
        first = int(names[settled].removeprefix("lookup:"))
        end = len(tokens) + settled
        longest = max(m for p in range(1, len(tokens)) for m in range(p + 1) if text[p - m : p] == text[end - m : end])
        assert first == min(longest, LONGEST) or size < min(longest, LONGEST), (
            "the nearest of equal n-grams may match less"
        )
        assert first >= min(longest, size, LONGEST)


def test_is_a_drafter() -> None:
    drafter = LookupDrafter()
    assert isinstance(drafter, Drafter)
    assert drafter.name == "lookup"
    drafter.observe(0, [1, 2])
    drafter.close()
    drafter.close()
    with pytest.raises(InvariantError, match="2 tokens are committed but 0 were observed"):
        propose(drafter, [1, 2], 1)


@pytest.mark.parametrize(
    "tokens, budget, drafts",
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),  # copy what followed
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 1, [4]),  # the most recent occurrence
        ([5, 1, 2, 3, 1, 2, 9, 5, 1, 2], 1, [3]),  # a longer match beats a nearer one
        ([7, 7, 7], 4, [7, 7, 7, 7]),  # period 1
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # period 2
        ([1, 2, 3, 1, 2], 6, [3, 1, 2, 3, 1, 2]),  # through the end and on
        ([1, 2, 3, 4], 4, []),  # nothing repeats
        ([3], 4, []),
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_examples(tokens: list[int], budget: int, drafts: list[int]) -> None:
    assert fresh(tokens, budget) == drafts


@pytest.mark.parametrize(
    "tokens, start, budget, drafts",
    [
        ([1, 2, 3, 4, 9], (1, 2), 4, [1, 2, 3, 4]),  # what followed the settled drafts
        ([1, 2, 3, 4, 1], (2,), 3, [2, 3, 4]),  # a suffix that is partly settled
        ([5, 1, 2, 7], (1, 2), 7, [1, 2, 7, 1, 2, 7, 1]),  # through the end, the settled ones and itself
        ([1, 2, 3, 1, 2], (9,), 3, [9]),  # they broke the repetition
        ([1, 2, 3, 1, 2], (3, 1, 2), 2, [3, 1]),  # more than the budget
        ([1, 2], (), 2, []),
        ([8, 9], (1, 2, 1, 2), 6, [1, 2, 1, 2]),  # a repetition among drafts is not in the index
    ],
)
def test_settled_drafts_are_continued(
    tokens: list[int], start: tuple[int, ...], budget: int, drafts: list[int]
) -> None:
    assert fresh(tokens, budget, start) == drafts


def test_min_ngram_is_kept() -> None:
    tokens = [1, 2, 3, 2]
    assert fresh(tokens, 1, min_ngram=1) == [3]
    assert fresh(tokens, 1, min_ngram=2) == []


def test_a_block_of_many_equals_token_by_token() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    one, many = LookupDrafter(), LookupDrafter()
    many.observe(0, tokens)
    for token in tokens:
        one.observe(0, [token])
    assert propose(one, tokens, 4) == propose(many, tokens, 4) == [4, 1, 2, 4]


def test_works_without_any_end_token() -> None:
    """huggingface/transformers PR #27775 (comment): a model without an end id crashed prompt lookup."""
    drafter = LookupDrafter()
    tokens = [1, 2, 3, 1, 2]
    drafter.observe(0, tokens)
    for params in (SamplingParams(ignore_eos=True), SamplingParams(stop_token_ids=[])):
        context = context_of(tokens, params=params)
        assert proposed(drafter.propose([context], [2])[0]).tokens == (3, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_consumes_no_randomness_and_invents_no_token(temperature: float) -> None:
    """vllm-ascend#13608: a step without drafts advanced the generator. vllm#46899: -1 as a token.

    huggingface/transformers PR #48281: no test sampled.
    """
    tokens = [4, 5, 6, 4, 5]
    for text in (tokens, [4, 5, 6, 4]):
        drafter = LookupDrafter()
        drafter.observe(0, text)
        context = context_of(text, params=SamplingParams(temperature=temperature))
        proposal = proposed(drafter.propose([context], [4])[0])
        assert set(proposal.tokens) <= set(text)
        assert context.draws.asked == []  # type: ignore[attr-defined]


def test_skipped_steps_and_budgets_of_zero_leave_no_stale_drafts() -> None:
    """vllm#46899, vllm#40768: drafts of an earlier step survived a skipped one."""
    drafter = LookupDrafter()
    text = [1, 2, 3, 1, 2]
    drafter.observe(0, text)
    assert propose(drafter, text, 2) == [3, 1]
    for block in ([9], [3, 1], [2]):
        text = text + block
        drafter.observe(0, block)
    assert propose(drafter, text, 0) == []
    assert propose(drafter, text, 3) == scan(text, 3, 3, 2)


def test_a_context_that_was_not_observed_is_an_invariant_error() -> None:
    drafter = LookupDrafter()
    drafter.observe(7, [1, 2, 3])
    with pytest.raises(InvariantError, match=r"request 7: 4 tokens are committed but 3 were observed"):
        propose(drafter, [1, 2, 3, 4], 2, request_id=7)
    with pytest.raises(InvariantError, match="request 7"):
        propose(drafter, [1, 2, 4], 2, request_id=7)
    with pytest.raises(InvariantError, match=r"request 8: 1 tokens are committed but 0 were observed"):
        propose(drafter, [1], 2, request_id=8)


def test_releasing_forgets_and_unknown_ids_are_ignored() -> None:
    drafter = LookupDrafter()
    drafter.observe(0, [1, 2, 1, 2])
    drafter.release(0)
    drafter.release(0)
    drafter.observe(0, [2, 1])
    assert propose(drafter, [2, 1], 4) == []


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None])
def test_min_ngram_is_validated(value: Any) -> None:
    with pytest.raises(InvalidParams, match=rf"min_ngram = {value!r}; allowed: an integer from 1 to"):
        LookupDrafter(min_ngram=value)


@pytest.mark.parametrize("value", [1, True, 2.5, "3", None])
def test_max_ngram_is_validated(value: Any) -> None:
    with pytest.raises(InvalidParams, match=rf"max_ngram = {value!r}; allowed: an integer from 2 to"):
        LookupDrafter(max_ngram=value, min_ngram=2)


class CountingDict(dict[tuple[int, ...], int]):
    """Counts lookups and stores."""

    asked = 0

    def get(self, *args: Any) -> Any:
        CountingDict.asked += 1
        return super().get(*args)

    def __setitem__(self, key: tuple[int, ...], value: int) -> None:
        CountingDict.asked += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("length", [100, 100_000])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("num_settled", [0, 3])
def test_a_step_costs_the_same_at_any_length(length: int, repeats: bool, num_settled: int) -> None:
    """Reads and index operations of one step (4 drafts asked, 5 tokens committed), counted."""
    text = [i % 50 if repeats else i for i in range(length)]
    drafter = LookupDrafter()
    drafter.observe(0, text)
    history = drafter._histories[0]
    history.tokens, history._behind = CountingList(history.tokens), CountingDict(history._behind)
    context = context_of(CountingList(text), start=tuple((length + i) % 50 for i in range(num_settled)))
    CountingList.read = CountingDict.asked = 0
    proposal = proposed(drafter.propose([context], [4])[0])
    drafter.observe(0, [1, 2, 3, 4, 5])
    assert len(proposal) == (4 if repeats or num_settled else 0)
    assert CountingList.read <= 2 + (2 + 3) + 4 + 5 * (2 + 3) + 2 * LONGEST
    assert CountingDict.asked <= 2 + 5 * 2


def test_memory_is_linear() -> None:
    """At most one entry per token and n-gram size, on a text without any repetition."""
    drafter = LookupDrafter(max_ngram=3, min_ngram=2)
    drafter.observe(0, range(10_000))
    history: _History = drafter._histories[0]
    assert len(history.tokens) == 10_000
    assert len(history._behind) <= 2 * 10_000
    assert sys.getsizeof(history._behind) < 200 * 10_000
