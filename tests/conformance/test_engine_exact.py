"""The exact law of the whole engine: any drafter has the distribution of no drafter.

Every draw of a request is followed with its weight through propose, score, verify and commit, until the request
has finished, and the law of (tokens, text, finish reason) is compared with plain sampling, computed from its
definition in `engine_oracle`. Tolerance 1e-12, no statistics. max_tokens is the draft length + 2 unless a test
says otherwise, so that every path takes two steps at least, on the cache, counts and drafter memory that the step
before has left.

The enumerator refuses a run in which two purposes share noise (vllm#54282, flashinfer PR #424 and #425). What it
cannot see, noise that an earlier step has selected, is in tests/statistical.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.params import SamplingParams
from tests.drafters import PointDrafter
from tests.verify.tables import PAIRS, Tables, error

from .engine_oracle import Tokens, assert_same_law
from .engine_runs import (
    OTHER,
    SUBJECT,
    Ask,
    DrafterFactory,
    Scene,
    Table,
    joint_law,
    law,
    logits_of,
    lookup,
    model,
    none,
    point,
    point_until_unsure,
    rejected_law,
    sampling,
    sampling_twice,
    two_steps_law,
    until_unsure,
)
from .enumerator import TOLERANCE

WAYS: dict[str, tuple[str, DrafterFactory]] = {
    "rejection": ("rejection", sampling),
    "block": ("block", sampling),
    "coupled": ("coupled", sampling),
    "point": ("block", point),  # point proposals are decided by the target's draws under every setting
    "model, rejection": ("rejection", model),
    "model, block": ("block", model),
    "model, coupled": ("coupled", model),
    "unsure, rejection": ("rejection", until_unsure),
    "unsure, block": ("block", until_unsure),
    "unsure, coupled": ("coupled", until_unsure),
    "unsure, point": ("rejection", point_until_unsure),
    "lookup": ("block", lookup),
    "none": ("block", none),
}
RULES = list(WAYS)[:4]
MODELS = list(WAYS)[4:7]
LN2 = math.log(2.0)

MATES = (
    Ask((1, 0), SamplingParams(seed=71, verification="rejection", draft_length=2, max_tokens=20)),
    Ask((0, 1, 1), SamplingParams(seed=72, verification="coupled", draft_length=3, max_tokens=3, temperature=0.7)),
    Ask((1,), SamplingParams(seed=73, verification="block", draft_length=0, max_tokens=20, top_k=1)),
)
"""Companions with other draft lengths, parameters and prompts; the second is over before the others."""


def subject(way: str, K: int, prompt: Tokens = (0,), seed: int = SUBJECT, **params: Any) -> Ask:
    options = {"max_tokens": K + 2, "draft_length": K, "verification": WAYS[way][0], **params}
    return Ask(prompt, SamplingParams(seed=seed, **options))


def scene(tables: Any, way: str, *asks: Ask, **options: Any) -> Scene:
    return Scene(logits=logits_of(tables.p), q=tables.q, drafter=WAYS[way][1], asks=asks, **options)


def check(s: Scene) -> None:
    """The enumerated request comes out as plain sampling would have it."""
    (ask,) = (a for a in s.asks if a.enumerated)
    assert_same_law(law(s), s.plain(ask))


def constant(*row: float) -> Table:
    probs = np.array(row)
    return lambda tokens: probs


# --- the grid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("V, K", [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("way", RULES)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_rule_in_company(pair: str, way: str, V: int, K: int) -> None:
    """vllm-ascend#16370, EAGLE#20, EAGLE#50, openvino.genai#4190: what is recovered comes from (p - q)+ of its row."""
    check(scene(Tables(pair, V, seed=3), way, MATES[len(pair) % 3], subject(way, K)))


