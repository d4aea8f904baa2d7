"""SamplingParams: what every field may be, what its refusal says, and which names are refused with the reason."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidParams, PacelineError, UnsupportedOption
from paceline.params import MAX_SAMPLES, MAX_SEED, MAX_TOKEN_ID, REFUSED, SamplingParams

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def processor(tokens: Any, logits: Any) -> Any:
    return logits


class Model:
    """What pydantic's classes have."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


# field -> values that it takes, and what becomes of each.
TAKEN: dict[str, list[tuple[Any, Any]]] = {
    "n": [(1, 1), (128, 128), (np.int64(3), 3)],
    "max_tokens": [(1, 1), (None, None), (MAX_TOKEN_ID, MAX_TOKEN_ID)],
    "min_tokens": [(0, 0), (256, 256), (np.int32(5), 5)],
    "temperature": [(0, 0.0), (1e308, 1e308), (np.float32(0.5), 0.5)],
    "top_k": [(0, 0), (-1, -1), (MAX_TOKEN_ID, MAX_TOKEN_ID)],
    "top_p": [(1, 1.0), (5e-324, 5e-324)],
    "min_p": [(0, 0.0), (1, 1.0)],
    "presence_penalty": [(-2, -2.0), (2, 2.0)],
    "frequency_penalty": [(-2, -2.0), (2, 2.0)],
    "repetition_penalty": [(5e-324, 5e-324), (1e308, 1e308)],
    "logit_bias": [(None, None), ({}, {}), ({np.int64(7): -100, 0: 100}, {7: -100.0, 0: 100.0})],
    "bad_words": [(None, None), ([], ()), (["a", [1, 2], (np.int64(3),)], ("a", (1, 2), (3,)))],
    "allowed_token_ids": [(None, None), ([0], (0,)), (np.array([3, 1]), (3, 1)), (range(2), (0, 1))],
    "stop": [(None, None), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())],
    "stop_token_ids": [(None, None), ([], ()), ({5}, (5,))],
    "ignore_eos": [(True, True)],
    "seed": [(None, None), (0, 0), (MAX_SEED, MAX_SEED)],
    "logprobs": [(None, None), (0, 0), (-1, -1), (20, 20)],
    "prompt_logprobs": [(None, None), (0, 0), (-1, -1), (20, 20)],
    "logits_processors": [(None, None), ([], None), ([processor], (processor,))],
    "include_stop_str_in_output": [(True, True)],
    "logprobs_mode": [("raw_logprobs",) * 2, ("processed_logprobs",) * 2],
    "grammar": [
        (None, None), ({"json_schema": SCHEMA},) * 2, ({"json_schema": True},) * 2, ({"regex": "a"},) * 2,
        ({"json_schema": '{"type": "null"}'}, {"json_schema": {"type": "null"}}), ({"lark": "start: /a/"},) * 2,
        ({"json_schema": {}, "lenient": True, "whitespace": False},) * 2, ({"json_object": True},) * 2,
        ({"json_object": True, "whitespace": True},) * 2,
    ],
    "grammar_after": [(None, None), ("</think>", "</think>"), (0, 0), (np.int64(7), 7)],
    "verification": [(rule, rule) for rule in ("auto", "rejection", "block", "coupled")],
    "draft_length": [(None, None), (0, 0), (7, 7)],
}  # fmt: skip

