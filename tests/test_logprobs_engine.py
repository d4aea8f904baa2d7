"""Logprobs of the whole engine: for accepted, recovered and bonus tokens alike, what plain decoding would say.

Every number is compared with a straight computation: a fresh forward of the toy over the tokens before it, then scipy's
log-softmax or the reference distribution, sorted in full. The toy's rows are bit-equal in any company, so runs with and
without drafts must also agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from paceline import LLM
from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import InvalidInput
from paceline.params import SamplingParams
from paceline.sampling import reference_distribution
from paceline.types import CompletionOutput, Drafter, Logprobs, RequestOutput, Segment, StreamChunk
from tests.drafters import PointDrafter, TableDrafter

V = 12
LETTERS = "0123456789ab"
PROMPT = (1, 2, 3)
Tokens = tuple[int, ...]
Rows = Callable[[Tokens], np.ndarray]


def toy(**options: Any) -> ToyBackend:
    return ToyBackend(**{"vocab_size": V, "stop_ids": (), "max_len": 256, "max_seqs": 8, "seed": 5, **options})


@cache
def toy_row(tokens: Tokens) -> np.ndarray:
    """float64[V] behind `tokens`, from a forward of its own."""
    backend = toy(max_seqs=1, prefix_cache=False)
    return np.array(backend.forward([Segment(backend.acquire(), tokens, 0, 1)])[0][0])


def run(engine: Engine) -> tuple[dict[int, RequestOutput], list[StreamChunk]]:
    """Everything to the end: outputs and all chunks."""
    done: dict[int, RequestOutput] = {}
    chunks: list[StreamChunk] = []
    while engine.has_work:
        chunks += engine.step()
        engine.check()
    for chunk in chunks:
        if chunk.output is not None:
            done[chunk.request_id] = chunk.output
    return done, chunks


def generate(params: SamplingParams, drafter: Drafter | None = None, **options: Any) -> RequestOutput:
    engine = Engine(toy(**options), drafter or NoDrafter())
    request_id = engine.add(PROMPT, params)
    return run(engine)[0][request_id]


def expected_row(values: np.ndarray, logprobs: np.ndarray, token: int, top: int) -> list[tuple[int, float, int]]:
    """(token, logprob, rank): the token's own place, then the likeliest; everything sorted in full."""
    order = sorted(range(values.size), key=lambda v: (-values[v], v))
    places = [(v, float(logprobs[v]), rank) for rank, v in enumerate(order, start=1)]
    ahead = places if top < 0 else places[:top]
    own = places[order.index(token)]
    return [own, *(one for one in ahead if one[0] != token and one[1] > -math.inf)]


def check_row(found: Logprobs, expected: list[tuple[int, float, int]], tolerance: float = 1e-12) -> None:
    assert [(v, place.rank) for v, place in found.items()] == [(v, rank) for v, _, rank in expected]
    numbers = [place.logprob for place in found.values()]
    np.testing.assert_allclose(numbers, [x for _, x, _ in expected], rtol=0, atol=tolerance)


def check_completion(
    prompt: Tokens, one: CompletionOutput, params: SamplingParams, row_of: Rows = toy_row, tolerance: float = 1e-12
) -> None:
    """Every token's logprobs against the straight computation at the tokens that were emitted."""
    assert one.logprobs is not None
    assert params.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids) == len(one.kinds)
    for i, (token, found) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
        before = one.token_ids[:i]
        row = row_of((*prompt, *before))
        if params.logprobs_mode == "raw_logprobs":
            values, logprobs = row, log_softmax(row)
        else:
            values = reference_distribution(row, params, prompt, before).dense()
            with np.errstate(divide="ignore"):
                logprobs = np.log(values)
        check_row(found, expected_row(values, logprobs, token, params.logprobs), tolerance)
    total = sum(row[token].logprob for token, row in zip(one.token_ids, one.logprobs, strict=True))
    assert one.cumulative_logprob == pytest.approx(total)


