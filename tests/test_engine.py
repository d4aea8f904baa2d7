"""The loop on the toy backend: stops, limits, faults, cancellation, capabilities, counters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import (
    BackendError,
    BadLogits,
    DrafterError,
    InvalidParams,
    InvalidPrompt,
    RollbackError,
    UnsupportedOption,
)
from paceline.params import SamplingParams
from paceline.types import Distribution, Drafter, Proposal, RequestOutput, Segment, StreamChunk
from tests.drafters import PointDrafter, TableDrafter

PROMPT = (1, 2, 3)


def toy(**options: Any) -> ToyBackend:
    return ToyBackend(**{"vocab_size": 12, "stop_ids": (), "max_len": 256, "max_seqs": 8, "seed": 5, **options})


def run(engine: Engine) -> dict[int, RequestOutput]:
    """Everything to the end; owners check themselves after every step."""
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.output is not None:
                done[chunk.request_id] = chunk.output
        engine.check()
    assert engine.backend.slots_in_use == 0  # type: ignore[attr-defined]
    return done


def generate(
    params: SamplingParams, drafter: Drafter | None = None, backend: ToyBackend | None = None, **options: Any
) -> RequestOutput:
    engine = Engine(backend or toy(), drafter or NoDrafter(), **options)
    request_id = engine.add(PROMPT, params)
    return run(engine)[request_id]


def plain_tokens(n: int, **params: Any) -> tuple[int, ...]:
    return generate(SamplingParams(max_tokens=n, **params)).outputs[0].token_ids


def oracle(tokens: tuple[int, ...], wrong_at: Sequence[int] = ()) -> PointDrafter:
    """Drafts exactly what will come, but for the output positions in wrong_at."""

    def guess(seen: tuple[int, ...], budget: int) -> list[int]:
        start = len(seen) - len(PROMPT)
        right = tokens[start : start + budget]
        return [(t + 1) % 12 if start + i in wrong_at else t for i, t in enumerate(right)]

    return PointDrafter(guess)


# --- length and stops -------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_length", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 17])
def test_exact_length_for_every_draft_length(draft_length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, draft_length=draft_length)
    out = generate(params, oracle(plain_tokens(40, temperature=0)))
    completion = out.outputs[0]
    assert completion.token_ids == plain_tokens(max_tokens, temperature=0)
    assert completion.finish_reason == "length"
    assert out.speculation.emitted == max_tokens == len(completion.kinds)
    assert out.speculation.steps == -(-max_tokens // (draft_length + 1))


@pytest.mark.parametrize("draft_length", [0, 1, 3, 6])
@pytest.mark.parametrize("offset", range(8))
def test_stop_id_at_every_offset_of_a_block(draft_length: int, offset: int) -> None:
    """transformers PR #31301, #47912, PR #48981; sglang#31599, PR #33758: nothing after the stop leaks."""
    tokens = plain_tokens(40, seed=3)
    stop = tokens[offset]
    first = tokens.index(stop)
    params = SamplingParams(max_tokens=30, seed=3, stop_token_ids=[stop], draft_length=draft_length)
    drafter = oracle(tokens)
    out = generate(params, drafter)
    completion = out.outputs[0]
    assert completion.token_ids == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == "".join("0123456789ab"[t] for t in tokens[:first])
    assert out.speculation.emitted == first + 1
    assert drafter.observed == {}


def test_stop_id_text_is_kept_on_request() -> None:
    tokens = plain_tokens(10, seed=3)
    params = SamplingParams(seed=3, stop_token_ids=[tokens[4]], include_stop_str_in_output=True)
    first = tokens.index(tokens[4])
    assert generate(params).outputs[0].text == "".join("0123456789ab"[t] for t in tokens[: first + 1])


def test_stop_wins_over_length() -> None:
    """sglang#31599: a block [.., STOP, a, b] that crosses max_tokens ends with "stop"."""
    tokens = plain_tokens(40, seed=3)
    first = tokens.index(tokens[3])
    params = SamplingParams(max_tokens=first + 1, seed=3, stop_token_ids=[tokens[3]], draft_length=6)
    assert generate(params, oracle(tokens)).outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("draft_length", [0, 1, 2, 5])
