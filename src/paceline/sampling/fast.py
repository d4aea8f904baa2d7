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

__all__ = ["distribution"]


def distribution(logits: ArrayLike, params: SamplingParams, counts: TokenCounts | None) -> Distribution:
    """The distribution of the next token after every transform; the meaning is `reference_distribution`'s.

    logits: float32[V] or float64[V] (other real types are converted), any layout; never written to. -inf
    is allowed and means mass 0. counts: the history before this row, drafts of this step included; None
    only where params.has_penalties is False.
    Dense where no filter removed a token, else sparse; temperature 0 is one-hot at the lowest id among
    the largest logits.

    Raises BadLogits for NaN, +inf or no finite entry (naming the first such token), InvalidInput for a row
    of another shape, missing counts or a history token outside the vocabulary, InvalidParams for a
    logit_bias outside it.
    """
    row = as_row(logits)
    if params.logit_bias or params.has_penalties:
        row = _adjusted(row, params, counts)
    size = row.size
    if params.temperature == 0.0:
        token = int(row.argmax())  # the first NaN where there is one
        if not math.isfinite(row[token]):
            refuse_row(row)
        return Distribution.one_hot(token, size)
    peak = float(row.max())  # NaN where there is one
    if not math.isfinite(peak):
        refuse_row(row)
    weights = np.empty(size)
    top_k = params.top_k if 0 < params.top_k < size else 0
    if not top_k and params.top_p == 1.0 and params.min_p == 0.0:
        kernels.softmax(row, peak, params.temperature, weights)
        return Distribution(weights, size)
    total = kernels.weigh(row, peak, params.temperature, weights)
    ids, light = kernels.shortlist(weights, total, top_k, params.top_p, params.min_p)
    scores = row[ids].astype(np.float64)
    ids, probs = kernels.truncate(ids, light, scores, total, top_k, params.top_p, params.min_p)
    return Distribution(probs, size, None if ids.size == size else ids)


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
        outside = kernels.penalise(
            row, ids, seen, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        )
        if outside >= 0:
            refuse_token(outside, row.size)
    return row
