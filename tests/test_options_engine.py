"""Processors, min_tokens and bad words through the engine: what a spy sees with drafts is what it sees without.

The toy's rows are a table, so that every call can be compared with what plain decoding must show.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import NoLegalToken, ProcessorError
from paceline.params import SamplingParams
from paceline.types import Drafter, RequestOutput
from tests.drafters import PointDrafter, TableDrafter, Tokens

V, PROMPT = 12, (1, 2, 3, 1, 2)
Call = tuple[Tokens, tuple[float, ...]]
ARITHMETIC = (1, 2, 3, 4)
POINT = ("lookup", "wrong now and then", "always wrong", "random")
RULES = ("coupled", "rejection", "block")


@cache
def row(tokens: Tokens) -> np.ndarray:
    """Logits by the last token mostly, so that text repeats, but not by it alone."""
    random = np.random.default_rng((3, tokens[-1]))
    return random.normal(size=V) * 2.5 + np.random.default_rng((4, *tokens)).normal(size=V)


@cache
def draft_q(tokens: Tokens) -> np.ndarray:
    """A drafter that is right about as often as not."""
    z = row(tokens) + np.random.default_rng((9, *tokens)).normal(size=V) * 1.5
    p = np.exp(z - z.max())
    return p / p.sum()


def toy(**options: Any) -> ToyBackend:
    return ToyBackend(V, **{"table": row, "stop_ids": (), "max_len": 256, "max_seqs": 8, **options})


def drafter(name: str) -> Drafter:
    if name == "lookup":
        return LookupDrafter(max_ngram=2, min_ngram=1)
    if name == "sampled":
        return TableDrafter(draft_q)

    def greedy(tokens: Tokens, budget: int) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < budget:
            drafts.append(int(np.argmax(row((*tokens, *drafts)))))
        return drafts

    def guess(tokens: Tokens, budget: int) -> list[int]:
        if name == "random":
            return np.random.default_rng((1, *tokens)).integers(0, V, budget).tolist()
        right = greedy(tokens, budget)
        return [(t + 1) % V if name == "always wrong" or (len(tokens) + i) % 3 == 0 else t for i, t in enumerate(right)]

    return PointDrafter(guess)


def generate(*asked: SamplingParams, draft: Drafter | str = "none", **options: Any) -> list[RequestOutput]:
    """All requests in one engine; its books are checked after every step."""
    one = NoDrafter() if draft == "none" else drafter(draft) if isinstance(draft, str) else draft
    engine = Engine(toy(**options), one)
    ids = [engine.add(PROMPT, params) for params in asked]
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        done.update((chunk.request_id, chunk.output) for chunk in engine.step() if chunk.output is not None)
        engine.check()
    return [done[i] for i in ids]


def ids_of(out: RequestOutput) -> Tokens:
    return out.outputs[0].token_ids


def calls_for(output: Sequence[int]) -> list[Call]:
    """What plain decoding shows a processor in front of this output."""
    everything = (*PROMPT, *output)
    return [(t, tuple(row(t))) for t in (everything[: len(PROMPT) + i] for i in range(len(output)))]


class Log:
    """Keeps what it was shown, and leans on how much that was."""

    def __init__(self, calls: tuple[Call, ...] = ()) -> None:
        self.calls = calls

    def __call__(self, tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        self.calls = (*self.calls, (tokens, tuple(logits)))
        logits[len(self.calls) % V] += 2.0
        return logits

    def clone(self) -> Log:
        return Log(self.calls)


class Gate:
    """A machine of two states: a token below 3 turns it around, and while it is shut odd tokens are banned."""

    def __init__(self) -> None:
        self.shut, self.seen = False, 0

    def __call__(self, tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        self.seen += 1
        if tokens[-1] < 3:
            self.shut = not self.shut
        if self.shut:
            logits[1::2] = -np.inf
        return logits

    def clone(self) -> Gate:
        return copy.copy(self)

    @classmethod
    def obeyed(cls, output: Sequence[int]) -> bool:
        shut = False
        for i, token in enumerate(output):
            shut ^= (*PROMPT, *output)[len(PROMPT) + i - 1] < 3
            if shut and token % 2:
                return False
        return True


# --- processors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("draft", ["none", *POINT, "sampled"])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_a_spy_sees_what_plain_decoding_shows_it(draft: str, length: int, greedy: bool) -> None:
    """sglang#21724, sglang#26330: verified rows bypassed the processor. Nor is it called too often, or out of order.

    Point proposals, and sampled ones verified coupled: once for every emitted position, with its tokens and logits.
    """
    calls: list[Call] = []

    def spy(tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        calls.append((tokens, tuple(logits)))
        logits[tokens[-2]] -= 1.0
        return logits

    params = SamplingParams(
        max_tokens=30, temperature=0 if greedy else 0.8, seed=7, draft_length=length, logits_processors=[spy]
    )
    (plain,) = generate(params)
    assert calls == calls_for(ids_of(plain))
    calls.clear()
    (out,) = generate(params, draft=draft)
    assert ids_of(out) == ids_of(plain)
    assert calls == calls_for(ids_of(plain))
    if length and draft != "none":
        assert out.speculation.rejected > 0
        assert out.speculation.accepted > 0 or draft == "always wrong"


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("draft, rule", [*((d, "block") for d in POINT), *(("sampled", r) for r in RULES)])
@pytest.mark.parametrize("seed", range(3))
def test_the_state_after_every_step_is_plain_decodings(draft: str, rule: Any, length: int, seed: int) -> None:
    """mlx-engine#112: drafts and verified rows shared one stateful processor.

    Under rejection and block the text is another one than plain decoding's. But the object that goes on has seen every
    committed position once, in order, with exactly its history; and nobody called the user's own.
    """
    own = Log()
    engine = Engine(toy(), drafter(draft))
    engine.add(PROMPT, SamplingParams(
        max_tokens=25, seed=seed, draft_length=length, verification=rule, logits_processors=[own]
    ))  # fmt: skip
    (sequence,) = engine.waiting
    while engine.has_work:
        engine.step()
        (log,) = sequence.processors
        assert isinstance(log, Log)
        assert list(log.calls) == calls_for(sequence.tokens[len(PROMPT) :])
    assert sequence.num_output == 25
    assert own.calls == ()


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("draft", [*POINT, "sampled"])
def test_a_machine_that_bans_tokens_is_as_in_plain_decoding(draft: str, length: int) -> None:
    """mlx-engine#112, llama-cpp-python#1770: the machine had also walked along rejected drafts."""
    gate = {"seed": 3, "draft_length": length, "logits_processors": [Gate(), Log()]}
    asked = [SamplingParams(max_tokens=40, temperature=t, **gate) for t in (0.0, 1.0)]
    for out, plain in zip(generate(*asked, draft=draft), generate(*asked), strict=True):
        assert ids_of(out) == ids_of(plain)
        assert Gate.obeyed(ids_of(plain))


