"""Grammars: the legal tokens of every row, against a reference that shares no code; drafts, rollbacks, ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidParams, InvariantError, NoLegalToken, UnsupportedOption
from paceline.sampling.constrain import Grammar, GrammarCompiler

from .regexes import PIECES, REGEXES, Pair, Pieces, Reference, counted

CONTROL, OTHER, END = len(PIECES) - 3, len(PIECES) - 2, len(PIECES) - 1
STOPS = frozenset({END, OTHER})
COMPILER = GrammarCompiler(Pieces(PIECES), STOPS)


def start(regex: str, end_ids: frozenset[int] = STOPS, after: str | int | None = None) -> Grammar:
    return COMPILER.compile({"regex": regex}).start(end_ids, after)


def ids(*pieces: str | bytes) -> list[int]:
    return [PIECES.index(p.encode() if isinstance(p, str) else p) for p in pieces]


def legal(grammar: Grammar, drafts: Sequence[int] = ()) -> list[int]:
    mask = grammar.legal(drafts)
    assert mask is not None
    assert mask.dtype == np.bool_
    assert mask.shape == (len(PIECES),)
    return np.flatnonzero(mask).tolist()


# --- against the reference ---------------------------------------------------------------------------

DRAFTS = st.lists(st.integers(-1, len(PIECES) + 1), max_size=5)
END_IDS = st.sampled_from([STOPS, frozenset({END}), frozenset(), STOPS | {1}, frozenset({END, CONTROL, 7})])


def steered(data: st.DataObject, reference: Reference, tokens: list[int], size: int) -> list[int]:
    """Drafts that are mostly legal, so that walks get somewhere."""
    drafts: list[int] = []
    for _ in range(size):
        allowed = np.flatnonzero(reference.legal([*tokens, *drafts])).tolist()
        if not allowed or data.draw(st.integers(0, 9)) == 0:
            return drafts + data.draw(DRAFTS)
        drafts.append(data.draw(st.sampled_from(allowed)))
    return drafts


def check_all(grammar: Grammar, reference: Reference, tokens: list[int], drafts: list[int]) -> None:
    mask = grammar.legal(drafts)
    assert mask is not None
    assert mask.tolist() == reference.legal([*tokens, *drafts]).tolist()
    assert grammar.is_over(drafts) == reference.is_over([*tokens, *drafts])
    assert grammar.num_legal(drafts) == reference.num_legal(tokens, drafts)


@settings(max_examples=250, deadline=None)
@given(st.data(), REGEXES, END_IDS)
def test_every_answer_is_the_references(data: st.DataObject, pair: Pair, end_ids: frozenset[int]) -> None:
    """Random regular expressions, walks with drafts there and back in any order, commits of drafts or of others.

    vllm#27969, #9423: a draft that breaks the grammar; openvino.genai#4081, sglang#15050: states behind the end asked.
    """
    regex, language = pair
    if not Reference(language, PIECES, STOPS, frozenset()).legal([]).any():
        with pytest.raises(InvalidParams, match="nothing can follow it"):
            start(regex, end_ids)
        return
    grammar = start(regex, end_ids)
    reference = Reference(language, PIECES, STOPS, end_ids)
    tokens: list[int] = []
    for _ in range(4):
        drafts = steered(data, reference, tokens, data.draw(st.integers(0, 5)))
        for cut in data.draw(st.permutations(range(len(drafts) + 1))):
            check_all(grammar, reference, tokens, drafts[:cut])
        forced = grammar.forced(6)
        assert list(forced) == reference.forced(tokens)[:6]
        assert grammar.num_legal(forced) == len(forced)
        for token in drafts[: grammar.num_legal(drafts)][: data.draw(st.integers(0, 3))] or drafts[:1]:
            if reference.num_legal(tokens, [token]) == 0:
                with pytest.raises(InvariantError, match=f"token {token}"):
                    grammar.commit(token)
                break
            grammar.commit(token)
            tokens.append(token)
            if token in end_ids:
                assert grammar.num_legal([0]) == 0
                assert grammar.forced(5) == ()
                assert legal(grammar) == []
                return


@pytest.mark.parametrize("regex", ["(?:ab|aac)*é中?", "[abc]{3}\n*", "a(?:bc){0,3}中é+"])
def test_a_walk_leaves_nothing_behind(regex: str) -> None:
    """sglang#31711: after any walk a grammar answers like a fresh one at the same place, for good."""
    rng = np.random.default_rng(5)
    grammar, tokens = start(regex), list[int]()
    for _ in range(60):
        drafts = rng.integers(0, len(PIECES), 4).tolist()
        options = legal(grammar)
        if rng.random() < 0.7 and options:
            drafts[0] = int(rng.choice(options))
            options = legal(grammar, drafts[:1])
            drafts[1] = int(rng.choice(options)) if options else drafts[1]
        fresh = start(regex)
        for token in tokens:
            fresh.commit(token)
        for cut in rng.permutation(5):
            asked = drafts[:cut]
            assert legal(grammar, asked) == legal(fresh, asked)
            assert grammar.is_over(asked) == fresh.is_over(asked)
        assert grammar.forced(4) == fresh.forced(4)
        if grammar.num_legal(drafts) and drafts[0] not in STOPS and rng.random() < 0.4:
            grammar.commit(drafts[0])
            tokens.append(drafts[0])


