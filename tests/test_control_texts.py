"""Texts that are control tokens' names: such tokens add no text, so a search for the name would never end."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.backend.toy import ToyBackend, ToyTokenizer
from paceline.errors import InvalidParams

END, NAME = 256, "<control 256>"
GRAMMAR = {"regex": "[ab]+"}


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A toy whose tokenizer reads its control token's name."""
    plain = ToyTokenizer.encode

    def encode(self: ToyTokenizer, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        if parse_special and text.endswith(NAME):
            return [*plain(self, text.removesuffix(NAME)), END]
        return plain(self, text)

    monkeypatch.setattr(ToyTokenizer, "encode", encode)
    return LLM(ToyBackend(max_seqs=1), drafter="none")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": NAME}, f"stop = '{NAME}' is a control token (id 256) and adds no text; use stop_token_ids=[256]"),
        ({"stop": ["x", NAME]}, "use stop_token_ids=[256]"),
        ({"bad_words": ["x", NAME]}, f"bad_words[1] = '{NAME}' is a control token (id 256) and adds no text; use bad"),
        ({"bad_words": [NAME]}, "use bad_words=[[256]]"),
        ({"grammar_after": NAME, "grammar": GRAMMAR}, "use grammar_after=256"),
    ],
)
def test_a_control_token_s_name_is_refused_with_its_id(llm: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        llm.generate("abc", SamplingParams(**options))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [{"stop": f"a{NAME}"}, {"stop": "a"}, {"bad_words": ["a", [END]]}, {"grammar_after": "a", "grammar": GRAMMAR}],
)
def test_other_texts_are_texts(llm: LLM, options: dict[str, Any]) -> None:
    """A text that only holds the name may come, letter by letter; one letter is one token, but has text."""
    assert llm.generate("abc", SamplingParams(max_tokens=3, **options))[0].outputs[0].error is None


def test_names_of_a_real_model(model_path: Any) -> None:
    with LLM(model_path("smollm2:q4_1"), drafter="none", measure=False) as llm:
        for text in ("<|im_end|>", "<|im_start|>"):
            (token,) = llm.tokenizer.encode(text, add_special=False, parse_special=True)
            with pytest.raises(InvalidParams, match=rf"id {token}\) and adds no text; use stop_token_ids=\[{token}\]"):
                llm.generate("a", SamplingParams(stop=text))
        named = SamplingParams(grammar={"lark": 'start: "a" <|im_end|>'})
        with pytest.raises(InvalidParams, match=r"names <\|im_end\|>, which ends the text; leave it out"):
            llm.generate("a", named)
