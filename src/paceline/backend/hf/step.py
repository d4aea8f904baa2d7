"""One packed forward as the attention function sees it: whose rows, which cells, who sees whom.

A *cell* holds one token's keys and values in every layer; its number is page * page_size + offset. The packed
row holds the new tokens of many sequences one behind the other. Everything that layers share is worked out once
per step here, so that a layer does nothing but slice and attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InvariantError
from .chains import BLOCK
from .pools import Pools

__all__ = ["CHAIN_ROWS", "FOLD_ROWS", "Chains", "Part", "Step", "View", "current_step"]

FOLD_ROWS = 32
"""Up to so many new tokens of one sequence, the query heads of a group are attended as extra rows of their key
head, so that keys are read once; above, heads are attended one by one and masks need no copy per group."""

CHAIN_ROWS = 8
"""Chains of up to so many new tokens may be attended all together by chains.py; with more, PyTorch is faster."""

current_step: ContextVar[Step | None] = ContextVar("paceline_step", default=None)
"""The step the running forward belongs to. Some families drop private keywords, so it does not travel as one."""


@dataclass(slots=True)
class Part:
    """One sequence's share of a step.

    at: its first row in the packed row. count: its new tokens. start: tokens cached before them. pages: its page
    table up to start + count tokens. depths: int64[count], positions beyond start; None for a chain, where they
    are 0, 1, ... sees: bool[count, count], which new token sees which; None for a chain.
    """

    at: int
    count: int
    start: int
    pages: Sequence[int]
    depths: NDArray[np.int64] | None = None
    sees: NDArray[np.bool_] | None = None


@dataclass(slots=True)
class View:
    """What one sequence's rows attend to in the layers of one window.

    Keys are cells first .. first + length - 1, or those of `index` (int64[length]) where they lie apart. mask:
    additive, [1, 1, rows, length]; None where every row sees every key, or `causal` says the rest. wide: more than
    FOLD_ROWS new tokens.
    """

    at: int
    count: int
    first: int
    length: int
    index: Tensor | None
    mask: Tensor | None
    causal: bool
    wide: bool


@dataclass(slots=True)
class Chains:
    """All chains of at most CHAIN_ROWS new tokens, for `attend_chains`.

    rows: int64[R], their rows in the packed row; None where these are all. chains: int64[N, 4], for each its first row
    among these, its rows, the keys before them, and its first cell in `cells`: int64.
    """

    rows: Tensor | None
    chains: NDArray[np.int64]
    cells: NDArray[np.int64]


class Step:
    """The metadata of one forward; see the module. For the probe: hits, layers in the order they attended, and
    windows, those they asked for."""

    def __init__(self, parts: Sequence[Part], pools: Pools) -> None:
        self.parts = parts
        self.pools = pools
        self.total = sum(part.count for part in parts)
        self.hits: list[int] = []
        self.windows: set[int] = set()
        self._page_size = pools.page_size
        self._views: dict[tuple[int, int, torch.dtype, bool], list[View]] = {}
        self._chains: dict[int, Chains | None] = {}
        self._masks: dict[tuple[int, int, int, int, torch.dtype], Tensor] = {}
        cells = np.concatenate([self._cells(part, part.start) for part in parts])
        first = int(cells[0])
        self.run = first if bool((np.diff(cells) == 1).all()) else None
        """The first cell of the new tokens where they lie side by side, else None and `cells` names them."""
        self.cells = torch.from_numpy(cells).to(pools.device)

    def positions(self) -> NDArray[np.int64]:
        """int64[total]: the logical position of every row."""
        return np.concatenate([self._positions(part) for part in self.parts])

    def views(self, window: int, groups: int, dtype: torch.dtype, *, but_chains: bool = False) -> list[View]:
        """What every sequence attends to in a layer with that window (0: none) and that many query heads per
        key head. Shared by all layers that are alike. but_chains: without those that `chains` has."""
        key = (window, groups, dtype, but_chains)
        views = self._views.get(key)
        if views is None:
            wanted = [(i, part) for i, part in enumerate(self.parts) if not (but_chains and _is_short(part))]
            views = self._views[key] = [self._view(i, part, window, groups, dtype) for i, part in wanted]
        return views

    def chains(self, window: int) -> Chains | None:
        """The short chains, in a layer with that window; None where there are none."""
        if window not in self._chains:
            self._chains[window] = self._short_chains(window)
        return self._chains[window]

    def _short_chains(self, window: int) -> Chains | None:
        parts = [part for part in self.parts if _is_short(part)]
        if not parts:
            return None
        lines, cells, rows, begin, at = [], [], [], 0, 0
        for part in parts:
            oldest = _oldest(part, window) // BLOCK * BLOCK
            cells.append(self._cells(part, oldest))
            lines.append((at, part.count, part.start - oldest, begin))
            rows.append(np.arange(part.at, part.at + part.count))
            begin, at = begin + cells[-1].size, at + part.count
        named = None if at == self.total else torch.from_numpy(np.concatenate(rows))
        return Chains(named, np.array(lines, np.int64), np.concatenate(cells))

    def _view(self, i: int, part: Part, window: int, groups: int, dtype: torch.dtype) -> View:
        oldest = _oldest(part, window)
        length = part.start + part.count - oldest
        first, index = self._keys(part, oldest)
        clipped = bool(window) and length > window
        wide = part.count > FOLD_ROWS
        if part.count == 1:
            return View(part.at, 1, first, length, index, None, False, False)
        if wide and part.start == 0 and part.sees is None and not clipped:
            return View(part.at, part.count, first, length, index, None, True, True)
        repeat = 1 if wide else groups
        key = (i, oldest, window if clipped else 0, repeat, dtype)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._mask(part, oldest, key[2], repeat, dtype)
        return View(part.at, part.count, first, length, index, mask, False, wide)

    def _keys(self, part: Part, oldest: int) -> tuple[int, Tensor | None]:
        size = self._page_size
        skipped = oldest // size
        pages = part.pages[skipped : -(-(part.start + part.count) // size)]
        if len(pages) == 1 or list(pages) == list(range(pages[0], pages[0] + len(pages))):
            return pages[0] * size + oldest - skipped * size, None
        return 0, torch.from_numpy(self._cells(part, oldest)).to(self.pools.device)

    def _cells(self, part: Part, since: int) -> NDArray[np.int64]:
        """int64: the cells of positions since .. start + count - 1 in the order they are stored."""
        size = self._page_size
        first = since // size * size
        pages = np.array(part.pages[since // size : -(-(part.start + part.count) // size)], np.int64)
        cells = (pages[:, None] * size + np.arange(size)).ravel()[since - first : part.start + part.count - first]
        if cells.size != part.start + part.count - since:  # compiled code would read whatever lies behind them
            raise InvariantError(f"{len(part.pages)} pages of {size} for {part.start + part.count} tokens")
        return cells

    def _positions(self, part: Part) -> NDArray[np.int64]:
        return part.start + (np.arange(part.count, dtype=np.int64) if part.depths is None else part.depths)

    def _mask(self, part: Part, oldest: int, window: int, repeat: int, dtype: torch.dtype) -> Tensor:
        n, device = part.count, self.pools.device
        length = part.start + n - oldest
        sees = np.tri(n, dtype=np.bool_) if part.sees is None else part.sees
        mask = torch.zeros(repeat, n, length, dtype=dtype, device=device)
        mask[:, :, length - n :].masked_fill_(torch.from_numpy(~sees).to(device), float("-inf"))
        if window:
            # Logical positions, never the order of cells: siblings of a tree stand at one position.
            rows = self._positions(part)
            keys = np.concatenate([np.arange(oldest, part.start, dtype=np.int64), rows])
            gone = torch.from_numpy(rows[:, None] - keys[None, :] >= window).to(device)
            mask.masked_fill_(gone, float("-inf"))
        return mask.view(1, 1, repeat * n, length)


def _oldest(part: Part, window: int) -> int:
    """The first position any row of the part sees: its first row stands at `start` and sees back the farthest."""
    return max(0, part.start - window + 1) if window else 0


def _is_short(part: Part) -> bool:
    return part.count <= CHAIN_ROWS and part.sees is None