INTEGERS = [True, 1.5, "1", math.nan, [1]]
NUMBERS = [True, "1", b"1", math.nan, math.inf, -math.inf, [1.0], None, 1j]
FLAGS = [1, 0, "yes", None]
IDS: list[Any] = ["12", b"12", 5, [-1], [1.5], [True], ["1"], [MAX_TOKEN_ID + 1], [[1]]]
# field -> values that it refuses, and how the message says what is allowed.
REFUSES: dict[str, tuple[list[Any], str]] = {
    "n": ([0, -1, MAX_SAMPLES + 1, None, *INTEGERS], "an integer from 1 to 128"),
    "max_tokens": ([0, -1, MAX_TOKEN_ID + 1, *INTEGERS], "an integer from 1 to"),
    "min_tokens": ([-1, MAX_TOKEN_ID + 1, None, 257, *INTEGERS], r"an integer from 0 to|0 to max_tokens = 256"),
    "temperature": ([-0.1, *NUMBERS], r"a finite number in \[0, inf\)"),
    "top_k": ([-2, None, *INTEGERS], "an integer from -1 to"),
    "top_p": ([0, -0.1, 1.1, *NUMBERS], r"a finite number in \(0, 1\]"),
    "min_p": ([-0.1, 1.1, *NUMBERS], r"a finite number in \[0, 1\]"),
    "presence_penalty": ([-2.1, 2.1, *NUMBERS], r"a finite number in \[-2, 2\]"),
    "frequency_penalty": ([-2.1, 2.1, *NUMBERS], r"a finite number in \[-2, 2\]"),
    "repetition_penalty": ([0, -1, *NUMBERS], r"a finite number in \(0, inf\)"),
    "logit_bias": (
        [5, [1], "x", {"1": 1}, {-1: 1}, {1.0: 1}, {True: 1}, {1: 101}, {1: -101}, {1: "1"}, {1: None}, {1: math.nan}],
        r"a mapping|an integer from 0 to|a finite number in \[-100, 100\]",
    ),
    "bad_words": (["a", b"a", 5, [""], [[]], [b"a"], [5], [None], [[-1]], [["a"]], ["a", [True]]], "a list of|integer"),
    "allowed_token_ids": ([*IDS, []], "a list of token ids|an integer from 0 to|at least one token id"),
    "stop": (["", b"a", 5, [""], [5], [b"a"], [None], [["a"]]], "non-empty string"),
    "stop_token_ids": (IDS, "a list of token ids|an integer from 0 to"),
    "ignore_eos": (FLAGS, "True or False"),
    "seed": ([-1, MAX_SEED + 1, *INTEGERS], f"an integer from 0 to {MAX_SEED}"),
    "logprobs": ([-2, *INTEGERS], "an integer from -1 to"),
    "prompt_logprobs": ([-2, *INTEGERS], "an integer from -1 to"),
    "logits_processors": ([processor, "x", b"x", 5, [5], [None], [dict]], r"\(tokens, logits\)"),
    "include_stop_str_in_output": (FLAGS, "True or False"),
    "logprobs_mode": (["raw", None, 5, ["raw_logprobs"]], "raw_logprobs, processed_logprobs"),
    "grammar": (
        [
            "a", 5, {}, [], {"xml": 1}, {"regex": "a", "lark": "b"}, {"regex": ""}, {"regex": 5}, {"lark": ""},
            {"json_object": False}, {"json_object": 1}, {"json_schema": 5}, {"json_schema": "{"}, {"json_schema": None},
            {"json_schema": {"a": processor}}, {"json_schema": {}, "lenient": 1}, {"regex": "a", "lenient": True},
            {"json_object": True, "lenient": True}, {"json_schema": {}, "other": True},
            {"lark": "a", "whitespace": True}, Model, {"json_schema": Model}, {"json_schema": Model()},
            {"json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, {"json_schema": {"schema": SCHEMA}},
            {"json_schema": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        ],
        "a mapping with one of|non-empty text|allowed: True|allowed beside|an object or true|not JSON"
        "|model_json_schema|pass what stands under 'schema'",
    ),
    "grammar_after": (["", ["a"], True, 1.5, -1, [1], MAX_TOKEN_ID + 1], "allowed: a token id or a non-empty string$"),
    "verification": (["fast", "", None, 5, ["block"]], "auto, rejection, block, coupled"),
    "draft_length": ([-1, *INTEGERS], "an integer from 0 to"),
}  # fmt: skip


def params(name: str, value: Any) -> SamplingParams:
    more = {"grammar": {"regex": "a"}} if name == "grammar_after" else {}
    return SamplingParams(**{name: value}, **more)


def test_the_tables_hold_every_field() -> None:
    assert list(TAKEN) == list(REFUSES) == FIELDS


@pytest.mark.parametrize("name, value, kept", [(n, *pair) for n, pairs in TAKEN.items() for pair in pairs], ids=repr)
def test_what_a_field_takes(name: str, value: Any, kept: Any) -> None:
    got = getattr(params(name, value), name)
    assert got == kept
    assert type(got) is type(kept)


@pytest.mark.parametrize("name, value", [(n, v) for n, (values, _) in REFUSES.items() for v in values], ids=repr)
def test_what_a_field_refuses_names_field_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidParams, match=REFUSES[name][1]) as refused:
        params(name, value)
    message = str(refused.value)
    assert message.startswith(name)
    assert any(said in message for said in repeats(value))


def repeats(value: Any) -> list[str]:
    """How a message may repeat the value: as it is, as the tuple it became, or the part that is wrong."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [repr(value), repr(tuple(value))] if isinstance(value, list) else [repr(value)]
    return own + [said for part in parts for said in repeats(part)]


def test_what_is_given_for_a_schema_says_what_to_give() -> None:
    """The wrapper would be a schema that allows any JSON, for its words are no keywords."""
    for grammar, said in (
        (Model, "pass {'json_schema': Model.model_json_schema()}"),
        ({"json_schema": Model()}, "pass Model.model_json_schema()"),
        ({"json_schema": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "'schema' in its 'json_schema'"),
        ({"json_schema": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "what stands under 'schema'"),
    ):
        with pytest.raises(InvalidParams) as refused:
            SamplingParams(grammar=grammar)  # type: ignore[arg-type]
        assert str(refused.value).endswith(said)
    property_of_that_name = {"type": "object", "properties": {"schema": {}}, "title": "a"}
    SamplingParams(grammar={"json_schema": property_of_that_name})


def test_a_partial_is_to_be_wrapped() -> None:
    with pytest.raises(UnsupportedOption, match=r"is a partial.*wrap it in a function, as in lambda tokens"):
        SamplingParams(logits_processors=[functools.partial(processor)])
    SamplingParams(logits_processors=[lambda tokens, logits: functools.partial(processor)(tokens, logits)])


def test_grammar_after_needs_a_grammar() -> None:
    with pytest.raises(InvalidParams, match=r"grammar_after = '</think>'; allowed: None"):
        SamplingParams(grammar_after="</think>")


def test_defaults_are_what_people_expect() -> None:
    """TensorRT-LLM PR #19390: a request that set nothing came out greedy."""
    asked = SamplingParams()
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.n) == (1.0, 0, 1.0, 0.0, 1)
    assert not asked.has_penalties
    assert asked.stop_strings == ()
    assert asked.logprobs_mode == "raw_logprobs"


