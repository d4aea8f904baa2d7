"""The draft model: what it draws, the q it hands over, and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.draft import ModelDrafter
from paceline.errors import (
    BackendError,
    BadLogits,
    InvariantError,
    PacelineError,
    RollbackError,
    UnsupportedOption,
    VocabularyMismatch,
)
from paceline.params import SamplingParams
from paceline.sampling import TokenCounts, distribution
from paceline.types import DraftContext, Drafter, Proposal, Role

from .fakes import FakeBackend, FakeDraws, context_of, dense, proposed, softmax

GREEDY = SamplingParams(temperature=0.0)


def drafter_on(backend: FakeBackend, target: FakeBackend | None = None) -> ModelDrafter:
    return ModelDrafter(backend, "model:fake", target or FakeBackend(backend.info.vocab_size))


def one(drafter: ModelDrafter, context: DraftContext, budget: int) -> Proposal:
    proposal = proposed(drafter.propose([context], [budget])[0])
    drafter.check([context])
    return proposal


def greedy_continuation(backend: FakeBackend, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    text = list(tokens)
    for _ in range(count):
        text.append(int(np.argmax(backend.logits(tuple(text)))))
    return tuple(text[len(tokens) :])


def test_is_a_drafter_and_closes_its_backend() -> None:
    backend = FakeBackend()
    drafter = drafter_on(backend)
    assert isinstance(drafter, Drafter)
    assert drafter.name == "model:fake"
    drafter.observe(0, [1, 2])
    drafter.close()
    drafter.close()
    assert backend.closed


# --- construction -----------------------------------------------------------------------------------


def test_a_model_that_cannot_roll_back_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match=r"fake-model cannot draft \(it is recurrent\)"):
        drafter_on(FakeBackend(can_truncate=False))


def test_a_permuted_vocabulary_is_refused_at_construction() -> None:
    """sgl-project/sglang#24051, ggml-org/llama.cpp PR #3812."""
    with pytest.raises(VocabularyMismatch, match="token 1 is b'b' for the target but b'c' for the drafter"):
        drafter_on(FakeBackend(3, texts=[b"a", b"c", b"b"]), FakeBackend(3, texts=[b"a", b"b", b"c"]))


# --- what is drawn, and q ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.DRAFT, Role.TARGET])
def test_keys_of_the_draws(role: Role) -> None:
    """Draft i is drawn at position len(tokens) + i with node i and the context's role."""
    draws = FakeDraws()
    proposal = one(drafter_on(FakeBackend()), context_of([3, 1, 4], draws=draws, role=role), 4)
    assert [(position, r, node) for _, position, r, _, node in draws.asked] == [(3 + i, role, i) for i in range(4)]
    assert len(proposal) == 4


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3)])
def test_q_is_the_very_distribution_that_was_drawn_from(params: SamplingParams) -> None:
    """deepseek-ai/DeepSpec#31: drawn in one precision, carried in another."""
    draws = FakeDraws()
    proposal = one(drafter_on(FakeBackend()), context_of([3, 1, 4], params=params, draws=draws), 4)
    assert proposal.kind == "sampled"
    assert proposal.q is not None
    assert len(proposal.q) == 4
    for (weights, _, _, ids, _), q, token in zip(draws.asked, proposal.q, proposal.tokens, strict=True):
        assert weights is q.probs
        assert ids is q.ids
        assert q.prob(token) > 0


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_drafts_use_the_temperature_of_the_request(temperature: float) -> None:
    """huggingface/transformers PR #40976: the assistant silently ran at temperature 1."""
    backend = FakeBackend()
    tokens = (3, 1, 4)
    proposal = one(drafter_on(backend), context_of(tokens, params=SamplingParams(temperature=temperature)), 3)
    assert proposal.q is not None
    for i, q in enumerate(proposal.q):
        expected = softmax(backend.logits((*tokens, *proposal.tokens[:i])), temperature)
        np.testing.assert_allclose(q.dense(), expected, rtol=1e-12)


def test_two_requests_keep_their_own_params() -> None:
    backend = FakeBackend()
    drafter = drafter_on(backend)
    hot, cold = (SamplingParams(temperature=t) for t in (2.0, 0.5))
    answers = drafter.propose([context_of([1, 2], 0, params=hot), context_of([1, 2], 1, params=cold)], [1, 1])
    rows = [dense(proposed(answer).q or [])[0] for answer in answers]
    np.testing.assert_allclose(rows[0], softmax(backend.logits((1, 2)), 2.0), rtol=1e-12)
    np.testing.assert_allclose(rows[1], softmax(backend.logits((1, 2)), 0.5), rtol=1e-12)


