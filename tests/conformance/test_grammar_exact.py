"""The exact law of the whole engine under a grammar: that of plain sampling under it.

Legal sets that shrink to one or two tokens, penalties and top-p on top of them, forced tokens in front of sampled ones,
grammars that start, or are over, inside a block, and requests that end because nothing may follow. Every draw is
followed with its weight; tolerance 1e-12. test_options_exact.py has the other options, alone and in pairs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import AutoDrafter, ForcedDrafter, LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.sampling import GrammarCompiler, History
from paceline.sampling.constrain import Grammar
from paceline.types import Drafter, Proposal
from tests.drafters import PointDrafter, TableDrafter
from tests.verify.tables import Tables

from .engine_oracle import Tokens, assert_same_law
from .engine_runs import (
    OTHER,
    SUBJECT,
    Ask,
    DrafterFactory,
    Scene,
    checked_outcome,
    joint_law,
    law,
    logits_of,
    lookup,
    model,
    play,
    point,
    until_unsure,
)
from .enumerator import Branches, enumerate_outcomes
from .matrix import JSON, TOY, TOY_PROMPT, finished, open_toy

END, V = 3, 4


def forced(inner: DrafterFactory | None = None) -> DrafterFactory:
    def build(scene: Scene, target: ToyBackend) -> Drafter:
        return ForcedDrafter(inner(scene, target) if inner is not None else None)

    return build


def sampling(scene: Scene, target: ToyBackend) -> Drafter:
    """Samples one of the two likeliest tokens under q, legal or not."""

    def q(tokens: Tokens) -> np.ndarray:
        row = np.array(scene.q(tokens))
        row[np.argsort(-row)[2:]] = 0.0
        return row / row.sum()

    return TableDrafter(q)


WAYS: dict[str, tuple[str, DrafterFactory]] = {
    "rejection": ("rejection", sampling),
    "block": ("block", sampling),
    "coupled": ("coupled", sampling),
    "point": ("block", point),
    "unsure, block": ("block", until_unsure),
    "model, rejection": ("rejection", model),
    "model, block": ("block", model),
    "model, coupled": ("coupled", model),
    "forced": ("block", forced()),
    "forced, lookup": ("block", forced(lookup)),
    "forced, model, rejection": ("rejection", forced(model)),
    "forced, model, block": ("block", forced(model)),
    "forced, model, coupled": ("coupled", forced(model)),
}


def scene(way: str, *asks: Ask, tables: Any = None, end_ids: Tokens = (END,), **options: Any) -> Scene:
    tables = tables or Tables("random", V, seed=11)
    return Scene(logits=logits_of(tables.p), q=tables.q, drafter=WAYS[way][1], asks=asks, end_ids=end_ids, **options)


def subject(way: str, K: int, prompt: Tokens = (0, 2), seed: int = SUBJECT, **params: Any) -> Ask:
    options = {"max_tokens": K + 2, "draft_length": K, "verification": WAYS[way][0], **params}
    if "coupled" in way:  # every draft of every step is followed
        options["draft_length"] = 1
    return Ask(prompt, SamplingParams(seed=seed, **options))


def check(s: Scene) -> None:
    (ask,) = (a for a in s.asks if a.enumerated)
    assert_same_law(law(s), s.plain(ask))


# --- legal sets of one or two tokens ------------------------------------------------------------------

NARROW = {
    "two, one, two": "(0|1)2(1|0)(2|1)*",
    "one, then all": "01(0|1|2)*",
    "ends early or late": "0?1?2?0?",
    "same letter, other states": "(00|01|10)*",
    "none but the end": "(0|1){1,2}",
}
MIXED: dict[str, dict[str, Any]] = {
    "bare": {},
    "top-p": {"top_p": 0.75},
    "penalties and top-p": {"frequency_penalty": 0.9, "repetition_penalty": 1.4, "top_p": 0.8},
    "greedy": {"temperature": 0},
}


ALTERNATING = [
    pytest.param(regex, way, marks=[pytest.mark.slow] if (i + j) % 2 else [])
    for i, regex in enumerate(NARROW)
    for j, way in enumerate(WAYS)
]


@pytest.mark.parametrize("regex, way", ALTERNATING)
def test_narrow_grammars(regex: str, way: str) -> None:
    """vllm#27969, vllm#9423, vllm#11484: half of the drafts break the grammar, and that only lowers acceptance;
    sglang#9187, PR #12008: one legal token is still emitted where the first draft is illegal; llama-cpp-python#1770."""
    check(scene(way, subject(way, 2, max_tokens=4, grammar={"regex": NARROW[regex]})))


