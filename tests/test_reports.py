"""What requests report beside their tokens: errors with place and cause, times, gauges, scores."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from paceline import LLM, AsyncEngine, SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.draft import NoDrafter
from paceline.engine import Engine
from paceline.errors import BadLogits, InvalidInput, InvalidParams, InvalidPrompt, NoLegalToken, ProcessorError
from paceline.types import Segment

from .drafters import PointDrafter


class Poisoned(ToyBackend):
    """A toy whose rows hold NaN for one token."""

    def forward(self, batch: Sequence[Segment]) -> list[Any]:
        rows = super().forward(batch)
        for one in rows:
            if one.size:
                one[:, 5] = np.nan
        return rows


def only(llm: LLM, **options: Any) -> Any:
    return llm.generate([1, 2, 3], SamplingParams(**options))[0].outputs[0]


@pytest.mark.parametrize("options", [{}, {"bad_words": [[5]]}, {"allowed_token_ids": [1, 2]}, {"logprobs": 0}], ids=str)
def test_a_mask_does_not_hide_what_is_wrong_with_the_model(options: dict[str, Any]) -> None:
    """Nor do logprobs decide whether it is seen."""
    out = only(LLM(Poisoned(), drafter="none"), **options)
    assert isinstance(out.error, BadLogits)
    assert "request 0, position 3: logits hold NaN at token 5" in str(out.error)


def test_a_bad_row_of_the_prompt_says_where() -> None:
    out = only(LLM(Poisoned(), drafter="none"), prompt_logprobs=0, max_tokens=1)
    assert str(out.error).startswith("request 0, position 1: ")


def test_a_processors_own_error_is_the_cause() -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        return 1 / 0

    out = only(LLM("toy"), logits_processors=[broken])
    assert isinstance(out.error, ProcessorError)
    assert isinstance(out.error.__cause__, ZeroDivisionError)


def test_no_legal_token_names_the_options_in_play() -> None:
    out = only(LLM("toy"), allowed_token_ids=[7], bad_words=[[7]])
    assert isinstance(out.error, NoLegalToken)
    assert "allowed_token_ids, bad_words together" in str(out.error)
    assert "grammar" not in str(out.error)


def test_a_grammar_that_can_never_start_is_refused() -> None:
    with pytest.raises(InvalidParams, match="grammar_after = 256"):
        LLM("toy").generate("abc", SamplingParams(grammar={"regex": "a"}, grammar_after=256))


def test_drafts_of_no_use_are_not_verified() -> None:
    """Point drafts that the grammar forbids cost no row; the first illegal one is not verified either."""
    llm = LLM("toy")
    backend = llm.backend
    engine = Engine(backend, PointDrafter(lambda seen, k: [33] * k), draft_length=4)
    engine.add([1, 2], SamplingParams(grammar={"regex": "[ab]{6}"}, seed=1))
    while engine.has_work:
        (chunk, *_) = engine.step() or [None]
        if chunk is not None and chunk.output is not None:
            assert chunk.output.speculation.drafted == 0
            assert chunk.output.outputs[0].finish_reason == "stop"


def test_samples_share_the_time_of_a_step() -> None:
    """A step of sixteen samples is one step of the clock."""
    llm = LLM("toy", max_seqs=16)
    start = perf_counter()
    stats = llm.generate("abc", SamplingParams(n=16, max_tokens=60, seed=1))[0].speculation
    wall = perf_counter() - start
    booked = stats.prefill_seconds + stats.draft_seconds + stats.forward_seconds + stats.verify_seconds
    assert 0.0 < booked + stats.other_seconds <= wall


def test_gauges_count_requests_not_samples() -> None:
    async def main() -> None:
        async with AsyncEngine("toy", max_seqs=4) as engine:
            params = SamplingParams(n=4, max_tokens=200, ignore_eos=True)
            streams = [engine.stream("abc", params) for _ in range(3)]
            for stream in streams:
                await stream.start()
            await streams[0].__anext__()
            assert (engine.num_running, engine.num_waiting) == (1, 2)
            for stream in streams:
                await stream.aclose()
            await engine.check()

    asyncio.run(main())


def test_scores_are_those_of_the_tokens_that_follow() -> None:
    llm = LLM("toy")
    (score,) = llm.score("abc", "def")
    assert len(score.token_ids) == len(score.logprobs) == 3
    assert score.logprob == pytest.approx(sum(score.logprobs))
    pair = llm.score(["abc", "x"], ["def", [4, 5]])
    assert pair[0] == score
    assert pair[1].token_ids == (4, 5)
    chained = llm.score(["abc", "abcd"], ["d", "ef"])
    assert sum(one.logprob for one in chained) == pytest.approx(score.logprob)


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ("", "abc", "scored behind at least one"),
        ([[]], [[1]], "scored behind at least one"),
        ("abc", "", "no tokens"),
        (["abc"], [[]], "no tokens"),
        (["a", "b"], ["c"], "2 prompts for 1 continuations"),
        (["a", "b"], ["c", ""], "pair 1: "),
        ("abc", [999], "999"),
    ],
)
def test_what_cannot_be_scored_is_refused(prompts: Any, continuations: Any, message: str) -> None:
    llm = LLM("toy")
    with pytest.raises((InvalidPrompt, InvalidInput), match=message):
        llm.score(prompts, continuations)
    assert not llm.engine.has_work


def test_a_scored_text_is_the_one_that_was_written() -> None:
    """A tokenizer that puts a space in front of every text must not have another text scored."""

    class Spaced:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def encode(self, text: str, **options: Any) -> list[int]:
            return self.inner.encode(" " + text, **options)

    plain, backend = LLM("toy"), LLM("toy").backend
    backend.tokenizer = Spaced(backend.tokenizer)  # type: ignore[misc]
    spaced = LLM(backend, drafter=NoDrafter())
    prompt = plain.tokenizer.encode("abc")
    assert spaced.score([prompt], ["def"])[0] == plain.score([prompt], ["def"])[0]


def test_a_failed_sample_keeps_nobody_alive() -> None:
    """An error's traceback holds frames, and those hold streams: the request would never be given up."""

    def boom(tokens: Any, logits: Any) -> Any:
        if len(tokens) >= 3:
            raise ValueError("no more")
        return logits

    llm = LLM("toy")
    params = SamplingParams(n=2, max_tokens=9, ignore_eos=True, draft_length=0, logits_processors=[boom])
    for _ in range(5):
        stream = llm.stream([1], params)
        for chunk in stream:
            if chunk.finish_reason:
                break
        del stream, chunk
        gc.collect()
    llm.generate("abc", SamplingParams(max_tokens=1))
    assert llm._inbox == {}
    assert not llm.engine.has_work


