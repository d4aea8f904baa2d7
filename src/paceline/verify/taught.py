"""One speculative step as it is taught: short signatures, without the flaws of the usual versions.

No epsilon in the denominator, no argmax where something should be drawn, no `u <= probability`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidDistribution, InvalidInput
from ..types import FloatArray
from .inputs import checked_probs

TOLERANCE = 1e-9
"""How far the sum of a taught distribution may be from 1."""


class Uniforms(Protocol):
    """Anything with random() -> float in [0, 1): a numpy Generator, a random.Random, a test's stub."""

    def random(self) -> float: ...


def rejection_rule(
    target_probs: Sequence[float] | NDArray[Any],
    draft_probs: Sequence[float] | NDArray[Any],
    draft_token: int,
) -> tuple[float, list[float]]:
    """What to do with one draft: the probability of keeping it, and what to draw from when it is not kept.

    target_probs, draft_probs: p and q, V numbers each. draft_token: the token x that was drawn from q.
    Returns (min(1, p(x) / q(x)), normalised (p - q)+), the second being p itself when p = q, where it can
    never be needed. Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1.

    >>> rejection_rule([0.7, 0.3], [0.4, 0.6], 1)
    (0.5, [1.0, 0.0])

    Raises InvalidDistribution (a ValueError): lengths that differ or are 0, an entry that is negative or
    not finite, a sum off by more than 1e-9, a token that is not an index, a token with q = 0.
    """
    p = checked_probs(target_probs, "target_probs", TOLERANCE)
    q = checked_probs(draft_probs, "draft_probs", TOLERANCE)
    if p.size != q.size:
        raise InvalidDistribution(
            f"target_probs has {p.size} entries and draft_probs {q.size}; both need one per token"
        )
    x = _drawn_token(draft_token, q, "draft_token")
    accept_probability = min(1.0, float(p[x]) / float(q[x]))
    owed = np.maximum(p - q, 0.0)
    mass = float(owed.sum())
    return accept_probability, (owed / mass if mass > 0.0 else p).tolist()


def speculative_step_verification(
    draft_tokens: Sequence[int] | NDArray[Any],
    p_probs: Sequence[Any] | NDArray[Any],
    q_probs: Sequence[Any] | NDArray[Any],
    rng: Uniforms | int | None = None,
) -> list[int]:
    """Verify K drafts token by token and return the tokens to emit.

    draft_tokens: K ids, the i-th drawn from q_probs[i]. q_probs: (K, V). p_probs: (K, V), or (K + 1, V), in
    which case a bonus token follows when every draft is kept. rng: a numpy Generator (or anything with
    random()), a seed, or None for fresh noise.

    Returns the kept drafts, then the token recovered from normalised (p - q)+ at the first rejection, or the
    bonus. Chen et al. 2023 (arXiv 2302.01318), Algorithm 2.

    Raises InvalidDistribution (a ValueError) for what rejection_rule refuses and for shapes that differ.
    """
    tokens = _items(draft_tokens, "draft_tokens")
    p = [checked_probs(row, f"p_probs[{i}]", TOLERANCE) for i, row in enumerate(_items(p_probs, "p_probs"))]
    q = [checked_probs(row, f"q_probs[{i}]", TOLERANCE) for i, row in enumerate(_items(q_probs, "q_probs"))]
    if len(q) != len(tokens) or len(p) not in (len(tokens), len(tokens) + 1):
        raise InvalidDistribution(
            f"{len(tokens)} draft tokens need as many rows of q_probs, and as many or one more of p_probs; "
            f"got {len(q)} and {len(p)}"
        )
    if len({row.size for row in (*p, *q)}) > 1:
        raise InvalidDistribution(f"rows differ in length: p {[r.size for r in p]}, q {[r.size for r in q]}")
    drafts = [_drawn_token(x, q[i], f"draft_tokens[{i}]") for i, x in enumerate(tokens)]
    uniforms = _uniforms(rng)
    for i, x in enumerate(drafts):
        accept_probability, residual = rejection_rule(p[i], q[i], x)
        if not uniforms.random() < accept_probability:
            return [*drafts[:i], _draw(np.array(residual), uniforms.random())]
    return drafts if len(p) == len(drafts) else [*drafts, _draw(p[-1], uniforms.random())]


def _items(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise InvalidDistribution(f"{name} = {values!r} is not a sequence; pass one item per draft") from None


def _drawn_token(token: Any, q: FloatArray, name: str) -> int:
    """`token` as an index of q that q can have produced."""
    try:
        x = operator.index(token)
    except TypeError:
        x = -1
    if isinstance(token, bool) or not 0 <= x < q.size:
        raise InvalidDistribution(f"{name} = {token!r}; a token is an integer from 0 to {q.size - 1}")
    if not q[x] > 0.0:
        raise InvalidDistribution(f"{name} = {x} has q = 0; it cannot have been drawn from q")
    return x


def _draw(weights: FloatArray, u: float) -> int:
    """The token at which the running sum first exceeds u of the total; never one of weight 0."""
    tokens = np.flatnonzero(weights > 0.0)
    running = np.cumsum(weights[tokens])
    i = int(np.searchsorted(running, u * running[-1], side="right"))
    return int(tokens[min(i, tokens.size - 1)])


def _uniforms(rng: Uniforms | int | None) -> Uniforms:
    if rng is None or (isinstance(rng, (int, np.integer)) and not isinstance(rng, bool) and rng >= 0):
        return np.random.default_rng(rng)
    if isinstance(rng, bool) or not callable(getattr(rng, "random", None)):
        raise InvalidInput(f"rng = {rng!r}; pass a numpy Generator, a seed >= 0, or None")
    return rng  # type: ignore[return-value]