@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_at_every_offset(draft_length: int, start: int, length: int, include: bool) -> None:
    """vllm#47616, openvino.genai PR #1719: text, ids and counts are cut at the same place, across steps too."""
    tokens = plain_tokens(60, seed=3)
    text = "".join("0123456789ab"[t] for t in tokens)
    stop = text[start : start + length]
    end = text.index(stop) + len(stop)
    kept = end if include else end - len(stop)
    params = SamplingParams(
        max_tokens=50, seed=3, stop=stop, draft_length=draft_length, include_stop_str_in_output=include
    )
    out = generate(params, oracle(tokens))
    completion = out.outputs[0]
    assert (completion.text, completion.token_ids) == (text[:kept], tokens[:kept])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert out.speculation.emitted == len(completion.token_ids) == len(completion.kinds)
    assert out.speculation.accepted == completion.kinds.count("accepted")


def test_ignore_eos_emits_it_and_goes_on() -> None:
    backend = toy(stop_ids=(4, 7))
    out = generate(SamplingParams(max_tokens=60, seed=1, ignore_eos=True), backend=backend)
    assert {4, 7} & set(out.outputs[0].token_ids)
    assert len(out.outputs[0].token_ids) == 60
    stopped = generate(SamplingParams(max_tokens=60, seed=1), backend=toy(stop_ids=(4, 7))).outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] in (4, 7)
    assert stopped.token_ids == out.outputs[0].token_ids[: len(stopped.token_ids)]


@pytest.mark.parametrize("draft_length", [0, 1, 4, 9])
@pytest.mark.parametrize("prompt_length", [1, 20, 25, 26, 27, 28, 29, 30, 31])
def test_to_exactly_the_context_limit(draft_length: int, prompt_length: int) -> None:
    """vllm PR #38711, vllm#42533, exllamav2#274: no draft past the limit, and no token lost before it."""
    backend = toy(max_len=32)
    engine = Engine(backend, PointDrafter(lambda seen, k: [0] * k))
    request_id = engine.add([1] * prompt_length, SamplingParams(max_tokens=None, draft_length=draft_length))
    out = run(engine)[request_id].outputs[0]
    assert out.finish_reason == "length"
    assert len(out.token_ids) == 32 - prompt_length


# --- counters ---------------------------------------------------------------------------------------


def test_counters_add_up() -> None:
    tokens = plain_tokens(60, temperature=0)
    out = generate(SamplingParams(max_tokens=31, temperature=0, draft_length=4), oracle(tokens, wrong_at=(3, 11, 12)))
    s = out.speculation
    kinds = out.outputs[0].kinds
    assert s.emitted == 31 == len(kinds)
    assert s.accepted == kinds.count("accepted") == sum(s.accepted_at)
    assert s.drafted == sum(s.drafted_at)
    assert s.rejected == s.drafted - s.accepted > 0
    assert s.emitted == s.accepted + s.steps
    assert s.tokens_per_step == s.emitted / s.steps
    assert all(a <= d for a, d in zip(s.accepted_at, s.drafted_at, strict=True))
    assert s.forward_seconds > 0
    assert s.verify_seconds > 0


def test_a_mismatch_still_emits_one_token() -> None:
    """vllm#8320: tokens of a step at a mismatch are accepted + 1, never accepted."""
    out = generate(
        SamplingParams(max_tokens=20, temperature=0, draft_length=3),
        oracle(plain_tokens(40, temperature=0), wrong_at=range(40)),
    )
    assert out.speculation.accepted == 0
    assert out.speculation.steps == 20


def test_without_drafts_the_drafter_is_not_asked() -> None:
    drafter = oracle(plain_tokens(40, temperature=0))
    out = generate(SamplingParams(max_tokens=10, temperature=0, draft_length=0), drafter)
    assert drafter.calls == 0
    assert out.speculation.drafted == 0
    assert set(out.outputs[0].kinds) == {"bonus"}


# --- streaming --------------------------------------------------------------------------------------


def chunks_of(engine: Engine, request_id: int) -> list[StreamChunk]:
    found = []
    while engine.has_work:
        found += [c for c in engine.step() if c.request_id == request_id]
    return found


@pytest.mark.parametrize("stop", [None, "77", "a0", "5"])
def test_chunks_joined_are_the_output(stop: str | None) -> None:
    tokens = plain_tokens(60, seed=3)
    engine = Engine(toy(), oracle(tokens, wrong_at=(5, 6, 20)), draft_length=4)
    chunks = chunks_of(engine, engine.add(PROMPT, SamplingParams(max_tokens=50, seed=3, stop=stop)))
    output = chunks[-1].output
    assert output is not None
    completion = output.outputs[0]
    assert "".join(c.text for c in chunks) == completion.text
    assert sum((c.token_ids for c in chunks), ()) == completion.token_ids
    pieces = [p for c in chunks for p in c.pieces]
    assert "".join(text for text, _ in pieces) == completion.text
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(c.output is None for c in chunks[:-1])


