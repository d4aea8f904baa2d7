"""What every sampling option means, once more and without any shipped code, over texts of single bytes.

A grammar is a regular expression that is read by derivatives (Brzozowski 1964, "Derivatives of regular
expressions"): what may follow is whatever leaves something to match. From that, from lists of ids and from the
formulas of the filters come p of any row, the law of plain sampling by recursion, the stream of one seed from the
documented address of its noise, how a request ends, and its logprobs. Slow, and short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from paceline.backend.toy import ALPHABET
from paceline.params import SamplingParams
from paceline.types import Role

from .mutants_reference import race

Tokens = tuple[int, ...]
Outcome = tuple[Tokens, str, str, int | str | None]
"""(token_ids, text, finish_reason, stop_reason); of an error the last is the name of its type."""
Places = dict[int, tuple[float, int]]
"""Token -> (logprob, rank), as `logprobs` asks for them."""

# --- regular expressions ------------------------------------------------------------------------------

Node = tuple[Any, ...]
NOTHING: Node = ("nothing",)
EMPTY: Node = ("empty",)


def one_of(letters: Sequence[int]) -> Node:
    return ("letters", frozenset(letters)) if letters else NOTHING


def then(first: Node, second: Node) -> Node:
    if NOTHING in (first, second):
        return NOTHING
    if first == EMPTY:
        return second
    return first if second == EMPTY else ("then", first, second)


def either(*nodes: Node) -> Node:
    kept: set[Node] = set()
    for node in nodes:
        kept |= node[1] if node[0] == "either" else {node}
    kept.discard(NOTHING)
    if not kept:
        return NOTHING
    return next(iter(kept)) if len(kept) == 1 else ("either", frozenset(kept))


def repeat(node: Node, low: int, high: int | None) -> Node:
    if high is None:
        tail: Node = ("star", node)
    else:
        tail = EMPTY
        for _ in range(high - low):
            tail = either(EMPTY, then(node, tail))
    for _ in range(low):
        tail = then(node, tail)
    return tail


@cache
def may_end(node: Node) -> bool:
    """Whether the node matches the empty text."""
    match node[0]:
        case "empty" | "star":
            return True
        case "then":
            return may_end(node[1]) and may_end(node[2])
        case "either":
            return any(may_end(part) for part in node[1])
    return False


@cache
def behind(node: Node, byte: int) -> Node:
    """What must follow `byte`; NOTHING where it cannot stand here."""
    match node[0]:
        case "letters":
            return EMPTY if byte in node[1] else NOTHING
        case "then":
            rest = then(behind(node[1], byte), node[2])
            return either(rest, behind(node[2], byte)) if may_end(node[1]) else rest
        case "either":
            return either(*(behind(part, byte) for part in node[1]))
        case "star":
            return then(behind(node[1], byte), node)
    return NOTHING


@cache
def parse(pattern: str) -> Node:
    """Letters, \\escapes, [a-z0], groups, |, *, +, ?, {m}, {m,} and {m,n}."""
    node, rest = _alternatives(pattern)
    assert not rest, f"{rest!r} is left over of {pattern!r}"
    return node


def _alternatives(text: str) -> tuple[Node, str]:
    node, text = _sequence(text)
    while text.startswith("|"):
        other, text = _sequence(text[1:])
        node = either(node, other)
    return node, text


def _sequence(text: str) -> tuple[Node, str]:
    node = EMPTY
    while text and text[0] not in "|)":
        part, text = _atom(text)
        while text and text[0] in "*+?{":
            low, high, text = _times(text)
            part = repeat(part, low, high)
        node = then(node, part)
    return node, text


def _times(text: str) -> tuple[int, int | None, str]:
    if text[0] != "{":
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text[0]]
        return low, high, text[1:]
    inside, text = text[1:].split("}", 1)
    first, comma, last = inside.partition(",")
    return int(first), (int(last) if last else None) if comma else int(first), text


def _atom(text: str) -> tuple[Node, str]:
    if text[0] == "(":
        node, text = _alternatives(text[1:])
        return node, text[1:]
    if text[0] == "[":
        inside, text = text[1:].split("]", 1)
        letters: list[int] = []
        while inside:
            width = 3 if inside[1:2] == "-" else 1
            letters += range(ord(inside[0]), ord(inside[width - 1]) + 1)
            inside = inside[width:]
        return one_of(letters), text
    at = int(text[0] == "\\")
    return one_of([ord(text[at])]), text[at + 1 :]


PATTERNS: dict[str, str] = {}
"""What a Lark grammar or a schema says, as a regular expression; by `repr` of SamplingParams.grammar."""


def pattern_of(params: SamplingParams) -> str | None:
    """params.grammar as a regular expression."""
    if params.grammar is None:
        return None
    return str(params.grammar["regex"]) if "regex" in params.grammar else PATTERNS[repr(params.grammar)]


# --- one request --------------------------------------------------------------------------------------


class NoLegalError(Exception):
    """The constraints leave no token."""


@dataclass(frozen=True, eq=False)
class Plain:
    """One request on its own, by definition.

    logits(tokens) -> float64[V]. room: how many tokens the output may have. model_ends: end ids of the model, which
    have no text. pattern: what params.grammar says, as a regular expression. bad: params.bad_words as ids.
    """

    logits: Callable[[Tokens], Any]
    prompt: Tokens
    params: SamplingParams
    room: int
    model_ends: frozenset[int] = frozenset()
    pattern: str | None = None
    bad: tuple[Tokens, ...] = ()
    rows: dict[Tokens, list[float]] = field(default_factory=dict)

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end this request."""
        own = frozenset(self.params.stop_token_ids or ())
        return own if self.params.ignore_eos else own | self.model_ends

    def text(self, output: Tokens) -> str:
        return "".join(chr(ALPHABET[t]) for t in output if t not in self.model_ends)

    # --- what may follow ---

    def grammar(self, output: Tokens) -> Node | None:
        """What the grammar has left behind `output`; None where it does not hold (yet)."""
        if self.pattern is None:
            return None
        start, after = 0, self.params.grammar_after
        if isinstance(after, int):
            start = output.index(after) + 1 if after in output else -1
        elif after is not None:
            ended = [n for n in range(1, len(output) + 1) if self.text(output[:n]).endswith(after)]
            start = ended[0] if ended else -1
        if start < 0:
            return None
        node = parse(self.pattern)
        for token in output[start:]:
            node = NOTHING if token in self.model_ends else behind(node, ALPHABET[token])
        return node

    def legal(self, output: Tokens, vocab_size: int) -> set[int]:
        """Ids that may follow `output`."""
        p = self.params
        legal = set(range(vocab_size)) if p.allowed_token_ids is None else set(p.allowed_token_ids)
        for word in self.bad:
            head = word[:-1]
            if not head or output[-len(head) :] == head:
                legal.discard(word[-1])
        if len(output) < p.min_tokens:
            legal -= self.ends
        node = self.grammar(output)
        if node is None:
            return legal
        return {t for t in legal if self._grammar_takes(node, t)}

    def _grammar_takes(self, node: Node, token: int) -> bool:
        if token in self.model_ends:
            return token in self.ends and may_end(node)
        return behind(node, ALPHABET[token]) != NOTHING

    def is_complete(self, output: Tokens) -> bool:
        """Whether the grammar may end, and leaves nothing that could follow."""
        node = self.grammar(output)
        if node is None or not may_end(node) or len(output) < self.params.min_tokens:
            return False
        vocab_size = len(self.logits(self.prompt))
        return not any(self._grammar_takes(node, t) for t in range(vocab_size) if t not in self.model_ends)

    # --- the distribution ---

    def processed(self, output: Tokens) -> np.ndarray:
        """float64[V]: the row behind `output`, after the processors; those with state walk there from the start."""
        walk = any(hasattr(one, "clone") for one in self.params.logits_processors or ())
        processors = [one.clone() if hasattr(one, "clone") else one for one in self.params.logits_processors or ()]
        row = np.zeros(0)
        for n in range(0 if walk else len(output), len(output) + 1):
            row = np.array(self.logits((*self.prompt, *output[:n])), dtype=np.float64)
            for one in processors:
                row = one((*self.prompt, *output[:n]), row.copy())
        return row

    def p(self, output: Tokens) -> list[float]:
        """The distribution behind `output`. Raises NoLegalError."""
        if output not in self.rows:
            self.rows[output] = self._p(output)
        return self.rows[output]

    def _p(self, output: Tokens) -> list[float]:
        params, z = self.params, [float(value) for value in self.processed(output)]
        legal = self.legal(output, len(z))
        z = [value if token in legal else -math.inf for token, value in enumerate(z)]
        if max(z) == -math.inf:
            raise NoLegalError
        for token, bias in (params.logit_bias or {}).items():
            z[token] += bias
        r = params.repetition_penalty
        for token in {*self.prompt, *output}:
            z[token] = z[token] / r if z[token] > 0 else z[token] * r
        for token in set(output):
            z[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        if params.temperature == 0:
            return [float(token == z.index(max(z))) for token in range(len(z))]
        p = _normal([math.exp((value - max(z)) / params.temperature) for value in z])
        order = sorted(range(len(p)), key=lambda token: (-z[token], token))
        if params.top_k > 0:
            p = _only(p, order[: params.top_k])
        if params.top_p < 1:
            mass = [0.0]
            for token in order:
                mass.append(mass[-1] + p[token])
            p = _only(p, [token for token, before in zip(order, mass, strict=False) if before < params.top_p])
        return _only(p, [token for token in order if p[token] >= params.min_p * max(p)])

    # --- how it ends ---

    def ending(self, output: Tokens) -> Outcome | None:
        """How the request ends that has just received the last token of `output`; None where it goes on."""
        include, token = self.params.include_stop_str_in_output, output[-1]
        if token in self.ends:
            return output, self.text(output if include else output[:-1]), "stop", token
        text, settled = self.text(output), len(self.text(output[: self.params.min_tokens]))
        found = [s for s in self.params.stop_strings if text.endswith(s) and len(text) - len(s) >= settled]
        if found and text != self.text(output[:-1]):
            word = max(found, key=len)
            text = text if include else text[: -len(word)]
            least = min(self.params.min_tokens, len(output))
            covering = next(n for n in range(least, len(output) + 1) if self.text(output[:n])[: len(text)] == text)
            return output[:covering], text, "stop", word
        if self.is_complete(output):
            return output, text, "stop", None
        return (output, text, "length", None) if len(output) == self.room else None

    def law(self) -> dict[Outcome, float]:
        """The law of the outcome of plain sampling."""
        law: dict[Outcome, float] = {}

        def extend(output: Tokens, weight: float) -> None:
            try:
                p = self.p(output)
            except NoLegalError:
                dead = (output, self.text(output), "error", "NoLegalToken")
                law[dead] = law.get(dead, 0.0) + weight
                return
            for token, chance in enumerate(p):
                if chance > 0:
                    end = self.ending((*output, token))
                    if end is None:
                        extend((*output, token), weight * chance)
                    else:
                        law[end] = law.get(end, 0.0) + weight * chance

        extend((), 1.0)
        return law

    def stream(self, seed: int) -> Outcome:
        """The outcome that this seed has."""
        output: Tokens = ()
        while True:
            try:
                p = self.p(output)
            except NoLegalError:
                return output, self.text(output), "error", "NoLegalToken"
            output = (*output, race(p, seed, len(self.prompt) + len(output), Role.TARGET))
            end = self.ending(output)
            if end is not None:
                return end

    def places(self, output: Tokens, token: int, p: Sequence[float]) -> Places:
        """What `logprobs` says of the token behind `output`."""
        if self.params.logprobs is None:
            return {}
        if self.params.logprobs_mode == "raw_logprobs":
            return row_places(self.logits((*self.prompt, *output)), token, self.params.logprobs)
        return row_places([math.log(x) if x > 0 else -math.inf for x in p], token, self.params.logprobs)


def row_places(logits: Sequence[float], token: int, top: int) -> Places:
    """Logprob and rank of the token, then of the `top` likeliest (-1: all) that have any probability."""
    z = [float(value) for value in logits]
    total = max(z) + math.log(math.fsum(math.exp(value - max(z)) for value in z))
    order = sorted(range(len(z)), key=lambda t: (-z[t], t))
    possible = [t for t in order if z[t] > -math.inf]
    front = possible if top < 0 else possible[:top]
    return {t: (z[t] - total, order.index(t) + 1) for t in dict.fromkeys([token, *front])}


def _only(p: Sequence[float], kept: Sequence[int]) -> list[float]:
    chosen = set(kept)
    return _normal([mass if token in chosen else 0.0 for token, mass in enumerate(p)])


def _normal(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]
