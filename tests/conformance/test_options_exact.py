"""The exact law of the whole engine under every option, alone and in pairs: that of plain sampling.

As test_engine_exact.py, every draw followed with its weight, tolerance 1e-12; what plain sampling gives is worked out
in options_reference.py. The drafters propose what the options forbid as often as anything else, or draw under them
(the draft models). Every leaf also has the logprobs that plain decoding has there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import ForcedDrafter
from paceline.params import SamplingParams
from paceline.types import Drafter
from tests.verify.tables import Tables

from .engine_oracle import Tokens, assert_same_law
from .engine_runs import SUBJECT, Ask, DrafterFactory, Scene, law, logits_of, model, point, sampling

END = 3
V = 4


def pushing(tokens: Tokens, logits: Any) -> Any:
    """A processor without state."""
    logits[(tokens[-1] + len(tokens)) % 3] += 1.1
    return logits


class Remembering:
    """A processor with state: it pushes by all it has seen."""

    def __init__(self, seen: Tokens = ()) -> None:
        self.seen = seen

    def __call__(self, tokens: Tokens, logits: Any) -> Any:
        self.seen = (*self.seen, tokens[-1])
        logits[sum((i + 1) * t for i, t in enumerate(self.seen)) % 3] += 0.9
        return logits

    def clone(self) -> Remembering:
        return Remembering(self.seen)


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.9},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {0: 0.8, END: -0.7}},
    "allowed": {"allowed_token_ids": [0, 1, END]},
    "bad words": {"bad_words": [(0, 1), (1, 1, 0), (2, 2)]},
    "min_tokens": {"min_tokens": 2},
    "processor": {"logits_processors": [pushing]},
    "stateful": {"logits_processors": [Remembering()]},
    "stop": {"stop": ["01", "20"]},
    "include": {"include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": [2]},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 2},
    "processed": {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
    "prompt logprobs": {"prompt_logprobs": 1},
    "regex": {"grammar": {"regex": "0?(1|2)0*(1|22)*"}},
    "after": {"grammar": {"regex": "(20|1)*"}, "grammar_after": "0"},
    "after id": {"grammar": {"regex": "1?2*0"}, "grammar_after": 1},
}


def forced(inner: DrafterFactory) -> DrafterFactory:
    """Forced tokens in front of what `inner` drafts."""

    def build(scene: Scene, target: ToyBackend) -> Drafter:
        return ForcedDrafter(inner(scene, target))

    return build


WAYS: dict[str, tuple[str, DrafterFactory]] = {
    "rejection": ("rejection", sampling),
    "block": ("block", sampling),
    "coupled": ("coupled", sampling),
    "point": ("block", point),
    "model, rejection": ("rejection", model),
    "model, block": ("block", model),
    "model, coupled": ("coupled", model),
    "forced, model, block": ("block", forced(model)),
}


def check(way: str, names: Iterable[str], K: int = 2, seed: int = 7) -> None:
    """One request with these options comes out as plain sampling would have it."""
    rule, drafter = WAYS[way]
    params = {key: value for name in names for key, value in OPTIONS[name].items()}
    if "coupled" in way:
        K = 1  # every draft of every step is followed
    tables = Tables("random", V, seed)
    params = {"max_tokens": 3, "draft_length": K, "verification": rule, **params}
    ask = Ask((0, 2), SamplingParams(seed=SUBJECT, **params))
    s = Scene(logits=logits_of(tables.p), q=tables.q, drafter=drafter, asks=(ask,), end_ids=(END,))
    assert_same_law(law(s), s.plain(ask))


def agree(one: str, other: str) -> bool:
    return all(OPTIONS[one][key] == OPTIONS[other][key] for key in OPTIONS[one].keys() & OPTIONS[other].keys())


PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if agree(*pair)]
SOME = sorted(random.Random(1).sample(range(len(PAIRS)), 16))


FAST = ("rejection", "block", "point", "model, block")  # the coupled path is also in test_matrix.py
SINGLES = [
    pytest.param(option, way, marks=[] if way in FAST or option == "after" else [pytest.mark.slow])
    for option in OPTIONS
    for way in WAYS
    if "forced" not in way or "grammar" in OPTIONS[option]
]


@pytest.mark.parametrize("option, way", SINGLES)
def test_every_option(option: str, way: str) -> None:
    """vllm#18902, vllm#22987, sglang#21724: rows of drafts go through every option, with the drafts before them in
    their history; vllm#26317, #21987, #32642: min_tokens on each row; vllm PR #30846, llama.cpp#27972: logprobs;
    mlx-engine PR #112: a processor's state is that of the row; vllm PR #36138: a grammar that starts inside a block."""
    check(way, [option])


@pytest.mark.parametrize("number", SOME)
def test_some_pairs(number: int) -> None:
    check(("rejection", "block", "model, block", "point")[number % 4], PAIRS[number])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rejection", "block", "coupled", "point", "model, rejection", "forced, model, block"])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_all_pairs(pair: tuple[str, str], way: str) -> None:
    check(way, pair)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rejection", "block", "point"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_with_longer_drafts(option: str, way: str) -> None:
    check(way, [option], K=3, seed=8)


def test_every_option_shows() -> None:
    """Every option changes the law, the numbers that are told of it, or, with a stop, its text."""
    tables = Tables("random", V, 7)

    def plain(*names: str) -> dict[Any, float]:
        params = {key: value for name in names for key, value in OPTIONS[name].items()}
        ask = Ask((0, 2), SamplingParams(max_tokens=3, seed=SUBJECT, **params))
        return Scene(logits=logits_of(tables.p), q=tables.q, drafter=sampling, asks=(ask,), end_ids=(END,)).plain(ask)

    without = plain()
    told = {"include", "logprobs", "processed", "prompt logprobs"}
    for name in OPTIONS.keys() - told:
        law_of = plain(name)
        assert max(abs(law_of.get(o, 0.0) - without.get(o, 0.0)) for o in {*law_of, *without}) > 0.02, name
    assert plain("include", "stop") != plain("stop")
    assert np.isclose(sum(without.values()), 1.0)
