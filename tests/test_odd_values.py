"""Values that are no values: typed errors, whatever they are, and messages of a bearable length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.errors import InvalidInput, InvalidParams, PacelineError, UnsupportedOption, shown

HUGE = 10**5000  # more digits than Python writes out


def deep(n: int) -> Any:
    value: Any = {}
    for _ in range(n):
        value = {"not": value}
    return value


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "options",
    [
        {"n": HUGE}, {"seed": HUGE}, {"temperature": HUGE}, {"stop_token_ids": [HUGE]}, {"logit_bias": {HUGE: 1.0}},
        {"logit_bias": {1: HUGE}}, {"bad_words": [[HUGE]]}, {"n": Unshowable()}, {"stop": [Unshowable()]},
        {"grammar": {"json_schema": deep(100_000)}}, {"grammar": {"json_schema": Unshowable()}},
        {"grammar": {"regex": "\ud800"}}, {"grammar": {"lark": "\ud800"}}, {"stop": "\ud800"},
        {"bad_words": ["\ud800"]},
        {"grammar": {"regex": "a"}, "grammar_after": "\ud800"},
        {"bad_words": np.array(1)}, {"logits_processors": np.array(1)}, {"stop": np.array(1)},
        {"temperature": bytearray(b"0.5")}, {"top_p": memoryview(b"1")}, {"stop_token_ids": bytearray(b"1")},
        {"bad_words": {"a": 1}}, {"stop": {"a": 1}}, {"allowed_token_ids": {1: 2}},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_odd_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**options)
    assert next(iter(options)) in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("spec", [{"regex": "a\\"}, {"regex": "\\"}, {"regex": "a\\\\\\"}], ids=str)
def test_half_an_escape_is_no_regex(spec: dict[str, Any]) -> None:
    """llguidance drops the backslash and takes the rest."""
    with pytest.raises(InvalidParams, match="half an escape"):
        LLM("toy").generate("abc", SamplingParams(grammar=spec))


@pytest.mark.parametrize(
    "lark",
    [
        'start: my-rule\nmy-rule[temperature=0.5]: "a"',
        'start: x\nx [temperature=0.5]: "a"',
        'start: x\nx[suffix="]", temperature=0.5]: /a+/',
        "start: x\nx[ max_tokens = 3 , temperature = 1 ]: /a+/",
    ],
)
def test_a_rules_temperature_is_refused_wherever_it_stands(lark: str) -> None:
    with pytest.raises(UnsupportedOption, match="temperature"):
        LLM("toy").generate("abc", SamplingParams(grammar={"lark": lark}))


def test_a_temperature_in_a_text_is_a_text() -> None:
    out = LLM("toy").generate("abc", SamplingParams(grammar={"lark": 'start: "[temperature=1]"'}, max_tokens=40))[0]
    assert out.outputs[0].text == "[temperature=1]"


def test_a_schemas_own_whitespace_does_not_undo_the_option() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    own = {**schema, "x-guidance": {"whitespace_pattern": "q"}}
    params = SamplingParams(grammar={"json_schema": own, "whitespace": False}, max_tokens=60, seed=1)
    text = LLM("toy").generate("abc", params)[0].outputs[0].text
    assert "q" not in text


def test_prompts_of_odd_values() -> None:
    llm = LLM("toy")
    for prompt in ([HUGE], [Unshowable()], Unshowable(), [1, None]):
        with pytest.raises(InvalidInput):
            llm.generate(prompt, SamplingParams(max_tokens=1))  # type: ignore[arg-type]
    with pytest.raises(PacelineError):
        LLM("toy", max_seqs=HUGE)


def test_shown_is_short_and_never_fails() -> None:
    assert shown("a") == "'a'"
    assert len(shown("x" * 10**6)) < 500
    assert shown("x" * 10**6).startswith("'xxx")
    assert shown(HUGE) == "<int>"
    assert shown(Unshowable()) == "<Unshowable>"