# --- faults end one request alone -------------------------------------------------------------------


def with_mates(backend: ToyBackend, drafter: Drafter, params: SamplingParams) -> tuple[RequestOutput, ...]:
    """One request that is in for trouble between two that are not."""
    engine = Engine(backend, drafter)
    mate = SamplingParams(max_tokens=20, seed=11)
    a = engine.add((2, 2), mate)
    victim = engine.add(PROMPT, params)
    b = engine.add((3, 3), mate)
    done = run(engine)
    for request_id, prompt in ((a, (2, 2)), (b, (3, 3))):
        solo = Engine(toy(), NoDrafter())
        solo_id = solo.add(prompt, mate)
        assert done[request_id].outputs[0].token_ids == run(solo)[solo_id].outputs[0].token_ids
    return done[victim], done[a], done[b]


def test_a_nan_row_names_request_and_position() -> None:
    """vllm#44744, vllm#53029, vllm#21876; TensorRT-LLM#11125: NaN is a typed error, never an id."""
    backend = toy(nan_when=lambda seen: seen[:3] == PROMPT and len(seen) == 6)
    victim, *_ = with_mates(backend, LookupDrafter(), SamplingParams(max_tokens=20, seed=11))
    completion = victim.outputs[0]
    assert completion.finish_reason == "error"
    assert isinstance(completion.error, BadLogits)
    assert "request 1, position 6" in str(completion.error)
    assert len(completion.token_ids) == 3
    assert completion.token_ids == plain_tokens(20, seed=11)[:3]


def test_a_nan_row_behind_the_mismatch_is_never_looked_at() -> None:
    tokens = plain_tokens(20, seed=11)
    backend = toy(nan_when=lambda seen: seen[:3] == PROMPT and seen[3:] != tokens[: len(seen) - 3])
    out = generate(SamplingParams(max_tokens=20, seed=11), oracle(tokens, wrong_at=(2, 7)), backend)
    assert out.outputs[0].token_ids == tokens


@pytest.mark.parametrize("drafts", [[12], [-1], [3, 99]])
def test_ids_outside_the_vocabulary_never_reach_the_model(drafts: list[int]) -> None:
    """vllm#46899, vllm#40768, TensorRT-LLM#15182: -1 placeholders as token ids."""

    class Raw(PointDrafter):
        def propose(self, contexts: Any, budgets: Any) -> Any:
            bad = Proposal(tuple(drafts), tuple(range(-1, len(drafts) - 1)), "point")
            return [bad if c.tokens[:3] == list(PROMPT) else Proposal.point(()) for c in contexts]

    victim, *_ = with_mates(toy(), Raw(lambda seen, k: ()), SamplingParams(max_tokens=20))
    assert isinstance(victim.outputs[0].error, DrafterError)
    assert "request 1" in str(victim.outputs[0].error)


def test_too_many_drafts_and_trees_break_the_contract() -> None:
    for proposal in (Proposal.point([1] * 9), Proposal.point([1, 2], parents=[-1, -1])):

        class Bad(PointDrafter):
            answer = proposal

            def propose(self, contexts: Any, budgets: Any) -> Any:
                return [self.answer for _ in contexts]

        out = generate(SamplingParams(max_tokens=20), Bad(lambda seen, k: ()))
        assert isinstance(out.outputs[0].error, DrafterError)


def test_a_drafter_fault_in_the_list_ends_that_request_alone() -> None:
    class Faulty(PointDrafter):
        def propose(self, contexts: Any, budgets: Any) -> Any:
            return [
                BadLogits("draft row is NaN") if list(c.tokens[:3]) == list(PROMPT) else Proposal.point(())
                for c in contexts
            ]

    victim, *_ = with_mates(toy(), Faulty(lambda seen, k: ()), SamplingParams(max_tokens=20))
    assert isinstance(victim.outputs[0].error, BadLogits)


