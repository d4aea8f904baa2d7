"""What plain decoding must give, written once more without any shipped code that a mutant may touch.

p from logits and params, the law of a whole completion by recursion, and the stream of one seed from the
documented address of every random number. Slow and short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from paceline.backend.toy import ToyBackend
from paceline.params import SamplingParams
from paceline.rng import uniforms
from paceline.types import Role, Segment

Tokens = tuple[int, ...]
Table = Callable[[Tokens], Sequence[float]]
Completion = tuple[Tokens, str]
"""Output tokens, the stop id included, and the finish reason."""


def plain_p(logits: Sequence[float], params: SamplingParams, prompt: Tokens, output: Tokens) -> list[float]:
    """float[V] logits -> float[V] p: bias, penalties, temperature, top-k, top-p, min-p, in this order."""
    z = [float(value) for value in logits]
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in {*prompt, *output}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    top = max(z)
    if params.temperature == 0:
        return [1.0 if token == z.index(top) else 0.0 for token in range(len(z))]
    p = _normal([math.exp((value - top) / params.temperature) for value in z])
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if params.top_k > 0:
        p = _only(p, order[: params.top_k])
    if params.top_p < 1:
        mass, kept = 0.0, []
        for token in order:
            kept.append(token)
            mass += p[token]
            if mass >= params.top_p:
                break
        p = _only(p, kept)
    return _only(p, [token for token in order if p[token] >= params.min_p * max(p)])


def _only(p: list[float], kept: list[int]) -> list[float]:
    return _normal([mass if token in kept else 0.0 for token, mass in enumerate(p)])


def _normal(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def plain_law(
    table: Table, prompt: Tokens, params: SamplingParams, stop_ids: frozenset[int]
) -> dict[Completion, float]:
    """The law of one request's completion: one token at a time from plain_p, until a stop id or max_tokens."""
    assert params.max_tokens is not None
    law: dict[Completion, float] = {}
    alive: dict[Tokens, float] = {(): 1.0}
    while alive:
        longer: dict[Tokens, float] = {}
        for output, weight in alive.items():
            for token, p in enumerate(plain_p(table(prompt + output), params, prompt, output)):
                grown = (*output, token)
                if p == 0.0:
                    continue
                if token in stop_ids or len(grown) == params.max_tokens:
                    law[grown, "stop" if token in stop_ids else "length"] = weight * p
                else:
                    longer[grown] = weight * p
        alive = longer
    return law


def plain_stream(backend: ToyBackend, prompt: Tokens, params: SamplingParams) -> Tokens:
    """The tokens of this seed: every one after a fresh prefill of all before it, by its own documented noise."""
    assert params.max_tokens is not None
    assert params.seed is not None
    output: Tokens = ()
    while len(output) < params.max_tokens:
        slot = backend.acquire()
        rows = backend.forward([Segment(slot, prompt + output, 0, 1)])
        backend.release(slot)
        p = plain_p(rows[0][0], params, prompt, output)
        output = (*output, race(p, params.seed, len(prompt) + len(output), Role.TARGET))
    return output


def race(weights: Sequence[float], seed: int, position: int, role: Role, step_start: int = 0, node: int = 0) -> int:
    """argmin E_v / w_v with the noise at its documented address; step_start and node are 0 for TARGET."""
    best, winner = math.inf, -1
    for token, weight in enumerate(weights):
        if weight > 0:
            arrival = -math.log1p(-noise(seed, position, role, step_start, node, token)) / weight
            if arrival < best:
                best, winner = arrival, token
    return winner


def noise(seed: int, position: int, role: Role, step_start: int, node: int, token: int = 0) -> float:
    """The uniform of one token; token 0 for an accept."""
    counter = (token // 2, position, step_start, role + 256 * node)
    return uniforms(counter, (seed % 2**32, seed >> 32))[token % 2]


def softmax_logits(row: Sequence[float]) -> list[float]:
    """Logits whose softmax is `row`."""
    return [math.log(p) if p > 0 else -math.inf for p in row]


def furthest(law: dict[Completion, float], wanted: dict[Completion, float]) -> float:
    """The largest difference of two laws."""
    return max(abs(law.get(outcome, 0.0) - wanted.get(outcome, 0.0)) for outcome in {*law, *wanted})


def g_statistic(counts: dict[Tokens, int], law: dict[Tokens, float]) -> float:
    """G = 2 sum n log(n / expected); infinite where something impossible came out."""
    total = sum(counts.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return math.inf
    return 2 * float(np.sum([n * math.log(n / (total * law[outcome])) for outcome, n in counts.items()]))
