"""First come, first served: what each running request may do in the next step. Pure functions.

A step holds at most `max_step_tokens` tokens. Half of it, rounded up, is for decoding (one committed
token and its drafts per request), half for prefilling. A prompt is always cut at the same places, multiples of
the prefill half, whoever else is there and wherever a shared beginning ends. So the chunks that a prompt was
computed in never depend on company, and with equal kernels neither do its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


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


def plan(requests: Sequence[tuple[int, int, int]], max_step_tokens: int) -> list[Turn]:
    """Turns for requests in order of arrival, each given as (cached, uncached, wanted).

    cached, uncached: committed tokens that are cached and that are not; uncached = 1 means it decodes, more that it
    prefills all but the last. wanted: drafts it would like; the oldest get theirs first. Needs max_step_tokens >=
    2 * len(requests), so that every decoding request gets its one token and the first prefilling request its chunk:
    nobody starves, because whoever arrived first is always served.
    """
    chunk = prefill_chunk(max_step_tokens)
    drafts_left = max_step_tokens - chunk - sum(uncached == 1 for _, uncached, _ in requests)
    prefill_left = chunk
    turns = []
    for cached, uncached, wanted in requests:
        if uncached == 1:
            drafts = min(wanted, drafts_left)
            drafts_left -= drafts
            turns.append(Turn(decode=True, drafts=drafts))
        else:
            size = min(chunk - cached % chunk, uncached - 1)
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
    cuts, held = [0] if rows else [], 0
    for i, n in enumerate(rows):
        if held and held + n > max_rows:
            cuts.append(i)
            held = 0
        held += n
    return [slice(a, b) for a, b in pairwise([*cuts, len(rows)])]
