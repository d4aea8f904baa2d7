"""The battery, continued: every option, against options_reference.py, which no mutant touches.

So an option that is wrong in the same way with and without drafts is seen too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import AutoDrafter, ForcedDrafter, LookupDrafter, ModelDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.rng import derive_seed
from tests.drafters import PointDrafter
from tests.verify.tables import Tables

from .engine_oracle import assert_same_law, plain_request
from .engine_runs import SUBJECT, Ask, DrafterFactory, Scene, check_logprobs, law, logits_of, model, sampling
from .matrix import STOP, TOY, WIDE, Adversary, Case, adversary, cases, finished, open_toy, toy_row
from .mutants_checks import CHECKS, check
from .options_reference import Outcome, Plain, Tokens
from .test_options_exact import Remembering

Patch = pytest.MonkeyPatch

# --- the toy's options, as their reference has them ---------------------------------------------------


def reference(params: SamplingParams) -> Plain:
    return plain_request(toy_row, TOY.prompt, params, WIDE["max_len"], (STOP,))


@cache
def wanted() -> list[tuple[Case, list[Plain], list[Outcome]]]:
    """Every option alone: each sample's request and outcome by definition."""
    answers = []
    for case in cases(TOY, greedy=False, every=None):
        plain = reference(case.params)
        seeds = [derive_seed(case.params.seed or 0, i) for i in range(case.params.n)]
        answers.append((case, [plain] * len(seeds), [plain.stream(seed) for seed in seeds]))
    return answers


def options_are_right(names: tuple[str, ...], drafter: str) -> None:
    """Those options under an adversary, or a draft model behind forced tokens: text, end and logprobs."""
    chosen = [row for row in wanted() if row[0].names[0] in names]
    backend = open_toy()
    streams: dict[int, Tokens] = {}
    built: Any = adversary(TOY, backend, streams) if drafter == "adversary" else ForcedDrafter(
        ModelDrafter(open_toy(draft=True), "model:second", backend))  # fmt: skip
    engine = Engine(backend, built)
    ids = []
    for case, _, outcomes in chosen:
        ids.append(engine.add(TOY.prompt, case.params))
        streams.update((ids[-1] + i, outcome[0]) for i, outcome in enumerate(outcomes))
    done = finished(engine)
    for (case, plain, outcomes), request_id in zip(chosen, ids, strict=True):
        for i, one in enumerate(done[request_id].outputs):
            reason = type(one.error).__name__ if one.error is not None else one.stop_reason
            told = (one.token_ids, one.text, one.finish_reason, reason)
            assert told == outcomes[i], f"{case}, sample {i}: {told}, by definition {outcomes[i]}"
            check_logprobs(done[request_id], i, plain[i])


GROUPS = {
    "grammar": ("regex", "schema", "lark", "after", "after id"),
    "masks": ("allowed", "bad words", "min_tokens"),
    "processors": ("processor", "stateful"),
    "logprobs": ("logprobs", "processed", "prompt logprobs"),
    "ends": ("stop", "include", "stop ids", "ignore_eos"),
    "samples": ("n",),
}
for group, group_names in GROUPS.items():
    for group_drafter in ("adversary", "model"):
        CHECKS[f"options/{group}, {group_drafter}"] = partial(options_are_right, group_names, group_drafter)


# --- laws ---------------------------------------------------------------------------------------------


def forced_model(scene: Scene, target: ToyBackend) -> Any:
    return AutoDrafter(ForcedDrafter(), ForcedDrafter(model(scene, target)), "forced+model")


def law_of_option(drafter: DrafterFactory, rule: Any, options: dict[str, Any], prompt: Tokens = (0, 2)) -> None:
    tables = three_and_an_end()
    params = SamplingParams(seed=SUBJECT, **{"max_tokens": 3, "draft_length": 2, "verification": rule, **options})
    ask = Ask(prompt, params)
    scene = Scene(logits=logits_of(tables.p), q=tables.q, drafter=drafter, asks=(ask,), end_ids=(3,))
    assert_same_law(law(scene), scene.plain(ask))


