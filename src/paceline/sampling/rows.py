"""What a row of logits may be, and how a bad one is refused."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import BadLogits, InvalidInput, InvalidParams
from ..params import SamplingParams

Row = NDArray[Any]  # float32[V] or float64[V]


def as_row(logits: ArrayLike) -> Row:
    """`logits` as contiguous float32[V] or float64[V] (other real types become float64). May be a view.

    Raises InvalidInput where it is not one non-empty axis of real numbers.
    """
    row = np.asarray(logits)
    if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "fiu":
        raise InvalidInput(
            f"logits have shape {row.shape} and dtype {row.dtype}; pass one row of real numbers, one per token"
        )
    if row.dtype != np.float32 and row.dtype != np.float64:
        return row.astype(np.float64)
    return np.ascontiguousarray(row)


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidParams where logit_bias names a token outside the vocabulary."""
    top = max(params.logit_bias, default=-1) if params.logit_bias else -1
    if top >= vocab_size:
        raise InvalidParams(
            f"logit_bias names token {top}, but the vocabulary has {vocab_size} tokens; allowed: 0 to {vocab_size - 1}"
        )


def refuse_token(token: int, vocab_size: int) -> NoReturn:
    """Raise InvalidInput for a history token that is outside the vocabulary."""
    raise InvalidInput(
        f"the history holds token {token}, but the vocabulary has {vocab_size} tokens; allowed: 0 to {vocab_size - 1}"
    )


def refuse_row(row: Row) -> NoReturn:
    """Raise BadLogits saying what is wrong with a row whose largest entry is not finite."""
    for name, bad in (("NaN", np.isnan(row)), ("+inf", np.isposinf(row))):
        if bad.any():
            token = int(np.argmax(bad))
            raise BadLogits(
                f"logits hold {name} at token {token} ({int(bad.sum())} of {row.size} entries); "
                "the model or a logit transform produced it"
            )
    raise BadLogits(f"all {row.size} logits are -inf; at least one token needs a finite logit")