@pytest.mark.parametrize("way", ["rejection", "block", "point", "model, rejection", "model, block"])
@pytest.mark.parametrize("mixed", list(MIXED)[1:])
def test_filters_see_the_legal_tokens_only(mixed: str, way: str) -> None:
    """The nucleus is taken of the legal tokens: at least one of them survives it, and their odds are renormalised."""
    regex = NARROW["two, one, two" if "model" in way else "ends early or late"]
    check(scene(way, subject(way, 2, max_tokens=4, grammar={"regex": regex}, **MIXED[mixed])))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("regex", NARROW)
@pytest.mark.parametrize("K", [1, 2, 3])
def test_narrow_grammars_over_more_steps(K: int, regex: str, mixed: str, way: str) -> None:
    max_tokens = {1: 5, 2: 4, 3: 4}[K]
    check(scene(way, subject(way, K, max_tokens=max_tokens, grammar={"regex": NARROW[regex]}, **MIXED[mixed])))


def test_the_grammar_comes_before_top_p() -> None:
    """p = (.6, .3, .1), only 1 and 2 legal, top-p 0.7: (3/4, 1/4) has its nucleus at 1; after top-p, 2 would not exist
    and at 0.5 nothing would be left."""
    row = np.array([0.6, 0.3, 0.1, 0.0])
    tables = SimpleNamespace(p=lambda tokens: row, q=lambda tokens: np.full(4, 0.25))
    for top_p, wanted in ((0.7, {"1": 1.0}), (0.8, {"1": 0.75, "2": 0.25}), (0.5, {"1": 1.0})):
        for way in ("rejection", "block", "point"):
            ask = subject(way, 1, max_tokens=2, grammar={"regex": "1|2"}, top_p=top_p)
            got = law(scene(way, ask, tables=tables))
            assert_same_law({text: weight for (_, text, _, _), weight in got.items()}, wanted)


# --- forced tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("forced")])
@pytest.mark.parametrize("regex", ["01(0|1)2(1|2)*", "(0|1)(20|12)*", "2102"])
def test_forced_tokens_in_front_of_sampled_ones(regex: str, way: str) -> None:
    """A chain whose first rows are one-hot, then really drawn ones."""
    check(scene(way, subject(way, 3, max_tokens=5, grammar={"regex": regex})))


@pytest.mark.parametrize("way", ["forced, model, rejection", "forced, model, block"])
def test_forced_tokens_are_verified_like_any_other(way: str) -> None:
    """Bad words and allowed ids can forbid what the grammar forces; then nothing may follow, and that is the law."""
    for option in ({"bad_words": [(0, 1)]}, {"allowed_token_ids": [0, 2, END]}, {"bad_words": [(1, 2)]}):
        check(scene(way, subject(way, 3, max_tokens=5, grammar={"regex": "(0|2)(01|12|0)(1|2)"}, **option)))


def test_forced_drafts_are_kept() -> None:
    """Where nothing else forbids them, every forced token is accepted: a text of one spelling takes three steps."""
    engine = Engine(open_toy(), ForcedDrafter(), draft_length=4)
    engine.add(TOY_PROMPT, SamplingParams(seed=1, grammar={"regex": "abcdefghijkl"}))
    (output,) = finished(engine).values()
    assert output.outputs[0].text == "abcdefghijkl"
    assert output.outputs[0].finish_reason == "stop"
    assert (output.speculation.steps, output.speculation.rejected) == (3, 0)


# --- a grammar that starts inside the block -----------------------------------------------------------


def fixed(drafts: Sequence[int]) -> DrafterFactory:
    """The same point drafts in every step."""
    return lambda scene, target: PointDrafter(lambda tokens, budget: drafts[:budget])


def likely(drafts: Sequence[int], vocab_size: int = V) -> DrafterFactory:
    """Really sampled drafts, of which `drafts` is the likeliest run and the next id the other that may come."""

    def q(tokens: Tokens) -> np.ndarray:
        token = drafts[(len(tokens) - 2) % len(drafts)]
        row = np.zeros(vocab_size)
        row[token], row[(token + 1) % vocab_size] = 0.7, 0.3
        return row

    return lambda scene, target: TableDrafter(q)


def with_drafter(s: Scene, drafter: DrafterFactory) -> Scene:
    return Scene(logits=s.logits, q=s.q, asks=s.asks, drafter=drafter, end_ids=s.end_ids)


