"""Top-k, top-p and min-p by selection: the exp of a logit is taken only where a filter may keep it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...compiling import kernel
from ...rng import BLOCK
from .weights import total_of_ids, weights_of

BUCKETS = 4096
FULLEST = 128  # longest bucket that insertion sort may meet
PART = 16  # tokens that are looked at one by one where any of them is wanted
ROOM = 1e-9  # relative room left where a bound must hold in spite of rounding
FIRST_REACH, FURTHER = 8.0, 4.0  # exponents below the peak that top-p looks at first, and then at a time


# --- the shortlist ----------------------------------------------------------------------------------


@kernel
def shortlist(
    row: Any, tops: Any, peak: float, scale: float, total: float, top_k: int, top_p: float, min_p: float
) -> Any:
    """Every token that a filter may keep or count: ids int64[n] ascending, their weights and logits float64[n].

    row: float32[V] or float64[V]; tops, peak and scale belong to it. total: that of the row; only top-p looks at it,
    where no top-k comes first. top_k = 0, top_p = 1.0 and min_p = 0.0 are off. A token of weight 0 is never kept.
    Only blocks whose top reaches the bound are looked into; nothing is sorted.
    """
    least, mass = -np.inf, 0.0
    lightest = 0.0
    if top_k > 0:
        least = _reached_by(row, tops, top_k)
    elif top_p < 1.0:
        mass = top_p * total * (1.0 + ROOM)
        # The V tokens or fewer below this weight weigh less than what may be cut.
        lightest = ((1.0 - top_p) * (1.0 - ROOM) - 1e-11) * total / row.size
    if min_p > 0.0 and mass == 0.0 and (top_k == 0 or top_p == 1.0):
        least = max(least, _logit_of(min_p, peak, scale))
    reach = FIRST_REACH
    while True:
        is_last = mass == 0.0 or 2.0**-reach <= lightest or reach > 1000.0
        if mass > 0.0:
            least = _logit_of(lightest if is_last else 2.0**-reach, peak, scale)
        ids, logits = _reaching(row, tops, least)
        weights = np.empty(ids.size)
        weights_of(logits, peak, scale, 1.0, weights)
        if is_last or weights.sum() >= mass:
            return _with_weight(ids, weights, logits)
        reach += FURTHER


@kernel
def _logit_of(weight: float, peak: float, scale: float) -> Any:
    """A logit that every token of at least this weight has, with room for the rounding of both; 0 gives -inf."""
    if weight <= 0.0:
        return -np.inf
    depth = (ROOM - np.log2(weight)) / scale  # may overflow to inf, which is a bound too
    return peak - depth - ROOM * 1e-3 * (abs(peak) + abs(depth))


@kernel
def _reaching(row: Any, tops: Any, least: float) -> Any:
    """Ids, int64[n] ascending, and logits, float64[n], of the tokens whose logit is `least` or more."""
    room = 0
    for b in range(tops.size):
        if tops[b] >= least:
            room += BLOCK
    ids, logits = np.empty(room, dtype=np.int64), np.empty(room)
    n: Any = 0
    for b in range(tops.size):
        if tops[b] >= least:
            for start in range(b * BLOCK, min((b + 1) * BLOCK, row.size), PART):
                part = row[start : start + PART]
                if _number_of(part, least) > 0:
                    for i in range(part.size):
                        x = np.float64(part[i])
                        ids[n], logits[n] = start + i, x  # overwritten unless it is reached: nothing to mispredict
                        n += x >= least
    return ids[:n], logits[:n]


@kernel
def _with_weight(ids: Any, weights: Any, logits: Any) -> Any:
    """Without the tokens of weight 0; in place, and then copies of the right size."""
    n = 0
    for i in range(ids.size):
        ids[n], weights[n], logits[n] = ids[i], weights[i], logits[i]
        n += weights[i] > 0.0
    return ids[:n].copy(), weights[:n].copy(), logits[:n].copy()


@kernel
def _reached_by(row: Any, tops: Any, count: int) -> Any:
    """A logit that at least `count` tokens reach, and not many more: where so many tops do, so do as many tokens."""
    if 2 * count <= tops.size:
        return _bisected(tops, count)
    return _bisected(row, count)


@kernel
def _bisected(logits: Any, count: int) -> Any:
    """A value that at least `count` of the logits reach, near the count-th largest; -inf where so few are finite."""
    high, low = -np.inf, np.inf  # the largest and the smallest that is not -inf
    for i in range(logits.size):
        x = np.float64(logits[i])
        high = max(high, x)
        low = min(low, x if x > -np.inf else np.inf)
    if _number_of(logits, low) < count:
        return -np.inf
    for _ in range(60):
        middle = 0.5 * low + 0.5 * high
        reaching = _number_of(logits, middle)
        if reaching >= count:
            low = middle
            if reaching <= count + (count >> 3) or not middle < high:
                break
        else:
            high = middle
    return low


@kernel
def _number_of(logits: Any, least: float) -> Any:
    """How many logits are `least` or more."""
    n: Any = 0
    for i in range(logits.size):
        n += np.float64(logits[i]) >= least
    return n


# --- the filters ------------------------------------------------------------------------------------


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
            left = total_of_ids(*_kept(ids, weights, keep)) if top_k > 0 else total
            keep[front[_nucleus(weights, front, top_p * left) :]] = False
    if min_p > 0.0:
        for i in range(ids.size):
            keep[i] &= weights[i] >= min_p
    kept_ids, kept_weights = _kept(ids, weights, keep)
    return kept_ids, kept_weights * (1.0 / total_of_ids(kept_ids, kept_weights))


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
