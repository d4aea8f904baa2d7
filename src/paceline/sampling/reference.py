"""The meaning of every sampling option, in plain numpy: one pure function per transform, in order.

The fast path of `distribution` is held to this page bit for bit. All arithmetic is float64. Logit transforms map
float64[V] to float64[V]. Filters map *weights* to weights: the mass of each token relative to the most likely
one, 0 where a filter removed it. Comparing weights with fractions of what is left is the same as
renormalising after each filter, without its rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput, NoLegalToken
from ..params import SamplingParams
from ..types import Distribution, FloatArray, IntArray
from . import kernels
from .processors import Processor, cloned
from .rows import as_row, check_bias, refuse_row, refuse_token

__all__ = ["constrained_row", "reference_distribution"]

Run = tuple[int, ...]


def reference_distribution(
    logits: ArrayLike,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    processors: Sequence[Processor] | None = None,
    bad_words: Sequence[Run] | None = None,
    end_ids: Collection[int] = (),
    legal: NDArray[np.bool_] | None = None,
) -> Distribution:
    """The distribution of the next token after prompt + output (drafts before the row belong to output).

    Order: processors, constraints, logit_bias, repetition, presence and frequency penalty, temperature, top-k, top-p,
    min-p; each filter sees the renormalised result of the one before. What params alone do not tell:

    processors: as they are at this row; default clones of params.logits_processors. bad_words: runs of token ids;
    default params.bad_words, which must then hold no texts. end_ids: what ends the request, for min_tokens. legal:
    bool[V], what the grammar allows here, or None for everything.

    Result and errors as for `distribution`; NoLegalToken where processors and constraints leave nothing of a row.
    """
    row = as_row(logits).astype(np.float64)
    check_bias(params, row.size)
    z = row
    for processor in cloned(params.logits_processors or ()) if processors is None else processors:
        z = np.array(processor((*prompt, *output), z.copy()), dtype=np.float64)
    z = constrained_row(
        z,
        output,
        allowed=params.allowed_token_ids,
        bad_words=_runs(params) if bad_words is None else bad_words,
        early_ids=end_ids if len(output) < params.min_tokens else (),
        legal=legal,
    )
    if z.max() == -np.inf and row.max() > -np.inf:
        raise NoLegalToken("logits_processors and constraints leave no token that may follow")
    z = with_bias(z, params.logit_bias or {})
    if params.has_penalties:
        for token in (*prompt, *output):
            if not 0 <= token < z.size:
                refuse_token(token, z.size)
        z = with_repetition(z, params.repetition_penalty, {*prompt, *output})
        counts = np.bincount(np.array(output, dtype=np.int64), minlength=z.size)
        z = with_presence(z, params.presence_penalty, counts)
        z = with_frequency(z, params.frequency_penalty, counts)
    if not np.isfinite(z.max()):
        refuse_row(z)
    if params.temperature == 0.0:
        return Distribution.one_hot(int(np.argmax(z)), z.size)
    weights = relative(z, params.temperature)
    ranking = np.argsort(-z, kind="stable")
    kept = weights
    if 0 < params.top_k < z.size:
        kept = top_k(kept, ranking, params.top_k)
    if params.top_p < 1.0:
        kept = top_p(kept, ranking, params.top_p)
    if params.min_p > 0.0:
        kept = min_p(kept, params.min_p)
    return _distribution(kept, truncated=kept is not weights)


def constrained_row(
    z: FloatArray,
    output: Sequence[int],
    *,
    allowed: Collection[int] | None = None,
    bad_words: Sequence[Run] = (),
    early_ids: Collection[int] = (),
    legal: NDArray[np.bool_] | None = None,
) -> FloatArray:
    """float64[V] with -inf at every token that a constraint forbids; a new array.

    allowed: all that may come. bad_words: runs that the output, drafts included, may not hold. early_ids: ids that
    would end the request before min_tokens. legal: bool[V], the grammar's.
    """

    def may_follow(token: int) -> bool:
        longer = (*output, token)
        return (
            (allowed is None or token in allowed)
            and not any(longer[-len(run) :] == tuple(run) for run in bad_words)
            and token not in early_ids
            and (legal is None or bool(legal[token]))
        )

    return np.array([x if may_follow(token) else -np.inf for token, x in enumerate(z)])


def _runs(params: SamplingParams) -> list[Run]:
    runs = []
    for word in params.bad_words or ():
        if isinstance(word, str):
            raise InvalidInput(f"bad_words holds the text {word!r}; pass bad_words=bad_word_sequences(...) for it")
        runs.append(tuple(word))
    return runs


def with_bias(z: FloatArray, bias: Mapping[int, float]) -> FloatArray:
    """Add each token's bias to its logit."""
    z = z.copy()
    for token, value in bias.items():
        z[token] += value
    return z


