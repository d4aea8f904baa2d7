"""Logits processors: what users may put in front of every other transform.

A processor is called as `processor(tokens, logits)`: the tokens so far, and the logits of the next one. Two kinds:

- a function of these two and of nothing else;
- an object that keeps state, is called in the same way, and has clone(): an independent copy with the same state.

Speculation asks for rows that plain decoding never sees. A function cannot tell. Of an object, every row has a clone of
its own that has seen exactly the rows before it; the clone that saw the last committed token's row goes on, all
others are thrown away. The caller's own object is never called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from ..errors import NoLegalToken, ProcessorError
from ..types import FloatArray

__all__ = ["Processor", "StatefulProcessor", "cloned", "run_processors"]


@runtime_checkable
class Processor(Protocol):
    """Changes the logits of one row."""

    def __call__(self, tokens: tuple[int, ...], logits: FloatArray, /) -> FloatArray:
        """The row to sample from, float64[V]; -inf forbids a token.

        tokens: prompt and output, and in a step's later rows its drafts. logits: float64[V], a copy of its own, which
        it may change and return. No NaN and no +inf; at least one token stays finite.
        """
        ...


@runtime_checkable
class StatefulProcessor(Processor, Protocol):
    """A processor that remembers earlier calls."""

    def clone(self) -> Self:
        """An independent copy with the same state: calling one never shows in the other."""
        ...


def run_processors(processors: Iterable[Processor], tokens: tuple[int, ...], logits: ArrayLike) -> FloatArray:
    """The row that `processors` make of `logits` in order, float64[V]; a new array, logits is not written to.

    Raises ProcessorError naming the processor that raised, or returned something else than V real numbers, or made a
    NaN or +inf; NoLegalToken where they leave nothing. A row that holds NaN, +inf or nothing to begin with is returned
    as it is: no processor is to blame, and none is called.
    """
    row = np.array(logits, dtype=np.float64)
    if not math.isfinite(row.max()):
        return row
    for i, processor in enumerate(processors):
        try:
            answer = processor(tokens, row)
        except Exception as error:
            raise ProcessorError(f"{_name(i, processor)} raised {type(error).__name__}: {error}") from error
        row = _row(answer, row.size, _name(i, processor))
        fault = _fault(row)
        if fault is not None:
            raise ProcessorError(f"{_name(i, processor)} made {fault}; to force a token, give all others -inf")
    if row.max() == -math.inf:
        raise NoLegalToken("logits_processors leave no token that may follow")
    return row


def cloned(processors: Iterable[Processor]) -> tuple[Processor, ...]:
    """The processors with a clone in place of each that has one.

    Raises ProcessorError where clone() raises, or returns no independent copy.
    """
    return tuple(_clone(i, processor) for i, processor in enumerate(processors))


def _clone(i: int, processor: Processor) -> Processor:
    clone = getattr(processor, "clone", None)
    if clone is None:
        return processor
    try:
        copy: Any = clone()
    except Exception as error:
        raise ProcessorError(f"{_name(i, processor)}: clone() raised {type(error).__name__}: {error}") from error
    is_one = callable(copy) and callable(getattr(copy, "clone", None)) and not isinstance(copy, type)
    if copy is processor or not is_one:
        what = "itself" if copy is processor else repr(copy)
        raise ProcessorError(f"{_name(i, processor)}: clone() returned {what}; return a copy with its own state")
    result: Processor = copy
    return result


def _row(answer: Any, size: int, name: str) -> FloatArray:
    """A copy: the processor may keep what it returned, and the next one may write into what it gets."""
    if answer is None:
        raise ProcessorError(f"{name} returned None; return the row, also where it was changed in place")
    try:
        row = np.asarray(answer)
    except Exception as error:
        raise ProcessorError(f"{name} returned {type(answer).__name__}, which is no array ({error})") from error
    if row.shape != (size,) or row.dtype.kind not in "fiu":
        raise ProcessorError(f"{name} returned shape {row.shape}, dtype {row.dtype}; return {size} real numbers")
    with np.errstate(over="ignore"):  # from a longer float: +inf is told below
        return np.array(row, dtype=np.float64)


def _fault(row: FloatArray) -> str | None:
    peak = float(row.max())
    if math.isnan(peak):
        return f"NaN at token {int(np.argmax(np.isnan(row)))}"
    return f"+inf at token {int(np.argmax(row))}" if peak == math.inf else None


def _name(i: int, processor: Processor) -> str:
    return f"logits_processors[{i}] = {getattr(processor, '__qualname__', type(processor).__qualname__)}"
