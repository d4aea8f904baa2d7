"""The compiled row kernels behind `distribution`. Each stays on the calling thread and allocates what it returns.

exp2.py      the exponential that fast path and reference share
weights.py   largest logit, weights, their total, penalties
filters.py   top-k, top-p and min-p by selection
race.py      a draw straight from logits

Words used here. *Weight*: mass relative to the most likely token, exp((logit - largest logit) / temperature),
so the likeliest token weighs exactly 1. *Total*: sum of the weights that are left; a filter that compares a
weight with a fraction of the total sees the renormalised result of the filter before. *Exponent*: the weight's
logarithm to base 2, (logit - largest logit) * scale. *Rank*: order by logit, largest first, the lower token id
first among equal logits; every filter keeps the front of this ranking. *Tops*: the largest logit of each block
of BLOCK tokens.
"""

from .exp2 import exp2_of
from .filters import rank, shortlist, truncate
from .race import race
from .weights import (
    peak_of,
    penalise,
    scale_of,
    tops_of,
    total,
    total_of,
    total_of_ids,
    weigh,
    weight_of,
    weights_of,
)

__all__ = [
    "exp2_of",
    "peak_of",
    "penalise",
    "race",
    "rank",
    "scale_of",
    "shortlist",
    "tops_of",
    "total",
    "total_of",
    "total_of_ids",
    "truncate",
    "weigh",
    "weight_of",
    "weights_of",
]
