"""Published pages: which page holds these tokens behind that page.

A page is found by the page before it and its own tokens, compared token by token. So a find is a proof, and not
the luck of a hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

__all__ = ["ROOT", "PrefixCache"]

ROOT = -1
"""What stands before a sequence's first page."""

Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Published pages, and those among them that nobody holds, in the order in which they may be evicted.

    Whoever holds a page holds all pages before it, and lets go of the last one first. So a page comes to rest
    after the pages behind it, and eviction in the order of coming to rest takes a chain from its end.
    """

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()  # longest at rest first

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._key_of)

    @property
    def resting(self) -> OrderedDict[int, None]:
        """Published pages nobody holds, the next to be evicted first."""
        return self._resting

    def find(self, before: int, tokens: tuple[int, ...]) -> int | None:
        """The page that holds `tokens` behind page `before`."""
        return self._page_of.get((before, tokens))

    def key(self, page: int) -> Key:
        """The page before `page`, and the tokens of `page`."""
        return self._key_of[page]

    def publish(self, page: int, before: int, tokens: tuple[int, ...]) -> None:
        """`page`, which somebody holds, can be found from now on."""
        self._page_of[before, tokens] = page
        self._key_of[page] = before, tokens

    def forget(self, page: int) -> None:
        """`page`, which no published page stands behind, cannot be found any more."""
        del self._page_of[self._key_of.pop(page)]

    def rest(self, page: int) -> None:
        """The last holder of `page` let go."""
        self._resting[page] = None

    def wake(self, page: int) -> None:
        """Somebody holds `page` again."""
        del self._resting[page]

    def evict(self) -> int:
        """Forget the page that has rested longest, and return it."""
        page, _ = self._resting.popitem(last=False)
        self.forget(page)
        return page
