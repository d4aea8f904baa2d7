"""What a rule may be given, and the errors for what it may not.

Arrays come from callers we do not know and are checked entry by entry. A `Distribution` comes from
`sampling/`, which has already checked it, and costs no second pass over the vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any, Protocol

import numpy as np

from ..errors import DrafterError, InvalidDistribution, InvalidInput
from ..types import Distribution, FloatArray, Proposal

ROW_TOLERANCE = 1e-6
"""How far a row's sum may be from 1: a float32 softmax passes. The rule is exact up to that error."""


class RowSource(Protocol):
    """Rows of p: float[K + 1, V], a list of rows, or an object that computes row i when it is asked."""

    def __getitem__(self, i: int, /) -> Any: ...


class Rows:
    """The target's rows as Distributions, each asked of `source` when first needed, and once.

    Row 0 follows the last committed token, row i + 1 follows draft i. Arrays, lists and tuples are
    checked whole at once, so that whether bad input raises does not depend on luck.
    """

    def __init__(self, source: RowSource, num_drafts: int) -> None:
        if isinstance(source, np.ndarray) and source.ndim != 2:
            raise InvalidDistribution(f"target_probs needs shape [K + 1, V], got {source.shape}")
        if isinstance(source, Sized) and len(source) != num_drafts + 1:
            raise InvalidDistribution(
                f"target_probs has {len(source)} rows; {num_drafts} drafts need {num_drafts + 1}: "
                "one after the last committed token and one after each draft"
            )
        self._source = source
        self._rows: dict[int, Distribution] = {}
        if isinstance(source, (np.ndarray, list, tuple)):
            for i in range(num_drafts + 1):
                self[i]

    def __getitem__(self, i: int) -> Distribution:
        if i not in self._rows:
            row = as_distribution(self._source[i], f"target_probs[{i}]")
            if i > 0 and row.vocab_size != self.vocab_size:
                raise InvalidDistribution(
                    f"target_probs[{i}] has {row.vocab_size} entries, target_probs[0] has {self.vocab_size}"
                )
            self._rows[i] = row
        return self._rows[i]

    @property
    def vocab_size(self) -> int:
        """V, from row 0, which every rule needs."""
        return self[0].vocab_size


def chain_rows(rule: str, target_probs: RowSource, proposal: Proposal, position: int) -> Rows:
    """The rows of p for a chain whose every token the target can emit.

    Raises InvalidInput for a tree or a position that is no index, InvalidDistribution for bad rows,
    DrafterError for a token >= V.
    """
    if not proposal.is_chain:
        raise InvalidInput(f"{rule} decides chains; a proposal with parents {proposal.parents} is a tree")
    if isinstance(position, bool) or not hasattr(position, "__index__") or operator.index(position) < 0:
        raise InvalidInput(f"position = {position!r}; it is the committed length, an integer >= 0")
    rows = Rows(target_probs, len(proposal))
    for i, token in enumerate(proposal.tokens):
        if token >= rows.vocab_size:
            raise DrafterError(
                f"draft {i} is token {token}, but the target's ids are 0 .. {rows.vocab_size - 1}; "
                "a drafter may only propose what the target can emit"
            )
    return rows


def draft_rows(rule: str, proposal: Proposal, vocab_size: int) -> list[Distribution]:
    """q for each draft of a sampled chain, over the target's vocabulary. Unused rows of q are not read.

    Raises InvalidInput for a point proposal, DrafterError where q gives a draft no mass.
    """
    if not proposal.tokens:
        return []
    if proposal.kind != "sampled" or proposal.q is None:
        raise InvalidInput(
            f"{rule} needs a sampled proposal, got a {proposal.kind} one; without q there is no ratio p/q: "
            "use verify_point"
        )
    rows = []
    for i, token in enumerate(proposal.tokens):
        q = _fit(as_distribution(proposal.q[i], f"q[{i}]"), vocab_size)
        if not q.prob(token) > 0.0:
            raise DrafterError(
                f"draft {i} is token {token}, but q[{i}] gives it {q.prob(token)}: it was not drawn from q. "
                "Pass the distribution that was really sampled, after every transform"
            )
        rows.append(q)
    return rows


def ratio(p: Distribution, q: Distribution, token: int, row: int) -> float:
    """p(token) / q(token), for q(token) > 0. NaN raises: min(1, NaN) would be 1 and accept anything."""
    value = p.prob(token) / q.prob(token)
    if not value >= 0.0:
        raise InvalidDistribution(f"target_probs[{row}] gives token {token} the probability {p.prob(token)}")
    return value


def as_distribution(row: Any, name: str) -> Distribution:
    """`row` itself if it is a Distribution, else a checked dense one around float64[V]."""
    if isinstance(row, Distribution):
        return row
    probs = checked_probs(row, name, ROW_TOLERANCE)
    return Distribution(probs, int(probs.size))


def checked_probs(row: Any, name: str, tolerance: float) -> FloatArray:
    """float64[V]: one non-empty axis, entries finite and >= 0, sum within `tolerance` of 1.

    Raises InvalidDistribution naming `name` and the offending value.
    """
    try:
        raw = np.asarray(row)
        if raw.dtype.kind not in "biufO":  # numbers, or objects that can become numbers, such as Fraction
            raise TypeError
        probs = raw.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError):
        raise InvalidDistribution(f"{name} = {row!r} is not a list of probabilities") from None
    if probs.ndim != 1 or probs.size == 0:
        raise InvalidDistribution(f"{name} needs one non-empty axis of probabilities, got shape {probs.shape}")
    if not (probs.min() >= 0.0 and probs.max() <= 1.0 + tolerance):  # false for NaN too
        i = int(np.flatnonzero(~((probs >= 0.0) & (probs <= 1.0 + tolerance)))[0])
        raise InvalidDistribution(f"{name}[{i}] = {probs[i]}; a probability is a number from 0 to 1")
    total = float(probs.sum())
    if abs(total - 1.0) > tolerance:
        raise InvalidDistribution(
            f"{name} sums to {total!r}; probabilities sum to 1 within {tolerance:g}: "
            "normalise them in float64 after every transform"
        )
    return probs


def _fit(q: Distribution, vocab_size: int) -> Distribution:
    """q over the target's vocabulary: ids that a drafter lacks have q = 0."""
    if q.vocab_size == vocab_size:
        return q
    mass = q.dense()
    if mass[vocab_size:].any():
        raise DrafterError(f"q gives mass to tokens from {vocab_size} on, which the target does not have")
    probs = np.zeros(vocab_size)
    probs[: mass.size] = mass[:vocab_size]
    return Distribution(probs, vocab_size)