def test_the_place_of_a_processors_error_is_told() -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        return [][0]

    error = only(LLM("toy"), logits_processors=[broken]).error
    assert error.__traceback__ is error.__cause__.__traceback__ is None
    assert "in broken" in error.__notes__[0]


def test_an_llm_that_is_asked_from_within_its_own_step_says_so() -> None:
    llm = LLM("toy")

    def again(tokens: Any, logits: Any) -> Any:
        llm.generate("abc", SamplingParams(max_tokens=1))
        return logits

    error = only(llm, logits_processors=[again]).error
    assert isinstance(error, ProcessorError)
    assert "within one of its own steps" in str(error)
    assert only(llm, max_tokens=1).error is None


def test_the_text_of_an_end_id_is_kept_whole() -> None:
    """A stop string inside of it ends nothing: the id has ended the text already."""
    (stop,) = LLM("toy").tokenizer.encode("x")
    for stops in (["x"], ["wx"]):
        params = {"stop": stops, "stop_token_ids": [stop], "logit_bias": {stop: 100.0}, "max_tokens": 5}
        kept = only(LLM("toy"), include_stop_str_in_output=True, **params)
        assert (kept.text, kept.stop_reason, kept.token_ids) == ("x", stop, (stop,))
        cut = only(LLM("toy"), **params)
        assert (cut.text, cut.stop_reason, cut.token_ids) == ("", stop, (stop,))