def with_repetition(z: FloatArray, penalty: float, seen: set[int]) -> FloatArray:
    """Divide a seen token's positive logit by the penalty, multiply one that is not; 0 stays 0.

    Source: Keskar et al., "CTRL" (arXiv 1909.05858), section 4.1, with the sign case that is usual since.
    """
    z = z.copy()
    with np.errstate(over="ignore"):
        for token in seen:
            z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    return z


def with_presence(z: FloatArray, penalty: float, counts: IntArray) -> FloatArray:
    """Subtract the penalty once from every token of the output. counts: int64[V]."""
    return np.where(counts > 0, z - penalty, z)


def with_frequency(z: FloatArray, penalty: float, counts: IntArray) -> FloatArray:
    """Subtract the penalty as often as the token is in the output. counts: int64[V]."""
    return np.where(counts > 0, z - penalty * counts, z)


def relative(z: FloatArray, temperature: float) -> FloatArray:
    """Weights exp((z - max z) / temperature): 1 for the most likely token, 0 from 2**-1023 down."""
    weights = np.empty_like(z)
    with np.errstate(over="ignore"):
        kernels.exp2_of((z - z.max()) * kernels.scale_of(temperature), weights)
    return weights


def top_k(weights: FloatArray, ranking: IntArray, k: int) -> FloatArray:
    """Keep the k first of the ranking (largest logit first, the lower id first among equals)."""
    return _only(weights, ranking[:k])


def top_p(weights: FloatArray, ranking: IntArray, p: float) -> FloatArray:
    """Keep the shortest front of the ranking whose share of what is left is at least p.

    Source: Holtzman et al., "The curious case of neural text degeneration" (arXiv 1904.09751), section 3.1.
    """
    before = np.concatenate(([0.0], np.cumsum(weights[ranking])[:-1]))
    return _only(weights, ranking[before < p * total_of(weights)])


def min_p(weights: FloatArray, share: float) -> FloatArray:
    """Keep tokens of at least `share` times the mass of the most likely one, whose weight is 1.

    Source: Nguyen et al., "Min-p sampling" (arXiv 2407.01082), section 3.
    """
    return _only(weights, np.flatnonzero(weights >= share))


def total_of(weights: FloatArray) -> float:
    """Sum of float64[V] in the order that the compiled path uses too: 32 lanes by token % 32, then halving."""
    rows = np.zeros((-(-weights.size // 32), 32))
    rows.ravel()[: weights.size] = weights
    lanes = np.add.accumulate(rows, axis=0)[-1]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def _only(weights: FloatArray, ids: IntArray) -> FloatArray:
    kept = np.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept


def _distribution(weights: FloatArray, truncated: bool) -> Distribution:
    """Renormalise; sparse where a filter removed a token. A filter never keeps a token of mass 0."""
    share = 1.0 / total_of(weights)
    ids = np.flatnonzero(weights)
    if not truncated or ids.size == weights.size:
        return Distribution(weights * share, weights.size)
    return Distribution(weights[ids] * share, weights.size, ids)