def table(tokens: Tokens) -> np.ndarray:
    """q of the sampled drafter: the model's own row, flattened, so that drafts are kept and rejected."""
    weights = np.exp(0.6 * (toy_row(tokens) - toy_row(tokens).max()))
    return np.asarray(weights / weights.sum())


def mostly_right(tokens: Tokens) -> PointDrafter:
    """Drafts what will come, but for every fifth place."""

    def guess(seen: Tokens, budget: int) -> list[int]:
        start = len(seen) - len(PROMPT)
        return [(t + (i % 5 == 4)) % V for i, t in enumerate(tokens[start : start + budget], start)]

    return PointDrafter(guess)


# --- every token of every kind ----------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
}


def drafters(params: SamplingParams) -> Iterator[tuple[str, Drafter]]:
    plain = generate(params)
    yield "lookup", LookupDrafter()
    yield "mostly right", mostly_right(plain.outputs[0].token_ids)
    yield "sampled", TableDrafter(table)
    yield "model", ModelDrafter(toy(seed=6), "model:toy:6", toy())


@pytest.mark.parametrize("draft_length", [1, 2, 4, 9])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_every_kind_of_token_has_the_logprobs_of_plain_decoding(
    draft_length: int, mode: Any, verification: Any
) -> None:
    """llama.cpp#27972 (0.0 for drafts that were kept), vllm PR #30846 (raw logprobs of changed logits)."""
    kinds = set()
    for options in OPTIONS.values():
        for top in (0, 3, -1):
            params = SamplingParams(
                max_tokens=20, seed=4, logprobs=top, logprobs_mode=mode, verification=verification, **options
            )
            plain = generate(params).outputs[0]
            check_completion(PROMPT, plain, params)
            drafting = SamplingParams(
                max_tokens=20,
                seed=4,
                logprobs=top,
                logprobs_mode=mode,
                verification=verification,
                draft_length=draft_length,
                **options,
            )
            for name, drafter in drafters(params):
                one = generate(drafting, drafter).outputs[0]
                check_completion(PROMPT, one, drafting)
                kinds.update(one.kinds)
                if verification == "coupled" or options["temperature"] == 0.0 or name in ("lookup", "mostly right"):
                    assert (one.token_ids, one.logprobs) == (plain.token_ids, plain.logprobs), name
    assert kinds == {"accepted", "recovered", "bonus"}, "the cases do not reach every kind of token"


def test_raw_and_processed_differ_where_they_should() -> None:
    """Catches a mode that is read and goes nowhere."""
    base: dict[str, Any] = {"max_tokens": 8, "seed": 4, "logprobs": 2, "temperature": 0.5, "logit_bias": {3: 4.0}}
    raw = generate(SamplingParams(**base)).outputs[0]
    processed = generate(SamplingParams(**base, logprobs_mode="processed_logprobs")).outputs[0]
    assert raw.token_ids == processed.token_ids
    assert raw.logprobs != processed.logprobs
    check_completion(PROMPT, raw, SamplingParams(**base))
    check_completion(PROMPT, processed, SamplingParams(**base, logprobs_mode="processed_logprobs"))