@pytest.mark.parametrize("raised", [True, False])
def test_a_drafter_that_fails_as_a_whole_ends_those_it_was_asked_for(raised: bool) -> None:
    class Broken(PointDrafter):
        def propose(self, contexts: Any, budgets: Any) -> Any:
            if raised:
                raise DrafterError("out of order")
            return []

    engine = Engine(toy(), Broken(lambda seen, k: ()))
    asked = engine.add(PROMPT, SamplingParams(max_tokens=9))
    spared = engine.add(PROMPT, SamplingParams(max_tokens=9, draft_length=0))
    done = run(engine)
    assert isinstance(done[asked].outputs[0].error, DrafterError)
    assert done[spared].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("method", ["propose", "observe", "release"])
def test_any_exception_of_a_drafter_is_typed_and_stays_with_it(method: str) -> None:
    """A drafter may be anybody's code: a ValueError of its own must not reach other requests."""

    class Buggy(PointDrafter):
        pass

    def broken(self: Any, first: Any, *_: Any) -> Any:
        raise ValueError("my own bug")

    setattr(Buggy, method, broken)
    engine = Engine(toy(), Buggy(lambda seen, k: ()))
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=5))
    done = run(engine)[request_id].outputs[0]
    assert isinstance(done.error, DrafterError)
    assert "ValueError: my own bug" in str(done.error)
    assert isinstance(done.error.__cause__, ValueError)


HALF = np.array([0.5, 0.5] + [0.0] * 10)


@pytest.mark.parametrize(
    "lie",
    [
        Proposal((1, 2), (-1, 0), "sampled", [HALF]),
        Proposal((1,), (-1,), "sampled", None),
        Proposal(("a",), (-1,), "point"),  # type: ignore[arg-type]
        Proposal((1.5,), (-1,), "point"),  # type: ignore[arg-type]
        Proposal((np.int64(1),), (-1,), "point"),  # type: ignore[arg-type]
        Proposal((1,), (-1,), "sampled", [Distribution(np.array([0.5, 0.5]), 12)]),
        Proposal((1,), (-1,), "sampled", [Distribution(np.array([0.5, 0.5]), 12, np.array([1, 50]))]),
        Proposal((1,), (-1,), "sampled", [Distribution(np.array([0.5, 0.5]), 12, np.array([1, 1]))]),
        Proposal((1,), (-1,), "sampled", [Distribution(np.array([0.5, 0.5]), 12, np.array([-1, 1]))]),
        Proposal((1,), (-1,), "sampled", [HALF * 5]),
        Proposal((1,), (-1,), "sampled", [HALF * np.nan]),
        Proposal((1,), (-1,), "sampled", [np.array([1.5, -0.5] + [0.0] * 10)]),
        Proposal((1,), (-1,), "sampled", ["abc"]),
        Proposal((5,), (-1,), "sampled", [HALF]),
        Proposal((1,), (-1,), "sampled", [np.array([0.5, 0.25] + [0.0] * 10 + [0.25])]),
    ],
)
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_proposal_that_lies_ends_its_request_alone(lie: Proposal, verification: Any) -> None:
    class Liar(PointDrafter):
        def propose(self, contexts: Any, budgets: Any) -> Any:
            return [lie if tuple(c.tokens[:3]) == PROMPT else Proposal.point(()) for c in contexts]

    params = SamplingParams(max_tokens=20, verification=verification)
    victim, *_ = with_mates(toy(), Liar(lambda seen, k: ()), params)
    assert isinstance(victim.outputs[0].error, DrafterError)


@pytest.mark.parametrize("cut", [lambda r: r[:, :3], lambda r: np.hstack([r, r]), lambda r: r[:0], lambda r: None])
def test_rows_of_another_shape_are_a_backend_error(cut: Any) -> None:
    """vllm#44744: a row wider than the vocabulary must never become an id beyond it."""
    backend = toy()
    forward = backend.forward
    backend.forward = lambda batch: [cut(rows) for rows in forward(batch)]  # type: ignore[method-assign]
    engine = Engine(backend, NoDrafter())
    request_id = engine.add(PROMPT[:1], SamplingParams(max_tokens=5))
    assert isinstance(run(engine)[request_id].outputs[0].error, BackendError)