MARKER = 2
AFTERS: dict[str, dict[str, Any]] = {
    "token": {"grammar_after": MARKER},
    "text": {"grammar_after": "2"},
    "text of two tokens": {"grammar_after": "02"},
}


FAST = {("token", "block"), ("text", "coupled"), ("text of two tokens", "rejection"), *((a, "point") for a in AFTERS)}
STARTS = [
    pytest.param(after, rule, marks=[] if (after, rule) in FAST else [pytest.mark.slow])
    for after in AFTERS
    for rule in ("point", "rejection", "block", "coupled")
]


@pytest.mark.parametrize("after, rule", STARTS)
@pytest.mark.parametrize("place", range(3))
def test_a_grammar_starts_behind_a_draft(place: int, after: str, rule: str) -> None:
    """vllm#44006, vllm#44297, vllm#36138, vllm#31858, vllm#34650, vllm#46118: the marker at each place of a block, what
    follows it legal and illegal, and the marker itself accepted, rejected and recovered."""
    drafts = [0, 0, 0, 0]
    drafts[place] = MARKER
    ask = subject(rule, 3, max_tokens=4, grammar={"regex": "1(0|1)*"}, **AFTERS[after])
    drafter = fixed(drafts) if rule == "point" else likely(drafts, vocab_size=3)
    s = with_drafter(scene(rule, ask, tables=Tables("random", 3, seed=11), end_ids=()), drafter)
    if rule == "coupled":
        assert_same_law(law(s), s.plain(ask))
        return
    outcomes, kinds = law_and_kinds(s, ask, place)
    assert_same_law(outcomes, s.plain(ask))
    assert {"accepted", "rejected"} <= kinds, f"the drafted marker was only {kinds}"
    assert place == 0 or "recovered" in kinds, "the marker never came where another token was drafted"


def law_and_kinds(s: Scene, ask: Ask, place: int) -> tuple[dict[Any, float], set[str]]:
    """The law, and what became of the marker drafted at this place of the first block, and of those that were not."""
    plain = s.by_definition(ask)

    def run(branches: Branches) -> tuple[Any, frozenset[str]]:
        outputs, ids = play(s, s.engine(branches))
        one = outputs[ids[ask]].outputs[0]
        met = {kind for token, kind in zip(one.token_ids, one.kinds, strict=True) if token == MARKER}
        reached = len(one.token_ids) > place and set(one.kinds[:place]) <= {"accepted"}
        tags = met | {"rejected"} if reached and one.token_ids[place] != MARKER else met
        return checked_outcome(outputs[ids[ask]], ask, branches, plain), frozenset(tags)

    outcomes: dict[Any, float] = {}
    kinds: set[str] = set()
    for (outcome, tags), weight in enumerate_outcomes(run).items():
        outcomes[outcome] = outcomes.get(outcome, 0.0) + weight
        kinds |= tags
    return outcomes, kinds


@pytest.mark.parametrize("way", ["model, rejection", "model, block", "model, coupled", "forced, model, block"])
@pytest.mark.parametrize("after", AFTERS)
def test_the_draft_model_meets_the_marker_itself(after: str, way: str) -> None:
    """Its q is constrained behind the marker that it drew a moment ago, and the committed one."""
    ask = subject(way, 2, max_tokens=3, grammar={"regex": "1(0|1)*"}, **AFTERS[after])
    check(scene(way, ask, tables=Tables("random", 3, seed=11), end_ids=()))


# --- a grammar that is over inside the block ----------------------------------------------------------


@pytest.mark.parametrize("ends", [(END,), ()], ids=["with an end id", "without one"])
@pytest.mark.parametrize("rule", ["point", "rejection", "block"])
@pytest.mark.parametrize("place", range(3))
def test_drafts_behind_the_end(place: int, rule: str, ends: Tokens) -> None:
    """openvino.genai#4081, sglang#15373, sglang#15050: an end id at each place with drafts behind it, or the last token
    that the grammar allows; nobody asks what may follow. transformers#47912, PR #47931 and sglang PR #30291: nothing
    behind it comes out."""
    drafts = [0, 1, 0, 1]
    if ends:
        drafts[place] = END
    regex = "(0|1)*" if ends else f"(0|1){{{place + 1}}}"
    ask = subject(rule, 3, max_tokens=4, grammar={"regex": regex})
    s = with_drafter(scene(rule, ask, end_ids=ends), fixed(drafts) if rule == "point" else likely(drafts))
    outcomes = law(s)
    assert_same_law(outcomes, s.plain(ask))
    assert any(reason == "stop" for _, _, reason, _ in outcomes)


