"""Attention of sequences with a short chain of new tokens each, all of them in one compiled loop, on a CPU.

A step of plain decoding is many small tasks: for every sequence and layer a few query rows over some hundred keys.
PyTorch takes one call for each, and the call costs more than the work in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from ...compiling import LINE, inlined, kernel, prefetch, shared, summing
from ...sampling.kernels.exp2 import exp2
from ...sampling.kernels.weights import LOG2_E, peak_of

__all__ = ["BLOCK", "attend_chains"]

BLOCK = 64
"""Keys or values that are widened at once; with 64 dimensions half of a small first-level cache."""
GROUP = 4  # keys whose products are taken together
SIXTEEN = np.uint32(16)


def _number(x: Any) -> Any:
    """An element of the pool as a number: of uint16 the bfloat16 with these bits, as float32."""
    raise NotImplementedError("for compiled code only")


@overload(_number, inline="always")
def _number_of(x: Any) -> Any:
    def from_bits(x: Any) -> Any:
        return np.uint32(np.uint32(x) << SIXTEEN).view(np.float32)

    def itself(x: Any) -> Any:
        return x

    return from_bits if x == types.uint16 else itself


@inlined
def _widen(pool: Any, cells: Any, first: int, size: int, block: Any) -> None:
    """The lines of pool [C, D] that cells[first : first + size] name, as numbers, to the first lines of block."""
    for j in range(size):
        next_time = pool[cells[min(first + j + BLOCK, cells.size - 1)]]
        for d in range(0, next_time.size, LINE // next_time.itemsize):
            prefetch(next_time, d)
        line = pool[cells[first + j]]
        for d in range(line.size):
            block[j, d] = _number(line[d])


@summing
def _products(row: Any, block: Any, out: Any) -> None:
    """out[j] = row . block[j], in whole groups: a key gets the same sum wherever the end is, and behind it is room."""
    zero = row.dtype.type(0)  # a constant: another beginning keeps sums from being vectorised
    for j in range(0, out.size, GROUP):
        a = b = c = e = zero
        for d in range(row.size):
            a += row[d] * block[j, d]
            b += row[d] * block[j + 1, d]
            c += row[d] * block[j + 2, d]
            e += row[d] * block[j + 3, d]
        out[j], out[j + 1], out[j + 2], out[j + 3] = a, b, c, e


@summing
def _add(weights: Any, block: Any, out: Any) -> None:
    """out += sum of weights[j] * block[j], eight at a time."""
    size, j = weights.size, 0
    while j + 8 <= size:
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        w4, w5, w6, w7 = weights[j + 4], weights[j + 5], weights[j + 6], weights[j + 7]
        for d in range(out.size):
            out[d] += ((w0 * block[j, d] + w1 * block[j + 1, d]) + (w2 * block[j + 2, d] + w3 * block[j + 3, d])) + (
                (w4 * block[j + 4, d] + w5 * block[j + 5, d]) + (w6 * block[j + 6, d] + w7 * block[j + 7, d])
            )
        j += 8
    while j < size:
        for d in range(out.size):
            out[d] += weights[j] * block[j, d]
        j += 1


@kernel
def _powers(scores: Any, steepness: float) -> None:
    """scores become 2**(steepness * (score - the highest))."""
    top = peak_of(scores) * steepness
    for j in range(scores.size):
        scores[j] = exp2(scores[j] * steepness - top)


@summing
def _normalise(weights: Any) -> None:
    """weights become shares of their sum."""
    total = weights.dtype.type(0)
    for j in range(weights.size):
        total += weights[j]
    share = weights.dtype.type(1) / total
    for j in range(weights.size):
        weights[j] *= share


@inlined
def _seen(place: int, window: int) -> tuple[int, int]:
    """From where and up to where the row at `place` sees keys."""
    return max(0, place + 1 - window) if window else 0, place + 1


@shared
def attend_chains(
    query: Any, keys: Any, values: Any, chains: Any, cells: Any, window: int, scale: float, out: Any
) -> None:
    """out = softmax(scale * query . keys) . values for every row, over the keys that it sees.

    query: float32 or float64[R, Hkv, G, D], which also names the precision of all sums. keys: [Hkv, C, D] and values:
    [Hkv, C, Dv], of the same type or bfloat16 as its bits, uint16. chains: int64[N, 4], for every sequence its first
    row in query, how many rows, how many keys before them, and where its cells begin. cells: int64, for every sequence
    those of the keys before and of its rows. window: so many keys a row sees, its own included; 0 for all. scale: > 0.
    out: like query, [R, Hkv, G, Dv].

    To the bit, a row's result hangs on no other row as long as the first of the keys that are named stands at a
    multiple of BLOCK in its sequence.
    """
    heads, groups = query.shape[1], query.shape[2]
    for task in prange(heads * chains.shape[0]):
        h, n = task // chains.shape[0], task % chains.shape[0]
        at, count, before, begin = chains[n, 0], chains[n, 1], chains[n, 2], chains[n, 3]
        total = before + count
        here = cells[begin : begin + total]
        weights = np.empty((count, groups, total + GROUP - 1), query.dtype)
        key_block = np.empty((BLOCK, query.shape[3]), query.dtype)
        value_block = np.empty((BLOCK, out.shape[3]), query.dtype)
        for first in range(0, total, BLOCK):
            size = min(BLOCK, total - first)
            _widen(keys[h], here, first, size, key_block)
            end = first + (size + GROUP - 1) // GROUP * GROUP
            for r in range(count):
                for g in range(groups):
                    _products(query[at + r, h, g], key_block, weights[r, g, first:end])
        for r in range(count):
            start, end = _seen(before + r, window)
            for g in range(groups):
                _powers(weights[r, g, start:end], scale * LOG2_E)
                _normalise(weights[r, g, start:end])
                out[at + r, h, g] = 0
        for first in range(0, total, BLOCK):
            size = min(BLOCK, total - first)
            _widen(values[h], here, first, size, value_block)
            for r in range(count):
                start, end = _seen(before + r, window)
                start, end = max(start, first), min(end, first + size)
                if start < end:
                    for g in range(groups):
                        _add(weights[r, g, start:end], value_block[start - first :], out[at + r, h, g])
