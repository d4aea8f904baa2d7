"""Trees of new tokens: their shape, and which slot holds one that nobody has decided. For backends that run trees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError, InvariantError, RollbackError
from ..types import Segment

__all__ = ["TreeBook", "deepest", "depths"]


def depths(parents: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A tree's depths int64[n] and its ancestor-or-self matrix bool[n, n]. Parents precede children."""
    n = len(parents)
    depth = np.zeros(n, np.int64)
    sees = np.eye(n, dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            depth[i] = depth[parent] + 1
            sees[i] |= sees[parent]
    return depth, sees


def deepest(segment: Segment) -> int:
    """Tokens on the longest path of a segment. Raises BackendError for parents that are no tree in order."""
    count = len(segment.tokens)
    if segment.parents is None:
        return count
    parents = _integers(segment.parents)
    if parents is None or len(parents) != count or any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise BackendError(
            f"slot {segment.slot}: parents {segment.parents} of {count} tokens; there is one integer for each token, "
            "and a parent precedes its child"
        )
    return int(depths(parents)[0].max()) + 1


class TreeBook:
    """The last segment of each slot where that was a tree, until somebody decides which branch stays.

    What was written as a tree and is one path is a chain. Lengths are counted by whoever asks.
    """

    def __init__(self) -> None:
        self._trees: dict[int, tuple[int, tuple[int, ...]]] = {}  # where it starts, and its parents

    def wrote(self, segment: Segment) -> None:
        """A segment was cached."""
        parents = tuple(range(-1, len(segment.tokens) - 1)) if segment.parents is None else tuple(segment.parents)
        if _is_path(parents, range(len(parents))):
            self._trees.pop(segment.slot, None)
        else:
            self._trees[segment.slot] = (segment.start, parents)

    def forget(self, slot: int) -> None:
        """The slot holds a chain again, or nothing."""
        self._trees.pop(slot, None)

    def check_settled(self, slot: int, length: int, cached: int) -> None:
        """Raise BackendError where fewer than `length` tokens are cached, or they include branches of a tree."""
        if not 0 <= length <= cached:
            raise BackendError(f"slot {slot} holds {cached} tokens, not {length}")
        if not self._is_settled(slot, length):
            start, parents = self._trees[slot]
            raise BackendError(
                f"slot {slot} holds a tree from {start} on with parents {parents}; keep() one branch first"
            )

    def check_truncate(self, slot: int, length: int, cached: int) -> None:
        """Raise RollbackError where fewer than `length` tokens are cached, or they are not one branch of a tree."""
        if not 0 <= length <= cached:
            raise RollbackError(f"cannot truncate slot {slot} to {length} tokens: it holds {cached}")
        if not self._is_settled(slot, length):
            start, parents = self._trees[slot]
            raise RollbackError(
                f"cannot truncate slot {slot} to {length} tokens: from {start} on it holds a tree with parents "
                f"{parents}; keep() one branch"
            )

    def check_keep(self, slot: int, length: int, nodes: Sequence[int], cached: int) -> None:
        """Raise RollbackError where the first `length` of `cached` tokens and `nodes` further on are not one path."""
        start, parents = self._trees.get(slot, (length, tuple(range(-1, cached - length - 1))))
        offsets = _integers(nodes)
        kept = None if offsets is None else [*range(length - start), *(length - start + node for node in offsets)]
        if not (kept is not None and start <= length <= cached and min(offsets or [0]) >= 0 <= length):
            raise RollbackError(
                f"cannot keep {length} tokens and nodes {list(nodes)} of slot {slot}: it holds {cached} tokens, "
                f"the last tree from {start} on"
            )
        if not _is_path(parents, kept):
            raise RollbackError(
                f"cannot keep {length} tokens and nodes {list(nodes)} of slot {slot}: not one path of the "
                f"{cached - start} tokens from {start} on with parents {parents}"
            )

    def check(self, length_of: Callable[[int], int]) -> None:
        """Raise InvariantError where a slot with a tree does not end with it."""
        for slot, (start, parents) in self._trees.items():
            if length_of(slot) != start + len(parents):
                raise InvariantError(
                    f"slot {slot} holds {length_of(slot)} tokens, but its tree has {len(parents)} from {start} on"
                )

    def _is_settled(self, slot: int, length: int) -> bool:
        tree = self._trees.get(slot)
        return tree is None or _is_path(tree[1], range(length - tree[0]))


def _is_path(parents: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether every node is there and continues the one before it, the first one the cached tokens."""
    before = -1
    for node in nodes:
        if not (0 <= node < len(parents) and parents[node] == before):
            return False
        before = node
    return True


def _integers(values: Any) -> tuple[int, ...] | None:
    """`values` as integers, bool not being one; None where they are not."""
    try:
        found = tuple(values)
        return None if any(isinstance(value, bool) for value in found) else tuple(operator.index(v) for v in found)
    except TypeError:
        return None
