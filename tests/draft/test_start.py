"""Drafts that are settled before the draft model draws its own."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft import ModelDrafter
from paceline.errors import BadLogits, InvariantError
from paceline.params import SamplingParams
from paceline.sampling import TokenCounts, distribution
from paceline.types import DraftContext, Proposal

from .fakes import FakeBackend, FakeGrammar, context_of, dense, proposed

GREEDY = SamplingParams(temperature=0.0)


def drafter_on(backend: FakeBackend, target: FakeBackend | None = None) -> ModelDrafter:
    return ModelDrafter(backend, "model:fake", target or FakeBackend(backend.info.vocab_size))


def one(drafter: ModelDrafter, context: DraftContext, budget: int) -> Proposal:
    proposal = proposed(drafter.propose([context], [budget])[0])
    drafter.check([context])
    return proposal


def asked(context: DraftContext) -> list[tuple[int, int]]:
    """(position, node) of all draws."""
    return [(position, node) for _, position, _, _, node in context.draws.asked]  # type: ignore[attr-defined]


def test_settled_drafts_have_one_hot_rows_and_the_others_their_own() -> None:
    backend = FakeBackend()
    context = context_of([3, 1], start=(5, 0))
    proposal = one(drafter_on(backend), context, 4)
    assert proposal.kind == "sampled"
    assert proposal.tokens[:2] == (5, 0)
    assert asked(context) == [(4, 2), (5, 3)]
    rows = dense(proposal.q or [])
    np.testing.assert_array_equal(rows[:2], np.eye(7)[[5, 0]])
    for i in (2, 3):
        row = distribution(backend.logits((3, 1, *proposal.tokens[:i])), SamplingParams(), None)
        np.testing.assert_array_equal(rows[i], row.dense())


def test_settled_drafts_are_forwarded_with_the_committed_tokens_once() -> None:
    backend = FakeBackend()
    one(drafter_on(backend), context_of([3, 1], start=(5, 0)), 4)
    segments = [s for batch in backend.batches for s in batch]
    assert segments[0].tokens == (3, 1, 5, 0)
    assert [s.num_rows for s in segments] == [1, 1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)])
@pytest.mark.parametrize("budget", range(4))
def test_where_nothing_is_drawn_it_is_a_point_and_costs_nothing(params: SamplingParams, budget: int) -> None:
    backend = FakeBackend()
    context = context_of([3, 1], start=(5, 0, 2), params=params)
    proposal = one(drafter_on(backend), context, budget)
    assert (proposal.kind, proposal.tokens) == ("point", (5, 0, 2)[:budget])
    assert backend.batches == []
    assert backend.slots == {}
    assert asked(context) == []


def test_greedy_drafts_behind_settled_ones_are_a_point() -> None:
    backend = FakeBackend()
    proposal = one(drafter_on(backend), context_of([3, 1], start=(5,), params=GREEDY), 3)
    second = int(np.argmax(backend.logits((3, 1, 5))))
    assert proposal.kind == "point"
    assert proposal.tokens == (5, second, int(np.argmax(backend.logits((3, 1, 5, second)))))


def test_penalties_count_settled_drafts() -> None:
    params = SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3)
    backend = FakeBackend()
    proposal = one(drafter_on(backend), context_of([3, 3, 5], start=(3, 2, 3), params=params), 5)
    assert proposal.q is not None
    for i in (3, 4):
        counts = TokenCounts([3, 3, 5])
        counts.add(proposal.tokens[:i])
        row = distribution(backend.logits((3, 3, 5, *proposal.tokens[:i])), params, counts)
        np.testing.assert_array_equal(proposal.q[i].dense(), row.dense())


@pytest.mark.parametrize("place", [0, 1])
def test_an_id_the_draft_model_cannot_read_stops_it_for_this_step_alone(place: int) -> None:
    """The id is never forwarded, and drafts the request did not take are not held against it."""
    backend, target = FakeBackend(5), FakeBackend(8)
    drafter = drafter_on(backend, target)
    start = (6, 1) if place == 0 else (1, 6)
    context = context_of([1, 2], start=start)
    proposal = one(drafter, context, 4)
    assert (proposal.kind, proposal.tokens) == ("point", start)
    assert backend.batches == []
    assert asked(context) == []
    assert len(one(drafter, context_of([1, 2, 3]), 4)) == 4  # the target took another token
    assert len(one(drafter, context_of([1, 2, 3, 6], start=(0,)), 4)) == 1  # the target took it
    assert backend.slots == {}


@pytest.mark.parametrize("left", range(-2, 4))
def test_settled_drafts_need_no_room_in_the_draft_models_context(left: int) -> None:
    """turboderp-org/exllamav2#274: nothing is forwarded beyond the context, and what is settled is proposed anyway."""
    backend = FakeBackend(max_len=12)
    tokens = [i % 7 for i in range(12 - left)]
    proposal = one(drafter_on(backend), context_of(tokens, start=(5, 0), params=GREEDY), 4)
    assert proposal.tokens[:2] == (5, 0)
    assert len(proposal) == max(2, min(4, left + 1))


