"""First come, first served: what each running request may do in the next step. Pure functions.

A step holds at most `max_step_tokens` tokens. Half of it, rounded up, is for decoding (one committed
token and its drafts per request), half for prefilling. A prompt is always cut at the same places, whoever
else is there: chunks of exactly the prefill half, then the rest. So the chunks of a request never depend
on its company, and with equal kernels neither do its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's share of a step: prefill `prefill` tokens, or decode with at most `drafts` drafts.

    prefill = drafts = 0 and decode = False: the request waits this step.
    """

    prefill: int = 0
    decode: bool = False
    drafts: int = 0


def prefill_chunk(max_step_tokens: int) -> int:
    """Tokens of one prefill chunk; the part of a step that prefilling may use."""
    return max_step_tokens // 2


def plan(uncached: Sequence[int], wanted: Sequence[int], max_step_tokens: int) -> list[Turn]:
    """Turns for requests in order of arrival.

    uncached[i] >= 1: committed tokens of request i that are not cached; 1 means it decodes, more that it
    prefills all but the last. wanted[i]: drafts it would like. Needs max_step_tokens >= 2 * len(uncached),
    so that every decoding request gets its one token and the first prefilling request its chunk: nobody
    starves, because whoever arrived first is always served.
    """
    chunk = prefill_chunk(max_step_tokens)
    drafts_left = max_step_tokens - chunk - sum(n == 1 for n in uncached)
    prefill_left = chunk
    turns = []
    for n, want in zip(uncached, wanted, strict=True):
        if n == 1:
            drafts = min(want, drafts_left)
            drafts_left -= drafts
            turns.append(Turn(decode=True, drafts=drafts))
        else:
            size = min(chunk, n - 1)
            if size > prefill_left:
                # Later, shorter prompts do not overtake: order of arrival holds.
                size = prefill_left = 0
            prefill_left -= size
            turns.append(Turn(prefill=size))
    return turns


def parts(rows: Sequence[int], max_rows: int) -> list[slice]:
    """Cut a step's requests, in order, into forwards of at most max_rows rows of logits.

    rows[i]: rows of request i. Nobody is split: a request with more than max_rows goes alone.
    """
    cuts, held = [0], 0
    for i, n in enumerate(rows):
        if held and held + n > max_rows:
            cuts.append(i)
            held = 0
        held += n
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(rows)], strict=True)]