# --- bytes -------------------------------------------------------------------------------------------


def test_legal_is_whatever_can_be_written() -> None:
    """Where texts differ each way of cutting them is legal, and each of a token's doubles."""
    grammar = start("ab[bc]|a中")
    doubles = [i for i, piece in enumerate(PIECES) if piece == b"ab"]
    assert len(doubles) == 2
    assert legal(grammar) == sorted([*ids("a"), *doubles, *ids("abc", b"a\xe4\xb8")])
    assert legal(grammar, ids(b"a\xe4\xb8")) == ids(b"\xad")
    assert legal(grammar, ids("a")) == sorted(ids("b", "bc", "中"))


def test_a_certain_text_is_written_as_the_tokenizer_writes_it() -> None:
    """But where its last token could be part of a longer one, that one is legal too; pieces of it are not."""
    abc, ab, c = ids("abc", "ab", "c")
    assert legal(start("abcabc[ab]")) == [abc]
    assert start("abcabc[ab]").forced(9) == (abc, abc)
    doubles = [i for i, piece in enumerate(PIECES) if piece == b"ab"]
    grammar = start("ab(?:c|b)")
    assert legal(grammar) == sorted([*doubles, abc])
    assert grammar.forced(3) == ()
    assert grammar.num_legal(ids("a", "b")) == 0
    assert legal(grammar, [ab]) == ids("b", "c")
    assert c not in legal(grammar)


@pytest.mark.parametrize("piece", [b"\xff", b"\xffab", b"\xfe", b"a\xff", b"\xa9\xa9"])
def test_tokens_that_are_no_text_are_never_legal(piece: bytes) -> None:
    """0xff marks special tokens in llguidance: a token that begins with it is no name of one."""
    (token,) = ids(piece)
    for spec in ({"regex": r"(?s:.)*"}, {"lark": r'start: /(?s:.)*/ | "ab"'}):
        grammar = COMPILER.compile(spec).start(STOPS)
        assert token not in legal(grammar)
        assert grammar.num_legal([token]) == 0
        assert len(legal(grammar)) > 5


def test_control_tokens_are_legal_where_a_grammar_names_them() -> None:
    grammar = COMPILER.compile({"lark": f'start: "a" <|{CONTROL}|> "b" | "c"'}).start(STOPS)
    a, b, c = ids("a", "b", "c")
    assert legal(grammar) == [a, c]
    assert legal(grammar, [a]) == [CONTROL]
    assert grammar.num_legal([a, CONTROL, b]) == 3
    assert grammar.forced(5) == ()
    grammar.commit(a)
    assert grammar.forced(5) == ()
    assert legal(grammar) == [CONTROL], "asking what is forced moved the matcher"
    assert start("[^b]*").num_legal([CONTROL]) == 0
    with pytest.raises(InvalidParams, match="ends the text; leave it out"):
        COMPILER.compile({"lark": f'start: "a" <|{END}|> "b"'})


