"""`distribution`: the one road from logits to p and q."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..params import SamplingParams
from ..types import Distribution
from . import kernels
from .counts import TokenCounts
from .rows import Row, as_row, check_bias, refuse_row, refuse_token
from .softmax import Softmax

__all__ = ["distribution"]

FLOAT32 = np.dtype(np.float32)


def distribution(
    logits: ArrayLike, params: SamplingParams, counts: TokenCounts | None, *, borrow: bool = False
) -> Distribution:
    """The distribution of the next token after every transform; the meaning is `reference_distribution`'s.

    logits: float32[V] or float64[V] (other real types are converted), any layout; never written to. -inf
    is allowed and means mass 0. counts: the history before this row, drafts of this step included; None
    only where params.has_penalties is False. borrow: the caller promises not to change `logits` while the result
    is in use, which saves a copy of the row.
    Dense where no filter removed a token, else sparse; temperature 0 is one-hot at the lowest id among
    the largest logits. A dense row computes what it is asked for, when it is asked.

    Raises BadLogits for NaN, +inf or no finite entry (naming the first such token), InvalidInput for a row
    of another shape, missing counts or a history token outside the vocabulary, InvalidParams for a
    logit_bias outside it.
    """
    row = _fit_row(logits)
    if params.logit_bias or params.has_penalties:
        row = _adjusted(row, params, counts)
    size = row.size
    if params.temperature == 0.0:
        token = int(row.argmax())  # the first NaN where there is one
        if not math.isfinite(row[token]):
            refuse_row(row)
        return Distribution.one_hot(token, size)
    peak = kernels.peak_of(row)
    if not math.isfinite(peak):
        refuse_row(row)
    scale = kernels.scale_of(params.temperature)
    top_k = params.top_k if 0 < params.top_k < size else 0
    if not top_k and params.top_p == 1.0 and params.min_p == 0.0:
        is_ours = row.flags.owndata and row is not logits
        return Softmax(row if borrow or is_ours else row.copy(), peak, scale)
    filters = top_k, float(params.top_p), float(params.min_p)
    total = kernels.total(row, peak, scale) if params.top_p < 1.0 and not top_k else 0.0
    ids, weights, scores = kernels.shortlist(row, kernels.tops_of(row), peak, scale, total, *filters)
    ids, probs = kernels.truncate(ids, weights, scores, total, *filters)
    return Distribution(probs, size, None if ids.size == size else ids)


def _fit_row(logits: ArrayLike) -> Row:
    """`as_row`, and writable: kernels are compiled for such arrays, and for others they would be once more."""
    if type(logits) is np.ndarray and logits.dtype is FLOAT32 and logits.ndim == 1 and logits.flags.carray:
        return logits if logits.size else as_row(logits)  # what backends give, without a closer look
    row = as_row(logits)
    return row if row.flags.writeable else row.copy()


def _adjusted(row: Row, params: SamplingParams, counts: TokenCounts | None) -> Row:
    """A float64 copy of the row with logit_bias and penalties in it; touches only the tokens they name."""
    row = row.astype(np.float64)  # always a copy
    if params.logit_bias:
        check_bias(params, row.size)
        n = len(params.logit_bias)
        tokens = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=n)
        row[tokens] += np.fromiter(params.logit_bias.values(), dtype=np.float64, count=n)
    if params.has_penalties:
        if counts is None:
            raise InvalidInput("these params have penalties; pass the TokenCounts of the row's history")
        ids, seen = counts.arrays()
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        outside = kernels.penalise(row, ids, seen, *map(float, penalties))
        if outside >= 0:
            refuse_token(outside, row.size)
    return row
