"""Free pages, kept as runs of neighbours.

A backend reads neighbouring pages as one view and gathers others, so a sequence should grow into the page right
behind its last one, and a new sequence should start where nobody else is about to grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

__all__ = ["FreeRuns"]


class FreeRuns:
    """The free ones among pages 0 .. num_pages - 1. A run is written [first, end)."""

    def __init__(self, num_pages: int) -> None:
        self._end = {0: num_pages}  # first -> end, of every run
        self._first = {num_pages: 0}  # end -> first
        self._widest = [(-num_pages, 0)]  # heap of (-size, first); runs that changed since are skipped when met
        self._count = num_pages

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for first in sorted(self._end):
            yield from range(first, self._end[first])

    def add(self, page: int) -> None:
        """`page` is free; it joins the runs beside it."""
        self._count += 1
        self._put(self._first.pop(page, page), self._end.pop(page + 1, page + 1))

    def take(self, count: int, behind: int | None = None) -> list[int]:
        """`count` pages, which are there: those right behind page `behind`, then out of the widest runs.

        A run is entered in its middle, so that whoever sits before it can grow, but for the run at page 0,
        which has nobody before it.
        """
        pages: list[int] = []
        if behind is not None and count and behind + 1 in self._end:
            pages += self._cut(behind + 1, behind + 1, count)
        while len(pages) < count:
            first, end = self._widest_run()
            missing = count - len(pages)
            middle = (first + end) // 2 if first else 0
            pages += self._cut(first, max(first, min(middle, end - missing)), missing)
        return pages

    def _widest_run(self) -> tuple[int, int]:
        while True:
            size, first = self._widest[0]
            if self._end.get(first) == first - size:
                return first, first - size
            heappop(self._widest)

    def _cut(self, first: int, at: int, count: int) -> range:
        """Take [at, at + count), as far as it goes, out of the run that starts at `first`."""
        end = self._end.pop(first)
        del self._first[end]
        taken = range(at, min(at + count, end))
        self._count -= len(taken)
        if first < at:
            self._put(first, at)
        if taken.stop < end:
            self._put(taken.stop, end)
        return taken

    def _put(self, first: int, end: int) -> None:
        self._end[first], self._first[end] = end, first
        heappush(self._widest, (first - end, first))
        if len(self._widest) > 4 * len(self._end) + 16:
            self._widest = [(a - b, a) for a, b in self._end.items()]
            heapify(self._widest)