# --- as a value -----------------------------------------------------------------------------------------

FULL = {
    "logit_bias": {3: 1.0}, "bad_words": ["a", [1]], "stop": "x", "seed": 5, "grammar": {"json_schema": SCHEMA},
    "grammar_after": "b", "logits_processors": [processor], "allowed_token_ids": [3],
}  # fmt: skip


@pytest.mark.parametrize("same", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)),
                                  dataclasses.replace, lambda p: SamplingParams(**{n: getattr(p, n) for n in FIELDS}),
                                  lambda p: eval(repr(p).replace(repr(processor), "processor"))],
                         ids=["copy", "deepcopy", "pickle", "replace", "fields", "repr"])  # fmt: skip
def test_copies_are_equal(same: Any) -> None:
    asked = SamplingParams(**FULL)
    assert same(asked) == asked
    assert same(asked) != SamplingParams(**{**FULL, "seed": 6})


def test_replace_checks_again() -> None:
    asked = SamplingParams(seed=3, max_tokens=4)
    assert dataclasses.replace(asked, seed=4) == SamplingParams(seed=4, max_tokens=4)
    with pytest.raises(InvalidParams, match="min_tokens = 5; allowed: 0 to max_tokens = 4"):
        dataclasses.replace(asked, min_tokens=5)
    with pytest.raises(UnsupportedOption, match="best_of = 5"):
        dataclasses.replace(asked, best_of=5)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 3  # type: ignore[misc]


def test_later_changes_to_what_was_passed_do_not_reach_it() -> None:
    """A request must not change under way because somebody reuses the dict or list that it was made from."""
    bias, words, stops, schema = {1: 1.0}, [[1]], ["a"], {"type": "object", "properties": {}}
    asked = SamplingParams(logit_bias=bias, bad_words=words, stop=stops, grammar={"json_schema": schema})
    before = copy.deepcopy(asked)
    bias[1] = 5.0
    words[0].append(2)
    stops.append("b")
    schema["properties"]["a"] = {}  # type: ignore[index]
    assert asked == before


def test_help_shows_the_options() -> None:
    signature = inspect.signature(SamplingParams)
    assert list(signature.parameters) == FIELDS
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in signature.parameters.values())
    for name in FIELDS:
        assert name in (SamplingParams.__doc__ or "")


# --- names that are no fields ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("value", [None, 0.5])
def test_options_of_other_engines_are_refused_by_name(name: str, value: Any) -> None:
    """Also where the value is their default: whoever passes it must learn that nobody reads it."""
    with pytest.raises(UnsupportedOption, match=f"^{name} = {value!r} is not an option of Paceline: ..."):
        SamplingParams(**{name: value})


def test_what_to_do_instead_exists() -> None:
    """Advice that names a field or a page must name a real one."""
    assert not set(REFUSED) & set(FIELDS)
    for name, why in REFUSED.items():
        if why.endswith(" is the name"):
            assert why.split()[0] in FIELDS, name
        if "docs/" in why:
            page = Path(__file__).parent.parent / "docs" / "sampling.md"
            assert "docs/sampling.md" in why
            assert name.split("_")[0] in page.read_text(encoding="utf-8").lower()
    for name in ("best_of", "use_beam_search", "dry_multiplier", "xtc_probability", "mirostat", "typical_p", "tfs_z",
                 "top_n_sigma", "dynatemp_range", "guided_json", "structured_outputs", "response_format",
                 "truncate_prompt_tokens", "skip_special_tokens", "max_new_tokens", "temp"):  # fmt: skip
        assert name in REFUSED
    for name in ("json_schema", "json_object", "regex", "lark", "lenient", "whitespace", "gbnf"):
        assert REFUSED[name].startswith("it belongs in grammar = {"), name
    SamplingParams(grammar={"json_schema": {"enum": ["a", "b"]}}, bad_words=[[1], [2]])  # as two hints say


@pytest.mark.parametrize("name, hint", [
    ("temprature", "did you mean temperature?"), ("maxtokens", "did you mean max_tokens?"),
    ("stop_token_id", "did you mean stop_token_ids?"), ("frobnicate", "it has n, max_tokens, "),
])  # fmt: skip
def test_unknown_names_are_a_type_error_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"SamplingParams has no option '{name}'; {hint}") as refused:
        SamplingParams(**{name: 1})
    assert not isinstance(refused.value, PacelineError)


def test_positional_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.7)  # type: ignore[misc]