@pytest.mark.parametrize("fault", [BackendError, RuntimeError, KeyError])
def test_whatever_a_release_raises_the_request_ends_and_holds_nothing(fault: type[Exception]) -> None:
    """sglang PR #18984: also what is no typed error must leave no draft memory behind, and no reader without an end."""
    backend, observed = toy(), PointDrafter(lambda seen, k: [0] * k)
    release = backend.release

    def failing(slot: int) -> None:
        release(slot)
        raise fault("driver hiccup")

    backend.release = failing  # type: ignore[method-assign]
    engine = Engine(backend, observed)
    for _ in range(3):
        engine.add(PROMPT, SamplingParams(max_tokens=2, seed=1))
    outputs = [chunk.output for _ in range(4) for chunk in engine.step() if chunk.output is not None]
    assert [out.outputs[0].finish_reason for out in outputs] == ["error"] * 3
    assert all("driver hiccup" in str(out.outputs[0].error) for out in outputs)
    assert not observed.observed
    assert not engine.has_work


def test_a_release_that_fails_does_not_keep_the_other_one() -> None:
    backend = toy()
    drafter = PointDrafter(lambda seen, k: ())
    engine = Engine(backend, drafter)
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=2))
    release = backend.release

    def failing(slot: int) -> None:
        release(slot)
        raise BackendError("release went wrong")

    backend.release = failing  # type: ignore[method-assign]
    assert isinstance(run(engine)[request_id].outputs[0].error, BackendError)
    assert drafter.observed == {}


def test_an_answer_that_is_no_proposal() -> None:
    class Odd(PointDrafter):
        def propose(self, contexts: Any, budgets: Any) -> Any:
            return [None for _ in contexts]

    assert isinstance(generate(SamplingParams(), Odd(lambda s, k: ())).outputs[0].error, DrafterError)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}])
def test_the_row_behind_a_draft_that_ends_the_request_is_not_the_models(params: dict[str, Any]) -> None:
    """openvino.genai#4081 in kind: what follows the end may be impossible to score, and must not matter."""

    def backend() -> ToyBackend:
        return toy(stop_ids=(7,), nan_when=lambda seen: 7 in seen[len(PROMPT) :])

    plain = generate(SamplingParams(max_tokens=200, **params), backend=backend()).outputs[0]
    assert plain.finish_reason == "stop"
    last = set()
    for length in range(1, 6):
        asked = SamplingParams(max_tokens=200, draft_length=length, **params)
        drafted = generate(asked, oracle(plain.token_ids), backend()).outputs[0]
        assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, "stop")
        last.add(drafted.kinds[-1])
    assert "accepted" in last
    for seed in range(20):
        ending = TableDrafter(lambda seen: [0.0] * 7 + [1.0] + [0.0] * 4)
        asked = SamplingParams(max_tokens=200, verification="block", seed=seed)
        assert generate(asked, ending, backend()).outputs[0].finish_reason == "stop"


def test_fail_ends_everybody_and_leaves_a_working_engine() -> None:
    engine = Engine(toy(), LookupDrafter(), max_seqs=2)
    ids = [engine.add(PROMPT, SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    engine.step()
    chunks = engine.fail(BackendError("the cable"))
    assert sorted(c.request_id for c in chunks) == ids
    assert all(c.finish_reason == "error" for c in chunks)
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=30, seed=0))
    assert run(engine)[request_id].outputs[0].token_ids == plain_tokens(30, seed=0)


def test_a_rollback_that_fails_is_a_typed_error() -> None:
    """mlx-lm#846: a rollback that did nothing must not pass for one that did."""
    out = generate(SamplingParams(max_tokens=20, seed=1), PointDrafter(lambda s, k: [0] * k), toy(rollback="fails"))
    assert isinstance(out.outputs[0].error, RollbackError)


def test_a_failed_forward_ends_the_requests_in_it() -> None:
    backend = toy()
    engine = Engine(backend, NoDrafter())
    a = engine.add(PROMPT, SamplingParams(max_tokens=5))
    engine.step()
    forward = backend.forward

    def broken(batch: Any) -> Any:
        backend.forward = forward  # type: ignore[method-assign]
        raise BackendError("no memory")

    backend.forward = broken  # type: ignore[method-assign]
    engine.step()
    b = engine.add(PROMPT, SamplingParams(max_tokens=5))
    done = run(engine)
    assert a not in done
    assert done[b].outputs[0].finish_reason == "length"


# --- cancellation, admission, capabilities ----------------------------------------------------------