def test_settled_drafts_are_proposed_where_the_memory_is_taken_by_others() -> None:
    backend = FakeBackend(max_len=12)
    drafter = drafter_on(backend)
    for request in range(3):
        one(drafter, context_of([1] * 10, request), 3)
    backend.reserved[0] += 10
    proposal = one(drafter, context_of([1] * 6, 3, start=(5,)), 4)
    assert (proposal.kind, proposal.tokens) == ("point", (5,))


# --- nothing legal to draft ---------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
@pytest.mark.parametrize("start", [(), (5, 0)])
def test_where_nothing_may_follow_nothing_is_drawn(params: SamplingParams, start: tuple[int, ...]) -> None:
    """Nothing behind the end of a grammar is proposed."""
    backend = FakeBackend()
    context = context_of([3, 1], start=start, params=params, grammar=FakeGrammar(7, {start: ()}))
    proposal = one(drafter_on(backend), context, 4)
    assert (proposal.kind, proposal.tokens) == ("point", start)
    assert asked(context) == []


def test_drafting_stops_behind_the_last_legal_draft() -> None:
    grammar = FakeGrammar(7, {(): (2,), (2,): (4,), (2, 4): ()})
    proposal = one(drafter_on(FakeBackend()), context_of([3, 1], grammar=grammar), 5)
    assert (proposal.kind, proposal.tokens) == ("sampled", (2, 4))
    np.testing.assert_array_equal(dense(proposal.q or []), np.eye(7)[[2, 4]])


def test_drafts_are_drawn_among_what_is_legal() -> None:
    grammar = FakeGrammar(7, {(): (2, 6), (2,): (4, 5), (6,): (1, 3)})
    backend = FakeBackend(max_slots=6)
    drafter = drafter_on(backend)
    for seed in range(6):
        tokens = [seed, 1]
        proposal = one(drafter, context_of(tokens, seed, grammar=grammar), 2)
        row = backend.logits(tuple(tokens))
        expected = np.exp(row[[2, 6]]) / np.exp(row[[2, 6]]).sum()
        np.testing.assert_allclose(dense(proposal.q or [])[0][[2, 6]], expected, rtol=1e-12)
        assert proposal.tokens in {(2, 4), (2, 5), (6, 1), (6, 3)}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_tokens_that_only_the_target_knows_are_legal_and_not_an_error(params: SamplingParams) -> None:
    """Everything legal is beyond the draft model's vocabulary: the target can go on, the drafter cannot."""
    options = SamplingParams(temperature=params.temperature, allowed_token_ids=[6, 7])
    backend = FakeBackend(5)
    drafter = drafter_on(backend, FakeBackend(8))
    proposal = one(drafter, context_of([1, 2], params=options, vocab_size=8), 3)
    assert (proposal.kind, proposal.tokens) == ("point", ())


def test_a_row_that_is_bad_by_itself_is_still_an_error() -> None:
    """A NaN must not pass for "nothing legal": it names the draft model."""
    backend = FakeBackend(logits=lambda tokens: np.full(7, np.nan))
    context = context_of([3, 1], 9, start=(5,), grammar=FakeGrammar(7, {(5,): (1, 2)}))
    (answer,) = drafter_on(backend).propose([context], [3])
    assert type(answer) is BadLogits
    assert "model:fake, request 9, position 3" in str(answer)


def test_a_fault_of_one_requests_grammar_ends_that_request_alone() -> None:
    class Broken(FakeGrammar):
        def legal(self, drafts: object = ()) -> None:
            raise InvariantError("the grammar lost its place")

    backend = FakeBackend()
    drafter = drafter_on(backend)
    contexts = [context_of([3, 1], 0, grammar=Broken(7)), context_of([3, 1], 1)]
    answers = drafter.propose(contexts, [3, 3])
    assert isinstance(answers[0], InvariantError)
    assert len(proposed(answers[1])) == 3
    drafter.check(contexts)
