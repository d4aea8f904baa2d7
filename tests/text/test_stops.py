"""Stop strings against a reference that decodes everything first, and as streams see them."""

from __future__ import annotations

import codecs
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidParams, InvariantError
from paceline.text import StopMatch, StopScanner, TextStream

# A tiny alphabet, so that stop strings really occur, with characters of one to four bytes.
ALPHABET = "abé€😀"
words = st.text(alphabet=ALPHABET, min_size=1, max_size=5)
stop_sets = st.lists(words, max_size=4).map(tuple)
TROUBLE = [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xff", b"", b"ba"]


def first_match(text: str, stops: tuple[str, ...]) -> StopMatch | None:
    """Earliest end, then earliest start, by trying all of them."""
    found = [
        StopMatch(start, start + len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return min(found, key=lambda m: (m.end, m.start), default=None)


def reference(
    pieces: list[bytes], stops: tuple[str, ...], include: bool, min_tokens: int = 0
) -> tuple[str, int, str | None]:
    """(text, tokens covering it, stop string): decode all prefixes from scratch, then look."""
    texts = [codecs.utf_8_decode(b"".join(pieces[:n]), "replace", False)[0] for n in range(len(pieces) + 1)]
    early = len(texts[min(min_tokens, len(pieces))])
    match = first_match(texts[-1][early:], stops)
    if match is None:
        return b"".join(pieces).decode("utf-8", "replace"), len(pieces), None
    text = texts[-1][: early + (match.end if include else match.start)]
    return text, min(n for n in range(min_tokens, len(texts)) if len(texts[n]) >= len(text)), match.stop


def run(
    pieces: list[bytes], stops: tuple[str, ...] = (), include: bool = False, block: int = 1, min_tokens: int = 0
) -> tuple[TextStream, list[tuple[str, int]], int]:
    """Push all pieces until stopped, releasing after every `block`; (stream, pieces released, pushed)."""
    stream = TextStream(pieces.__getitem__, stops, include, min_tokens)
    released: list[tuple[str, int]] = []
    pushed = 0
    for i in range(len(pieces)):
        pushed += 1
        stopped = stream.push(i)
        if stopped or pushed % block == 0:
            released += stream.release()
        if stopped:
            break
    stream.finish()
    return stream, released + stream.release(), pushed


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=400)
@given(st.text(alphabet=ALPHABET, max_size=24), stop_sets, st.lists(st.integers(0, 24), max_size=5))
def test_scanner_finds_the_first_match_in_any_pieces(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    match = None
    for a, b in itertools.pairwise(edges):
        match = match or scanner.feed(text[a:b])
    assert match == first_match(text, stops)


@settings(max_examples=400)
@given(st.text(alphabet=ALPHABET, max_size=16), stop_sets)
def test_held_is_the_longest_suffix_that_may_become_a_stop(text: str, stops: tuple[str, ...]) -> None:
    scanner = StopScanner(stops)
    if scanner.feed(text) is not None:
        return
    prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
    assert scanner.held == max((n for n in range(len(text) + 1) if text[len(text) - n :] in prefixes), default=0)


@settings(max_examples=500)
@given(
    st.one_of(
        st.tuples(st.text(alphabet=ALPHABET, max_size=24), st.lists(st.integers(0, 99), max_size=20)).map(
            lambda pair: split(pair[0].encode(), pair[1])
        ),
        st.lists(st.sampled_from(TROUBLE), max_size=16),
    ),
    st.lists(st.one_of(words, st.just("\ufffd"), st.just("a\ufffd")), max_size=4).map(tuple),
    st.booleans(),
    st.integers(1, 6),
    st.just(0) | st.integers(0, 18),
)
def test_stream_equals_decoding_everything_first(
    pieces: list[bytes], stops: tuple[str, ...], include: bool, block: int, min_tokens: int
) -> None:
    """Text, tokens and stop string do not depend on how many tokens a step commits.

    vllm#47616, openvinotoolkit/openvino.genai PR #1719, huggingface/transformers PR #31301; with min_tokens
    vllm#26317, vllm#32642.
    """
    stream, released, pushed = run(pieces, stops, include, block, min_tokens)
    text, num_tokens, stop = reference(pieces, stops, include, min_tokens)
    assert stop is None or pushed > min_tokens
    assert (stream.text, stream.num_tokens, stream.stop_string) == (text, num_tokens, stop)
    assert "".join(piece for piece, _ in released) == text
    indices = [i for _, i in released]
    assert indices == sorted(indices)
    assert all(i < num_tokens for i in indices)
    assert stream.num_released <= num_tokens


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(TROUBLE), max_size=8),
    st.lists(st.sampled_from(TROUBLE), max_size=8),
    stop_sets,
    st.integers(0, 10),
)
def test_looking_ahead_sees_what_pushing_would(
    before: list[bytes], ahead: list[bytes], stops: tuple[str, ...], min_tokens: int
) -> None:
    """Half characters, half stop strings and min_tokens on both sides of the look; and it changes nothing."""
    pieces = [*before, *ahead]
    stream, twin = (TextStream(pieces.__getitem__, stops, min_tokens=min_tokens) for _ in range(2))
    for i in range(len(before)):
        twin.push(i)
        if stream.push(i):
            return
    later = range(len(before), len(pieces))
    seen = stream.look_ahead(later)
    assert seen == next((n for n, token in enumerate(later, 1) if twin.push(token)), None)
    for token in later[:seen]:
        stream.push(token)
    assert (stream.text, stream.stop_string) == (twin.text, twin.stop_string)


@given(st.lists(st.sampled_from(TROUBLE), max_size=16), stop_sets, st.booleans(), st.just(0) | st.integers(0, 18))
def test_what_was_released_stays(pieces: list[bytes], stops: tuple[str, ...], include: bool, min_tokens: int) -> None:
    """At every moment: released text and tokens are a prefix of the result, and nothing more can wait."""
    text, num_tokens, _ = reference(pieces, stops, include, min_tokens)
    stream = TextStream(pieces.__getitem__, stops, include, min_tokens)
    shown, shown_tokens = "", 0
    prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
    for i in range(len(pieces)):
        stopped = stream.push(i)
        shown += "".join(piece for piece, _ in stream.release())
        assert text.startswith(shown)
        assert shown_tokens <= stream.num_released <= num_tokens
        shown_tokens = stream.num_released
        if stopped:
            assert shown == text
            return
        waiting = stream.text[len(shown) :]
        assert waiting in prefixes | {""}


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_at_every_offset_of_an_accepted_block(offset: int, include: bool) -> None:
    """vllm#47616: ids and text were cut differently when the stop string was inside a block."""
    pieces = [b"x"] * 7
    pieces[offset : offset + 2] = [b"E", b"ND"]
    stream = TextStream(pieces.__getitem__, ("END",), include)
    stops = [stream.push(i) for i in range(offset + 2)]
    assert stops == [False] * (offset + 1) + [True]
    assert stream.text == "x" * offset + ("END" if include else "")
    assert stream.num_tokens == offset + (2 if include else 0)


@pytest.mark.parametrize("begun", range(1, 5))
@pytest.mark.parametrize("block", range(1, 6))
def test_stop_string_begun_in_one_step_and_ended_inside_the_next(begun: int, block: int) -> None:
    """openvinotoolkit/openvino.genai PR #1719; huggingface/transformers PR #48981, #47912."""
    pieces = [b"a", b"a"][: block - 1] + [bytes([c]) for c in b"</end>"] + [b"b"] * block
    stream, released, pushed = run(pieces, ("</end>",), block=begun)
    expected = "a" * min(2, block - 1)
    assert stream.text == "".join(piece for piece, _ in released) == expected
    assert stream.num_tokens == len(expected)
    assert pushed == len(expected) + 6


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_before_min_tokens_does_not_count(min_tokens: int, include: bool) -> None:
    """vllm#26317, vllm#21987, vllm#32642: a stop at any offset of a block ended requests before min_tokens.

    One that begins before and ends behind does not count either.
    """
    pieces = [b"a", b"EN", b"D", b"b", b"EN", b"D", b"c", b"END"]
    stream, released, pushed = run(pieces, ("END",), include, 3, min_tokens)
    end, tokens, seen = ("a", 1, 3) if min_tokens < 2 else ("aENDb", 4, 6) if min_tokens < 5 else ("aENDbENDc", 7, 8)
    assert stream.text == "".join(text for text, _ in released) == end + ("END" if include else "")
    assert stream.num_tokens == max(min_tokens, seen if include else tokens)
    assert pushed == seen


def test_tokens_without_text_count_towards_min_tokens() -> None:
    """The kept tokens are never fewer than min_tokens, though fewer would cover the text."""
    stream, _, pushed = run([b"a", b"", b"", b".", b"b"], (".",), min_tokens=3)
    assert (stream.text, stream.num_tokens, pushed) == ("a", 3, 4)


def test_a_character_completed_behind_min_tokens_is_looked_at() -> None:
    stream, _, _ = run([b"a\xe2\x82", b"\xac"], ("\u20ac",), min_tokens=1)
    assert (stream.text, stream.stop_string) == ("a", "\u20ac")


def test_before_min_tokens_nothing_is_held_back() -> None:
    """Text that cannot be part of a stop string reaches a reader at once."""
    stream = TextStream([b"a<", b"/", b"<", b"/e>"].__getitem__, ("</e>",), min_tokens=2)
    seen = []
    for i in range(4):
        stream.push(i)
        seen.append("".join(text for text, _ in stream.release()))
    assert seen == ["a<", "/", "", ""]
    assert stream.text == "a</"


def test_text_is_cut_inside_a_token_and_that_token_counts() -> None:
    stream, released, _ = run([b"one", b" two. Three", b" four"], (". ",))
    assert stream.text == "one two"
    assert stream.num_tokens == 2
    assert released == [("one", 0), (" two", 1)]


def test_stop_at_the_very_start_leaves_no_text_and_no_tokens() -> None:
    stream, released, _ = run([b"", b"stop"], ("stop",))
    assert (stream.text, stream.num_tokens, released) == ("", 0, [])


@pytest.mark.parametrize(
    "stops, text, cut",
    [
        (("abc", "b"), "abc", "a"),  # ends earliest
        (("b", "ab"), "xab", "x"),  # together: the longest
        (("ab", "abc"), "abc", ""),  # one prefix of another
        (("aab",), "aaab", "a"),  # overlaps itself
        (("abab", "aba"), "cababa", "c"),
        (("bcd", "abcde"), "abcde", "a"),  # one inside another
    ],
)
def test_overlapping_stops(stops: tuple[str, ...], text: str, cut: str) -> None:
    for order in (stops, stops[::-1]):
        for size in (1, 2, len(text)):
            pieces = [text[i : i + size].encode() for i in range(0, len(text), size)]
            assert run(pieces, order)[0].text == cut


def test_a_stop_character_split_over_tokens_stops_with_its_last_byte() -> None:
    pieces = [b"hi \xe2", b"\x82", b"\xac", b"never"]
    stream = TextStream(pieces.__getitem__, ("€",))
    assert [stream.push(i) for i in range(3)] == [False, False, True]
    assert stream.text == "hi "
    assert stream.num_tokens == 1


def test_a_false_start_is_released_as_soon_as_it_is_known() -> None:
    pieces = [b"a", b"<", b"/", b"b", b"<", b"/e"]
    stream = TextStream(pieces.__getitem__, ("</e>",))
    seen = []
    for i in range(6):
        assert not stream.push(i)
        seen.append("".join(piece for piece, _ in stream.release()))
    assert seen == ["a", "", "", "</b", "", ""]
    stream.finish()
    assert stream.release() == [("<", 4), ("/e", 5)]
    assert stream.num_tokens == stream.num_released == 6


def test_a_character_left_half_comes_out_at_the_end_once() -> None:
    pieces = [b"a\xf0\x9f", b""]
    stream = TextStream(pieces.__getitem__, ("\ufffd",))
    stream.push(0)
    assert stream.release() == [("a", 0)]
    stream.push(1)
    stream.finish()
    stream.finish()
    assert stream.release() == [("\ufffd", 0)]
    assert (stream.text, stream.num_tokens, stream.stop_string) == ("a\ufffd", 2, None)


def test_half_a_character_behind_the_stop_is_dropped() -> None:
    stream, _, _ = run([b"a.\xe2\x82"], (".",))
    assert (stream.text, stream.num_tokens) == ("a", 1)


def test_pushing_after_the_end_is_an_error() -> None:
    stopped = TextStream([b"."].__getitem__, (".",))
    stopped.push(0)
    finished = TextStream([b"."].__getitem__)
    finished.finish()
    for stream in (stopped, finished):
        with pytest.raises(InvariantError, match="token 0 came after"):
            stream.push(0)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParams, match=r"stop = \('a', ''\)"):
        StopScanner(("a", ""))


class Counting(dict[str, int]):
    """A dict that counts how often it is asked."""

    asked = 0

    def __contains__(self, key: object) -> bool:
        Counting.asked += 1
        return super().__contains__(key)

    def get(self, *args: Any) -> Any:
        Counting.asked += 1
        return super().get(*args)


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_token_costs_the_same_however_long_the_text(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scanner = StopScanner(("aaaaab", "aaac", "\n\nUser:"))
    scanner._children = [Counting(children) for children in scanner._children]
    scanner.feed("a" * length)
    monkeypatch.setattr(Counting, "asked", 0)
    scanner.feed("a" * 100)
    assert 0 < Counting.asked <= 400


@pytest.mark.parametrize("length", [100, 10_000])
def test_releasing_looks_at_new_pieces_only(length: int) -> None:
    class Pieces(list[str]):
        read = 0

        def __getitem__(self, i: Any) -> Any:
            Pieces.read += 1
            return super().__getitem__(i)

    stream = TextStream(lambda token: b"a")
    for i in range(length):
        stream.push(i)
    stream.release()
    stream._pieces = Pieces(stream._pieces)
    stream.push(0)
    assert stream.release() == [("a", length)]
    assert Pieces.read <= 3