@pytest.mark.parametrize("rule", RULES)
def test_a_machine_that_bans_tokens_is_obeyed_under_every_rule(rule: Any) -> None:
    asked = [SamplingParams(max_tokens=30, seed=seed, draft_length=3, verification=rule, logits_processors=[Gate()])
             for seed in range(20)]  # fmt: skip
    outs = generate(*asked, draft="sampled")
    assert all(len(ids_of(out)) == 30 and Gate.obeyed(ids_of(out)) for out in outs)
    assert sum(out.speculation.accepted for out in outs) > 0 < sum(out.speculation.rejected for out in outs)


def test_the_state_survives_preemption() -> None:
    """A request that is computed anew goes on with the state it had; its rows are not shown again."""
    asked = [SamplingParams(max_tokens=40, seed=i, draft_length=3, logits_processors=[Gate(), Log()]) for i in range(4)]
    outs = generate(*asked, draft="lookup", kv_tokens=96, page_size=4)
    assert sum(out.num_preemptions for out in outs) > 0
    assert [ids_of(out) for out in outs] == [ids_of(generate(params)[0]) for params in asked]


def test_samples_do_not_share_state() -> None:
    (out,) = generate(SamplingParams(n=3, max_tokens=20, seed=5, logits_processors=[Log()]), draft="lookup")
    for sample in out.outputs:
        alone = SamplingParams(max_tokens=20, seed=sample.seed, logits_processors=[Log()])
        assert sample.token_ids == ids_of(generate(alone)[0])