@pytest.mark.parametrize("rule", ["point", "rejection", "block", "coupled"])
def test_a_complete_grammar_ends_the_request(rule: str) -> None:
    """No end id is needed, and none is emitted: finish_reason "stop", stop_reason None; at the last token too."""
    ask = subject(rule, 2, max_tokens=3, grammar={"regex": "(0|1)2|012"})
    s = with_drafter(scene(rule, ask), likely([0, 2, 0]))
    outcomes = law(s)
    assert_same_law(outcomes, s.plain(ask))
    assert {(text, why, reason) for _, text, why, reason in outcomes} == {
        ("02", "stop", None), ("12", "stop", None), ("012", "stop", None)
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["point", "rejection", "block"])
@pytest.mark.parametrize("ignore", [False, True])
def test_several_end_ids(ignore: bool, rule: str) -> None:
    """The model's end id and one more, which is text: legal where the grammar may end, or where its text is legal."""
    ask = subject(rule, 2, max_tokens=4, grammar={"regex": "0(1|0)*2?"}, stop_token_ids=[1], ignore_eos=ignore)
    s = with_drafter(scene(rule, ask), likely([0, 1, END, 2]))
    assert_same_law(law(s), s.plain(ask))


@pytest.mark.parametrize("way", ["rejection", "block", "coupled", "point", "model, block", "forced, model, rejection"])
@pytest.mark.parametrize(
    "option",
    [{"allowed_token_ids": [0, 1, END]}, {"bad_words": [(0, 1), (0, 2)]}, {"min_tokens": 4}],
    ids=["allowed", "bad words", "min_tokens"],
)
def test_where_nothing_may_follow(option: dict[str, Any], way: str) -> None:
    """A typed error with exactly the probability that plain sampling has it with; drafts change nothing about that."""
    K = 1 if way in ("rejection", "block") else 2
    ask = subject(way, K, max_tokens=4, grammar={"regex": "(0|1)(1|2)2"}, **option)
    s = scene(way, ask)
    outcomes = law(s)
    assert_same_law(outcomes, s.plain(ask))
    assert any(why == "error" for _, _, why, _ in outcomes)


# --- min_tokens and bad words -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["point", "rejection", "block"])
@pytest.mark.parametrize("least", range(1, 5))
@pytest.mark.parametrize("place", range(3))
def test_end_ids_before_min_tokens(place: int, least: int, rule: str) -> None:
    """vllm#26317, vllm#21987, vllm#32642: an end id, and a stop id that is text, drafted at each place."""
    drafts = [0, 0, 1, 0]
    drafts[place] = END if (place + least) % 2 else 1
    ask = subject(rule, 3, max_tokens=4, min_tokens=least, stop_token_ids=[1])
    s = with_drafter(scene(rule, ask), fixed(drafts) if rule == "point" else likely(drafts))
    assert_same_law(law(s), s.plain(ask))


@pytest.mark.parametrize("rule", ["point", "rejection", "block"])
@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_before_min_tokens(include: bool, least: int, rule: str) -> None:
    """They do not count before, not even where they end behind it; token_ids never fall below min_tokens."""
    params = {"stop": ["01", "12", "0"], "include_stop_str_in_output": include, "min_tokens": least}
    ask = subject(rule, 2, max_tokens=4, **params)
    s = with_drafter(scene(rule, ask), likely([0, 1, 2, 0]))
    outcomes = law(s)
    assert_same_law(outcomes, s.plain(ask))
    assert all(len(tokens) >= least for tokens, _, _, _ in outcomes)


@pytest.mark.parametrize("way", ["rejection", "block", "coupled", "point", "model, block"])
def test_bad_words_across_steps_and_drafts(way: str) -> None:
    """Runs of two, three and four tokens, begun in an earlier step, among the drafts, or in the prompt, which does not
    count; and a word inside another."""
    words = [(0, 1), (2, 0, 0), (1, 1), (1, 2, 1, 2), (0, 2)]
    ask = subject(way, 2, prompt=(2, 0), max_tokens=4, bad_words=words)
    s = scene(way, ask)
    outcomes = law(s)
    assert_same_law(outcomes, s.plain(ask))
    assert any(tokens[0] == 1 for tokens, _, _, _ in outcomes), "(0, 1) is forbidden across the prompt's end"


