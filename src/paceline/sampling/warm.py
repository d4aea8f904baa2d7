"""Compile the row kernels, or load what an earlier run compiled, at a moment of one's choosing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..params import SamplingParams
from ..rng import KeyedDraws, Role
from .counts import TokenCounts
from .fast import distribution
from .rows import Row
from .softmax import Softmax

__all__ = ["warm_up"]

Progress = Callable[[str, int, int | None], None]


def warm_up(progress: Progress | None = None) -> None:
    """Make every row kernel ready, so that no request waits for a compiler.

    The first time on a machine this compiles them, in about ten seconds; numba keeps the result on disk (in
    NUMBA_CACHE_DIR, else beside the package, else in the user's cache folder), from where later processes load it
    in a fraction of a second. In one process only the first call does anything.

    progress: called as progress("sampling kernels", done, all).
    """
    steps = [step for dtype in (np.float32, np.float64) for step in _steps(dtype)]
    for i, step in enumerate(steps):
        if progress is not None:
            progress("sampling kernels", i, len(steps))
        step()
    if progress is not None:
        progress("sampling kernels", len(steps), len(steps))


def _steps(dtype: type[np.floating[Any]]) -> list[Callable[[], object]]:
    """What runs each kernel on rows of a dtype once."""
    row: Row = np.linspace(-3.0, 0.0, 300).astype(dtype)
    draws, counts = KeyedDraws(0, 0), TokenCounts([1])
    p, known = Softmax(row, 0.0, 1.0), Softmax(row, 0.0, 1.0)
    return [
        lambda: p.pick(draws, 0, Role.TARGET),
        lambda: p.prob(1),
        lambda: p.probs,
        lambda: known.probs,
        lambda: draws.pick(known.probs, 0, Role.RECOVER),
        lambda: distribution(row, SamplingParams(top_k=20, top_p=0.9, min_p=0.01), None),
        lambda: draws.pick(np.ones(2), 0, Role.TARGET, ids=np.array([1, 2])),
        lambda: distribution(row, SamplingParams(presence_penalty=1.0), counts),
        lambda: draws.accept(0.5, 0),
    ]
