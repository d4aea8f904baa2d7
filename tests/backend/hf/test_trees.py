"""Trees: a node sees the cached tokens and its ancestors, stands at its depth, and one path of it stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from paceline.errors import BackendError, RollbackError
from paceline.types import Segment

from .models import apart, cells_apart, contents, opened, reference, tokens

# Two branches at the root, siblings further down, and one branch longer than the windows (9).
PARENTS = (-1, -1, 0, 0, 1, 2, 4, 4, 6, 8, 9, 10, 11, 12, 13, 5)
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "gpt_neox", "stablelm")


def path_to(node: int, parents: Sequence[int] = PARENTS) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("cached", [1, 6, 20])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_is_the_end_of_its_branch(family: str, cached: int) -> None:
    """Rows of a tree equal the rows of its branches. Catches masks, positions and windows counted in cells."""
    text, nodes = tokens(1, cached), tokens(2, len(PARENTS))
    own = reference(family)
    backend = opened(family, page_size=4)
    slot, other = backend.acquire(), backend.acquire()
    backend.forward([Segment(slot, text, 0, 0)])
    beside = tokens(3, 12)
    rows, rows_beside = backend.forward(
        [Segment(slot, nodes, cached, len(nodes), PARENTS), Segment(other, beside, 0, 12)]
    )
    for node in range(len(nodes)):
        branch = [nodes[i] for i in path_to(node)]
        assert apart(rows[node], own.rows((*text, *branch))[-1]) <= 1e-11
    assert apart(rows_beside, own.rows(beside)) <= 1e-11
    backend.close()


@pytest.mark.parametrize("last", [0, 3, 7, 14, 15])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_a_fresh_prefill(family: str, last: int) -> None:
    """TensorRT-LLM#10343, openvino#38079: after a branch that is not the first was kept, cells and text were wrong."""
    text, nodes = tokens(4, 11), tokens(5, len(PARENTS))
    backend = opened(family, page_size=4)
    slot = backend.acquire()
    backend.forward([Segment(slot, text[:-1], 0, 0)])
    # As a step does it: the last committed token, and the tree behind it.
    parents = (-1, *(p + 1 for p in PARENTS))
    backend.forward([Segment(slot, (text[-1], *nodes), 10, len(nodes) + 1, parents)])
    path = path_to(last)
    backend.keep(slot, 11, path)
    backend.check()
    kept = (*text, *(nodes[i] for i in path))
    assert backend.length(slot) == len(kept)
    (rows,) = backend.forward([Segment(slot, (7, 8), len(kept), 2)])
    assert apart(rows, reference(family).rows((*kept, 7, 8))[-2:]) <= 1e-11
    alone = opened(family, page_size=4)
    there = alone.acquire()
    alone.forward([Segment(there, (*kept, 7, 8), 0, 1)])
    assert cells_apart(contents(backend, slot), contents(alone, there)) <= 1e-11
    backend.close()
    alone.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_step_after_step(seed: int) -> None:
    """Many trees in a row, beside chains and single tokens, published on the way."""
    rng = np.random.default_rng(seed)
    own = reference("gemma2")
    backend = opened("gemma2", page_size=int(rng.integers(1, 6)))
    texts = [list(tokens(10 + i, 5)) for i in range(3)]
    slots = [backend.acquire() for _ in texts]
    backend.forward([Segment(slot, tuple(text[:-1]), 0, 0) for slot, text in zip(slots, texts, strict=True)])
    for _ in range(8):
        batch = []
        for i in rng.permutation(3).tolist():
            n = int(rng.integers(0, 10))
            nodes = rng.integers(2, 60, n).tolist()
            parents = (-1, *(int(rng.integers(0, j + 1)) for j in range(n)))
            batch.append(Segment(slots[i], (texts[i][-1], *nodes), len(texts[i]) - 1, n + 1, parents if n else None))
        for segment, rows in zip(batch, backend.forward(batch), strict=True):
            i = slots.index(segment.slot)
            parents = segment.parents or (-1,)
            end = int(rng.integers(0, len(segment.tokens)))
            path = path_to(end, parents)
            branch = [segment.tokens[j] for j in path]
            assert apart(rows[path], own.rows((*texts[i][:-1], *branch))[-len(path) :]) <= 1e-11
            backend.keep(segment.slot, len(texts[i]), [j - 1 for j in path[1:]])
            texts[i] += [*branch[1:], int(rng.integers(2, 60))]
            backend.commit(segment.slot, len(texts[i]) - 1)
            backend.check()
    backend.close()


def test_what_is_no_path_is_refused() -> None:
    """An undecided tree cannot be forwarded, forked, committed or cut as if it were a chain."""
    backend = opened("llama")
    slot = backend.acquire()
    backend.forward([Segment(slot, (3, 4, 5, 6), 0, 0)])
    backend.forward([Segment(slot, (7, 8, 9, 10), 4, 0, (-1, 0, 0, 2))])
    for call in (
        lambda: backend.forward([Segment(slot, (1,), 8, 1)]),
        lambda: backend.fork(slot),
        lambda: backend.commit(slot, 7),
    ):
        with pytest.raises(BackendError, match=r"slot 0 holds a tree from 4 on with parents \(-1, 0, 0, 2\)"):
            call()
    with pytest.raises(RollbackError, match="to 7 tokens: from 4 on it holds a tree"):
        backend.truncate(slot, 7)
    for length, nodes in ((5, [0, 1]), (5, [2]), (5, [1, 0]), (5, [3]), (3, [1]), (5, [-1]), (9, [])):
        with pytest.raises(RollbackError, match=rf"cannot keep {length} tokens and nodes"):
            backend.keep(slot, length, nodes)
    assert backend.length(slot) == 8
    backend.keep(slot, 5, [1, 2])
    assert backend.length(slot) == 7
    backend.commit(slot, 7)
    backend.check()
    with pytest.raises(BackendError, match=r"parents \(-1, 1\) of 2 tokens; .* a parent precedes its child"):
        backend.forward([Segment(slot, (1, 2), 7, 1, (-1, 1))])
    backend.close()


def test_keep_in_a_chain_is_a_truncation() -> None:
    backend = opened("llama", page_size=2)
    slot = backend.acquire()
    backend.forward([Segment(slot, (3, 4, 5, 6, 7, 8), 0, 0)])
    with pytest.raises(RollbackError):
        backend.keep(slot, 3, [1])
    backend.keep(slot, 3, [0])
    assert backend.length(slot) == 4
    backend.close()