def test_a_stop_string_inside_a_block_ends_the_calls_too() -> None:
    """No row behind a stop string is made, although the string is known to have come only once its tokens are taken."""
    calls: list[Call] = []

    def spy(tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        calls.append((tokens, tuple(logits)))
        return logits

    tokens = ids_of(generate(SamplingParams(max_tokens=30, temperature=0))[0])
    stop = "".join("0123456789ab"[t] for t in tokens[8:11])
    params = SamplingParams(max_tokens=30, temperature=0, stop=stop, logits_processors=[spy], draft_length=4)
    (plain,) = generate(params)
    expected = list(calls)
    calls.clear()
    (out,) = generate(params, draft=PointDrafter(lambda seen, k: tokens[len(seen) - len(PROMPT) :][:k]))
    assert ids_of(out) == ids_of(plain)
    assert (out.outputs[0].stop_reason, plain.outputs[0].stop_reason) == (stop, stop)
    assert calls == expected


# --- processors that fail -------------------------------------------------------------------------------


def raises(tokens: Tokens, logits: np.ndarray) -> Any:
    raise ZeroDivisionError("no")


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises, "raised ZeroDivisionError: no"),
    "None": (lambda tokens, logits: None, "returned None"),
    "shape": (lambda tokens, logits: logits[:-1], r"shape \(11,\)"),
    "NaN": (lambda tokens, logits: logits * np.nan, "made NaN"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("draft", ["none", "lookup", "wrong now and then", "sampled"])
def test_a_processor_that_fails_ends_its_own_request(fault: str, at: int, draft: str) -> None:
    """At every offset of a block: what came before stays, the error names processor and place, neighbours go on."""
    wrong, said = FAULTS[fault]

    def processor(tokens: Tokens, logits: np.ndarray) -> Any:
        return wrong(tokens, logits) if len(tokens) == len(PROMPT) + at else logits

    fine = SamplingParams(max_tokens=12, seed=2, draft_length=4)
    victim = SamplingParams(max_tokens=12, seed=1, draft_length=4, logits_processors=[Log(), processor])
    spared = SamplingParams(max_tokens=12, seed=1, logits_processors=[Log()])
    left, out, right = generate(fine, victim, fine, draft=draft)
    completion = out.outputs[0]
    assert completion.finish_reason == "error"
    assert type(completion.error) is ProcessorError
    for words in (said, r"logits_processors\[1\]", f"request {out.request_id}, position {len(PROMPT) + at}"):
        with pytest.raises(ProcessorError, match=words):
            raise completion.error
    assert completion.token_ids == ids_of(generate(spared)[0])[:at]
    assert ids_of(left) == ids_of(right) == ids_of(generate(fine)[0])


def test_leaving_no_token_is_a_typed_error_of_its_own() -> None:
    def nothing(tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        return logits - np.inf if len(tokens) == len(PROMPT) + 2 else logits

    for params in (SamplingParams(seed=1, logits_processors=[nothing]),
                   SamplingParams(seed=1, allowed_token_ids=[1], bad_words=[[1, 1, 1]])):  # fmt: skip
        for draft in ("none", "lookup", "sampled"):
            (out,) = generate(params, draft=draft)
            assert type(out.outputs[0].error) is NoLegalToken
            assert len(ids_of(out)) == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_nobody_takes_may_fail(rule: Any) -> None:
    """Behind a rejected draft a processor may fail as it likes: only a row whose token is wanted ends the request."""

    def strict(tokens: Tokens, logits: np.ndarray) -> np.ndarray:
        assert tokens[-1] not in ARITHMETIC or tokens[-2] not in ARITHMETIC or len(tokens) == len(PROMPT)
        return logits

    outs = generate(*(SamplingParams(max_tokens=12, seed=seed, draft_length=4, verification=rule,
                                     logits_processors=[strict]) for seed in range(40)), draft="sampled")  # fmt: skip
    for out in outs:
        tokens = (PROMPT[-1], *ids_of(out))
        bad = [i for i in range(1, len(tokens)) if {tokens[i - 1], tokens[i]} <= set(ARITHMETIC)]
        if out.outputs[0].finish_reason == "error":
            assert bad == [len(tokens) - 1]
        else:
            assert out.outputs[0].finish_reason == "length"
            assert not [i for i in bad if i < len(tokens) - 1]
    assert {out.outputs[0].finish_reason for out in outs} == {"error", "length"}


# --- min_tokens, bad words, length ----------------------------------------------------------------------


def ended(tokens: Tokens) -> np.ndarray:
    """A model that wants to end all the time."""
    z = row(tokens).copy()
    z[[10, 11]] = 9.0 + tokens[-1] % 2, 9.5
    return z


@pytest.mark.parametrize("length", range(1, 5))
@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6, 7])
def test_end_ids_at_every_draft_offset_wait_for_min_tokens(min_tokens: int, offset: int, length: int) -> None:
    """vllm#26317, vllm#21987, vllm#32642: neither the mask nor the stop check looked at the position within a step."""
    asked = [
        SamplingParams(max_tokens=20, min_tokens=min_tokens, temperature=t, seed=3, draft_length=length,
                       stop_token_ids=[11], logit_bias={5: -1.0}) for t in (0.0, 1.0)
    ]  # fmt: skip
    plain = generate(*asked, table=ended, stop_ids=(10,))

    def guess(seen: Tokens, budget: int) -> list[int]:
        start = len(seen) - len(PROMPT)
        right = [*ids_of(plain[0])[start : start + budget], *[5] * budget][:budget]
        return [10 + len(seen) % 2 if i == offset else t for i, t in enumerate(right)]

    for out, one in zip(generate(*asked, draft=PointDrafter(guess), table=ended, stop_ids=(10,)), plain, strict=True):
        assert ids_of(out) == ids_of(one)
        assert len(ids_of(out)) > min_tokens
        assert not {10, 11} & set(ids_of(out)[:-1])
        assert out.outputs[0].stop_reason == ids_of(out)[-1] in (10, 11)
    assert len(ids_of(plain[0])) == min_tokens + 1


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("draft", [*POINT, "sampled"])
def test_bad_words_across_step_borders(draft: str, length: int) -> None:
    """A run is never completed, wherever steps begin; the drafters go on proposing what the free model says."""
    free = [ids_of(o) for o in generate(*(SamplingParams(max_tokens=30, temperature=t, seed=6) for t in (0.0, 1.0)))]
    words = [free[0][3:6], free[0][8:10], free[1][2:6], free[1][7:9], [int(free[1][12])]]
    asked = [SamplingParams(max_tokens=30, temperature=t, seed=6, draft_length=length, bad_words=words)
             for t in (0.0, 1.0)]  # fmt: skip
    plain = generate(*asked)
    for out, one, unbound in zip(generate(*asked, draft=draft), plain, free, strict=True):
        assert ids_of(out) == ids_of(one) != unbound
        for word in words:
            n = len(word)
            assert tuple(word) not in {ids_of(out)[i : i + n] for i in range(30)}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_bad_words_and_min_tokens_hold_under_the_other_rules(rule: Any) -> None:
    limits = {"min_tokens": 4, "bad_words": [[0], [9, 5]], "allowed_token_ids": [0, 2, 5, 9, 10]}
    asked = [SamplingParams(max_tokens=20, seed=s, draft_length=4, verification=rule, **limits) for s in range(30)]
    outs = generate(*asked, draft="sampled", stop_ids=(10,))
    for out in outs:
        tokens = ids_of(out)
        assert set(tokens) <= {2, 5, 9, 10}
        assert (9, 5) not in {*itertools.pairwise(tokens)}
        assert 10 not in tokens[:4]
        assert len(tokens) >= 4
    assert any(ids_of(out)[-1] == 10 for out in outs)


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 12])
def test_exact_length_with_every_option_on(max_tokens: int, length: int) -> None:
    params = SamplingParams(
        max_tokens=max_tokens, min_tokens=max_tokens, seed=2, draft_length=length, bad_words=[[1, 2], [4]], n=2,
        allowed_token_ids=range(11), logits_processors=[Gate()], presence_penalty=0.5, logit_bias={3: 1.0}, logprobs=1,
    )  # fmt: skip
    for draft in ("none", "lookup", "wrong now and then", "sampled"):
        (out,) = generate(params, draft=draft, stop_ids=(11,))
        for sample in out.outputs:
            assert sample.error is None
            assert len(sample.token_ids) == max_tokens
            assert sample.logprobs is not None
            assert len(sample.logprobs) == len(sample.kinds) == max_tokens
            assert sample.finish_reason == "length"
