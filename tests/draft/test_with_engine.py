"""The drafters in the real loop, on the toy model, whose logits show every stale or misplaced token."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import ForcedDrafter, LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import BadLogits, RollbackError
from paceline.params import SamplingParams, Verification
from paceline.rng import KeyedDraws
from paceline.types import DraftContext, Drafter, RequestOutput, Role

from .fakes import history_of, proposed

PROMPTS = [[1, 2, 3], [4, 5, 4, 5, 4], [6]]


def run(
    backend: ToyBackend,
    drafter: Drafter,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    check: bool = False,
) -> list[RequestOutput]:
    engine = Engine(backend, drafter)
    ids = [engine.add(prompt, params) for prompt in prompts]
    outputs: dict[int, RequestOutput] = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
        if check and isinstance(drafter, ModelDrafter | ForcedDrafter):
            drafter.check()
    return [outputs[i] for i in ids]


def toy(seed: int = 0, **options: object) -> ToyBackend:
    return ToyBackend(40, seed=seed, stop_ids=(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_target_as_its_own_drafter_accepts_everything(
    verification: Verification, temperature: float, penalty: float
) -> None:
    """openvinotoolkit/openvino.genai#4425: in fresh pipelines no draft was accepted, now and then.

    huggingface/transformers PR #48281: drafter x {greedy, sample}. SafeAILab/EAGLE and others: with the
    same params on both sides p = q, so that one refused draft already shows a difference.
    """
    params = SamplingParams(
        temperature=temperature, frequency_penalty=penalty, seed=3, max_tokens=41, verification=verification
    )
    for _ in range(3):
        target, draft = toy(), toy()
        outputs = run(target, ModelDrafter(draft, "model:toy", target), params, check=True)
        for output in outputs:
            assert output.speculation.rejected == 0
            assert output.speculation.drafted >= 32
            assert len(output.outputs[0].token_ids) == 41
        assert draft.slots_in_use == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["lookup", "another model", "a model with a short context"])
def test_the_text_of_a_seed_is_that_without_drafter(kind: str, temperature: float) -> None:
    """Point and coupled requests: whatever is drafted, the plain sampler's text. vllm#42533 for the short
    context: it ends in the middle of every request, and drafting with it."""
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=60)
    plain = run(toy(), NoDrafter(), params)
    target = toy()
    drafter: Drafter = LookupDrafter()
    if kind != "lookup":
        draft = toy(seed=0 if "short" in kind else 1, max_len=24 if "short" in kind else 4096)
        drafter = ModelDrafter(draft, "model:toy", target)
    outputs = run(target, drafter, params, check=True)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain]
    assert sum(o.speculation.drafted for o in outputs) > 0


FORM = {"regex": "0123(ab?|c)456(d|ee)(x[0-9]{1,4}y){2}7890123456789"}
"""Forced, then free, then forced."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verification", ["coupled", "block", "rejection"])
@pytest.mark.parametrize("inner", ["none", "lookup", "model", "a model with a short context", "a smaller vocabulary"])
def test_forced_tokens_are_free_drafts(inner: str, verification: Verification, temperature: float) -> None:
    """The forced parts cost no step of their own, with any drafter behind them; where the text is that of a seed, it
    is the plain one."""
    pytest.importorskip("llguidance")
    params = SamplingParams(
        grammar=FORM, temperature=temperature, seed=3, max_tokens=60, verification=verification, frequency_penalty=0.1
    )
    plain = run(toy(), NoDrafter(), params)
    target = toy()
    drafter: Drafter = {"none": NoDrafter, "lookup": LookupDrafter}.get(inner, NoDrafter)()
    if inner not in ("none", "lookup"):
        draft = ToyBackend(9 if "small" in inner else 40, seed=1, stop_ids=(), max_len=16 if "short" in inner else 4096)
        drafter = ModelDrafter(draft, "model:toy", target)
    outputs = run(target, ForcedDrafter(drafter), params, check=True)
    for got, wanted in zip(outputs, plain, strict=True):
        assert re.fullmatch(FORM["regex"], got.outputs[0].text)
        assert got.outputs[0].finish_reason == "stop"
        if verification == "coupled" or temperature == 0.0 or inner in ("none", "lookup"):
            assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
        # 4 forced tokens cost one step, 3 none beyond the one before them, and 13 three.
        assert got.speculation.steps <= wanted.speculation.steps - 14
        assert got.speculation.accepted >= 14


def test_the_draft_memory_is_that_of_a_fresh_prefill() -> None:
    target, draft = toy(), toy(seed=1)
    drafter = ModelDrafter(draft, "model:toy", target)
    params = SamplingParams()
    text = [1, 2, 3]
    for step in range(12):
        context = DraftContext(
            0, text, 3, params, KeyedDraws(5, len(text)), Role.DRAFT, history_of(text, 3, params, vocab_size=40)
        )
        proposal = proposed(drafter.propose([context], [step % 5])[0])
        fresh = ModelDrafter(toy(seed=1), "model:toy", target)
        again = proposed(fresh.propose([context], [step % 5])[0])
        assert again.tokens == proposal.tokens
        drafter.check([context])
        if proposal.tokens:
            slot = drafter._memories[0].slot
            assert draft.cached_tokens(slot) == (*text, *proposal.tokens[:-1])
        text = [*text, *proposal.tokens[: step % 3], step % 40]


def test_a_bad_row_of_the_draft_model_ends_that_request_alone() -> None:
    target = toy()
    draft = toy(nan_when=lambda visible: visible[0] == 6 and len(visible) > 9)
    outputs = run(target, ModelDrafter(draft, "model:toy", target), SamplingParams(seed=1, max_tokens=30))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error"]
    error = outputs[2].outputs[0].error
    assert isinstance(error, BadLogits)
    assert "drafter model:toy, request 2, position" in str(error)
    assert draft.slots_in_use == target.slots_in_use == 0


def test_a_refused_rollback_of_the_draft_model_is_an_error_never_stale_drafts() -> None:
    """ml-explore/mlx-lm#846: a trim that did nothing."""
    target = toy()
    draft = toy(seed=1, rollback="fails")
    outputs = run(target, ModelDrafter(draft, "model:toy", target), SamplingParams(seed=1, max_tokens=30))
    assert {o.outputs[0].finish_reason for o in outputs} == {"error"}
    assert all(isinstance(o.outputs[0].error, RollbackError) for o in outputs)
    assert draft.slots_in_use == target.slots_in_use == 0


@pytest.mark.parametrize("with_drafts", [False, True])
def test_a_stop_string_cuts_the_same_in_blocks_as_token_by_token(with_drafts: bool) -> None:
    """vllm#47616, huggingface/transformers PR #47912, #48981: text cut, ids not; each drafter on its own."""
    plain = run(toy(), NoDrafter(), SamplingParams(temperature=0.0, max_tokens=40))
    for i, output in enumerate(plain):
        text = output.outputs[0].text
        for start in range(1, 12):
            stop = text[start : start + 3]
            params = SamplingParams(temperature=0.0, max_tokens=40, stop=[stop])
            target = toy()
            drafter = ModelDrafter(toy(), "model:toy", target) if with_drafts else LookupDrafter()
            result = run(target, drafter, params, [PROMPTS[i]])[0].outputs[0]
            assert result.text == text[: text.index(stop)]
            assert result.finish_reason == "stop"
            assert result.stop_reason == stop
            assert result.token_ids == output.outputs[0].token_ids[: len(result.text)]