@cache
def three_and_an_end() -> Tables:
    return Tables("random", 4, 11)


LAWS: dict[str, tuple[DrafterFactory, str, dict[str, Any]]] = {
    "grammar": (sampling, "rejection", {"grammar": {"regex": "(0|1)2(1|0)(2|1)*"}}),
    "grammar states": (sampling, "rejection", {"grammar": {"regex": "(00|12|21|22)*"}}),
    "grammar block": (sampling, "block", {"grammar": {"regex": "0?1?2?0?"}}),
    "grammar top-p": (model, "rejection", {"grammar": {"regex": "(1|2)(0|2)*"}, "top_p": 0.6}),
    "grammar start": (model, "rejection", {"grammar": {"regex": "1(0|1)*"}, "grammar_after": "2"}),
    "forced and banned": (
        forced_model,
        "block",
        {"grammar": {"regex": "(0|2)(01|12)(1|2)"}, "bad_words": [(0, 1)], "max_tokens": 4},
    ),
    "stateful block": (sampling, "block", {"logits_processors": [Remembering()]}),
    "bad words": (sampling, "rejection", {"bad_words": [(2, 0), (0, 1), (1, 1)]}),
    "min_tokens": (sampling, "rejection", {"min_tokens": 2, "stop_token_ids": [1]}),
}
for law_name, law_args in LAWS.items():
    CHECKS[f"law/{law_name}"] = partial(law_of_option, *law_args)


# --- calls --------------------------------------------------------------------------------------------


@check("processor calls")
def processors_are_called_as_plainly() -> None:
    """Once for every emitted place, in order, with what stands before it; point and coupled ask for no other row."""
    for drafter in ("adversary", "model"):
        for options in ({}, {"stop": "o"}, {"grammar": {"regex": "[a-z]{7}"}}, {"stop_token_ids": [14]}):
            seen: list[Tokens] = []

            def spy(tokens: Tokens, logits: Any, seen: list[Tokens] = seen) -> Any:
                seen.append(tokens)
                return logits

            params = SamplingParams(seed=4, max_tokens=20, verification="coupled", logits_processors=[spy], **options)
            outcome = reference(replace(params, logits_processors=None)).stream(4)
            backend = open_toy()
            built: Any = Adversary({0: outcome[0]}, [STOP, 14, 24], 100) if drafter == "adversary" else ModelDrafter(
                open_toy(draft=True), "model:second", backend)  # fmt: skip
            engine = Engine(backend, built, draft_length=4)
            engine.add(TOY.prompt, params)
            (output,) = finished(engine).values()
            tokens = output.outputs[0].token_ids
            text = (*TOY.prompt, *tokens)
            rows = [text[: len(TOY.prompt) + i] for i in range(len(tokens))]
            assert seen[: len(rows)] == rows, f"{options}: a processor saw other rows than were emitted"
            behind = 1 if "stop" in options else 0  # the stop string itself was cut away
            assert len(seen) <= len(rows) + behind, f"{options}: {len(seen)} rows for {len(rows)} tokens"


@check("sample memory")
def samples_share_the_prompt_and_nothing_else() -> None:
    """Memory for three of ten samples or so, each of them the solo run of its seed, and nothing held after."""
    backend = open_toy(kv_tokens=112, page_size=4, max_seqs=4)
    free = backend.free_pages  # type: ignore[attr-defined]
    engine = Engine(backend, LookupDrafter(2, 1), draft_length=3)
    asked = [SamplingParams(seed=seed, n=5, max_tokens=24, ignore_eos=True, top_p=0.9) for seed in (8, 9)]
    ids = [engine.add(TOY.prompt, params) for params in asked]
    done = finished(engine)
    for request_id, params in zip(ids, asked, strict=True):
        for i, one in enumerate(done[request_id].outputs):
            outcome = reference(params).stream(derive_seed(params.seed or 0, i))
            assert (one.token_ids, one.text) == outcome[:2], f"sample {i}: {one.text!r}, by definition {outcome[1]!r}"
    backend.check()
    assert backend.slots_in_use == 0  # type: ignore[attr-defined]
    assert backend.free_pages == free  # type: ignore[attr-defined]