@pytest.mark.parametrize("way", list(WAYS)[4:])
@pytest.mark.parametrize("pair", ["random", "zeros in both", "mixed", "disjoint"])
def test_every_drafter(pair: str, way: str) -> None:
    """vllm-ascend#13608, vllm#39273: steps with and without drafts take turns in some of these; and lookup on a model
    without end ids (transformers PR #27775)."""
    check(scene(Tables(pair, 2, seed=1), way, subject(way, 2, prompt=(0, 1, 0)), MATES[1]))
    check(scene(Tables(pair, 3, seed=1), way, subject(way, 1)))


@pytest.mark.parametrize("way", ["rejection", "block", "point", "unsure, block"])
def test_three_drafts_in_a_ragged_batch(way: str) -> None:
    check(scene(Tables("dyadic", 2, seed=5), way, MATES[0], subject(way, 3), MATES[1], MATES[2]))


@pytest.mark.parametrize("way", ["rejection", "block"])
@pytest.mark.parametrize("pair", ["random", "zeros in both", "p = q"])
def test_two_whole_steps(pair: str, way: str) -> None:
    check_two_whole_steps(pair, way, V=2, K=2, seed=3)


def check_two_whole_steps(pair: str, way: str, V: int, K: int, seed: int) -> None:
    """Two steps of up to K + 1 tokens each, whatever the first emitted, then plain sampling."""
    tables = Tables(pair, V, seed)
    s = scene(tables, way, MATES[1], subject(way, K, prompt=(0,), max_tokens=30))
    after_prompt = SimpleNamespace(vocab_size=V, p=lambda tokens: tables.p((0, *tokens)))
    assert error(two_steps_law(s), after_prompt, 2 * (K + 1)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rejection", "block", "point"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seed", [3, 4])
def test_two_whole_steps_of_three_drafts(seed: int, pair: str, way: str) -> None:
    check_two_whole_steps(pair, way, V=3, K=3, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["random", "zeros in both", "disjoint", "dyadic", "mixed"])
def test_three_drafts_coupled(pair: str) -> None:
    """Every draft of the first two steps is followed, so the drafts of later steps are left out."""
    tables = Tables(pair, 3, seed=3)
    ask = subject("coupled", 3)
    check(Scene(logits=logits_of(tables.p), q=tables.q, drafter=sampling_twice, asks=(ask,)))