def test_cancel_frees_everything() -> None:
    backend = toy()
    drafter = PointDrafter(lambda seen, k: [0] * k)
    engine = Engine(backend, drafter, max_seqs=2)
    ids = [engine.add(PROMPT, SamplingParams(max_tokens=50, seed=i)) for i in range(3)]
    for _ in range(3):
        engine.step()
    (running,) = engine.cancel(ids[0])
    (waiting,) = engine.cancel(ids[2])
    for chunk in (running, waiting):
        assert chunk.output is not None
        assert chunk.output.outputs[0].finish_reason == "cancelled"
    assert running.output is not None
    assert running.output.outputs[0].token_ids == plain_tokens(50, seed=0)[: running.output.speculation.emitted]
    assert engine.cancel(ids[0]) == []
    assert engine.cancel(999) == []
    assert list(drafter.observed) == [ids[1]]
    assert backend.slots_in_use == 1
    assert run(engine)[ids[1]].outputs[0].token_ids == plain_tokens(50, seed=1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens"),
        ([1, 12], "prompt token 1 is 12"),
        ([-1], "prompt token 0 is -1"),
        ([True], "prompt token 0 is True"),
        ([1.5], "prompt token 0 is 1.5"),
        (["a"], "prompt token 0 is 'a'"),
        ([1] * 256, "has 256 tokens"),
    ],
)
def test_bad_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        Engine(toy(), NoDrafter()).add(prompt, SamplingParams())


def test_ids_in_params_must_exist() -> None:
    engine = Engine(toy(), NoDrafter())
    with pytest.raises(InvalidParams, match="stop_token_ids names token 12"):
        engine.add(PROMPT, SamplingParams(stop_token_ids=[12]))
    with pytest.raises(InvalidParams, match="logit_bias names token 40"):
        engine.add(PROMPT, SamplingParams(logit_bias={40: 1.0}))
    with pytest.raises(InvalidParams, match="allowed_token_ids names token 12"):
        engine.add(PROMPT, SamplingParams(allowed_token_ids=[1, 12]))
    with pytest.raises(InvalidParams, match=r"bad_words\[1\] names token 99"):
        engine.add(PROMPT, SamplingParams(bad_words=["a", [1, 99]]))
    with pytest.raises(InvalidParams, match="grammar_after names token 12"):
        engine.add(PROMPT, SamplingParams(grammar={"regex": "a"}, grammar_after=12))
    assert not engine.has_work


def test_requests_wait_for_room() -> None:
    """As many run as their tokens fit now; who grows beyond that is preempted and loses nothing but time."""
    backend = toy(kv_tokens=64, page_size=4)
    engine = Engine(backend, NoDrafter())
    ids = [engine.add(PROMPT, SamplingParams(max_tokens=27, seed=i)) for i in range(9)]
    engine.step()
    assert len(engine.running) == 8
    assert len(engine.waiting) == 1
    done = run(engine)
    assert [done[i].outputs[0].token_ids for i in ids] == [plain_tokens(27, seed=i) for i in range(9)]
    assert done[ids[0]].num_preemptions == 0
    assert done[ids[7]].num_preemptions > 0
    with pytest.raises(InvalidPrompt, match="room for 64"):
        engine.add(PROMPT, SamplingParams(max_tokens=None))


def test_a_model_that_cannot_roll_back_runs_plainly() -> None:
    drafter = PointDrafter(lambda seen, k: [0] * k)
    out = generate(SamplingParams(max_tokens=10, seed=4), drafter, toy(can_truncate=False))
    assert drafter.calls == 0
    assert out.outputs[0].token_ids == plain_tokens(10, seed=4)


def test_engine_options_are_checked() -> None:
    with pytest.raises(InvalidParams, match="max_seqs = 9"):
        Engine(toy(), NoDrafter(), max_seqs=9)
    with pytest.raises(InvalidParams, match="max_seqs = 8; allowed: at most half of max_step_tokens = 15"):
        Engine(toy(max_step_tokens=15), NoDrafter())
    with pytest.raises(InvalidParams, match="draft_length = -1"):
        Engine(toy(), NoDrafter(), draft_length=-1)


def test_unseeded_requests_differ_and_report_their_seed() -> None:
    """vllm#50440: one seed broadcast over a batch correlates its requests; and a replay needs the seed."""
    engine = Engine(toy(), LookupDrafter())
    ids = [engine.add(PROMPT, SamplingParams(max_tokens=30)) for _ in range(8)]
    done = run(engine)
    outputs = [done[i].outputs[0] for i in ids]
    assert len({o.token_ids for o in outputs}) == 8
    assert len({o.seed for o in outputs}) == 8
    again = generate(SamplingParams(max_tokens=30, seed=outputs[0].seed, verification=outputs[0].verification))  # type: ignore[arg-type]
    assert again.outputs[0].token_ids == outputs[0].token_ids