def test_a_control_token_that_ends_the_request_ends_only_a_whole_text() -> None:
    """Even where a Lark grammar names it in the middle."""
    grammar = COMPILER.compile({"lark": f'start: "a" (<|{CONTROL}|> | "b") "c"?'}).start(frozenset({CONTROL}))
    a, b = ids("a", "b")
    assert CONTROL not in legal(grammar, [a])
    assert grammar.num_legal([a, CONTROL]) == 1
    assert CONTROL in legal(grammar, [a, b])


# --- drafts, ends, starts ----------------------------------------------------------------------------


def test_work_does_not_grow_with_length() -> None:
    """sglang#31711: rollback copied the whole history; sglang#29110: a token was accepted twice by the matcher.

    Steps of four drafts, two of them kept: what the matcher is asked to do is the same in step 3 and in step 400.
    """
    grammar = start("[abc]*")
    spy = counted(grammar)
    a, b = ids("a", "b")
    work: list[tuple[int, int]] = []
    for step in range(400):
        before = spy.calls, spy.rolled_back
        for cut in range(5):
            grammar.legal([a, b, b, a][:cut])
        grammar.num_legal([a, b, b, a])
        for token in (a, b, a):  # two accepted, one recovered
            grammar.commit(token)
        work.append((spy.calls - before[0], spy.rolled_back - before[1]))
        assert spy.consumed - spy.rolled_back == 3 * (step + 1), "the matcher holds what was committed, once"
    assert len(set(work[2:])) == 1
    assert work[3][0] <= 8


def test_a_state_is_looked_at_once() -> None:
    """Drafter, scheduler and target ask for the same rows, the rule from the last one to the first."""
    grammar = start("[abc]*")
    masks = [grammar.legal(ids("a", "b", "c")[:i]) for i in range(4)]
    spy = counted(grammar)
    for i in reversed(range(4)):
        assert grammar.legal(ids("a", "b", "c")[:i]) is masks[i]
        assert not grammar.is_over(ids("a", "b", "c")[:i])
    grammar.commit(ids("a")[0])
    assert grammar.legal(ids("b", "c")) is masks[3]
    assert spy.calls == spy.rolled_back == 0


def test_masks_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        start("a+").legal()[0] = True  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        start("a").legal([5, 5])[0] = True  # type: ignore[index]


@pytest.mark.parametrize("drafts", [[1, 1, 1], [0, 99], [-1], [len(PIECES)], [0, END, 0], [OTHER], [CONTROL, 0], [14]])
def test_illegal_drafts_harm_nobody(drafts: list[int]) -> None:
    """vllm#27969, #9423, #11484: the matcher was stepped with an invalid token, and the engine died or went astray."""
    grammar, calm = start("a(?:a|中)c+"), start("a(?:a|中)c+")
    for token in ids("a", "中", "c", "c"):
        for i in range(len(drafts) + 1):
            grammar.legal(drafts[:i])
            grammar.is_over(drafts[:i])
        assert grammar.num_legal(drafts) == next(
            (i for i, t in enumerate(drafts) if t not in legal(calm, drafts[:i])), len(drafts)
        )
        assert legal(grammar) == legal(calm)
        assert grammar.forced(3) == calm.forced(3)
        grammar.commit(token)
        calm.commit(token)


