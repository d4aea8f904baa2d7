"""The draft model's KV memory under anything a scheduler and a verifier can do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.draft import ModelDrafter
from paceline.params import SamplingParams
from paceline.sampling import distribution
from paceline.types import Proposal

from .fakes import CountingList, FakeBackend, FakeDraws, context_of, history_of, proposed

VOCAB = 5
MAX_LEN = 24
SLOTS = 3


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class MemoryMachine(RuleBasedStateMachine):
    """Requests come, draft with any budget or none, have any number of drafts accepted, and go.

    Each proposal must equal that of a drafter that reads the whole text afresh, and must forward no token
    that was cached: huggingface/transformers PR #32370 (right, but very slow). Id VOCAB is the target's alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backend = FakeBackend(VOCAB, max_len=MAX_LEN, max_slots=SLOTS, max_step_tokens=7)
        self.drafter = ModelDrafter(self.backend, "model:fake", FakeBackend(VOCAB + 1))
        self.texts: dict[int, list[int]] = {}
        self.last: dict[int, Proposal] = {}
        self.cached: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.next_id = 0

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN + 2),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def arrive(self, prompt: list[int], temperature: float) -> None:
        if len(self.texts) == SLOTS:
            return
        self.texts[self.next_id] = prompt
        self.params[self.next_id] = SamplingParams(temperature=temperature)
        self.drafter.observe(self.next_id, prompt)
        self.next_id += 1

    @rule(
        budgets=st.lists(st.integers(0, 5), min_size=SLOTS, max_size=SLOTS),
        skip=st.integers(0, SLOTS),
        starts=st.lists(st.lists(st.integers(0, VOCAB), max_size=6).map(tuple), min_size=SLOTS, max_size=SLOTS),
    )
    def propose(self, budgets: list[int], skip: int, starts: list[tuple[int, ...]]) -> None:
        """Settled drafts may be more than the budget, and hold an id that the draft model does not know."""
        ids = [request for i, request in enumerate(self.texts) if i != skip]
        contexts = [
            context_of(self.texts[i], i, params=self.params[i], start=start)
            for i, start in zip(ids, starts, strict=False)
        ]
        before = self.backend.tokens_forwarded
        answers = self.drafter.propose(contexts, budgets[: len(ids)])
        needed = 0
        for request, answer, budget, start in zip(ids, answers, budgets, starts, strict=False):
            proposal = self.last[request] = proposed(answer)
            text = self.texts[request]
            settled = list(start[:budget])
            assert list(proposal.tokens) == self.afresh(request, budget, settled)
            num_drawn = len(proposal) - len(settled)
            assert proposal.kind == ("sampled" if num_drawn and self.params[request].temperature else "point")
            if len(text) > MAX_LEN or (max(text) >= VOCAB and len(settled) < min(budget, MAX_LEN - len(text) + 1)):
                self.cached.pop(request, None)  # nothing can be drawn any more, and others can use the memory
            if num_drawn:  # where nothing is drawn nothing is forwarded
                cached = text + list(proposal.tokens[:-1])
                kept = min(common(self.cached.get(request, []), cached), len(text) - 1)
                needed += len(cached) - kept
                self.cached[request] = cached
        assert self.backend.tokens_forwarded - before == needed
        self.drafter.check(contexts)

    @rule(
        which=st.integers(0, SLOTS - 1),
        accepted=st.integers(0, 5),
        token=st.one_of(st.integers(0, VOCAB - 1), st.just("next draft")),
    )
    def commit(self, which: int, accepted: int, token: int | str) -> None:
        """Accept some of the last drafts and one token more, which may be the next draft after all."""
        if which >= len(self.texts):
            return
        request = list(self.texts)[which]
        drafts = list(self.last.pop(request, Proposal.point(())).tokens)
        block = drafts[:accepted]
        rest = [*drafts[accepted:], 0]
        block.append(rest[0] if isinstance(token, str) else token)
        self.texts[request] = self.texts[request] + block
        self.drafter.observe(request, block)

    @rule(which=st.integers(0, SLOTS - 1))
    def leave(self, which: int) -> None:
        if which >= len(self.texts):
            return
        request = list(self.texts)[which]
        for owner in (self.texts, self.last, self.cached, self.params):
            owner.pop(request, None)
        self.drafter.release(request)

    @invariant()
    def balanced(self) -> None:
        self.drafter.check()
        assert len(self.backend.slots) <= len(self.texts)
        held = sorted(map(tuple, self.backend.slots.values()))
        assert held == sorted(map(tuple, self.cached.values()))

    def afresh(self, request: int, budget: int, settled: list[int]) -> list[int]:
        n, draws = len(self.texts[request]), FakeDraws(request)
        text = [*self.texts[request], *settled]
        while len(text) < n + budget and len(text) <= MAX_LEN and max(text) < VOCAB:
            q = distribution(self.backend.logits(tuple(text)), self.params[request], None)
            text.append(draws.pick(q.probs, len(text), context_of(text).role, ids=q.ids, node=len(text) - n))
        return text[n:]


MemoryMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase


@pytest.mark.parametrize("accepted", range(5))
def test_forwarded_tokens_per_round(accepted: int) -> None:
    """huggingface/transformers PR #32370 (#32366): cached tokens were forwarded again in every round.

    With K = 4: after a accepted drafts the text grew by a + 1, of which min(a, 3) were cached as drafts.
    """
    backend = FakeBackend(7, max_len=200)
    drafter = ModelDrafter(backend, "model:fake", FakeBackend(7))
    text = [1, 2, 3]
    for round_number in range(6):
        before = backend.tokens_forwarded
        context = context_of(text, params=SamplingParams(temperature=0.0))
        proposal = proposed(drafter.propose([context], [4])[0])
        catch_up = accepted + 1 - min(accepted, 3) if round_number else len(text)
        assert backend.tokens_forwarded - before == catch_up + 3
        other = (proposal.tokens[accepted] + 1) % 7 if accepted < 4 else 0
        text = [*text, *proposal.tokens[:accepted], other]


def test_every_forwarded_id_is_a_token() -> None:
    """NVIDIA/TensorRT-LLM#15182, vllm#46899: -1 paddings of rejected or skipped drafts were embedded."""
    backend = FakeBackend(7, max_len=200)
    drafter = ModelDrafter(backend, "model:fake", FakeBackend(7))
    rng = np.random.default_rng(5)
    text = [1, 2, 3]
    for _ in range(30):
        context = context_of(text)
        proposal = proposed(drafter.propose([context], [int(rng.integers(0, 5))])[0])
        kept = int(rng.integers(0, len(proposal) + 1)) if rng.random() < 0.5 else 0
        text = [*text, *proposal.tokens[:kept], int(rng.integers(0, 7))]
    forwarded = [t for batch in backend.batches for s in batch for t in s.tokens]
    assert len(forwarded) > 60
    assert set(forwarded) <= set(range(7))


def test_a_token_equal_to_the_rejected_draft_is_not_forwarded_twice() -> None:
    """A recovered token may be the very draft that block verification did not keep."""
    backend = FakeBackend(7)
    drafter = ModelDrafter(backend, "model:fake", FakeBackend(7))
    first = proposed(drafter.propose([context_of([1, 2])], [4])[0])
    text = [1, 2, *first.tokens[:2]]  # one accepted, the second recovered
    before = backend.tokens_forwarded
    drafter.propose([context_of(text)], [1])
    assert backend.tokens_forwarded - before == 1


def test_proposing_twice_without_a_commit_gives_the_same_drafts() -> None:
    backend = FakeBackend(7)
    drafter = ModelDrafter(backend, "model:fake", FakeBackend(7))
    tokens = [proposed(drafter.propose([context_of([1, 2, 3])], [k])[0]).tokens for k in (4, 4, 2)]
    assert tokens[0] == tokens[1]
    assert tokens[2] == tokens[0][:2]
    drafter.check([context_of([1, 2, 3])])


@pytest.mark.parametrize("length", [50, 2_000])
def test_a_step_reads_new_tokens_only(length: int) -> None:
    """The text is compared and forwarded once; later steps cost the same at any length."""
    logits = FakeBackend(7).logits
    backend = FakeBackend(
        7, max_len=3_000, max_step_tokens=3_000, max_slots=1, logits=lambda tokens: logits(tokens[-9:])
    )
    drafter = ModelDrafter(backend, "model:fake", FakeBackend(7))
    params = SamplingParams(presence_penalty=0.5)
    text = CountingList(i % 7 for i in range(length))
    history = history_of(text, params=params)
    for _ in range(2):
        CountingList.read = 0
        context = context_of(text, prompt_length=length, params=params, history=history)
        proposal = proposed(drafter.propose([context], [4])[0])
        for token in (*proposal.tokens[:2], (proposal.tokens[2] + 1) % 7):
            text.append(token)
            history.commit(token)
    assert 0 < CountingList.read <= 3 * 4
