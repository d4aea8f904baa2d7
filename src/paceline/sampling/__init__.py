"""Logits + params + history -> the distribution of the next token. The only road to one, for every row.

distribution(logits, params, counts)                       what the engine calls, compiled
reference_distribution(logits, params, prompt, output)     what it means, in plain numpy
TokenCounts(prompt_ids)                                    the history that penalties need

The same road serves plain, accepted, recovered and bonus rows of the target, and the drafter's q.
"""

from .counts import TokenCounts
from .fast import distribution
from .reference import reference_distribution

__all__ = ["TokenCounts", "distribution", "reference_distribution"]