@pytest.mark.parametrize("at", range(5))
def test_an_end_id_at_every_draft(at: int) -> None:
    """openvino.genai#4081, sglang#15050, PR#15373: a mask was asked behind an end id accepted in the window."""
    grammar = start("[abc]{2,}")
    drafts = ids("a", "b", "c", "a", "b")
    drafts[at] = END
    for i in range(len(drafts) + 1):
        mask = legal(grammar, drafts[:i])
        if i > at:
            assert mask == [], "nothing follows an end"
        else:
            assert (END in mask, OTHER in mask) == (i >= 2, i >= 2)
    assert grammar.num_legal(drafts) == (at + 1 if at >= 2 else at)
    assert not grammar.is_over(drafts)
    assert legal(grammar, ids("a"))[:3] == ids("a", "b", "c")


def test_several_end_ids_and_those_that_do_not_end() -> None:
    """ignore_eos: the model's end ids end nothing, so they are not legal; stop_token_ids may be ordinary tokens."""
    a, b = ids("a", "b")
    assert {END, OTHER} <= set(legal(start("[ab]+"), [a]))
    assert {END, OTHER}.isdisjoint(legal(start("[ab]+", frozenset()), [a]))
    assert CONTROL in legal(start("[ab]+", frozenset({CONTROL})), [a])
    stopping = start("ab?", frozenset({b}))
    assert b not in legal(stopping)
    assert legal(stopping, [a]) == [b]
    assert stopping.num_legal([a, b, a]) == 2
    assert legal(stopping, [a, b]) == []


def test_complete_means_that_nothing_can_follow() -> None:
    grammar = start("[ab]b{1,2}")
    a, b = ids("a", "b")
    assert [grammar.is_over([a, b, b][:i]) for i in range(4)] == [False, False, False, True]
    assert legal(grammar, [a, b, b]) == []
    assert grammar.num_legal([a, b, b, END]) == 3
    for token in (a, b, b):
        grammar.commit(token)
    assert grammar.is_over()
    assert legal(grammar) == []
    assert grammar.forced(4) == ()
    with pytest.raises(InvariantError, match=f"token {a}"):
        grammar.commit(a)


def test_siblings_have_states_of_their_own() -> None:
    """TensorRT-LLM#18892: a linear mask was used for the rows of a tree."""
    grammar = start("a(?:bc|中é)")
    a, b, x = ids("a", "b", "中")
    for _ in range(2):
        assert legal(grammar, [a, b]) == ids("c")
        assert legal(grammar, [a, x]) == ids("é")
        assert legal(grammar, [b]) == []


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("kept", range(5))
def test_a_grammar_starts_inside_the_drafts(at: int, kept: int) -> None:
    """vllm#44006, #44297, #36138: off for the rows behind the end of reasoning in one window; sglang#9187: a row
    without constraint yet was all zeros. The trigger is draft `at`; `kept` drafts are accepted, so it may be rejected.
    """
    a, b, c = ids("中", "b", "c")
    for after, trigger in ((CONTROL, CONTROL), ("\n\n", ids("\n\n")[0])):
        grammar = start("中[bc]", after=after)
        drafts = [c, c, c, c]
        drafts[at] = trigger
        for i in range(5):
            if i <= at:
                assert grammar.legal(drafts[:i]) is None
                assert not grammar.is_over(drafts[:i])
            else:
                assert legal(grammar, drafts[:i]) == (legal(start("中[bc]")) if i == at + 1 else [])
        assert grammar.num_legal(drafts) == at + 1
        assert grammar.num_legal([*drafts[: at + 1], a, b, b]) == at + 3
        assert grammar.is_over([*drafts[: at + 1], a, b])
        assert grammar.forced(4) == ()
        for token in drafts[: min(kept, at + 1)]:
            grammar.commit(token)
        if kept <= at:
            assert grammar.legal() is None
            grammar.commit(trigger)
        assert legal(grammar) == legal(start("中[bc]"))
        assert grammar.forced(4) == start("中[bc]").forced(4) != ()


