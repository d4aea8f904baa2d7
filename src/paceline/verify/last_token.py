"""The token that follows the accepted drafts: recovered from a residual, or the bonus."""

from __future__ import annotations

import numpy as np

from ..types import Distribution, Draws, FloatArray, Role, Verdict


def residual(p: Distribution, q: Distribution, scale: float = 1.0) -> FloatArray:
    """(scale * p - q)+, not normalised, at p's own tokens: float64[V], or float64[n] when p is sparse.

    Tokens outside p's support have none, so a truncated p keeps the work at n entries. This is what p
    still owes after q's accepted share: the norm(max(0, p - q)) of Leviathan et al. 2023
    (arXiv 2211.17192), Algorithm 1; with scale = b the residual of block verification.
    """
    if p.ids is None and q.ids is not None:
        owed = scale * p.probs
        owed[q.ids] -= q.probs
    else:
        owed = scale * p.probs - q.at(p.ids)
    return np.maximum(owed, 0.0, out=owed)


def acceptance(p: Distribution, q: Distribution) -> float:
    """sum_v min(p(v), q(v)) = 1 - TV(p, q): the chance that token-by-token rejection keeps a draft from q.

    Leviathan et al. 2023, Corollary 3.6.
    """
    return float(p.probs.sum() - residual(p, q).sum())


def recovered(accepted: tuple[int, ...], p: Distribution, weights: FloatArray, draws: Draws, position: int) -> Verdict:
    """Stop after `accepted`: one more token from `weights`, the residual over p's tokens.

    A residual without mass means p = q, and then the draft was kept: the branch has probability zero.
    Rounding can still lead here (a ratio of 1 - 1e-16 meets the largest uniform); p itself is then right
    to within that rounding.
    """
    n = len(accepted)
    if weights.sum() == 0.0:
        weights = p.probs
    token = draws.pick(weights, position + n, Role.RECOVER, ids=p.ids, node=n)
    return Verdict((*accepted, token), n, tuple(range(n)), "recovered")


def bonus(accepted: tuple[int, ...], p: Distribution, draws: Draws, position: int) -> Verdict:
    """Every draft was kept (or there was none: plain decoding): one more token from p itself."""
    n = len(accepted)
    token = p.pick(draws, position + n, Role.TARGET)
    return Verdict((*accepted, token), n, tuple(range(n)), "bonus")