@pytest.mark.slow
@pytest.mark.parametrize("V, K", [(2, 3), (3, 2)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_drafter_with_longer_drafts(pair: str, way: str, V: int, K: int) -> None:
    if "coupled" in way:
        K -= 1  # every draft of every step is followed
    check(scene(Tables(pair, V, seed=4), way, MATES[1], subject(way, K)))


# --- what ends a request ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "end",
    [
        {"end_ids": (2,)},
        {"end_ids": (2,), "ignore_eos": True},
        {"end_ids": (2,), "stop_token_ids": [0], "include_stop_str_in_output": True},
    ],
    ids=["end id", "ignored", "two stop ids"],
)
def test_end_ids_inside_the_draft(way: str, end: dict[str, Any]) -> None:
    """transformers#47912, PR #31301 and PR #48981, sglang#31599, sglang PR #33758: the drafter proposes the end id."""
    params = {k: v for k, v in end.items() if k != "end_ids"}
    tables = SimpleNamespace(p=Tables("random", 3, seed=8).p, q=constant(0.3, 0.2, 0.5))
    ask = subject(way, 1 if "coupled" in way else 2, prompt=(1, 0, 1, 0), max_tokens=3, **params)
    check(scene(tables, way, MATES[1], ask, end_ids=end["end_ids"]))


@pytest.mark.parametrize("place", range(4))
def test_an_end_id_at_each_place_of_a_point_draft(place: int) -> None:
    """transformers#47912; drafts behind the end id are there too, and none of them may leak."""
    drafts = [0, 1, 0, 1]
    drafts[place] = 2
    ask = subject("point", 4, max_tokens=5)
    s = scene(Tables("random", 3, seed=2), "point", ask, end_ids=(2,))
    assert_same_law(law(with_drafter(s, lambda scene, target: PointDrafter(lambda t, k: drafts[:k]))), s.plain(ask))


def with_drafter(s: Scene, drafter: DrafterFactory) -> Scene:
    return Scene(logits=s.logits, q=s.q, asks=s.asks, drafter=drafter, end_ids=s.end_ids)


@pytest.mark.parametrize("way", ["rejection", "block", "coupled", "point", "lookup"])
@pytest.mark.parametrize(
    "stop",
    [
        {"stop": "01"},
        {"stop": "00", "include_stop_str_in_output": True},
        {"stop": ["110", "10", "0110"]},
    ],
    ids=lambda s: str(s["stop"]),
)
def test_stop_strings(way: str, stop: dict[str, Any]) -> None:
    """vllm#47616, openvino.genai PR #1719: a stop string inside a block or across steps cuts ids and text alike."""
    K = 1 if way == "coupled" else 2
    check(scene(Tables("random", 2, seed=6), way, subject(way, K, prompt=(0, 1), **stop), MATES[0]))


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("way", [*RULES, *MODELS])
def test_max_tokens_cuts_a_block(way: str, max_tokens: int) -> None:
    check(scene(Tables("random", 2, seed=4), way, subject(way, 3, max_tokens=max_tokens), MATES[0]))


@pytest.mark.parametrize("way", [*RULES, *MODELS])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_context_limit_cuts_a_block(way: str, room: int) -> None:
    """vllm#42533, vllm PR #38711, exllamav2#274, llama.cpp#13963."""
    ask = subject(way, 3, prompt=(0, 1, 1), max_tokens=None)
    check(scene(Tables("random", 2, seed=4), way, ask, MATES[2], max_len=3 + room))


# --- every transform, on the row it belongs to ------------------------------------------------------

TRANSFORMS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.4},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "greedy": {"temperature": 0},
    "bias": {"logit_bias": {0: 1.0, 2: -0.5}},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},
    "filters": {"temperature": 0.8, "top_k": 2, "top_p": 0.9, "min_p": 0.1, "logit_bias": {1: 0.7}},
    "all": {
        "temperature": 1.3,
        "top_k": 2,
        "min_p": 0.2,
        "repetition_penalty": 0.7,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.9,
        "logit_bias": {2: 0.5},
    },
}