def test_verification_is_resolved_and_reported() -> None:
    def used(**params: Any) -> str:
        return generate(SamplingParams(max_tokens=1, **params)).outputs[0].verification

    assert used() == "block"
    assert used(seed=1) == "coupled"
    assert used(seed=1, verification="rejection") == "rejection"


def test_cached_is_committed_minus_one_after_every_step() -> None:
    backend = toy()
    engine = Engine(backend, oracle(plain_tokens(60, seed=3), wrong_at=(2, 3, 9)))
    engine.add(PROMPT, SamplingParams(max_tokens=40, seed=3))
    while engine.has_work:
        engine.step()
        for sequence in engine.running:
            assert backend.cached_tokens(sequence.slot) == tuple(sequence.tokens[:-1])


# --- the memory cap of a forward ----------------------------------------------------------------------


class CountingRows(ToyBackend):
    """Remembers how many rows of logits each forward gave, and how many arrays of earlier forwards live on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(12, stop_ids=(), max_len=256, max_seqs=8, seed=5, **options)
        self.rows: list[int] = []
        self.most_alive = 0
        self._given: list[weakref.ref[Any]] = []

    def forward(self, batch: Sequence[Segment]) -> list[Any]:
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._given))
        out = super().forward(batch)
        self._given = [weakref.ref(rows) for rows in out]
        self.rows.append(sum(len(rows) for rows in out))
        return out


@pytest.mark.parametrize("max_rows", [1, 3, 5, 7, 1000])
def test_verification_is_cut_into_forwards_under_the_cap(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#48630, vllm#38220: rows of logits are bounded whatever the batch is; the tokens are the same."""
    monkeypatch.setattr("paceline.engine.LOGITS_BYTES", 8 * 12 * max_rows)
    params = [SamplingParams(max_tokens=20, seed=i, draft_length=3, verification="coupled") for i in range(6)]
    plain = [plain_tokens(20, seed=i) for i in range(6)]
    backend = CountingRows()
    engine = Engine(backend, LookupDrafter(1, 1))
    ids = [engine.add(PROMPT, one) for one in params]
    done = run(engine)
    assert [done[i].outputs[0].token_ids for i in ids] == plain
    assert max(backend.rows) <= max_rows
    assert backend.most_alive == 0
    assert (len(backend.rows) > 6 * 20) == (max_rows == 1)


# --- what is published --------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_only_what_became_text_is_published(page_size: int) -> None:
    """vllm#54282's neighbours and sglang PR #10846: pages of rejected drafts are nobody's beginning, also where the
    last step of a request ended with them."""
    backend = toy(page_size=page_size)
    plain = plain_tokens(40, seed=3)
    end = max(i for i, token in enumerate(plain) if token not in plain[:i])  # the last token to come up at all
    assert end > 8
    # The draft there is wrong, the token that comes instead ends the request, and drafts behind it stay in the cells.
    engine = Engine(backend, oracle(plain, wrong_at=(2, 3, end)), draft_length=7)
    engine.add(PROMPT, SamplingParams(max_tokens=60, seed=3, stop_token_ids=[plain[end]]))
    outputs = run(engine)
    assert outputs[0].outputs[0].token_ids == plain[: end + 1]
    plain = plain[: end + 1]
    text = PROMPT + plain
    pages = {text[i : i + page_size] for i in range(0, len(text) - page_size + 1, page_size)}
    published = [tokens for _, tokens in backend._book.published()]
    assert len(published) == (len(text) - 1) // page_size  # all but the newest token, which was never forwarded
    assert set(published) <= pages


def test_stop_strings_need_a_model_with_text() -> None:
    """An option that can never take effect is refused, not ignored."""
    backend = toy()

    def encode(text: str, **options: Any) -> list[int]:
        raise UnsupportedOption("this model takes no text")

    backend.tokenizer.encode = encode  # type: ignore[method-assign]
    engine = Engine(backend, NoDrafter())
    with pytest.raises(UnsupportedOption, match="takes no text"):
        engine.add(PROMPT, SamplingParams(stop="x"))
    engine.add(PROMPT, SamplingParams(stop_token_ids=[3]))