def test_processed_logprobs_are_behind_the_masks() -> None:
    """An end id before min_tokens, and what a processor forbids, is not listed; the raw row knows nothing of both."""

    def never_two(tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        logits[2] = -math.inf
        return logits

    options: dict[str, Any] = {
        "max_tokens": 6,
        "min_tokens": 5,
        "stop_token_ids": [7],
        "seed": 2,
        "logprobs": -1,
        "logits_processors": [never_two],
    }
    processed = SamplingParams(**options, logprobs_mode="processed_logprobs")
    for drafter in (NoDrafter(), TableDrafter(table)):
        one = generate(processed, drafter).outputs[0]
        assert one.logprobs is not None
        for i, (token, found) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            row = toy_row((*PROMPT, *one.token_ids[:i])).copy()
            row[2] = -math.inf
            if i < 5:
                row[7] = -math.inf
            with np.errstate(invalid="ignore"):
                check_row(found, expected_row(row, log_softmax(row), token, -1))
    raw = SamplingParams(**options)
    check_completion(PROMPT, generate(raw, TableDrafter(table)).outputs[0], raw)


# --- where it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_length", [0, 1, 3, 6])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_cuts_ids_text_logprobs_and_counts_at_one_place(draft_length: int, include: bool) -> None:
    """vllm#47616: the text was trimmed, ids and logprobs were not. A string at every offset of a block, and an id."""
    whole = generate(SamplingParams(max_tokens=40, seed=3, logprobs=2)).outputs[0]
    assert whole.logprobs is not None
    text = "".join(LETTERS[t] for t in whole.token_ids)
    for start in range(8):
        for length in (1, 2, 3):
            stop = text[start : start + length]
            end = text.index(stop) + len(stop)
            kept = end if include else end - len(stop)
            params = SamplingParams(
                max_tokens=40,
                seed=3,
                logprobs=2,
                stop=stop,
                include_stop_str_in_output=include,
                draft_length=draft_length,
            )
            out = generate(params, mostly_right(whole.token_ids))
            one = out.outputs[0]
            assert one.logprobs == whole.logprobs[:kept]
            assert (one.text, one.token_ids) == (text[:kept], whole.token_ids[:kept])
            assert out.speculation.emitted == len(one.token_ids) == len(one.logprobs)
        stop_id = whole.token_ids[start]
        cut = whole.token_ids.index(stop_id) + 1
        params = SamplingParams(max_tokens=40, seed=3, logprobs=2, stop_token_ids=[stop_id], draft_length=draft_length)
        one = generate(params, mostly_right(whole.token_ids)).outputs[0]
        assert (one.token_ids, one.logprobs) == (whole.token_ids[:cut], whole.logprobs[:cut])


@pytest.mark.parametrize("draft_length", [0, 1, 2, 5])
@pytest.mark.parametrize("max_len", [4, 5, 9, 16, 17])
def test_up_to_exactly_the_context_limit(draft_length: int, max_len: int) -> None:
    """vllm PR #38711: wrong logprobs near the maximal length, where fewer drafts fit."""
    params = SamplingParams(max_tokens=None, seed=3, logprobs=3, draft_length=draft_length)
    for drafter in (LookupDrafter(), TableDrafter(table), PointDrafter(lambda seen, budget: [5] * budget)):
        one = generate(params, drafter, max_len=max_len).outputs[0]
        assert len(one.token_ids) == max_len - len(PROMPT)
        assert one.finish_reason == "length"
        check_completion(PROMPT, one, params)


def test_preempted_and_computed_anew() -> None:
    """Catches rows that are scored twice, or not at all, when a sequence comes back."""
    prompts = [(*range(n), 5) for n in (3, 6, 9, 11)]
    params = [SamplingParams(max_tokens=30, seed=i, logprobs=2, prompt_logprobs=2) for i in range(4)]
    engine = Engine(toy(kv_tokens=64, page_size=4), TableDrafter(table))
    ids = [engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    done, _ = run(engine)
    assert sum(done[i].num_preemptions for i in ids) > 0
    for i, prompt, one in zip(ids, prompts, params, strict=True):
        check_completion(prompt, done[i].outputs[0], one)
        check_prompt(done[i], 2)


def test_preempted_in_the_middle_of_a_prompt() -> None:
    """Catches a prompt that is scored from its beginning again, or from where its cells ended."""
    engine = Engine(toy(kv_tokens=64, page_size=4, max_seqs=2, max_step_tokens=4), NoDrafter())
    engine.add(PROMPT, SamplingParams(max_tokens=60, seed=1))
    scored = engine.add(text_of(44), SamplingParams(max_tokens=2, seed=1, prompt_logprobs=2))
    done: dict[int, RequestOutput] = {}
    scored_at_preemption = 0
    while engine.has_work:
        done |= {chunk.request_id: chunk.output for chunk in engine.step() if chunk.output is not None}
        for sequence in engine.waiting:
            scored_at_preemption = max(scored_at_preemption, len(sequence.prompt_logprobs) * sequence.num_preemptions)
    assert 1 < scored_at_preemption < 44, "it was not preempted in the middle"
    check_prompt(done[scored], 2)


# --- the stream -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "lookup", "model:toy", "model:toy:3"])
def test_chunks_together_have_the_logprobs_of_the_output(drafter: str) -> None:
    """Catches logprobs that leave before their text does, or a chunk that repeats some."""
    params = SamplingParams(
        max_tokens=40, seed=1, logprobs=1, n=3, stop="zq", logit_bias=dict.fromkeys(range(200, 230), 4.0)
    )
    with LLM("toy", drafter=drafter) as llm:
        ids: list[Tokens] = [(), (), ()]
        logprobs: list[tuple[Logprobs, ...]] = [(), (), ()]
        output = None
        for chunk in llm.stream("abcabc", params):
            assert chunk.logprobs is not None
            ids[chunk.index] += chunk.token_ids
            logprobs[chunk.index] += chunk.logprobs
            output = chunk.output
        assert output is not None
        assert ids == [one.token_ids for one in output.outputs]
        assert logprobs == [one.logprobs for one in output.outputs]
        assert all(len(one.token_ids) > 5 for one in output.outputs)


def test_none_where_none_were_asked_for() -> None:
    engine = Engine(toy(), LookupDrafter())
    asked = engine.add(PROMPT, SamplingParams(max_tokens=5, seed=1))
    done, chunks = run(engine)
    assert done[asked].outputs[0].logprobs is None
    assert done[asked].outputs[0].cumulative_logprob is None
    assert done[asked].prompt_logprobs is None
    assert all(chunk.logprobs is None for chunk in chunks)


def test_text_of_a_token_that_is_part_of_a_character() -> None:
    with LLM("toy") as llm:
        one = llm.generate("é", SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert one.prompt_logprobs is not None
    assert one.prompt_logprobs[1] is not None
    assert [place.text for place in one.prompt_logprobs[1].values()] == ["\ufffd"]


# --- the prompt -------------------------------------------------------------------------------------


def check_prompt(out: RequestOutput, top: int, row_of: Rows = toy_row, tolerance: float = 1e-12) -> None:
    prompt = out.prompt_token_ids
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(prompt)
    assert out.prompt_logprobs[0] is None
    for i in range(1, len(prompt)):
        row = row_of(prompt[:i])
        found = out.prompt_logprobs[i]
        assert found is not None
        check_row(found, expected_row(row, log_softmax(row), prompt[i], top), tolerance)


def text_of(n: int) -> Tokens:
    return tuple(i * i % 7 + i % 3 for i in range(n))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize("max_step_tokens", [16, 512])
@pytest.mark.parametrize("max_rows", [1, 3, 1000])
def test_prompt_logprobs_over_chunks(length: int, max_step_tokens: int, max_rows: int) -> None:
    """Catches a border between chunks, or between forwards, at which a row is lost or counted twice; and a prompt whose
    rows together take more memory than one forward may."""
    backend = toy(max_step_tokens=max_step_tokens)
    engine = Engine(backend, LookupDrafter())
    engine.max_rows = max_rows
    forward = backend.forward

    def limited(batch: Sequence[Segment]) -> list[Any]:
        assert sum(segment.num_rows for segment in batch) <= max_rows
        return forward(batch)

    backend.forward = limited  # type: ignore[method-assign]
    asked = {
        engine.add(text_of(length), SamplingParams(max_tokens=3, seed=1, prompt_logprobs=top)): top
        for top in (0, 3, -1)
    }
    plain = engine.add(text_of(length), SamplingParams(max_tokens=3, seed=1))
    done, _ = run(engine)
    for request_id, top in asked.items():
        check_prompt(done[request_id], top)
        assert done[request_id].outputs[0].token_ids == done[plain].outputs[0].token_ids


def test_a_cached_beginning_is_scored_too() -> None:
    """Catches rows that are missing because somebody's pages were shared; others still share them."""
    prompt = text_of(40)
    engine = Engine(toy(page_size=4), NoDrafter())

    def ask(**options: Any) -> RequestOutput:
        request_id = engine.add(prompt, SamplingParams(max_tokens=2, seed=1, **options))
        return run(engine)[0][request_id]

    ask()
    scored = ask(prompt_logprobs=1)
    check_prompt(scored, 1)
    assert ask().num_cached_tokens > 0
    samples = ask(prompt_logprobs=-1, n=3, logprobs=1)
    check_prompt(samples, -1)
    for one in samples.outputs:
        check_completion(prompt, one, SamplingParams(logprobs=1))


# --- score ------------------------------------------------------------------------------------------


def by_hand(prompt: Tokens, rest: Tokens) -> list[float]:
    return [float(log_softmax(toy_row((*prompt, *rest[:i])))[token]) for i, token in enumerate(rest)]


def test_score_is_the_sum_by_hand_and_that_of_a_forced_generation() -> None:
    pairs = [((1, 2, 3), (4, 5, 6, 7)), ((9,), (0,)), (text_of(30), text_of(50))]
    with LLM(toy(page_size=4), drafter="lookup") as llm:
        scores = llm.score([list(a) for a, _ in pairs], [list(b) for _, b in pairs])
        for (prompt, rest), score in zip(pairs, scores, strict=True):
            expected = by_hand(prompt, rest)
            assert score.token_ids == rest
            np.testing.assert_allclose(score.logprobs, expected, rtol=0, atol=1e-12)
            assert score.logprob == pytest.approx(sum(expected))

            def forced(tokens: Tokens, logits: np.ndarray, prompt: Tokens = prompt, rest: Tokens = rest) -> np.ndarray:
                return np.where(np.arange(V) == rest[len(tokens) - len(prompt)], logits, -math.inf)

            params = SamplingParams(max_tokens=len(rest), logprobs=0, logits_processors=[forced])
            one = llm.generate(list(prompt), params)[0].outputs[0]
            assert one.token_ids == rest
            assert one.cumulative_logprob == score.logprob


def test_score_takes_texts_and_refuses_what_does_not_pair() -> None:
    with LLM("toy") as llm:
        (score,) = llm.score("abc", "def")
        assert score.token_ids == tuple(llm.tokenizer.encode("def"))
        assert score.logprob < 0.0
        assert llm.score(["abc", "x"], ["def", "y"])[0] == score
        with pytest.raises(InvalidInput, match=r"2 prompts.*1 continuation"):
            llm.score(["abc", "x"], ["def"])
        with pytest.raises(InvalidInput, match="continuation = ''"):
            llm.score("abc", "")


# --- a transformers model ---------------------------------------------------------------------------


def test_on_a_transformers_model() -> None:
    """Rows of packed, ragged forwards over pages, against the model's own attention over one text at a time."""
    torch = pytest.importorskip("torch")
    from tests.conformance.test_company import VOCAB, open_hf, tiny_model

    torch.set_num_threads(1)
    model = tiny_model()

    @cache
    def row_of(tokens: Tokens) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy())

    def guess(seen: Tokens, budget: int) -> Sequence[int]:
        best = int(row_of(tuple(seen)).argmax())
        return [best, *[(best + i) % VOCAB for i in range(1, budget)]]

    prompt = tuple(i * 5 % VOCAB for i in range(21))
    kinds = set()
    engine = Engine(open_hf(max_seqs=4, kv_tokens=400, max_step_tokens=32), PointDrafter(guess))
    asked = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        for options in OPTIONS.values():
            params = SamplingParams(
                max_tokens=15, seed=2, logprobs=3, prompt_logprobs=2, logprobs_mode=mode, ignore_eos=True, **options
            )
            asked[engine.add(prompt, params)] = params
    done, _ = run(engine)
    for request_id, params in asked.items():
        one = done[request_id].outputs[0]
        check_completion(prompt, one, params, row_of, 1e-9)
        check_prompt(done[request_id], 2, row_of, 1e-9)
        kinds.update(one.kinds)
    assert kinds == {"accepted", "recovered", "bonus"}
