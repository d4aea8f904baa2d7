"""The law of plain sampling, from its definition: one token after another, looking at nothing but p.

What an engine with drafts must reproduce. It knows no steps, no drafts, no cache and no text stream; only the
meaning of the sampling options is shared with the shipped code (`reference_distribution`, numpy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from paceline.backend.toy import ALPHABET
from paceline.params import SamplingParams
from paceline.sampling import reference_distribution

from .enumerator import TOLERANCE, Law

Tokens = tuple[int, ...]
Row = np.ndarray
Outcome = tuple[Tokens, str, str, int | str | None]
"""(token_ids, text, finish_reason, stop_reason) of a finished request."""


def plain_law(
    logits: Callable[[Tokens], Row],
    prompt: Tokens,
    params: SamplingParams,
    max_len: int,
    end_ids: Iterable[int] = (),
) -> Law:
    """Exact law of the outcome. logits(prompt + output) -> float64[V]; end_ids: those of the model."""
    room = min(max_len - len(prompt), params.max_tokens or max_len)
    law: Law = {}

    def extend(output: Tokens, weight: float) -> None:
        p = reference_distribution(logits((*prompt, *output)), params, prompt, output).dense()
        for token in np.flatnonzero(p).tolist():
            longer = (*output, token)
            end = ending(longer, params, room, frozenset(end_ids))
            if end is None:
                extend(longer, weight * p[token])
            else:
                law[end] = law.get(end, 0.0) + weight * p[token]

    extend((), 1.0)
    return law


def ending(output: Tokens, params: SamplingParams, room: int, end_ids: frozenset[int]) -> Outcome | None:
    """How a request that has just received the last token of `output` ends, or None where it goes on."""
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else end_ids)
    if output[-1] in stops:
        shown = output if params.include_stop_str_in_output else output[:-1]
        return output, text_of(shown, end_ids), "stop", output[-1]
    text = text_of(output, end_ids)
    ended_by = max((s for s in params.stop_strings if text.endswith(s)), key=len, default=None)
    if ended_by is not None:
        if not params.include_stop_str_in_output:
            text = text[: -len(ended_by)]
        covering = next(n for n in range(len(output) + 1) if text_of(output[:n], end_ids)[: len(text)] == text)
        return output[:covering], text, "stop", ended_by
    if len(output) == room:
        return output, text, "length", None
    return None


def text_of(output: Tokens, end_ids: frozenset[int]) -> str:
    """The toy's text: one character a token, none for the model's end ids."""
    return "".join(chr(ALPHABET[token]) for token in output if token not in end_ids)


def largest_error(law: Law, wanted: Law) -> float:
    """max |law - wanted| over all outcomes of either."""
    return max(abs(law.get(o, 0.0) - wanted.get(o, 0.0)) for o in {*law, *wanted})


def assert_same_law(law: Law, wanted: Law) -> None:
    """Both laws agree within TOLERANCE at every outcome; the message names the worst."""
    worst = max({*law, *wanted}, key=lambda o: abs(law.get(o, 0.0) - wanted.get(o, 0.0)))
    assert largest_error(law, wanted) <= TOLERANCE, (
        f"{worst} comes out with probability {law.get(worst, 0.0)!r}, plain sampling has {wanted.get(worst, 0.0)!r}"
    )
