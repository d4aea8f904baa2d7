"""Stop strings, found exactly where a decoder that emits one character at a time would find them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvalidParams, InvariantError
from .detokenize import Detokenizer

__all__ = ["StopMatch", "StopScanner", "TextStream"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in a text: text[start:end] == stop, in characters from the start of the text."""

    start: int
    end: int
    stop: str


class StopScanner:
    """Finds the first stop string in a text that grows in pieces.

    "First" is the stop that ends earliest; of those that end together, the one that starts earliest, which
    is the longest. This is what somebody sees who looks after every character, so neither the pieces nor
    the tokens behind them matter. Matching is an Aho-Corasick automaton (Aho and Corasick 1975, "Efficient
    string matching"): a character costs O(1) amortised, whatever the length of the text and the number of
    stop strings, and the depth of the state is at the same time how much of the text must be held back.

    stops: non-empty strings, in any order, duplicates allowed; none at all never matches.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise InvalidParams(f"stop = {tuple(stops)!r}; allowed: non-empty strings")
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._children)
        self._link()
        self._state = 0
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may become part of a stop string: the longest suffix
        of the text that is a proper prefix of one. All before them can be shown to a reader for good."""
        return self._depth[self._state]

    def feed(self, text: str) -> StopMatch | None:
        """Append `text`; the first match, or None. Feed nothing after a match."""
        for character in text:
            self._length += 1
            self._state = self._next(self._state, character)
            stop = self._stop[self._state]
            if stop is not None:
                return StopMatch(self._length - len(stop), self._length, stop)
        return None

    def look_ahead(self, pieces: Iterable[str]) -> int | None:
        """How many of `pieces`, were they fed in turn, a match would take; None where there is none."""
        state = self._state
        for i, piece in enumerate(pieces):
            for character in piece:
                state = self._next(state, character)
                if self._stop[state] is not None:
                    return i + 1
        return None

    def skip(self, text: str) -> None:
        """Append `text` without looking for a stop string in it; only before anything is fed."""
        self._length += len(text)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._children[state]:
                self._children[state][character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = self._children[state][character]
        self._stop[state] = stop

    def _link(self) -> None:
        """fail[s] = the state of the longest proper suffix of s's string that is in the trie."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self._stop[state] is None:
                # A shorter stop string may end here too; the longest wins, so only where s has none.
                self._stop[state] = self._stop[self._fail[state]]
            for character, child in self._children[state].items():
                self._fail[child] = self._next(self._fail[state], character)
                queue.append(child)

    def _next(self, state: int, character: str) -> int:
        while state and character not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(character, 0)


class TextStream:
    """One request's output as text: decoded, cut at the first stop string, released piece by piece.

    token_bytes: the bytes a token adds, b"" for control tokens. stop_strings: `SamplingParams.stop`.
    include_stop: keep the stop string at the end of the text instead of cutting before it. min_tokens: characters that
    the first so many tokens complete are no part of a stop string, and num_tokens never falls below.

    Push every output token once, one by one, whatever the size of the step that decided them: a block of
    five tokens is then no different from five steps. The text ends inside a token if that is where the
    stop string begins. Only whole characters are text, so bytes of a half character neither match nor
    break a stop string; the U+FFFD that invalid bytes become once the next byte shows them invalid is a
    character like any other, but the one that `finish` makes of a character left half comes after the
    generation has ended, and stops nothing.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._scanner = StopScanner(stop_strings)
        self._has_stops = bool(stop_strings)
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._pieces: list[str] = []  # _pieces[i]: the characters token i completed
        self._match: StopMatch | None = None
        self._finished = False
        self._is_closed = False  # by an end id, whose text was the last
        self._num_released = 0  # characters
        self._piece = 0  # the piece released last, and where in the text it starts
        self._piece_start = 0

    def push(self, token: int, *, search: bool = True) -> bool:
        """Append one output token; True when a stop string has now ended the text. Push nothing after.

        search: False for an end id, whose text is kept as it is. Push nothing after that either.
        """
        if self._match is not None or self._finished or self._is_closed:
            raise InvariantError(f"token {token} came after the text had ended")
        self._pieces.append("")  # booked first: an interrupt must not leave a token without its piece
        self._pieces[-1] = piece = self._detokenizer.push(token)
        if not search:
            self._is_closed = True
        elif len(self._pieces) > self._min_tokens:
            self._match = self._scanner.feed(piece)
        else:
            self._scanner.skip(piece)
        return self._match is not None

    def look_ahead(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens`, were they pushed in turn, it takes to end the text by a stop string; else None."""
        if not self._has_stops:
            return None
        unsearched = max(0, self._min_tokens - len(self._pieces))
        pieces = self._detokenizer.look_ahead(tokens)
        return self._scanner.look_ahead("" if i < unsearched else piece for i, piece in enumerate(pieces))

    def finish(self) -> None:
        """The generation is over, for whatever reason: nothing is held back any longer. Idempotent.

        A character left half becomes U+FFFD, unless a stop string had ended the text before it.
        """
        if self._match is None and not self._finished:
            tail = self._detokenizer.flush()
            if tail:
                self._pieces[self._detokenizer.tokens_covering(self._detokenizer.length) - 1] += tail
        self._finished = True

    @property
    def text(self) -> str:
        """The text so far, cut at the stop string. It holds what is still held back from a reader."""
        return "".join(self._pieces)[: self._end]

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._match.stop if self._match else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the shortest prefix that covers `text`, at least min_tokens; all where no stop string ended it."""
        if self._match is None:
            return len(self._pieces)
        return max(self._min_tokens, self._detokenizer.tokens_covering(self._end))

    @property
    def num_released(self) -> int:
        """Tokens of the shortest prefix that covers the released text; whatever comes, they are final."""
        return self._detokenizer.tokens_covering(self._num_released)

    def release(self) -> list[tuple[str, int]]:
        """What a reader may see since the last call, as (text, index of the token it came from).

        All pieces ever released, joined, are a prefix of the final `text`, and all of it after the end.
        Text that may yet turn out to begin a stop string waits.
        """
        over = self._match is not None or self._finished
        end = self._end if over else self._end - self._scanner.held
        released = []
        while self._num_released < end:
            piece, start = self._pieces[self._piece], self._piece_start
            text = piece[self._num_released - start : end - start]
            if text:
                released.append((text, self._piece))
                self._num_released += len(text)
            else:  # not before it must: finish() may still lengthen the last piece
                self._piece, self._piece_start = self._piece + 1, start + len(piece)
        return released

    @property
    def _end(self) -> int:
        """Characters of `text`."""
        if self._match is None:
            return self._detokenizer.length
        return self._match.end if self._include_stop else self._match.start
