"""Forced tokens in front of what any drafter proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.draft import ForcedDrafter, GuardedDrafter, LookupDrafter, ModelDrafter, NoDrafter
from paceline.errors import BackendError, DrafterError, InvariantError, PacelineError
from paceline.params import SamplingParams
from paceline.types import DraftContext, Drafter, Proposal

from .fakes import FakeBackend, FakeGrammar, context_of, proposed

TEXT = [1, 2, 3, 1, 2]


class Inner:
    """Answers by `answer(context, budget)`; keeps what it was asked and told."""

    name = "inner"

    def __init__(self, answer: Callable[[DraftContext, int], Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[DraftContext, int]] = []
        self.told: list[Any] = []

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        self.asked += zip(contexts, budgets, strict=True)
        return [self.answer(c, k) for c, k in zip(contexts, budgets, strict=True)]

    def observe(self, request_id: int, committed: Sequence[int], hidden: Any = None) -> None:
        self.told.append((request_id, committed, hidden))

    def release(self, request_id: int) -> None:
        self.told.append(("release", request_id))

    def check(self, contexts: Sequence[DraftContext]) -> None:
        self.told.append(("check", contexts))

    def close(self) -> None:
        self.told.append("close")


def forcing(forced: Sequence[int] | PacelineError, request_id: int = 0, **options: Any) -> DraftContext:
    return context_of(TEXT, request_id, grammar=FakeGrammar(7, forced=forced), **options)


def one(drafter: ForcedDrafter, context: DraftContext, budget: int) -> Any:
    (answer,) = drafter.propose([context], [budget])
    return answer


def lookup() -> ForcedDrafter:
    drafter = ForcedDrafter(LookupDrafter())
    drafter.observe(0, TEXT)
    return drafter


def model(backend: FakeBackend | None = None) -> ForcedDrafter:
    return ForcedDrafter(ModelDrafter(backend or FakeBackend(), "model:fake", FakeBackend()))


# --- alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", range(5))
def test_alone_it_proposes_what_is_forced(budget: int) -> None:
    context = forcing((4, 5, 6))
    answer = proposed(one(ForcedDrafter(), context, budget))
    assert (answer.kind, answer.tokens) == ("point", (4, 5, 6)[:budget])
    assert context.history._grammar.limits == ([budget] if budget else [])  # type: ignore[attr-defined]


def test_without_a_grammar_it_proposes_nothing() -> None:
    assert proposed(one(ForcedDrafter(), context_of(TEXT), 3)).tokens == ()


def test_names() -> None:
    assert ForcedDrafter().name == ForcedDrafter(NoDrafter()).name == "forced"
    assert lookup().name == "forced+lookup"
    assert model().name == "forced+model:fake"
    assert isinstance(lookup(), Drafter)


def test_more_than_was_asked_for_is_cut() -> None:
    """A limit that is not kept would be a proposal over budget, which ends the request."""
    grammar = FakeGrammar(7)
    grammar.forced = lambda limit: (4, 5, 6)  # type: ignore[method-assign]
    assert proposed(one(ForcedDrafter(), context_of(TEXT, grammar=grammar), 2)).tokens == (4, 5)
    assert proposed(one(lookup(), context_of(TEXT, grammar=grammar), 2)).tokens == (4, 5)


# --- in front of others -------------------------------------------------------------------------------


def test_lookup_goes_on_behind_what_is_forced() -> None:
    assert proposed(one(lookup(), forcing(()), 3)).tokens == (3, 1, 2)
    assert proposed(one(lookup(), forcing((3,)), 3)).tokens == (3, 1, 2)
    assert proposed(one(lookup(), forcing((6,)), 3)).tokens == (6,)  # (2, 6) never stood there
    assert proposed(one(lookup(), forcing((6, 1, 2)), 6)).tokens == (6, 1, 2, 3, 1, 2)


def test_a_draft_model_goes_on_behind_what_is_forced() -> None:
    answer = proposed(one(model(), forcing((4, 5)), 4))
    assert (answer.kind, answer.tokens[:2], len(answer)) == ("sampled", (4, 5), 4)
    greedy = proposed(one(model(), forcing((4, 5), params=SamplingParams(temperature=0.0)), 4))
    assert (greedy.kind, greedy.tokens[:2], len(greedy)) == ("point", (4, 5), 4)


def test_a_draft_model_is_not_asked_where_the_budget_is_spent() -> None:
    backend = FakeBackend()
    answer = proposed(one(model(backend), forcing((4, 5, 6)), 3))
    assert (answer.kind, answer.tokens) == ("point", (4, 5, 6))
    assert backend.batches == []


def test_ids_beyond_the_draft_models_vocabulary_are_proposed_and_never_forwarded() -> None:
    backend = FakeBackend(5)
    drafter = ForcedDrafter(ModelDrafter(backend, "model:fake", FakeBackend(7)))
    answer = proposed(one(drafter, forcing((4, 6)), 4))
    assert (answer.kind, answer.tokens) == ("point", (4, 6))
    assert backend.batches == []


def test_who_is_asked_and_for_what() -> None:
    inner = Inner(lambda context, budget: Proposal.point((*context.start, 0)))
    contexts = [forcing((4,), 0), forcing((4, 5), 1), forcing((), 2), context_of(TEXT, 3), forcing((4,), 4)]
    answers = ForcedDrafter(inner).propose(contexts, [3, 2, 2, 4, 0])
    assert [proposed(a).tokens for a in answers] == [(4, 0), (4, 5), (0,), (0,), ()]
    assert [(c.request_id, c.start, budget) for c, budget in inner.asked] == [(0, (4,), 3), (2, (), 2), (3, (), 4)]
    assert inner.asked[1][0] is contexts[2]
    assert inner.asked[0][0].history is contexts[0].history
    assert contexts[0].start == ()


def test_everything_else_is_passed_on() -> None:
    inner = Inner(lambda context, budget: Proposal.point(()))
    drafter = ForcedDrafter(inner)
    contexts = [context_of(TEXT)]
    drafter.observe(3, [1, 2], hidden=np.ones(2))
    drafter.observe(3, [4])
    drafter.release(3)
    drafter.check(contexts)
    drafter.close()
    assert inner.told[0][:2] == (3, [1, 2])
    assert inner.told[0][2] is not None
    assert inner.told[1:] == [(3, [4], None), ("release", 3), ("check", contexts), "close"]
    ForcedDrafter().check(contexts)  # has none


def test_the_books_of_the_draft_model_are_checked() -> None:
    backend = FakeBackend()
    drafter = model(backend)
    one(drafter, forcing((4,)), 3)
    backend.slots[0].pop()
    with pytest.raises(InvariantError, match="tokens on the books"):
        drafter.check()


# --- drafters that know nothing of settled drafts -----------------------------------------------------


@pytest.mark.parametrize(
    "answer, kept",
    [
        (Proposal.point((4, 5, 6)), True),  # any policy is safe for points
        (Proposal.point((4,)), False),
        (Proposal.point((3, 1, 2)), False),
        (Proposal.point(()), False),
        (Proposal.point((4, 5, 6), (-1, 0, 1)), True),
        (Proposal.point((4, 5, 6), (-1, -1, 1)), False),
        (Proposal.sampled((4, 5), np.eye(7)[[4, 5]]), True),
        (Proposal.sampled((4, 5), np.full((2, 7), 1 / 7)), False),  # equal by chance
        (Proposal.sampled((4, 5), [np.eye(7)[4], np.full(7, 1 / 7)]), False),
        (Proposal.sampled((3, 1), np.full((2, 7), 1 / 7)), False),
    ],
)
def test_what_does_not_begin_with_the_forced_tokens_is_left_out(answer: Proposal, kept: bool) -> None:
    got = one(ForcedDrafter(Inner(lambda context, budget: answer)), forcing((4, 5)), 3)
    if kept:
        assert got is answer
    else:
        assert (proposed(got).kind, proposed(got).tokens) == ("point", (4, 5))
    free = one(ForcedDrafter(Inner(lambda context, budget: answer)), context_of(TEXT), 3)
    assert free is answer


# --- faults -------------------------------------------------------------------------------------------


def test_a_grammar_that_fails_is_an_error_for_its_request_alone() -> None:
    fault = InvariantError("the grammar lost its place")
    contexts = [forcing((4,), 0), forcing(fault, 1), context_of(TEXT, 2)]
    inner = Inner(lambda context, budget: Proposal.point((*context.start, 0)))
    answers = ForcedDrafter(inner).propose(contexts, [3, 3, 3])
    assert answers[1] is fault
    assert proposed(answers[0]).tokens == (4, 0)
    assert proposed(answers[2]).tokens == (0,)
    assert [c.request_id for c, _ in inner.asked] == [0, 2]


def test_a_drafter_that_fails_is_an_error_for_those_it_was_asked_for() -> None:
    def fail(context: DraftContext, budget: int) -> Proposal:
        raise RuntimeError("out of luck")

    contexts = [forcing((4, 5), 0), forcing((4,), 1), context_of(TEXT, 2)]
    answers = ForcedDrafter(Inner(fail)).propose(contexts, [2, 2, 2])
    assert proposed(answers[0]).tokens == (4, 5)
    for answer in answers[1:]:
        assert isinstance(answer, DrafterError)
        assert "drafter inner failed: RuntimeError: out of luck" in str(answer)


def test_answers_that_are_errors_are_passed_on() -> None:
    fault = BackendError("the draft model is gone")
    assert one(ForcedDrafter(Inner(lambda context, budget: fault)), forcing((4,)), 3) is fault


def test_too_few_answers_are_never_given_to_the_wrong_request() -> None:
    class Short(Inner):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
            return super().propose(contexts, budgets)[1:]

    drafter = ForcedDrafter(Short(lambda context, budget: Proposal.point((*context.start, context.request_id))))
    answers = drafter.propose([forcing((4,), 0), context_of(TEXT, 1)], [3, 3])
    assert all(isinstance(answer, DrafterError) for answer in answers)
    assert "drafter inner answered 1 of 2 requests" in str(answers[0])


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        (4, 5),
        Proposal((4, 5), (-1, 0), "sampled", None),
        Proposal((4, 5), (-1, 0), "sampled", []),
        Proposal((4, 5), (-1, 0), "sampled", [np.eye(2)[0]]),
        Proposal(None, None, "point"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_passed_on_and_raises_nothing_here(nonsense: Any) -> None:
    """One malformed answer must not end everybody's requests; whoever admits proposals names it."""
    guarded = GuardedDrafter(ForcedDrafter(Inner(lambda context, budget: nonsense)))
    contexts = [forcing((4,), 0), context_of(TEXT, 1)]
    answers = guarded.propose(contexts, [3, 3])
    assert len(answers) == 2
    assert all(answer is nonsense for answer in answers)
