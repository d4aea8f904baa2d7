"""Incremental decoding equals decoding the whole, and text maps back to tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import Detokenizer

# Bytes that make every kind of trouble: ASCII, lead bytes of 2, 3 and 4, continuations, surrogate and
# over-long forms, and bytes that never occur in UTF-8.
TROUBLE = [0x41, 0xC2, 0xC3, 0xA9, 0xE0, 0x80, 0xED, 0xA0, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xBF, 0xF4, 0xFF]
tokens_of_bytes = st.lists(st.lists(st.sampled_from(TROUBLE), max_size=4).map(bytes), max_size=12)


def over(pieces: list[bytes]) -> Detokenizer:
    """A detokenizer in whose vocabulary token i is pieces[i]."""
    return Detokenizer(pieces.__getitem__)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=300)
@given(tokens_of_bytes)
def test_pushes_and_flush_join_to_the_decoding_of_the_whole(pieces: list[bytes]) -> None:
    detokenizer = over(pieces)
    parts = [detokenizer.push(i) for i in range(len(pieces))]
    text = "".join(parts) + detokenizer.flush()
    assert text == b"".join(pieces).decode("utf-8", errors="replace")
    assert detokenizer.length == len(text)
    assert detokenizer.flush() == ""


@settings(max_examples=200)
@given(st.text(max_size=12), st.lists(st.integers(0, 60), max_size=12))
def test_a_character_appears_with_its_last_byte_and_not_before(text: str, cuts: list[int]) -> None:
    """mlx-lm style streaming: no half characters, whatever bytes the tokens cut."""
    text = text.encode("utf-8", "replace").decode()
    pieces = split(text.encode(), cuts)
    detokenizer = over(pieces)
    seen, num_bytes = "", 0
    for i, piece in enumerate(pieces):
        seen += detokenizer.push(i)
        num_bytes += len(piece)
        complete = [k for k in range(len(text) + 1) if len(text[:k].encode()) <= num_bytes]
        assert seen == text[: max(complete)]
    assert detokenizer.flush() == ""


@settings(max_examples=200)
@given(tokens_of_bytes, st.booleans())
def test_tokens_covering_is_the_shortest_prefix(pieces: list[bytes], flush: bool) -> None:
    detokenizer = over(pieces)
    parts = [detokenizer.push(i) for i in range(len(pieces))]
    if flush:
        with_bytes = [i for i, piece in enumerate(pieces) if piece]
        tail = detokenizer.flush()
        if tail:
            parts[with_bytes[-1]] += tail
    for length in range(detokenizer.length + 1):
        prefixes = [n for n in range(len(parts) + 1) if len("".join(parts[:n])) >= length]
        assert detokenizer.tokens_covering(length) == min(prefixes)


@pytest.mark.parametrize("text", ["naïve", "漢字仮名", "😀👍🏽", "e\u0301", "\ufeffmark", "\ufffd", "a\x00b"])
def test_one_byte_per_token(text: str) -> None:
    pieces = [bytes([b]) for b in text.encode()]
    detokenizer = over(pieces)
    assert "".join(detokenizer.push(i) for i in range(len(pieces))) == text


def test_control_tokens_neither_complete_nor_break_a_character() -> None:
    pieces = [b"\xf0\x9f", b"", b"\x98\x80", b""]
    detokenizer = over(pieces)
    assert [detokenizer.push(i) for i in range(4)] == ["", "", "\U0001f600", ""]
    assert detokenizer.tokens_covering(1) == 3


def test_a_half_character_at_the_end_belongs_to_the_token_that_began_it() -> None:
    detokenizer = over([b"a", b"\xe2\x82", b""])
    assert [detokenizer.push(i) for i in range(3)] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.tokens_covering(1) == 1
    assert detokenizer.tokens_covering(2) == 2
