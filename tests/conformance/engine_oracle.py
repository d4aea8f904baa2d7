"""The law of plain sampling, from its definition: one token after another, looking at nothing but p.

What an engine with drafts must reproduce. It knows no steps, no drafts, no cache and no text stream, and shares no
code with what it judges: see options_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paceline.params import SamplingParams

from .enumerator import TOLERANCE, Law
from .options_reference import Outcome, Plain, Tokens, pattern_of

__all__ = ["Outcome", "Row", "Tokens", "assert_same_law", "largest_error", "plain_law", "plain_request"]

Row = np.ndarray


def plain_request(
    logits: Callable[[Tokens], Any], prompt: Tokens, params: SamplingParams, max_len: int, end_ids: Iterable[int] = ()
) -> Plain:
    """One request by definition. logits(prompt + output) -> float64[V]; end_ids: those of the model."""
    return Plain(
        logits=logits,
        prompt=prompt,
        params=params,
        room=min(max_len - len(prompt), params.max_tokens or max_len),
        model_ends=frozenset(end_ids),
        pattern=pattern_of(params),
        bad=tuple(word for word in params.bad_words or () if not isinstance(word, str)),
    )


def plain_law(
    logits: Callable[[Tokens], Any], prompt: Tokens, params: SamplingParams, max_len: int, end_ids: Iterable[int] = ()
) -> Law:
    """Exact law of the outcome."""
    return plain_request(logits, prompt, params, max_len, end_ids).law()


def largest_error(law: Law, wanted: Law) -> float:
    """max |law - wanted| over all outcomes of either."""
    return max(abs(law.get(o, 0.0) - wanted.get(o, 0.0)) for o in {*law, *wanted})


def assert_same_law(law: Law, wanted: Law) -> None:
    """Both laws agree within TOLERANCE at every outcome; the message names the worst."""
    worst = max({*law, *wanted}, key=lambda o: abs(law.get(o, 0.0) - wanted.get(o, 0.0)))
    assert largest_error(law, wanted) <= TOLERANCE, (
        f"{worst} comes out with probability {law.get(worst, 0.0)!r}, plain sampling has {wanted.get(worst, 0.0)!r}"
    )