def test_a_trigger_is_found_across_tokens_and_inside_them() -> None:
    """The grammar starts with the next token, whatever the completing token has behind the trigger."""
    a, b, c = ids("a", "b", "c")
    grammar = start("b", after="a中b")
    ab, half, rest, bc = (PIECES.index(p) for p in (b"ab", b"a\xe4\xb8", b"\xad", b"bc"))
    assert grammar.legal([half, rest]) is None
    assert legal(grammar, [half, rest, bc]) == [b], "the c behind the trigger is not the grammar's"
    for token in (c, ab, half, rest):
        grammar.commit(token)
        assert grammar.legal() is None
    assert grammar.num_legal([c, c, END, c]) == 3, "before it starts only an end id ends"
    grammar.commit(b)
    assert legal(grammar) == [b]
    single = start("b", after="中")
    assert single.legal([a, c, a]) is None
    assert legal(single, [a, *ids("中")]) == [b]


def test_an_end_before_the_start() -> None:
    grammar = start("b", after=CONTROL)
    assert grammar.num_legal([0, END, CONTROL, 1]) == 2
    assert not grammar.is_over([END])


# --- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"step_max_items": 50}, {"max_items_in_row": 30}])
def test_a_parser_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]) -> None:
    """Never "anything goes" or "nothing is legal" without a word; and drafts that were never kept harm nobody.

    One limit is met when a mask is asked for, the other when a token is taken.
    """
    import llguidance

    real = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **o: real(**limit, **o))
    ambiguous = {"lark": 'start: s\ns: s s | "a" | "b" s | s "c"'}
    grammar = GrammarCompiler(Pieces(PIECES), STOPS).compile(ambiguous).start(STOPS)
    (a,) = ids("a")
    depth = next(i for i in range(40) if raises_no_legal_token(grammar, [a] * i))
    assert depth > 1
    for _ in range(2):
        assert a in legal(grammar, [a] * (depth - 1))
        with pytest.raises(NoLegalToken, match=r"gave up.*([Tt]oo many|\d+) items"):
            grammar.legal([a] * depth)
        assert grammar.num_legal([a] * (depth + 2)) in (depth, depth + 1, depth + 2)
        assert not grammar.is_over([a] * depth)
        assert grammar.num_legal(ids("b", "a")) == 2
    for _ in range(depth):
        grammar.commit(a)
    with pytest.raises(NoLegalToken, match="gave up"):
        grammar.legal()
    assert grammar.forced(3) == ()


def raises_no_legal_token(grammar: Grammar, drafts: list[int]) -> bool:
    try:
        grammar.legal(drafts)
    except NoLegalToken:
        return True
    return False


@pytest.mark.parametrize(("regex", "allowed"), [("a{0}", "only the empty text"), ("(?:ab){0}", "only the empty text")])
def test_a_grammar_that_lets_nothing_come_is_refused(regex: str, allowed: str) -> None:
    with pytest.raises(InvalidParams, match=allowed):
        COMPILER.compile({"regex": regex})


@pytest.mark.parametrize("option", ["max_tokens=3", "stop=/[bcd]/", 'stop=""'])
def test_a_grammar_that_cannot_go_back_is_refused(option: str) -> None:
    """vllm#27969: not on the first draft that must be taken back, but when it is asked for."""
    with pytest.raises(UnsupportedOption, match="rollback not supported"):
        COMPILER.compile({"lark": f'start: (x " ")+\nx[{option}]: /[a-z]+/'})


def test_long_forced_text_may_start_inside_a_character() -> None:
    """Beyond MAX_WRITTEN bytes only the beginning is looked at, and it may begin with half a character."""
    pieces = [*PIECES, *(bytes([b]) for b in "\U0001f984".encode())]
    vocabulary = Pieces(pieces)
    text = "\U0001f984" * 40
    grammar = GrammarCompiler(vocabulary, STOPS).compile({"regex": text}).start(STOPS)
    written = b""
    while not grammar.is_over():
        (token,) = grammar.forced(1)
        written += pieces[token]
        grammar.commit(token)
    assert written.decode() == text
