"""A reference for grammars: regular expressions as derivatives of byte languages, and vocabularies to write them with.

A language is a tuple, as in Brzozowski's "Derivatives of regular expressions" (1964): ("byte", b), ("seq", x, y),
("or", {...}), ("star", x), EMPTY (the empty text) or NEVER (no text). No llguidance anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from paceline.errors import InvalidPrompt
from paceline.sampling.constrain import Grammar

Language = tuple[Any, ...]
EMPTY: Language = ("empty",)
NEVER: Language = ("never",)
CHARACTERS = ("a", "b", "c", "é", "中", "\n")


def seq(x: Language, y: Language) -> Language:
    if NEVER in (x, y):
        return NEVER
    if x == EMPTY or y == EMPTY:
        return y if x == EMPTY else x
    return seq(x[1], seq(x[2], y)) if x[0] == "seq" else ("seq", x, y)


def either(*parts: Language) -> Language:
    flat: set[Language] = set()
    for part in parts:
        flat |= part[1] if part[0] == "or" else {part}
    flat.discard(NEVER)
    if not flat:
        return NEVER
    return flat.pop() if len(flat) == 1 else ("or", frozenset(flat))


def text(characters: str) -> Language:
    language = EMPTY
    for byte in reversed(characters.encode()):
        language = seq(("byte", byte), language)
    return language


@cache
def nullable(x: Language) -> bool:
    """Whether the empty text is in it."""
    if x[0] == "seq":
        return nullable(x[1]) and nullable(x[2])
    if x[0] == "or":
        return any(map(nullable, x[1]))
    return x[0] in ("empty", "star")


@cache
def after_byte(x: Language, byte: int) -> Language:
    """The rests of its texts that begin with `byte`."""
    if x[0] == "byte":
        return EMPTY if x[1] == byte else NEVER
    if x[0] == "or":
        return either(*(after_byte(part, byte) for part in x[1]))
    if x[0] == "star":
        return seq(after_byte(x[1], byte), x)
    if x[0] == "seq":
        first = seq(after_byte(x[1], byte), x[2])
        return either(first, after_byte(x[2], byte)) if nullable(x[1]) else first
    return NEVER


def after(x: Language, data: bytes) -> Language:
    """The rests of its texts that begin with `data`; NEVER if there are none."""
    for byte in data:
        x = after_byte(x, byte)
    return x


def only(x: Language) -> bytes:
    """What all its texts begin with: the text that is forced."""
    data = b""
    while x != NEVER and not nullable(x):
        nexts = [b for b in range(256) if after_byte(x, b) != NEVER]
        if len(nexts) != 1:
            break
        data += bytes(nexts)
        x = after_byte(x, nexts[0])
    return data


# Two and three characters, halves of characters, a token twice, nonsense, control tokens; the last is the model's end.
ODD = (
    *("ab", "bc", "aa", "abc", "éa", "b中", "\n\n", "ab"),
    *(b"\xc3", b"\xa9b", b"a\xe4\xb8", b"\xad", b"\xff", b"\xffab", b"\xfe", b"a\xff", b"\xa9\xa9", b"", b"", b""),
)
PIECES = [*(c.encode() for c in CHARACTERS), *(p.encode() if isinstance(p, str) else p for p in ODD)]

Pair = tuple[str, Language]  # a regular expression as it is written, and what it means


def _leaf() -> st.SearchStrategy[Pair]:
    one = st.sampled_from(CHARACTERS).map(lambda c: (c.replace("\n", r"\n"), text(c)))
    some = st.sets(st.sampled_from(CHARACTERS), min_size=2, max_size=4).map(
        lambda cs: ("[" + "".join(sorted(cs)).replace("\n", r"\n") + "]", either(*map(text, cs)))
    )
    word = st.text("abc中", min_size=2, max_size=5).map(lambda w: (w, text(w)))
    return one | some | word


def _repeated(pair: Pair, low: int, high: int | None) -> Pair:
    written, language = pair
    once = f"(?:{written})"
    if high is None:
        return f"{once}{{{low},}}", _times(language, low, ("star", language))
    rest = EMPTY
    for _ in range(high - low):
        rest = either(EMPTY, seq(language, rest))
    return f"{once}{{{low},{high}}}", _times(language, low, rest)


def _times(language: Language, count: int, rest: Language) -> Language:
    for _ in range(count):
        rest = seq(language, rest)
    return rest


def _bigger(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    several = st.lists(inner, min_size=2, max_size=3)
    return (
        several.map(lambda ps: ("".join(f"(?:{w})" for w, _ in ps), _joined([x for _, x in ps])))
        | several.map(lambda ps: ("|".join(f"(?:{w})" for w, _ in ps), either(*(x for _, x in ps))))
        | inner.map(lambda p: (f"(?:{p[0]})?", either(EMPTY, p[1])))
        | st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(lambda t: _repeated(t[0], t[1], t[1] + t[2]))
        | st.tuples(inner.filter(lambda p: not nullable(p[1])), st.integers(0, 1)).map(
            lambda t: _repeated(t[0], t[1], None)
        )
    )


def _joined(parts: Sequence[Language]) -> Language:
    language = EMPTY
    for part in reversed(parts):
        language = seq(part, language)
    return language


REGEXES = st.recursive(_leaf(), _bigger, max_leaves=6)


def longest(pieces: Sequence[bytes], data: bytes) -> int:
    """The first of the longest pieces that `data` begins with, -1 if there is none."""
    fitting = [i for i, piece in enumerate(pieces) if piece and data.startswith(piece)]
    return max(fitting, key=lambda i: len(pieces[i])) if fitting else -1


class Pieces:
    """A tokenizer of given pieces, which always takes the longest; b"" is a control token named <|ID|>.

    space: it puts one in front of every text, as SentencePiece does.
    """

    def __init__(self, pieces: Sequence[bytes], *, space: bool = False) -> None:
        self.pieces, self.space = list(pieces), space
        self.vocab_size = len(self.pieces)
        self.asked: list[str] = []

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        self.asked.append(text)
        data = (b" " if self.space else b"") + text.encode()
        ids: list[int] = []
        while data:
            if longest(self.pieces, data) < 0:
                raise InvalidPrompt(f"no piece for {data!r}")
            ids.append(longest(self.pieces, data))
            data = data[len(self.pieces[ids[-1]]) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def token_text(self, token: int) -> bytes:
        return self.pieces[token] or b"<|%d|>" % token

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        raise NotImplementedError


class Reference:
    """What a Grammar of a regular expression answers, from the whole history anew each time.

    Where one text alone can follow, it is written as Pieces would: always the longest that fits.
    """

    def __init__(
        self, language: Language, pieces: Sequence[bytes], stop_ids: frozenset[int], end_ids: frozenset[int]
    ) -> None:
        self.language, self.pieces = language, pieces
        self.stop_ids, self.end_ids = stop_ids, end_ids
        self.bare_ends = frozenset(t for t in end_ids if t in stop_ids or not pieces[t])

    def _rest(self, tokens: Sequence[int]) -> Language:
        """What may follow; NEVER behind an illegal token or an end id."""
        x = self.language
        for i, token in enumerate(tokens):
            if not self._may(x, token) or (token in self.end_ids and i < len(tokens)):
                return NEVER
            x = after(x, self.pieces[token])
        return x

    def _may(self, x: Language, token: int) -> bool:
        if x == NEVER or not 0 <= token < len(self.pieces) or token in self.stop_ids | self.bare_ends:
            return False
        piece, certain = self.pieces[token], only(x)
        if not piece or after(x, piece) == NEVER:
            return False
        if not certain or not self._can_write(certain):
            return True
        first = longest(self.pieces, certain)
        return piece.startswith(certain) if self.pieces[first] == certain else token == first

    def _can_write(self, data: bytes) -> bool:
        while data:
            first = longest(self.pieces, data)
            if first < 0:
                return False
            data = data[len(self.pieces[first]) :]
        return True

    def _over(self, x: Language) -> bool:
        return nullable(x) and not any(self._may(x, t) for t in range(len(self.pieces)))

    def is_over(self, tokens: Sequence[int]) -> bool:
        return self._over(self._rest(tokens))

    def legal(self, tokens: Sequence[int]) -> np.ndarray:
        x = self._rest(tokens)
        ends = nullable(x) and not self._over(x)
        return np.array([self._may(x, t) or (ends and t in self.bare_ends) for t in range(len(self.pieces))])

    def num_legal(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        for i, token in enumerate(drafts):
            if not 0 <= token < len(self.pieces) or not self.legal([*tokens, *drafts[:i]])[token]:
                return i
        return len(drafts)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """As long as there is one legal token, and text is what makes it so."""
        forced: list[int] = []
        while only(self._rest([*tokens, *forced])):
            options = np.flatnonzero(self.legal([*tokens, *forced])).tolist()
            if len(options) != 1 or options[0] in self.end_ids:
                break
            forced += options
        return forced


class CountingMatcher:
    """Counts what a real matcher is asked to do."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.consumed = self.rolled_back = self.calls = self.copies = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        taken: int = self.matcher.try_consume_tokens(tokens)
        self.consumed += taken
        self.calls += len(tokens)
        return taken

    def deep_copy(self) -> Any:
        self.copies += 1
        return self.matcher.deep_copy()

    def rollback(self, count: int) -> bool:
        self.rolled_back += count
        return bool(self.matcher.rollback(count))


def counted(grammar: Grammar) -> CountingMatcher:
    spy = CountingMatcher(grammar._matcher)
    grammar._matcher = spy  # type: ignore[assignment]
    return spy
