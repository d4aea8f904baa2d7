"""The compiled row kernels behind `distribution`. Each stays on the calling thread and allocates what it returns.

Words used here. *Weight*: mass relative to the most likely token, exp((logit - largest logit) / temperature),
so the likeliest token weighs exactly 1. *Total*: sum of the weights that are left; a filter that compares a
weight with a fraction of the total sees the renormalised result of the filter before. *Rank*: order by logit,
largest first, the lower token id first among equal logits; every filter keeps the front of this ranking.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ..rng import inlined, kernel

LANES = 64
BLOCK = 64  # weights under one block peak
BUCKETS = 4096
FULLEST = 128  # longest bucket that insertion sort may meet
ROOM = 1e-9  # relative room left where a bound must hold in spite of rounding


# --- exp --------------------------------------------------------------------------------------------

LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 21 trailing zero bits, so k * LN2_HIGH is exact for every |k| < 2**20.
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
SHIFTER = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits of the sum
TAYLOR = tuple(1.0 / math.factorial(i) for i in range(14))
SMALLEST = -708.0  # below it the result would leave the normal floats; it is 0.0 instead
MANTISSA_BITS = np.int64(52)


def _fused_multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in one rounding, the same on every machine; numba has no spelling for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


_fma: Any = intrinsic(_fused_multiply_add)


@inlined
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0 (-inf included, NaN not) within 1 ulp; exactly 1 at 0, exactly 0 below -708.

    x = k ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's two-part ln 2); exp(r) by its Taylor polynomial of
    degree 13, whose remainder is below 5e-18; k is added to the exponent bits. No branch and no call, so a
    loop over it is vectorised.
    """
    shifted = _fma(x, LOG2_E, SHIFTER)
    k = shifted - SHIFTER
    r = _fma(-k, LN2_LOW, _fma(-k, LN2_HIGH, x))
    y = TAYLOR[13]
    y = _fma(y, r, TAYLOR[12])
    y = _fma(y, r, TAYLOR[11])
    y = _fma(y, r, TAYLOR[10])
    y = _fma(y, r, TAYLOR[9])
    y = _fma(y, r, TAYLOR[8])
    y = _fma(y, r, TAYLOR[7])
    y = _fma(y, r, TAYLOR[6])
    y = _fma(y, r, TAYLOR[5])
    y = _fma(y, r, TAYLOR[4])
    y = _fma(y, r, TAYLOR[3])
    y = _fma(y, r, TAYLOR[2])
    y = _fma(y, r, TAYLOR[1])
    y = _fma(y, r, TAYLOR[0])
    bits = np.float64(y).view(np.int64) + (np.float64(shifted).view(np.int64) << MANTISSA_BITS)
    return np.int64(bits).view(np.float64) if x >= SMALLEST else 0.0


@kernel
def exp(x: Any, out: Any) -> None:
    """out[i] = exp(x[i]) for x <= 0: float64[n] to float64[n]. The `exp` of fast path and reference."""
    for i in range(x.size):
        out[i] = _exp(x[i])


# --- softmax ----------------------------------------------------------------------------------------


@kernel
def total_of(weights: Any) -> Any:
    """Sum of float64[V] in one fixed order on every machine: token v goes to lane v % 64, then pairwise.

    Zeros change nothing, so the total of a truncated row is the same dense or sparse.
    """
    lanes = np.zeros(LANES)
    whole = weights.size - weights.size % LANES
    for start in range(0, whole, LANES):
        row = weights[start : start + LANES]
        for j in range(LANES):
            lanes[j] += row[j]
    for i in range(whole, weights.size):
        lanes[i - whole] += weights[i]
    return _fold(lanes)


@kernel
def _total_of_ids(ids: Any, weights: Any) -> Any:
    """`total_of` of sparse weights: int64[n] ascending, float64[n]."""
    lanes = np.zeros(LANES)
    for i in range(ids.size):
        lanes[ids[i] % LANES] += weights[i]
    return _fold(lanes)


@kernel
def _fold(lanes: Any) -> Any:
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] += lanes[half + j]
        half //= 2
    return lanes[0]


@kernel
def weigh(row: Any, peak: float, temperature: float, weights: Any) -> Any:
    """weights[v] = exp((row[v] - peak) / temperature), float32[V] or float64[V] to float64[V]; the total.

    The peak is subtracted before the division, so no temperature > 0 can overflow.
    """
    if temperature == 1.0:
        for i in range(row.size):
            weights[i] = _exp(np.float64(row[i]) - peak)
    else:
        for i in range(row.size):
            weights[i] = _exp((np.float64(row[i]) - peak) / temperature)
    return total_of(weights)


