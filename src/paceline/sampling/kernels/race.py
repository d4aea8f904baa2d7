"""A draw straight from logits: the exponential race of `rng`, run on weights that are made only where they may win."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...compiling import kernel
from ...rng import BLOCK, PAIRS, limit_of, run_block, upper_words
from .weights import tops_of, weights_of

HALF = 0.5  # how `pick` scales weights of which the largest is 1


@kernel
def race(row: Any, peak: float, scale: float, c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
    """The token that wins the race on the row's weights: what `KeyedDraws.pick` draws from `weights_of` the row.

    row: float32[V] or float64[V]; peak and scale belong to it. c1 .. k1: counter words and key. A block's
    weights are made only where a uniform of the block is below what its top could still win with, so most of the
    row costs its noise and no exp. The block of the peak runs first: its likeliest token sets a bound that is
    hard to beat.
    """
    if row.size == 1:
        return 0
    tops = tops_of(row)
    lights = np.empty(tops.size)
    weights_of(tops, peak, scale, 1.0, lights)
    first = np.argmax(tops)
    weights, even, odd = np.empty(BLOCK), np.empty(PAIRS, dtype=np.uint32), np.empty(PAIRS, dtype=np.uint32)
    winner, best = -1, np.inf
    for turn in range(-1, tops.size):
        b: Any = first if turn < 0 else turn
        if turn == first or not lights[b] > 0.0:
            continue
        start = b * BLOCK
        limit = limit_of(best, HALF * lights[b])
        if upper_words(start, limit, even, odd, c1, c2, c3, k0, k1):
            part = row[start : start + BLOCK]
            w = weights[: part.size]
            weights_of(part, peak, scale, 1.0, w)
            winner, best = run_block(start, w, HALF, even, odd, limit, winner, best, c1, c2, c3, k0, k1)
    return winner