@check("complete grammars")
def a_complete_grammar_ends_it() -> None:
    """And it is no cut, not even at the last token that there may be."""
    for max_tokens in (4, 9):
        params = SamplingParams(seed=1, max_tokens=max_tokens, grammar={"regex": "[a-z]{4}"})
        engine = Engine(open_toy(), PointDrafter(lambda tokens, budget: [20] * budget))
        engine.add(TOY.prompt, params)
        (output,) = finished(engine).values()
        one = output.outputs[0]
        assert (len(one.text), one.finish_reason, one.error) == (4, "stop", None), one


@check("stops before min_tokens")
def stop_strings_wait_for_min_tokens() -> None:
    tokens, text, _, _ = reference(SamplingParams(max_tokens=24, ignore_eos=True)).stream(1)
    assert 4 < tokens.index(STOP) < 20, "a token without text is wanted right before the stop string"
    for least in (2, 5, 9, tokens.index(STOP) + 1):
        for stop in (text[3:5], text[least - 1 : least + 1], text[least : least + 2]):
            params = SamplingParams(max_tokens=24, ignore_eos=True, stop=stop, min_tokens=least, verification="coupled")
            plain = reference(params)
            engine = Engine(open_toy(), PointDrafter(lambda tokens, budget: [0] * budget))
            engine.add(TOY.prompt, replace(params, seed=1))
            (output,) = finished(engine).values()
            one = output.outputs[0]
            told = (one.token_ids, one.text, one.finish_reason, one.stop_reason)
            assert told == plain.stream(1), f"min_tokens = {least}, stop = {stop!r}: {told}, not {plain.stream(1)}"


@check("options/processors twice")
def a_second_request_starts_anew() -> None:
    for _ in range(2):
        options_are_right(("stateful",), "model")


@check("raw and processed logprobs")
def raw_logprobs_are_the_models() -> None:
    """Whatever a processor writes; and processed ones are those of what was sampled from."""

    def loud(tokens: Tokens, logits: Any) -> Any:
        logits[24] += 5.0
        return logits

    for mode in ("raw_logprobs", "processed_logprobs"):
        options: Any = {"logprobs": 2, "logprobs_mode": mode, "logits_processors": [loud], "top_k": 3}
        params = SamplingParams(seed=2, max_tokens=12, **options)
        plain = reference(params)
        engine = Engine(open_toy(), LookupDrafter(2, 1))
        engine.add(TOY.prompt, params)
        (output,) = finished(engine).values()
        assert output.outputs[0].token_ids == plain.stream(2)[0]
        check_logprobs(output, 0, plain)


@check("options/logprobs and stop")
def logprobs_are_cut_with_the_tokens() -> None:
    text = reference(SamplingParams(max_tokens=24)).stream(1)[1]
    params = SamplingParams(seed=1, max_tokens=24, logprobs=1, stop=text[3:6])
    engine = Engine(open_toy(), LookupDrafter(2, 1))
    engine.add(TOY.prompt, params)
    (output,) = finished(engine).values()
    assert output.outputs[0].token_ids == reference(params).stream(1)[0]
    check_logprobs(output, 0, reference(params))


@check("options/shared history")
def samples_count_for_themselves() -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True, bad_words=[(20, 21)])
    engine = Engine(open_toy(), LookupDrafter(2, 1))
    engine.add(TOY.prompt, params)
    (output,) = finished(engine).values()
    for i, one in enumerate(output.outputs):
        assert one.token_ids == reference(params).stream(derive_seed(3, i))[0], f"sample {i}"