@kernel
def softmax(row: Any, peak: float, temperature: float, probs: Any) -> None:
    """`weigh`, then divided by the total in place."""
    share = 1.0 / weigh(row, peak, temperature, probs)
    for i in range(probs.size):
        probs[i] *= share


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


# --- filters ----------------------------------------------------------------------------------------


@kernel
def _block_peaks(bits: Any) -> Any:
    """The largest of each block of BLOCK. Weights are >= 0, so their bits, int64[V], order as they do."""
    peaks = np.empty((bits.size + BLOCK - 1) // BLOCK, dtype=np.int64)
    for b in range(peaks.size):
        block = bits[b * BLOCK : (b + 1) * BLOCK]
        top = np.int64(0)
        for i in range(block.size):
            top = max(top, block[i])
        peaks[b] = top
    return peaks


@kernel
def _reached_by(bits: Any, count: int) -> Any:
    """A float that at least `count` of the weights reach, a little below the count-th largest; by bisection."""
    low, high = np.int64(0), np.int64(0x3FF0000000000001)  # one above the bits of 1.0, the largest weight
    while high - low > np.int64(1 << 44):  # 8 bits of the mantissa
        middle = (low + high) // 2
        reaching = 0
        for i in range(bits.size):
            reaching += bits[i] >= middle
        if reaching >= count:
            low = middle
        else:
            high = middle
    return np.int64(low).view(np.float64)


@kernel
def _floor(bits: Any, peaks: Any, total: float, top_k: int, top_p: float, min_p: float) -> Any:
    """A weight such that tokens below it cannot matter to any active filter.

    top-k: a weight that k tokens reach (where k block peaks do, so do k tokens). top-p: the V tokens or
    fewer below (1 - top_p) total / V weigh less than what may be cut. min-p: its own threshold, where no
    filter before it needs lighter tokens for its total. Room is left for rounding.
    """
    floor = 0.0
    if top_k > 0:
        floor = _reached_by(peaks if 2 * top_k <= peaks.size else bits, top_k)
    elif top_p < 1.0:
        floor = ((1.0 - top_p) * (1.0 - ROOM) - 1e-11) * total / bits.size
    if min_p > 0.0 and (top_k == 0 or top_p == 1.0):
        floor = max(floor, min_p)
    return floor * (1.0 - ROOM)


@kernel
def shortlist(weights: Any, total: float, top_k: int, top_p: float, min_p: float) -> Any:
    """Ids and weights of every token that a filter may keep or count: int64[n] ascending, float64[n].

    weights: float64[V] of total `total`. top_k = 0, top_p = 1.0 and min_p = 0.0 are off. A token of weight
    0 is never kept. One pass over the row, most of it block by block; nothing is sorted.
    """
    bits = weights.view(np.int64)
    peaks = _block_peaks(bits)
    floor = _floor(bits, peaks, total, top_k, top_p, min_p)
    floor_bits = max(np.float64(floor).view(np.int64), 1)
    ids = np.empty(weights.size, dtype=np.int64)
    n = 0
    for b in range(peaks.size):
        if peaks[b] >= floor_bits:
            for i in range(b * BLOCK, min((b + 1) * BLOCK, bits.size)):
                if bits[i] >= floor_bits:
                    ids[n] = i
                    n += 1
    short = ids[:n].copy()
    return short, weights[short]


@kernel
def truncate(ids: Any, weights: Any, logits: Any, total: float, top_k: int, top_p: float, min_p: float) -> Any:
    """Top-k, top-p and min-p on a shortlist: kept ids int64[n] ascending, and their probabilities float64[n].

    ids, weights: as `shortlist` gives them. logits: float64[n], theirs, which rank them; may be empty where
    top-k and top-p are off. total: of all weights of the row.
    """
    keep = np.ones(ids.size, dtype=np.bool_)
    if top_k > 0 or top_p < 1.0:
        keep[:] = False
        count = min(top_k, ids.size) if top_k > 0 else ids.size
        mass = np.inf if top_k > 0 else top_p * total
        ranking = rank(logits, weights, count, mass)
        front = ranking[: min(count, ranking.size)]
        for i in front:
            keep[i] = True
        if top_p < 1.0:
            left = _total_of_ids(*_kept(ids, weights, keep)) if top_k > 0 else total
            keep[front[_nucleus(weights, front, top_p * left) :]] = False
    if min_p > 0.0:
        for i in range(ids.size):
            keep[i] &= weights[i] >= min_p
    kept_ids, kept_weights = _kept(ids, weights, keep)
    return kept_ids, kept_weights * (1.0 / _total_of_ids(kept_ids, kept_weights))


@kernel
def _kept(ids: Any, weights: Any, keep: Any) -> Any:
    """The ids and weights whose keep is True."""
    kept_ids, kept_weights = np.empty(ids.size, dtype=np.int64), np.empty(ids.size)
    n = 0
    for i in range(ids.size):
        kept_ids[n], kept_weights[n] = ids[i], weights[i]  # overwritten unless kept: no branch to mispredict
        n += keep[i]
    return kept_ids[:n].copy(), kept_weights[:n].copy()


@kernel
def _nucleus(weights: Any, front: Any, mass: float) -> Any:
    """Length of the shortest front of the ranking that weighs at least `mass`, one token or more."""
    before = 0.0
    for n in range(front.size):
        if before >= mass:
            return n
        before += weights[front[n]]
    return front.size


@kernel
def rank(logits: Any, weights: Any, count: int, mass: float) -> Any:
    """The front of the ranking as indices int64[m]: at least `count` of them or `mass`, or all.

    A bucket sort: logits fall into buckets of equal width, buckets beyond the wanted front are dropped, and
    one insertion sort puts the rest in order. Where buckets fill too unevenly a merge sort does. Stable, so
    equal logits stay in order of their ids.
    """
    n = logits.size
    ranking = np.empty(n, dtype=np.int64)
    highest, lowest = logits[0], logits[0]
    for i in range(n):
        ranking[i] = i
        highest, lowest = max(highest, logits[i]), min(lowest, logits[i])
    spread = highest - lowest
    if not (n > FULLEST and 1e-300 < spread < 1e300):
        return _merge_sort(ranking, logits)
    sizes, masses = np.zeros(BUCKETS, dtype=np.int64), np.zeros(BUCKETS)
    bucket = np.empty(n, dtype=np.int32)
    width = (BUCKETS - 1) / spread
    for i in range(n):
        b: Any = min(np.int64((highest - logits[i]) * width), BUCKETS - 1)
        bucket[i] = b
        sizes[b] += 1
        masses[b] += weights[i]
    wanted, fullest = _front_buckets(sizes, masses, count, mass)
    length = 0
    for b in range(wanted):  # sizes become the places where buckets start
        sizes[b], length = length, length + sizes[b]
    for i in range(n):
        b = bucket[i]
        if b < wanted:
            ranking[sizes[b]] = i
            sizes[b] += 1
    if fullest > FULLEST:
        return _merge_sort(ranking[:length], logits)
    _insertion_sort(ranking[:length], logits)
    return ranking[:length]


@kernel
def _front_buckets(sizes: Any, masses: Any, count: int, mass: float) -> Any:
    """How many buckets hold the wanted front, and the size of the fullest of them."""
    seen, weighed, fullest = 0, 0.0, 0
    for b in range(sizes.size):
        seen += sizes[b]
        weighed += masses[b]
        fullest = max(fullest, sizes[b])
        if seen >= count or weighed >= mass * (1.0 + ROOM):
            return b + 1, fullest
    return sizes.size, fullest


@kernel
def _insertion_sort(ranking: Any, logits: Any) -> None:
    """In place, by logit downwards, stable."""
    for i in range(1, ranking.size):
        item = ranking[i]
        j = i
        while j > 0 and logits[ranking[j - 1]] < logits[item]:
            ranking[j] = ranking[j - 1]
            j -= 1
        ranking[j] = item


@kernel
def _merge_sort(ranking: Any, logits: Any) -> Any:
    """By logit downwards, stable: insertion-sorted runs, merged two by two. `ranking` is scratch."""
    n, run = ranking.size, 16
    for start in range(0, n, run):
        _insertion_sort(ranking[start : start + run], logits)
    source, target = ranking, np.empty_like(ranking)
    while run < n:
        for start in range(0, n, 2 * run):
            middle, end = min(start + run, n), min(start + 2 * run, n)
            left, right = start, middle
            for i in range(start, end):
                if right == end or (left < middle and logits[source[left]] >= logits[source[right]]):
                    target[i] = source[left]
                    left += 1
                else:
                    target[i] = source[right]
                    right += 1
        source, target = target, source
        run *= 2
    return source
