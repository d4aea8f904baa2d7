"""Keyed draws: every random number is a pure function of what it is for.

A generator that is consumed by order gives a request other numbers when its neighbours, its draft lengths or
its skipped steps change. Here a number is looked up instead, by Philox4x32-10 (Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), a bijection of a 128-bit counter under a 64-bit key:

key        the request's seed: low 32 bits, high 32 bits
counter 0  token // 2 for `pick`, 0 for `accept`
counter 1  position
counter 2  step start: committed tokens when the step began; 0 for role TARGET
counter 3  role + 256 * node; node is 0 for role TARGET

One call gives four words and so two uniforms: **lane 0** from words 0 (high) and 1 (low), **lane 1** from words
2 and 3. Even tokens read lane 0, odd tokens lane 1; `accept` reads lane 0.

Noise of role TARGET therefore depends on (seed, position, token) alone. The other roles carry the step start,
because a block or tree rule looks at the noise of positions that it then does not commit: keyed by position
alone, the next step would meet noise that the last one has already selected, and its output would be biased.

`pick` is an exponential race, argmin of E_v / w_v with independent exponential E_v, which draws v with
probability w_v / sum(w) for weights of any sum (the Gumbel-max trick in other words). `race_reference` is
the law in plain Python; the compiled race takes exactly the same decisions.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .compiling import inlined, kernel
from .errors import InvalidDistribution, InvalidInput
from .types import FloatArray, IntArray, Role

__all__ = [
    "KeyedDraws",
    "Role",
    "counter_words",
    "derive_seed",
    "fresh_seed",
    "limit_of",
    "philox4x32",
    "philox4x32_rows",
    "race_reference",
    "run_block",
    "uniforms",
    "upper_words",
]

Words4 = tuple[int, int, int, int]
Key = tuple[int, int, int, int, int]

MASK32 = 0xFFFFFFFF
MAX_SEED = 2**64 - 1
MAX_POSITION = 2**32 - 1
MAX_NODE = 2**24 - 1
DERIVE = 255  # stands where a role stands in counter word 3; no draw has this role


# --- Philox4x32-10 ----------------------------------------------------------------------------------

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> Words4:
    """Four 32-bit words from four counter words and two key words; `philox4x32_rows` is the compiled twin."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = divmod(MULTIPLIER_0 * c0, 2**32)
        high1, low1 = divmod(MULTIPLIER_1 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def uniforms(counter: Sequence[int], key: Sequence[int]) -> tuple[float, float]:
    """The two uniforms of one call, each a multiple of 2**-53 in [0, 1): (lane 0, lane 1).

    Lane 0 is the upper 53 bits of words 0 (high) and 1 (low), lane 1 those of words 2 and 3. The largest
    is 1 - 2**-53, so a uniform is never 1.
    """
    w0, w1, w2, w3 = philox4x32(counter, key)
    return ((w0 << 32 | w1) >> 11) * 2.0**-53, ((w2 << 32 | w3) >> 11) * 2.0**-53


# numba turns uint64 combined with int64 into float64, so every constant below is uint64.
_MASK, _32, _21, _11 = np.uint64(MASK32), np.uint64(32), np.uint64(21), np.uint64(11)
_M0, _M1, _W0, _W1 = (np.uint64(c) for c in (MULTIPLIER_0, MULTIPLIER_1, WEYL_0, WEYL_1))


@inlined
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """The ten rounds on uint64 values below 2**32."""
    for _ in range(ROUNDS):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c2 = (product1 >> _32) ^ c1 ^ k0, (product0 >> _32) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@kernel
def _philox_rows(counters: Any, k0: int, k1: int, out: Any) -> None:
    for i in range(counters.shape[0]):
        a, b, c, d = _philox(
            np.uint64(counters[i, 0]),
            np.uint64(counters[i, 1]),
            np.uint64(counters[i, 2]),
            np.uint64(counters[i, 3]),
            np.uint64(k0),
            np.uint64(k1),
        )
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a, b, c, d


def philox4x32_rows(counters: ArrayLike, key: Sequence[int]) -> NDArray[np.uint32]:
    """Compiled Philox4x32-10 of many counters under one key: uint32[n, 4] to uint32[n, 4]."""
    rows = np.ascontiguousarray(counters, dtype=np.uint32)
    if rows.ndim != 2 or rows.shape[1] != 4:
        raise InvalidInput(f"counters have shape {rows.shape}; pass uint32[n, 4]")
    out = np.empty_like(rows)
    _philox_rows(rows, int(key[0]), int(key[1]), out)
    return out


@inlined
def _unit(high: Any, low: Any) -> Any:
    """The upper 53 bits of two words as a float64 in [0, 1)."""
    return np.float64(np.int64((high << _21) | (low >> _11))) * 2.0**-53


@kernel
def _lane0(c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
    """Lane 0 of the call whose counter word 0 is 0."""
    a, b, _, _ = _philox(np.uint64(0), np.uint64(c1), np.uint64(c2), np.uint64(c3), np.uint64(k0), np.uint64(k1))
    return _unit(a, b)


@kernel
def _uniform_of(token: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
    """The uniform of one token."""
    a, b, c, d = _philox(
        np.uint64(token >> 1), np.uint64(c1), np.uint64(c2), np.uint64(c3), np.uint64(k0), np.uint64(k1)
    )
    return _unit(c, d) if token & 1 else _unit(a, b)


@kernel
def _noise_of_ids(ids: Any, c1: int, c2: int, c3: int, k0: int, k1: int, out: Any) -> None:
    """out[i] = the uniform of token ids[i]."""
    u1, u2, u3, v0, v1 = np.uint64(c1), np.uint64(c2), np.uint64(c3), np.uint64(k0), np.uint64(k1)
    for i in range(ids.size):
        a, b, c, d = _philox(np.uint64(ids[i] >> 1), u1, u2, u3, v0, v1)
        odd = (ids[i] & 1) == 1
        out[i] = _unit(c if odd else a, d if odd else b)


# --- the exponential race ---------------------------------------------------------------------------

BLOCK = 128  # tokens that are looked at together
PAIRS = BLOCK // 2
# u <= -log(1 - u), so a token with u > best * w has lost before the logarithm is taken. The slack is far above the
# rounding of the operations involved, so a token is only passed over when it loses in floats too.
SLACK = 1.0 + 1e-12
NO_IDS = np.empty(0, dtype=np.int64)
BAD_WEIGHTS, BAD_IDS = -1, -2


def race_reference(
    weights: Sequence[float],
    ids: Sequence[int] | None,
    seed: int,
    position: int,
    step_start: int,
    role: Role,
    node: int = 0,
) -> int:
    """The token that `KeyedDraws.pick` draws, in plain Python and valid weights only: written for reading.

    argmin over tokens with w > 0 of E / w, E = -log(1 - u), u the token's own uniform; ties go to the lowest
    token. Weights are first scaled by a power of two, so that the largest is near 1 and E / w cannot overflow.
    """
    tokens = range(len(weights)) if ids is None else ids
    tail = counter_words(position, step_start, role, node)
    scale = math.ldexp(1.0, -min(max(math.frexp(max(weights))[1], -1000), 1000))
    winner, best = -1, math.inf
    for token, weight in zip(tokens, weights, strict=True):
        if weight > 0 and weight * scale > 0:
            u = uniforms((token // 2, *tail), (seed & MASK32, seed >> 32))[token % 2]
            arrival = -math.log1p(-u) / (weight * scale)
            if arrival < best:
                winner, best = token, arrival
    return winner


@inlined
def limit_of(best: Any, weight: Any) -> Any:
    """The largest upper word of a uniform, uint32, with which a token of this weight or less may still win."""
    bound = best * SLACK * weight
    return np.uint32(bound * 2.0**32) if bound < 1.0 else np.uint32(MASK32)


@kernel
def upper_words(start: int, limit: Any, even: Any, odd: Any, c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
    """The upper words of the uniforms of BLOCK tokens, and whether any of them is at most `limit`.

    start: the first token, even. even, odd: uint32[PAIRS], for the even and the odd tokens. Most lose by it alone.
    """
    u1, u2, u3, v0, v1 = np.uint64(c1), np.uint64(c2), np.uint64(c3), np.uint64(k0), np.uint64(k1)
    below = np.uint32(0)
    for i in range(PAIRS):
        a, _, c, _ = _philox(np.uint64(start // 2 + i), u1, u2, u3, v0, v1)
        even[i], odd[i] = np.uint32(a), np.uint32(c)
        below |= np.uint32(np.uint32(a) <= limit) | np.uint32(np.uint32(c) <= limit)
    return below > 0


@kernel
def run_block(
    start: int, weights: Any, scale: float, even: Any, odd: Any, limit: Any, winner: int, best: float,
    c1: int, c2: int, c3: int, k0: int, k1: int,
) -> Any:  # fmt: skip
    """Winner and its arrival after the tokens start, start + 1, ... have run too, with weights * scale."""
    for i in range(weights.size):
        if (odd[i >> 1] if i & 1 else even[i >> 1]) > limit:
            continue
        weight = weights[i] * scale
        if not weight > 0:
            continue
        u = _uniform_of(start + i, c1, c2, c3, k0, k1)
        if u <= best * SLACK * weight:
            arrival = -math.log1p(-u) / weight
            if arrival < best or (arrival == best and start + i < winner):
                winner, best = start + i, arrival
    return winner, best


def _race(weights: FloatArray, ids: IntArray, c1: int, c2: int, c3: int, k0: int, k1: int) -> int:
    """Index of the winner, or BAD_WEIGHTS or BAD_IDS. float64[n]; int64[n], or int64[0] when dense."""
    return int(_race_of_ids(weights, ids, c1, c2, c3, k0, k1) if ids.size else _dense_race(weights, c1, c2, c3, k0, k1))


@kernel
def _dense_race(weights: Any, c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
    """The winner among float64[V], or BAD_WEIGHTS. The block of the largest weight runs first and sets the pace."""
    tops = _tops(weights)
    first = np.argmax(tops)
    largest = np.uint64(tops[first]).view(np.float64)
    if not 0 < largest < np.inf:
        return BAD_WEIGHTS
    if weights.size == 1:
        return 0
    scale = _scale_of(largest)
    even, odd = np.empty(PAIRS, dtype=np.uint32), np.empty(PAIRS, dtype=np.uint32)
    winner, best = -1, np.inf
    for turn in range(-1, tops.size):
        b: Any = first if turn < 0 else turn
        if turn == first or tops[b] == 0:
            continue
        limit = limit_of(best, np.uint64(tops[b]).view(np.float64) * scale)
        if upper_words(b * BLOCK, limit, even, odd, c1, c2, c3, k0, k1):
            part = weights[b * BLOCK : (b + 1) * BLOCK]
            winner, best = run_block(b * BLOCK, part, scale, even, odd, limit, winner, best, c1, c2, c3, k0, k1)
    return winner


@kernel
def _race_of_ids(weights: Any, ids: Any, c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
    """Index of the winner among sparse weights, or BAD_WEIGHTS or BAD_IDS. float64[n], int64[n]."""
    tops = _tops(weights)
    largest = np.uint64(tops[np.argmax(tops)]).view(np.float64)
    if not 0 < largest < np.inf:
        return BAD_WEIGHTS
    if not _ascending(ids):
        return BAD_IDS
    if weights.size == 1:
        return 0
    scale = _scale_of(largest)
    noise = np.empty(BLOCK)
    winner, best = -1, np.inf
    for start in range(0, weights.size, BLOCK):
        w = weights[start : start + BLOCK]
        u = noise[: w.size]
        _noise_of_ids(ids[start : start + BLOCK], c1, c2, c3, k0, k1, u)
        for i in range(w.size):
            weight = w[i] * scale
            if weight > 0 and u[i] <= best * SLACK * weight:
                arrival = -math.log1p(-u[i]) / weight
                if arrival < best:
                    winner, best = start + i, arrival
    return winner


@kernel
def _tops(weights: Any) -> Any:
    """The bits of the largest weight of each block, uint64[V / BLOCK].

    Floats of one sign order as their bits do; as unsigned integers, whatever is not a finite non-negative number
    (-0.0 included) lies above all that are. Maxima of integers are vector instructions.
    """
    bits = weights.view(np.uint64)
    tops = np.empty((bits.size + BLOCK - 1) // BLOCK, dtype=np.uint64)
    for b in range(tops.size):
        block = bits[b * BLOCK : (b + 1) * BLOCK]
        top = np.uint64(0)
        for i in range(block.size):
            top = max(top, block[i])
        tops[b] = top
    return tops


@inlined
def _scale_of(largest: Any) -> Any:
    """The power of two that brings the largest weight near 1."""
    return math.ldexp(1.0, -min(max(math.frexp(largest)[1], -1000), 1000))


@kernel
def _ascending(ids: Any) -> Any:
    falls = 0
    for i in range(ids.size - 1):
        falls += ids[i] >= ids[i + 1]
    return falls == 0 and ids[0] >= 0 and ids[-1] <= 2 * MASK32


# --- keys -------------------------------------------------------------------------------------------


def counter_words(position: int, step_start: int, role: Role, node: int) -> tuple[int, int, int]:
    """Counter words 1, 2 and 3 of a draw; for role TARGET, step start and node count as 0.

    Raises InvalidInput where a value does not fit its field.
    """
    if not 0 <= position <= MAX_POSITION:
        raise InvalidInput(f"position = {position}; a draw needs one from 0 to {MAX_POSITION}")
    if role == Role.TARGET:
        return int(position), 0, int(role)
    if not 0 <= node <= MAX_NODE:
        raise InvalidInput(f"node = {node}; a draw needs one from 0 to {MAX_NODE}")
    return int(position), step_start, role + 256 * int(node)


def fresh_seed() -> int:
    """A 64-bit seed from the operating system, for a request that brought none."""
    return secrets.randbits(64)


def derive_seed(seed: int, i: int) -> int:
    """The 64-bit seed of sample i of a request: `seed` itself for i = 0.

    For i > 0, words 0 (high) and 1 of Philox under the key `seed` at the counter (i, 0, 0, 255); 255 stands
    where a draw has its role, so a derived seed shares no noise with the draws of `seed`.
    """
    _check_seed(seed)
    if not 0 <= i <= MASK32:
        raise InvalidInput(f"sample i = {i}; allowed: 0 to {MASK32}")
    if i == 0:
        return seed
    high, low, _, _ = philox4x32((i, 0, 0, DERIVE), (seed & MASK32, seed >> 32))
    return high << 32 | low


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise InvalidInput(f"seed = {seed}; allowed: 0 to {MAX_SEED}")


class KeyedDraws:
    """The `Draws` of one request in one step; holds a key and no state.

    seed: 0 .. 2**64 - 1. step_start: committed tokens when the step began, 0 .. 2**32 - 1.
    """

    __slots__ = ("_key0", "_key1", "seed", "step_start")

    def __init__(self, seed: int, step_start: int) -> None:
        _check_seed(seed)
        if not 0 <= step_start <= MAX_POSITION:
            raise InvalidInput(f"step_start = {step_start}; allowed: 0 to {MAX_POSITION}")
        self.seed = int(seed)
        self.step_start = int(step_start)
        self._key0 = self.seed & MASK32
        self._key1 = self.seed >> 32

    def __repr__(self) -> str:
        return f"KeyedDraws(seed={self.seed}, step_start={self.step_start})"

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        """True with that probability: strictly u < probability, u of role ACCEPT at (position, node).

        0 or less never accepts, 1 or more always does. Raises InvalidDistribution on NaN.
        """
        if math.isnan(probability):
            raise InvalidDistribution(
                f"accept probability at position {position}, node {node} is NaN; check the rows p and q"
            )
        c1, c2, c3 = counter_words(position, self.step_start, Role.ACCEPT, node)
        return bool(_lane0(c1, c2, c3, self._key0, self._key1) < probability)

    def key(self, position: int, role: Role, node: int = 0) -> Key:
        """Counter words 1, 2 and 3 and the two key words of one pick, for a kernel that makes the noise itself.

        Raises InvalidInput for role ACCEPT.
        """
        if role == Role.ACCEPT:
            raise InvalidInput("role ACCEPT belongs to accept(); pick with TARGET, DRAFT or RECOVER")
        return (*counter_words(position, self.step_start, role, node), self._key0, self._key1)

    def pick(
        self,
        weights: FloatArray,
        position: int,
        role: Role,
        *,
        ids: IntArray | None = None,
        node: int = 0,
    ) -> int:
        """Draw a token with probability weights / sum(weights), by the exponential race of `race_reference`.

        weights: float64[n], finite, >= 0, at least one > 0, any sum. ids: int64[n] strictly ascending, the
        token of each weight; None when weights[v] is token v's. The noise belongs to the token, so a sparse
        row draws what the dense row with zeros elsewhere would. A single weight needs no noise.
        Raises InvalidDistribution where weights or ids break this, InvalidInput for role ACCEPT.
        """
        c1, c2, c3, k0, k1 = self.key(position, role, node)
        w = np.ascontiguousarray(weights, dtype=np.float64)
        names = NO_IDS if ids is None else np.ascontiguousarray(ids, dtype=np.int64)
        if w.ndim != 1 or w.size == 0 or (ids is not None and names.shape != w.shape):
            shape = "" if ids is None else f" and ids of shape {names.shape}"
            raise InvalidDistribution(
                f"pick at position {position} got weights of shape {w.shape}{shape}; "
                "pass one weight or more on one axis, and ids of the same shape or none"
            )
        winner = _race(w, names, c1, c2, c3, k0, k1)
        if winner == BAD_WEIGHTS:
            _check_weights(w, names, position, role)
            winner = _race(w + 0.0, names, c1, c2, c3, k0, k1)  # -0.0 becomes 0.0
        if winner == BAD_IDS:
            raise InvalidDistribution(
                f"pick at position {position} got ids that do not ascend strictly from 0; sort them, once each"
            )
        return winner if ids is None else int(names[winner])


def _check_weights(weights: FloatArray, ids: IntArray, position: int, role: Role) -> None:
    """Raise InvalidDistribution naming the first weight that is not a finite number >= 0, or their zero sum."""
    bad = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    where = f"pick at position {position}, role {role.name}"
    if bad.size:
        i = int(bad[0])
        token = int(ids[i]) if ids.size else i
        raise InvalidDistribution(
            f"{where}: the weight of token {token} is {weights[i]}; weights are finite and not negative"
        )
    if not weights.any():
        raise InvalidDistribution(f"{where}: all {weights.size} weights are zero; at least one is positive")
