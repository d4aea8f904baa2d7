"""Token ids to text, one token at a time, without half characters."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Detokenizer"]


class Detokenizer:
    """Incremental UTF-8 decoding of tokens, and the map from text back to tokens.

    token_bytes: the bytes a token adds to the text, b"" for control tokens (`Tokenizer.token_bytes`).

    A character is text once its last byte has come; until then it is held back. Invalid bytes become
    U+FFFD, as many and where ``bytes.decode("utf-8", errors="replace")`` of the whole would put them: what
    the pushes and the flush return, joined, *is* that decoding. One token costs the same after 10 and
    after 100,000 others.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ends: list[int] = []  # _ends[i]: characters of text once token i was decoded
        self._length = 0
        self._last_with_bytes = 0

    @property
    def length(self) -> int:
        """Characters decoded so far."""
        return self._length

    def push(self, token: int) -> str:
        """Decode one more token; return the characters it completed, often one word, sometimes none."""
        data = self._token_bytes(token)
        if data:
            self._last_with_bytes = len(self._ends)
        # Booked before it is decoded: an interrupt in between must not leave a token without an end.
        self._ends.append(self._length)
        text = self._decoder.decode(data)
        self._length += len(text)
        self._ends[-1] = self._length
        return text

    def look_ahead(self, tokens: Iterable[int]) -> Iterator[str]:
        """What push() would return for each of `tokens` in turn; nothing changes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate(self._decoder.getstate())
        for token in tokens:
            yield decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """End of generation: a character that stayed half becomes U+FFFD. Empty when called again.

        The U+FFFD belongs to the last token that brought bytes.
        """
        text = self._decoder.decode(b"", final=True)
        if text:
            self._length += len(text)
            for i in range(self._last_with_bytes, len(self._ends)):
                self._ends[i] = self._length
        return text

    def tokens_covering(self, length: int) -> int:
        """How many tokens the shortest prefix has whose text holds the first `length` characters."""
        return 0 if length == 0 else bisect_left(self._ends, length) + 1
