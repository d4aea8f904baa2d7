"""Weights and their sums: the passes over a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ...compiling import LINE, inlined, kernel, prefetch
from ...rng import BLOCK
from .exp2 import exp2, exp2_of_six

LANES = 32
TURN = 6 * LANES  # weights that one turn of a summing loop takes
LOG2_E = 1.4426950408889634
STEEPEST = 1.7e308  # keeps 0 * scale from being NaN where 1 / temperature overflows


def scale_of(temperature: float) -> float:
    """What turns a difference of logits into an exponent of 2."""
    return min(LOG2_E / temperature, STEEPEST)


# --- the largest logit ------------------------------------------------------------------------------


def _bits(row: Any) -> Any:
    """The bits of floats as signed and as unsigned integers of the same width: two views."""
    raise NotImplementedError("compiled code only")


@overload(_bits)
def _bits_by_width(row: Any) -> Any:
    def narrow(row: Any) -> Any:
        return row.view(np.int32), row.view(np.uint32)

    def wide(row: Any) -> Any:
        return row.view(np.int64), row.view(np.uint64)

    return narrow if row.dtype == types.float32 else wide


@kernel
def peak_of(row: Any) -> Any:
    """The largest of float32[V] or float64[V] as a float64; NaN where there is one, of either sign.

    Maxima of integers are vector instructions, maxima of floats that must notice NaN are not. As signed
    integers floats >= 0 order as they do, above all that are negative; as unsigned integers a negative NaN
    lies above everything else.
    """
    signed, unsigned = _bits(row)
    top, extreme = signed[0], unsigned[0]
    for i in range(row.size):
        top = max(top, signed[i])
        extreme = max(extreme, unsigned[i])
    value = np.empty(1, dtype=row.dtype)
    value[0] = -np.inf
    as_signed, as_unsigned = _bits(value)
    if extreme > as_unsigned[0]:
        return np.nan
    if top >= 0:
        as_signed[0] = top
    else:
        as_unsigned[0] = _least(unsigned)
    return np.float64(value[0])


@kernel
def tops_of(row: Any) -> Any:
    """The largest logit of each block: float32[V] or float64[V] without NaN to float64[V / BLOCK, rounded up]."""
    signed, unsigned = _bits(row)
    tops = np.empty((row.size + BLOCK - 1) // BLOCK)
    value = np.empty(1, dtype=row.dtype)
    as_signed, as_unsigned = _bits(value)
    for b in range(tops.size):
        block = signed[b * BLOCK : (b + 1) * BLOCK]
        top = block[0]
        for i in range(block.size):
            top = max(top, block[i])
        if top >= 0:
            as_signed[0] = top
        else:
            as_unsigned[0] = _least(unsigned[b * BLOCK : (b + 1) * BLOCK])
        tops[b] = value[0]
    return tops


@kernel
def _least(bits: Any) -> Any:
    """Of negative floats the largest has the least unsigned bits."""
    least = bits[0]
    for i in range(bits.size):
        least = min(least, bits[i])
    return least


# --- weights ----------------------------------------------------------------------------------------


@kernel
def weight_of(logit: float, peak: float, scale: float) -> Any:
    """The weight of one logit. The peak is subtracted first, so no temperature > 0 can overflow."""
    return exp2((logit - peak) * scale)


@kernel
def weights_of(row: Any, peak: float, scale: float, share: float, weights: Any) -> None:
    """weights[v] = the weight of row[v], times `share`: float32[n] or float64[n] to float64[n]."""
    for i in range(row.size):
        weights[i] = exp2((np.float64(row[i]) - peak) * scale) * share


# --- sums -------------------------------------------------------------------------------------------


@kernel
def total_of(weights: Any) -> Any:
    """Sum of float64[V] in one fixed order on every machine: token v goes to lane v % 32, then pairwise.

    Zeros change nothing, so the total of a truncated row is the same dense or sparse.
    """
    lanes = np.zeros(LANES)
    whole = weights.size - weights.size % TURN
    for start in range(0, whole, TURN):
        w = weights[start : start + TURN]
        for j in range(LANES):
            lane = lanes[j] + w[j] + w[j + LANES] + w[j + 2 * LANES]
            lanes[j] = lane + w[j + 3 * LANES] + w[j + 4 * LANES] + w[j + 5 * LANES]
    for i in range(whole, weights.size):
        lanes[i % LANES] += weights[i]
    return _fold(lanes)


@kernel
def total_of_ids(ids: Any, weights: Any) -> Any:
    """`total_of` of sparse weights: int64[n] ascending, float64[n]."""
    lanes = np.zeros(LANES)
    for i in range(ids.size):
        lanes[ids[i] % LANES] += weights[i]
    return _fold(lanes)


@kernel
def total(row: Any, peak: float, scale: float) -> Any:
    """`total_of` the weights of float32[V] or float64[V]; no array of them is made.

    Meanwhile the row that a backend puts behind this one, if it does, comes near: it is likely to be next.
    """
    lanes = np.zeros(LANES)
    whole = row.size - row.size % TURN
    for start in range(0, whole, TURN):
        part = row[start : start + TURN]
        for i in range(0, TURN, LINE // row.itemsize):
            prefetch(row, row.size + start + i)
        for j in range(LANES):
            a, b, c, d, e, f = _six_weights(part, j, peak, scale)
            lanes[j] = lanes[j] + a + b + c + d + e + f
    for i in range(whole, row.size):
        lanes[i % LANES] += exp2((np.float64(row[i]) - peak) * scale)
    return _fold(lanes)


@kernel
def weigh(row: Any, peak: float, scale: float, weights: Any) -> Any:
    """Total and weights in one pass: float32[V] or float64[V] to float64[V]."""
    lanes = np.zeros(LANES)
    whole = row.size - row.size % TURN
    for start in range(0, whole, TURN):
        part, w = row[start : start + TURN], weights[start : start + TURN]
        for j in range(LANES):
            a, b, c, d, e, f = _six_weights(part, j, peak, scale)
            w[j], w[j + LANES], w[j + 2 * LANES] = a, b, c
            w[j + 3 * LANES], w[j + 4 * LANES], w[j + 5 * LANES] = d, e, f
            lanes[j] = lanes[j] + a + b + c + d + e + f
    for i in range(whole, row.size):
        weights[i] = exp2((np.float64(row[i]) - peak) * scale)
        lanes[i % LANES] += weights[i]
    return _fold(lanes)


@inlined
def _six_weights(part: Any, j: Any, peak: Any, scale: Any) -> Any:
    """The weights of part[j], part[j + LANES], ..."""
    return exp2_of_six((
        (np.float64(part[j]) - peak) * scale,
        (np.float64(part[j + LANES]) - peak) * scale,
        (np.float64(part[j + 2 * LANES]) - peak) * scale,
        (np.float64(part[j + 3 * LANES]) - peak) * scale,
        (np.float64(part[j + 4 * LANES]) - peak) * scale,
        (np.float64(part[j + 5 * LANES]) - peak) * scale,
    ))  # fmt: skip


@kernel
def _fold(lanes: Any) -> Any:
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] += lanes[half + j]
        half //= 2
    return lanes[0]


# --- penalties --------------------------------------------------------------------------------------


@kernel
def penalise(row: Any, ids: Any, counts: Any, repetition: float, presence: float, frequency: float) -> Any:
    """Penalties in place on float64[V], touching the seen tokens only; the first id outside the row, or -1.

    ids: int64[n], tokens of prompt and output. counts: int64[n], how often each is in the output.
    """
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= row.size:
            return ids[i]
    for i in range(ids.size):
        z = row[ids[i]]
        z = z / repetition if z > 0 else z * repetition
        if counts[i] > 0:
            z = z - presence
            z = z - frequency * counts[i]
        row[ids[i]] = z
    return -1
