"""The history that penalties look at."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import InvalidInput, InvariantError
from ..types import IntArray

__all__ = ["TokenCounts"]


class TokenCounts:
    """Which tokens the prompt holds, and how often each token is in the output.

    `add` follows the commits of a request. `with_drafts` gives the counts of a row that stands after some
    drafts of a step; it costs the number of drafts, not the length of the history. It reads through to the
    counts it came from and is good for that step only: used after they have moved on, it raises
    InvariantError.
    """

    __slots__ = ("_base", "_counts", "_extra", "_ids", "_place", "_size", "_version")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._base: TokenCounts | None = None
        self._version = 0
        self._extra: dict[int, int] = {}  # drafts on top of _base; unused where _base is None
        self._place: dict[int, int] = {}  # token -> its place in _ids and _counts
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)
        self._size = 0
        for token in prompt_ids:
            self._place_of(_checked(token))

    def add(self, tokens: Iterable[int]) -> None:
        """Count output tokens, one by one. Raises InvalidInput for a negative token id."""
        if self._base is not None:
            for token in map(_checked, tokens):
                self._extra[token] = self._extra.get(token, 0) + 1
            return
        for token in map(_checked, tokens):
            place = self._place_of(token)  # may replace the arrays
            self._counts[place] += 1
            self._version += 1

    def with_drafts(self, drafts: Iterable[int]) -> TokenCounts:
        """These counts with `drafts` counted as output; this object does not change."""
        overlay = TokenCounts(())
        overlay._base = self._base or self
        overlay._version = overlay._base._version if self._base is None else self._version
        overlay._extra = dict(self._extra)
        overlay.add(drafts)
        return overlay

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Every seen token once, int64[n], and its count in the output, int64[n]. Views: do not write."""
        base = self._fresh_base()
        if base is None:
            return self._ids[: self._size], self._counts[: self._size]
        new = [token for token in self._extra if token not in base._place]
        ids = np.concatenate((base._ids[: base._size], np.array(new, dtype=np.int64)))
        counts = np.concatenate((base._counts[: base._size], np.zeros(len(new), dtype=np.int64)))
        places = {token: base._size + i for i, token in enumerate(new)}
        for token, count in self._extra.items():
            place = places.get(token)
            counts[base._place[token] if place is None else place] += count
        return ids, counts

    def seen(self, token: int) -> bool:
        """Whether the token is in the prompt or the output."""
        base = self._fresh_base() or self
        return token in base._place or token in self._extra

    def output_count(self, token: int) -> int:
        """How often the token is in the output."""
        base = self._fresh_base() or self
        place = base._place.get(token)
        return (0 if place is None else int(base._counts[place])) + self._extra.get(token, 0)

    def _fresh_base(self) -> TokenCounts | None:
        if self._base is not None and self._base._version != self._version:
            raise InvariantError(
                f"counts with drafts were used after {self._base._version - self._version} more tokens "
                "were committed; build them again with with_drafts()"
            )
        return self._base

    def _place_of(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._size
            if place == self._ids.size:
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place], self._counts[place] = token, 0
            self._place[token] = place
            self._size += 1
        return place


def _checked(token: int) -> int:
    if token < 0:
        raise InvalidInput(f"token {token} cannot be counted; token ids start at 0")
    return int(token)