def test_greedy_is_the_argmax_and_a_point() -> None:
    """ggml-org/llama.cpp#5657: at temperature 0 the draft had no probabilities to compare."""
    backend = FakeBackend()
    proposal = one(drafter_on(backend), context_of([3, 1, 4], params=GREEDY), 4)
    assert (proposal.kind, proposal.q) == ("point", None)
    assert proposal.tokens == greedy_continuation(backend, [3, 1, 4], 4)


def test_penalties_count_prompt_output_and_the_drafts_before() -> None:
    """vllm#22987: the history of the drafts was missing per row. Same history as the target's row."""
    params = SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3)
    backend = FakeBackend()
    drafter = drafter_on(backend)
    tokens = [3, 3, 5]
    for block in ([], [5, 5, 1], [1]):  # several steps: counts are kept, not recounted
        tokens = tokens + block
        context = context_of(tokens, prompt_length=3, params=params)
        proposal = one(drafter, context, 4)
        assert proposal.q is not None
        for i, q in enumerate(proposal.q):
            counts = TokenCounts(tokens[:3])
            counts.add([*tokens[3:], *proposal.tokens[:i]])
            row = backend.logits((*tokens, *proposal.tokens[:i]))
            np.testing.assert_array_equal(q.dense(), distribution(row, params, counts).dense())
    plain = distribution(backend.logits(tuple(tokens)), SamplingParams(), None).dense()
    assert np.abs(proposal.q[0].dense() - plain).max() > 0.01


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("whose", ["request", "drafter", "target"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafted_stop_is_kept_and_nothing_follows(whose: str, ignore_eos: bool, temperature: float) -> None:
    """Non-anticipating: the length may depend on drafts before a token, never on dropping the token."""
    plain = one(drafter_on(FakeBackend()), context_of([3, 1], params=SamplingParams(temperature=temperature)), 6)
    first = plain.tokens.index(plain.tokens[2])
    stop = [plain.tokens[2]]
    params = SamplingParams(
        temperature=temperature, stop_token_ids=stop if whose == "request" else None, ignore_eos=ignore_eos
    )
    drafter = drafter_on(
        FakeBackend(stop_ids=stop if whose == "drafter" else ()),
        FakeBackend(stop_ids=stop if whose == "target" else ()),
    )
    proposal = one(drafter, context_of([3, 1], params=params), 6)
    runs_on = ignore_eos and whose != "request"
    assert proposal.tokens == (plain.tokens if runs_on else plain.tokens[: first + 1])


def test_no_budget_means_no_draw_no_forward_and_no_slot() -> None:
    """vllm-ascend#13608: a discarded draw moved the generator."""
    backend = FakeBackend()
    context = context_of([1, 2, 3])
    assert len(one(drafter_on(backend), context, 0)) == 0
    assert context.draws.asked == []  # type: ignore[attr-defined]
    assert backend.batches == []
    assert backend.slots == {}


def test_drafts_do_not_depend_on_steps_without_drafts() -> None:
    """vllm-ascend#13608: run with drafts on all, some and no steps."""
    texts = [[3, 1], [3, 1, 4], [3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 2]]
    results = []
    for budgets in ([3, 3, 3, 3], [3, 0, 0, 3], [0, 0, 0, 3], [0, 2, 0, 3]):
        drafter = drafter_on(FakeBackend())
        for text, budget in zip(texts, budgets, strict=True):
            last = one(drafter, context_of(text), budget)
        results.append((last.tokens, dense(last.q or []).tolist()))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_drafter_is_always_right(temperature: float) -> None:
    """openvinotoolkit/openvino.genai#4425: fresh pipelines sometimes accepted no drafts at all.

    huggingface/transformers PR #48281: {greedy, sample}, since no test sampled.
    """
    params = SamplingParams(temperature=temperature)
    for _ in range(10):
        backend = FakeBackend()
        drafter = drafter_on(backend)
        text = [2, 5]
        for _ in range(3):
            proposal = one(drafter, context_of(text, prompt_length=2, params=params), 3)
            if temperature == 0.0:
                assert proposal.tokens == greedy_continuation(backend, text, 3)
            else:
                rows = [softmax(backend.logits((*text, *proposal.tokens[:i]))) for i in range(3)]
                np.testing.assert_allclose(dense(proposal.q or []), rows, rtol=1e-12)
            text = [*text, *proposal.tokens, 0]


def test_a_shared_prefix_changes_no_draft() -> None:
    """vllm#47930: acceptance collapsed where the target's prefix cache covered what the drafter had not."""
    backend = FakeBackend()
    drafter = drafter_on(backend)
    prefix = [1, 2, 3, 4, 5]
    one(drafter, context_of([*prefix, 6], 0, params=GREEDY), 2)
    proposal = one(drafter, context_of([*prefix, 0], 1, params=GREEDY), 3)
    assert proposal.tokens == greedy_continuation(backend, [*prefix, 0], 3)


# --- batches ----------------------------------------------------------------------------------------


def test_one_forward_per_depth_for_all_who_still_draft() -> None:
    backend = FakeBackend()
    drafter = drafter_on(backend)
    contexts = [context_of([1, 2], i) for i in range(4)]
    answers = drafter.propose(contexts, [3, 1, 0, 2])
    assert [len(proposed(a)) for a in answers] == [3, 1, 0, 2]
    assert [len(batch) for batch in backend.batches] == [3, 2, 1]
    assert [sum(len(s.tokens) for s in batch) for batch in backend.batches] == [6, 2, 1]


@pytest.mark.parametrize("long_first", [True, False])
def test_long_prompts_are_cut_into_steps_and_do_not_hold_up_the_others(long_first: bool) -> None:
    backend = FakeBackend(max_step_tokens=8)
    drafter = drafter_on(backend)
    short = context_of([1, 2], 0, params=GREEDY)
    long = context_of([i % 7 for i in range(30)], 1, params=GREEDY)
    contexts = [long, short] if long_first else [short, long]
    for context, answer in zip(contexts, drafter.propose(contexts, [2, 2]), strict=True):
        assert proposed(answer).tokens == greedy_continuation(backend, context.tokens, 2)
    # 30 + 1 and 2 + 1 tokens in batches of 8; a row only where a draft is drawn.
    assert [sum(len(s.tokens) for s in batch) for batch in backend.batches] == [8, 8, 8, 8, 1, 1]
    assert sum(s.num_rows for batch in backend.batches for s in batch) == 4


def test_more_requests_than_tokens_in_a_step() -> None:
    backend = FakeBackend(max_step_tokens=2)
    contexts = [context_of([i, 1], i, params=GREEDY) for i in range(4)]
    answers = drafter_on(backend).propose(contexts, [2] * 4)
    for context, answer in zip(contexts, answers, strict=True):
        assert proposed(answer).tokens == greedy_continuation(backend, context.tokens, 2)
    # Batches are full until one request is left, whose next token waits for its last.
    assert [sum(len(s.tokens) for s in batch) for batch in backend.batches] == [2, 2, 2, 2, 2, 1, 1]


# --- the end of the draft model's context -----------------------------------------------------------


@pytest.mark.parametrize("budget", range(5))
@pytest.mark.parametrize("left", range(-2, 6))
def test_budgets_end_with_the_draft_models_context(left: int, budget: int) -> None:
    """turboderp-org/exllamav2#274, vllm#42533: drafts past the context. `left`: places behind the text.

    The last draft is not forwarded, so one more than `left` fits; the fake refuses any forward beyond.
    """
    backend = FakeBackend(max_len=12)
    tokens = [i % 7 for i in range(12 - left)]
    proposal = one(drafter_on(backend), context_of(tokens, params=GREEDY), budget)
    assert len(proposal) == max(0, min(budget, left + 1))
    assert proposal.tokens == greedy_continuation(backend, tokens, len(proposal))


# --- vocabularies of different length ---------------------------------------------------------------


def test_ids_unknown_to_the_drafter_have_q_0() -> None:
    backend, target = FakeBackend(5), FakeBackend(8)
    params = SamplingParams(logit_bias={7: 100.0})
    proposal = one(drafter_on(backend, target), context_of([1, 2], params=params), 3)
    assert proposal.q is not None
    for i, q in enumerate(proposal.q):
        assert q.vocab_size == 8
        expected = softmax(backend.logits((1, 2, *proposal.tokens[:i])))
        np.testing.assert_allclose(q.at(np.arange(8)), [*expected, 0, 0, 0], rtol=1e-12)


def test_ids_unknown_to_the_target_are_never_drafted() -> None:
    backend, target = FakeBackend(8, logits=lambda tokens: np.arange(8.0)), FakeBackend(5)
    proposal = one(drafter_on(backend, target), context_of([1, 2]), 4)
    assert max(proposal.tokens) < 5
    expected = softmax(np.arange(5.0))
    for row in dense(proposal.q or []):
        np.testing.assert_allclose(row, expected, rtol=1e-12)
    greedy = one(drafter_on(backend, target), context_of([1, 2], 1, params=GREEDY), 2)
    assert greedy.tokens == (4, 4)


@pytest.mark.parametrize("rejected", [False, True])
def test_a_text_the_drafter_cannot_read_gets_empty_proposals(rejected: bool) -> None:
    """The unknown id may stand where a rejected draft was cached; nothing is forwarded in its place."""
    backend, target = FakeBackend(5), FakeBackend(8)
    drafter = drafter_on(backend, target)
    text = [1, 2]
    if rejected:
        one(drafter, context_of(text), 3)
    text = [1, 2, 6]
    assert len(one(drafter, context_of(text), 3)) == 0
    forwarded = backend.tokens_forwarded
    assert len(one(drafter, context_of([*text, 1]), 3)) == 0
    assert backend.tokens_forwarded == forwarded
    assert backend.slots == {}
    drafter.release(0)
    assert len(one(drafter, context_of([1, 2]), 3)) == 3


# --- faults -----------------------------------------------------------------------------------------


def nan_after(*bad: tuple[int, ...]) -> Any:
    good = FakeBackend().logits
    return lambda tokens: np.full(7, np.nan) if tokens in bad else good(tokens)


def test_a_bad_row_ends_one_request_and_names_it() -> None:
    healthy = context_of([1, 2], 0, params=GREEDY)
    first = greedy_continuation(FakeBackend(), [3, 4], 1)
    backend = FakeBackend(logits=nan_after((3, 4, *first)))
    drafter = drafter_on(backend)
    sick = context_of([3, 4], 9, params=GREEDY)
    answers = drafter.propose([sick, healthy], [3, 3])
    assert isinstance(answers[0], BadLogits)
    assert "model:fake, request 9, position 3" in str(answers[0])
    assert proposed(answers[1]).tokens == greedy_continuation(FakeBackend(), [1, 2], 3)
    drafter.check([sick, healthy])
    # Its slot is as good as any: with other tokens committed it drafts again.
    again = one(drafter, context_of([3, 4, 0], 9, params=GREEDY), 2)
    assert again.tokens == greedy_continuation(FakeBackend(), [3, 4, 0], 2)


def test_a_failed_forward_is_an_error_for_its_batch_and_leaves_no_slot() -> None:
    backend = FakeBackend()
    drafter = drafter_on(backend)
    contexts = [context_of([1, 2], 0, params=GREEDY), context_of([3], 1, params=GREEDY)]
    drafter.propose(contexts, [2, 2])
    backend.fail_next_forward = True
    answers = drafter.propose(contexts, [2, 2])
    assert all(isinstance(a, BackendError) for a in answers)
    drafter.check(contexts)
    assert backend.slots == {}
    answers = drafter.propose(contexts, [2, 2])
    for context, answer in zip(contexts, answers, strict=True):
        assert proposed(answer).tokens == greedy_continuation(backend, context.tokens, 2)


def test_a_failed_rollback_is_an_error_for_one_request() -> None:
    """ml-explore/mlx-lm#846: a rollback that did nothing."""
    backend = FakeBackend()
    drafter = drafter_on(backend)
    texts = [[1, 2], [3, 4]]
    drafter.propose([context_of(t, i, params=GREEDY) for i, t in enumerate(texts)], [3, 3])
    backend.fail_next_truncate = True
    contexts = [context_of([*t, 0], i, params=GREEDY) for i, t in enumerate(texts)]
    answers: list[Proposal | PacelineError] = drafter.propose(contexts, [2, 2])
    assert isinstance(answers[0], RollbackError)
    assert proposed(answers[1]).tokens == greedy_continuation(backend, [3, 4, 0], 2)
    drafter.check(contexts)


def test_no_free_slot_is_an_error_for_those_who_got_none() -> None:
    answers = drafter_on(FakeBackend(max_slots=1)).propose([context_of([1], 0), context_of([1], 1)], [2, 2])
    assert len(proposed(answers[0])) == 2
    assert isinstance(answers[1], BackendError)


def test_committed_tokens_that_vanish_are_an_invariant_error() -> None:
    drafter = drafter_on(FakeBackend())
    one(drafter, context_of([1, 2, 3]), 2)
    answer = drafter.propose([context_of([1, 2])], [2])[0]
    assert isinstance(answer, InvariantError)
    assert "2 tokens are committed, but 3 were before" in str(answer)


def test_check_finds_books_that_do_not_balance() -> None:
    backend = FakeBackend()
    drafter = drafter_on(backend)
    context = context_of([1, 2, 3])
    one(drafter, context, 3)
    with pytest.raises(InvariantError, match="the first 3 cached tokens are not the committed ones"):
        drafter.check([context_of([1, 5, 3])])
    backend.slots[0].pop()
    with pytest.raises(InvariantError, match="5 tokens on the books, 3 of them committed, 4 in slot 0"):
        drafter.check()
    drafter._memories[1] = drafter._memories[0]
    with pytest.raises(InvariantError, match="two requests share a slot"):
        drafter.check()
