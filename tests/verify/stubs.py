"""Draws and rows that tests can steer or read afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.types import Role

LARGEST_UNIFORM = 1.0 - 2.0**-53


class FixedDraws:
    """Every uniform is `u`; a pick inverts the running sum at it. Keeps a record of what was asked."""

    def __init__(self, u: float) -> None:
        self.u = u
        self.accepts: list[tuple[float, int, int]] = []
        self.picks: list[tuple[int, Role, int]] = []

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        self.accepts.append((probability, position, node))
        return self.u < probability

    def pick(self, weights: Any, position: int, role: Role, *, ids: Any | None = None, node: int = 0) -> int:
        self.picks.append((position, role, node))
        assert weights.min() >= 0.0
        assert weights.sum() > 0.0
        positive = np.flatnonzero(weights > 0.0)
        running = np.cumsum(weights[positive])
        i = int(positive[min(np.searchsorted(running, self.u * running[-1], side="right"), positive.size - 1)])
        return i if ids is None else int(ids[i])


class LazyRows:
    """Rows of p that are computed when asked; remembers which were."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.asked: list[int] = []

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        return self._rows[i]