@pytest.mark.parametrize("way", [*RULES, "model, rejection", "model, block"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, way: str) -> None:
    """vllm#18902, vllm#22987, vllm#10198, sglang#33643, sglang PR #22049 and #28179: every verified row goes
    through every transform, with the drafts before it in its history; llama.cpp#5657: also at temperature 0;
    sglang#33695: also with a seed."""
    params = TRANSFORMS[transform]
    counted = "coupled" not in way and any("penalty" in name for name in params)
    ask = subject(way, 2 if counted else 1, prompt=(0, 2), max_tokens=3, **params)
    check(scene(Tables("random", 3, seed=7), way, ask))


@pytest.mark.slow
@pytest.mark.parametrize("way", [*RULES, *MODELS])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_over_more_steps(transform: str, way: str) -> None:
    ask = subject(way, 1 if "coupled" in way else 2, prompt=(0, 2), max_tokens=4, **TRANSFORMS[transform])
    check(scene(Tables("random", 3, seed=7), way, MATES[0], ask))


@pytest.mark.parametrize("way", [*RULES, *MODELS])
@pytest.mark.parametrize("filtered", [{}, {"top_p": 0.8}, {"top_k": 1}])
@pytest.mark.parametrize("temperature", [{}, {"temperature": 0}, {"temperature": 1}])
def test_unset_is_not_greedy(temperature: dict[str, Any], filtered: dict[str, Any], way: str) -> None:
    """TensorRT-LLM PR #19390, vllm#10198: and top_k = 1 at temperature 1 is."""
    ask = subject(way, 1, max_tokens=2, **temperature, **filtered)
    s = scene(SimpleNamespace(p=constant(0.6, 0.4), q=constant(0.3, 0.7)), way, ask)
    outcomes = law(s)
    assert_same_law(outcomes, s.plain(ask))
    greedy = temperature.get("temperature") == 0 or "top_k" in filtered
    assert len(outcomes) == (1 if greedy else 4)


def mirrored(half: dict[str, float]) -> dict[str, float]:
    """A law that is the same when 0 and 1 change places."""
    return {**half, **{text.translate({48: 49, 49: 48}): weight for text, weight in half.items()}}


SEEN_1 = {f"0{rest}": 1 / 6 for rest in ("00", "01", "10", "11")}
SEEN_1 |= {"100": 1 / 9, "101": 1 / 9, "110": 2 / 27, "111": 1 / 27}
BY_HAND: dict[str, tuple[dict[str, Any], list[float], dict[str, float]]] = {
    # params, the logits of every row, the law of three tokens after the prompt "1"
    "presence": (
        {"presence_penalty": LN2},
        [0.0, 0.0],
        mirrored({"000": 1 / 18, "001": 2 / 18, "010": 1 / 6, "011": 1 / 6}),
    ),
    "frequency": (
        {"frequency_penalty": LN2},
        [0.0, 0.0],
        mirrored({"000": 1 / 30, "001": 4 / 30, "010": 1 / 6, "011": 1 / 6}),
    ),
    "repetition of positive logits": ({"repetition_penalty": 2.0}, [2 * LN2, 2 * LN2], SEEN_1),
    "repetition of negative logits": ({"repetition_penalty": 2.0}, [-LN2, -LN2], SEEN_1),
    "temperature": (
        {"temperature": 0.5},
        [LN2, 0.0],
        {"".join(t): 0.8 ** t.count("0") * 0.2 ** t.count("1") for t in itertools.product("01", repeat=3)},
    ),
}


@pytest.mark.parametrize("way", [*RULES, *MODELS])
@pytest.mark.parametrize("case", BY_HAND)
def test_laws_computed_by_hand(case: str, way: str) -> None:
    params, logits, wanted = BY_HAND[case]
    ask = subject(way, 1 if "coupled" in way else 2, prompt=(1,), max_tokens=3, **params)
    row = np.array(logits)
    s = Scene(logits=lambda tokens: row, q=constant(0.75, 0.25), drafter=WAYS[way][1], asks=(ask,))
    assert_same_law({text: weight for (_, text, _, _), weight in law(s).items()}, wanted)


def test_filters_computed_by_hand() -> None:
    """p = (0.5, 0.3, 0.2) in three filters that all leave (5/8, 3/8); the drafter also proposes what they removed."""
    for params in ({"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.5}):
        for way in ("rejection", "block", "point"):
            ask = subject(way, 1, max_tokens=2, **params)
            s = scene(SimpleNamespace(p=constant(0.5, 0.3, 0.2), q=constant(0.1, 0.2, 0.7)), way, ask)
            wanted = {"00": 25 / 64, "01": 15 / 64, "10": 15 / 64, "11": 9 / 64}
            assert_same_law({text: weight for (_, text, _, _), weight in law(s).items()}, wanted)


@pytest.mark.parametrize("way", ["model, rejection", "model, block"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_model_that_drafts_for_itself_is_never_rejected(transform: str, way: str) -> None:
    """transformers PR #40976, DeepSpec#31: q goes through the request's own transforms, drafts counted, and is the
    very array that was drawn from; with q = p every ratio is then exactly 1."""
    p = Tables("random", 3, seed=9).p
    ask = subject(way, 2, prompt=(0, 2), max_tokens=3, **TRANSFORMS[transform])
    assert rejected_law(scene(SimpleNamespace(p=p, q=p), way, ask)) == pytest.approx({0: 1.0})


# --- the life of a batch ----------------------------------------------------------------------------

COUPLED_MATE = Ask((1, 1), SamplingParams(seed=74, verification="coupled", draft_length=2, max_tokens=4))


@pytest.mark.parametrize("way", [*RULES, *MODELS, "lookup"])
def test_a_prompt_of_several_prefill_chunks(way: str) -> None:
    """max_step_tokens = 8: chunks of 4, 4 and 2 while a companion decodes and takes its share of the drafts."""
    ask = subject(way, 1 if "coupled" in way else 2, prompt=(0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1))
    options = {"max_seqs": 2, "max_step_tokens": 8}
    check(scene(Tables("random", 2, seed=2), way, COUPLED_MATE, ask, backend=options))


@pytest.mark.parametrize("way", [*RULES, "model, block", "lookup"])
@pytest.mark.parametrize("when", [1, 2])
def test_another_request_is_cancelled_midway(way: str, when: int) -> None:
    """TensorRT-LLM PR #3456, sglang PR #18984: the subject stays in its slot while its neighbour's is given to a
    third, or takes over the slot itself."""
    doomed = Ask((1, 0, 1), SamplingParams(seed=75, draft_length=3, max_tokens=20), cancelled=when)
    tables = Tables("random", 2, seed=2)
    ask = subject(way, 1 if "coupled" in way else 2, prompt=(0, 1))
    options = {"max_seqs": 2, "max_step_tokens": 16}
    check(scene(tables, way, doomed, ask, COUPLED_MATE, backend=options))
    check(scene(tables, way, COUPLED_MATE, doomed, ask, backend=options))


def test_a_request_is_cancelled_while_it_prefills() -> None:
    doomed = Ask((0, 1) * 6, SamplingParams(seed=75, draft_length=3, max_tokens=9), cancelled=1)
    options = {"max_seqs": 2, "max_step_tokens": 8}
    check(scene(Tables("random", 2, seed=2), "block", doomed, COUPLED_MATE, subject("block", 2), backend=options))


def test_arriving_late() -> None:
    ask = subject("block", 2, prompt=(0, 1))
    late = Ask(ask.prompt, ask.params, arrives=2)
    check(scene(Tables("random", 2, seed=2), "block", *MATES, late))


# --- two requests at once ---------------------------------------------------------------------------


def check_product(s: Scene) -> None:
    """Each request has its own law, and the joint law is the product of the two."""
    one, other = (s.plain(a) for a in s.asks if a.enumerated)
    product = {(x, y): one[x] * other[y] for x in one for y in other}
    assert_same_law(joint_law(s), product)


@pytest.mark.parametrize(
    "ways", [("rejection", "rejection"), ("block", "block"), ("coupled", "coupled"), ("block", "rejection")]
)
@pytest.mark.parametrize("pair", ["random", "zeros in p"])
def test_a_pair_is_independent(pair: str, ways: tuple[str, str]) -> None:
    """vllm#50440: requests of one batch share no noise, not even with the same prompt."""
    first, second = ways
    asks = (subject(first, 1), MATES[0], subject(second, 1, seed=OTHER))
    check_product(scene(Tables(pair, 2, seed=3), first, *asks))


def test_a_pair_of_point_proposals_is_independent() -> None:
    asks = (subject("point", 1), subject("point", 2, prompt=(1,), seed=OTHER))
    check_product(scene(Tables("random", 2, seed=3), "point", *asks))


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_a_pair_is_independent_where_one_takes_the_drafts_of_the_other(way: str) -> None:
    """One draft a step for both: the second drafts only once the first has ended, which is a matter of luck."""
    asks = (subject(way, 1, max_tokens=2), subject(way, 1, prompt=(1,), seed=OTHER, max_tokens=3))
    options = {"max_seqs": 2, "max_step_tokens": 6}
    check_product(scene(Tables("random", 2, seed=3), way, *asks, end_ids=(1,), backend=options))


@pytest.mark.parametrize("way", RULES)
def test_the_same_seed_gives_the_same_tokens(way: str) -> None:
    """vllm#6038: two equal requests with one seed agree in every branch, with a stranger between them."""
    K = 1 if way == "coupled" else 2
    asks = (subject(way, K), MATES[0], subject(way, K))
    s = scene(Tables("random", 2, seed=3), way, *asks)
    both = joint_law(s)
    assert all(x == y for x, y in both)
    assert_same_law({x: weight for (x, _), weight in both.items()}, s.plain(asks[0]))