# --- many requests, one engine ------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [("rejection", "rejection"), ("block", "block"), ("point", "point")])
def test_two_requests_with_one_grammar_are_independent(ways: tuple[str, str]) -> None:
    """vllm#52620: each has its own state; the joint law is the product."""
    asks = tuple(
        subject(way, 1, seed=seed, max_tokens=3, grammar={"regex": NARROW["same letter, other states"]})
        for way, seed in zip(ways, (SUBJECT, OTHER), strict=True)
    )
    s = scene(ways[0], *asks)
    one, other = (s.plain(ask) for ask in asks)
    assert_same_law(joint_law(s), {(x, y): one[x] * other[y] for x in one for y in other})


def draft_model(target: Any) -> Drafter:
    return ModelDrafter(open_toy(draft=True), "model:second", target)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda target: LookupDrafter(2, 1),
        draft_model,
        lambda target: AutoDrafter(ForcedDrafter(), ForcedDrafter(draft_model(target)), "forced+model"),
    ],
    ids=["lookup", "model", "forced+model"],
)
def test_twelve_requests_with_a_schema(drafter: Callable[[Any], Drafter]) -> None:
    """vllm#52620: a shared beginning, twelve at once, memory for about half of them; every text parses and is the text
    that its seed has alone. sglang#29110: every emitted token is committed to its matcher once, preempted or not."""
    told = Counter[int]()

    def answers(build: Callable[[Any], Drafter], at_once: bool) -> list[Any]:
        backend = open_toy(kv_tokens=112 if at_once else None, page_size=4)
        engine = Engine(backend, build(backend), draft_length=3)
        done: dict[int, Any] = {}
        for seed in range(12):
            params = SamplingParams(seed=seed, grammar=JSON, max_tokens=100, verification="coupled", top_p=0.95)
            engine.add(TOY_PROMPT, params)
            if not at_once:
                done.update(finished(engine))
        done.update(finished(engine))
        return [done[i] for i in range(12)]

    alone = answers(lambda target: NoDrafter(), at_once=False)
    commit = Grammar.commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grammar, "commit", lambda self, token: told.update([id(self)]) or commit(self, token))
        together = answers(drafter, at_once=True)
    assert sum(output.num_preemptions for output in together) > 0
    for got, wanted in zip(together, alone, strict=True):
        (one,), (plain,) = got.outputs, wanted.outputs
        assert (one.token_ids, one.text) == (plain.token_ids, plain.text)
        assert one.finish_reason == "stop"
        value = json.loads(one.text)
        assert isinstance(value["id"], int)
        assert value["ok"] in ("yes", "no")
    assert sorted(told.values()) == sorted(len(output.outputs[0].token_ids) for output in together)


# --- states of branches -------------------------------------------------------------------------------


def test_siblings_have_states_of_their_own() -> None:
    """TensorRT-LLM#18892: rows of one tree, asked for in any order, each by its own path; nothing stays."""
    tokenizer = open_toy().tokenizer
    grammar = GrammarCompiler(tokenizer, frozenset({99})).compile({"regex": "(ab[0-4]|ac[5-9]|b{2,3})+"})
    tokens = list(TOY_PROMPT)
    history = History(SamplingParams(), tokens, len(tokens), 100, end_ids=frozenset({99}), grammar=grammar.start(
        frozenset({99})))  # fmt: skip
    a, b, c = 10, 11, 12
    wanted = {(): {a, b}, (a,): {b, c}, (a, b): set(range(5)), (a, c): set(range(5, 10)), (b,): {b},
              (b, b): {a, b, 99}, (a, b, 0): {a, b, 99}, (b, b, b): {a, b, 99}}  # fmt: skip
    paths = list(wanted)
    for path in [*paths, *reversed(paths), *paths[::2], *paths[1::2]]:
        p = history.distribution(np.zeros(100), path).dense()
        assert set(np.flatnonzero(p).tolist()) == wanted[path], path


def test_a_proposal_is_cut_behind_its_first_illegal_draft() -> None:
    """Keeping that draft is what makes it exact: without it, whether it is verified would hang on the draft itself.
    What follows it is never forwarded."""
    backend = open_toy()
    grammar = GrammarCompiler(backend.tokenizer, frozenset({99})).compile({"regex": "abc[0-9]*"})
    history = History(SamplingParams(), [1], 1, 100, end_ids=frozenset({99}), grammar=grammar.start(frozenset({99})))
    cases = {(10, 11, 12, 1): 4, (10, 11, 11, 12): 3, (99, 10): 1, (11,): 1, (10, 11, 12, 99, 0): 4, (): 0}
    for drafts, useful in cases.items():
        assert len(Proposal.point(drafts).first(history.num_useful(drafts))) == useful, drafts
    assert TOY.prompt == TOY_PROMPT
