"""Where a token stands in a row: its logprob, its rank, and the tokens ahead of it.

raw_logprobs(logits, token, top)        of the model's logits as they are
processed_logprobs(p, token, top)       of p, after every transform

Pure functions of one row, so that a token's numbers do not depend on how it came to be decided.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput
from ..types import Distribution, FloatArray, IntArray
from .rows import Row, as_row, refuse_row

__all__ = ["Entry", "processed_logprobs", "raw_logprobs"]

Entry = tuple[int, float, int]
"""A token, the natural logarithm of its probability (-inf for 0), and its rank: 1 for the likeliest token, and among
equals the lower id first."""


def raw_logprobs(logits: ArrayLike, token: int, top: int) -> list[Entry]:
    """The log-softmax of a row: `token` first, then the `top` likeliest tokens by rank, `token` not twice.

    logits: real[V], never written to; computed in float64. top: 0 is none, -1 all. A token whose logit is -inf is
    listed only where it is `token`.

    Raises BadLogits for NaN, +inf or no finite entry; InvalidInput for a row of another shape, or a token outside it.
    """
    row = as_row(logits)
    _check_token(token, row.size)
    peak = float(row.max())  # NaN where there is one
    if not math.isfinite(peak):
        refuse_row(row)
    shifted = row.astype(np.float64) - peak
    shift = math.log(float(np.exp(shifted).sum()))
    own = int(np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])) + 1
    best = _likeliest(row, row.size if top < 0 else top)
    ids = best[row[best] > -math.inf]
    return _entries(token, float(shifted[token]) - shift, own, ids, shifted[ids] - shift)


def processed_logprobs(p: Distribution, token: int, top: int) -> list[Entry]:
    """The same of a distribution: `token` first, then the `top` likeliest tokens by rank, `token` not twice.

    A token of probability 0 is listed only where it is `token`. Raises InvalidInput for a token outside p.
    """
    _check_token(token, p.vocab_size)
    own = p.prob(token)
    before = p.probs[: token if p.ids is None else int(np.searchsorted(p.ids, token))]
    lower = np.count_nonzero(before == own) if own > 0.0 else token - np.count_nonzero(before)
    rank = int(np.count_nonzero(p.probs > own) + lower) + 1
    best = _likeliest(p.probs, p.probs.size if top < 0 else top)
    best = best[p.probs[best] > 0.0]
    ids = best if p.ids is None else p.ids[best]
    return _entries(token, math.log(own) if own > 0.0 else -math.inf, rank, ids, np.log(p.probs[best]))


def _check_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidInput(f"token = {token}, but the row has {vocab_size} tokens; allowed: 0 to {vocab_size - 1}")


def _likeliest(values: Row, k: int) -> IntArray:
    """Indices of the k largest values, largest first, the lower index first among equals."""
    if k == 0:
        return np.empty(0, dtype=np.int64)
    if k < values.size:
        least = np.partition(values, values.size - k)[values.size - k]
        above: NDArray[np.int64] = np.flatnonzero(values > least)
        level = np.flatnonzero(values == least)[: k - above.size]
        chosen = np.sort(np.concatenate((above, level)))
    else:
        chosen = np.arange(values.size)
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _entries(token: int, logprob: float, rank: int, ids: IntArray, logprobs: FloatArray) -> list[Entry]:
    """`ids` are in order of rank, the first has rank 1."""
    ranked = zip(ids.tolist(), logprobs.tolist(), range(1, ids.size + 1), strict=True)
    return [(token, logprob, rank), *(entry for entry in ranked if entry[0] != token)]
