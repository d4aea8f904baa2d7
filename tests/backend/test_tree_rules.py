"""What may be done with a slot that holds a tree: the same rules, and the same typed errors, in every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from paceline.backend.toy import ToyBackend
from paceline.backend.trees import TreeBook
from paceline.errors import BackendError, InvariantError, RollbackError
from paceline.types import Backend, Segment

TEXT = (3, 4, 5, 6)
CHAIN, FORKED = (-1, 0, 1), (-1, 0, 0)


@pytest.fixture(params=["toy", "hf"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "toy":
        opened: Backend = ToyBackend(20, page_size=2, max_len=64)
    else:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from .hf import models

        opened = models.opened("llama", page_size=2)
    yield opened
    opened.check()
    opened.close()


def with_tree(backend: Backend, parents: tuple[int, ...]) -> int:
    slot = backend.acquire()
    backend.forward([Segment(slot, TEXT, 0, 0)])
    backend.forward([Segment(slot, (7, 8, 9)[: len(parents)], 4, 0, parents)])
    return slot


def test_a_tree_that_is_one_path_is_a_chain(backend: Backend) -> None:
    """A chain may follow it without keep(); what the slot knew of the tree must not outlive that."""
    slot = with_tree(backend, CHAIN)
    backend.forward([Segment(slot, (10, 11), 7, 0)])
    backend.check()
    backend.commit(slot, 8)
    fork = backend.fork(slot)
    backend.keep(fork, 7, [0])
    backend.truncate(slot, 8)
    rows = backend.forward([Segment(slot, (12,), 8, 1), Segment(fork, (12,), 8, 1)])
    plain = backend.acquire()
    (wanted,) = backend.forward([Segment(plain, (*TEXT, 7, 8, 9, 10, 12), 0, 1)])
    for got in rows:
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-11)


def test_an_undecided_tree_is_not_taken_for_a_chain(backend: Backend) -> None:
    slot = with_tree(backend, FORKED)
    calls: list[Callable[[], Any]] = [
        lambda: backend.forward([Segment(slot, (1,), 7, 1)]),
        lambda: backend.forward([Segment(slot, (1,), 7, 1, (-1,))]),
        lambda: backend.fork(slot),
        lambda: backend.commit(slot, 7),
    ]
    for call in calls:
        with pytest.raises(
            BackendError, match=r"slot 0 holds a tree from 4 on with parents \(-1, 0, 0\); keep\(\) one"
        ):
            call()
    with pytest.raises(RollbackError, match="cannot truncate slot 0 to 7 tokens: from 4 on it holds a tree"):
        backend.truncate(slot, 7)
    assert backend.length(slot) == 7
    backend.commit(slot, 6)  # one branch of it
    backend.truncate(slot, 6)
    backend.forward([Segment(slot, (1,), 6, 1)])


@pytest.mark.parametrize("parents", [None, CHAIN, FORKED])
def test_too_long_is_a_typed_error(backend: Backend, parents: tuple[int, ...] | None) -> None:
    slot = with_tree(backend, parents or CHAIN)
    if parents is None:
        backend.forward([Segment(slot, (10,), 7, 0)])
    for length in (-1, 9, 100):
        with pytest.raises(BackendError, match=f"slot 0 holds . tokens, not {length}"):
            backend.commit(slot, length)
        with pytest.raises(RollbackError, match=f"cannot truncate slot 0 to {length} tokens"):
            backend.truncate(slot, length)
        with pytest.raises(RollbackError, match=f"cannot keep {length} tokens"):
            backend.keep(slot, length, [])


@pytest.mark.parametrize("nodes", [[0, 1, 2], [1], [2, 1], [0, 0], [3], [-1], [0.0], ["x"], [None], [False], [0, 2, 1]])
def test_what_is_no_path_is_not_kept(backend: Backend, nodes: list[Any]) -> None:
    """Siblings after each other would be a text that nobody scored."""
    slot = with_tree(backend, FORKED)
    with pytest.raises(RollbackError, match="cannot keep 4 tokens and nodes"):
        backend.keep(slot, 4, nodes)
    assert backend.length(slot) == 7
    backend.keep(slot, 4, [0, 2])
    assert backend.length(slot) == 6


@pytest.mark.parametrize("parents", [(-1.0,), ("x",), (None,), (True,), (False,), (0,), (-2,), (), (-1, 0), 3])
def test_parents_that_are_no_tree(backend: Backend, parents: Any) -> None:
    slot = backend.acquire()
    with pytest.raises(BackendError, match=r"slot 0: parents .* of 1 tokens; there is one integer for each token"):
        backend.forward([Segment(slot, (1,), 0, 1, parents)])
    assert backend.length(slot) == 0
    with pytest.raises(BackendError, match=r"slot 0: parents \(-1, False\) of 2 tokens"):
        backend.forward([Segment(slot, (1, 2), 0, 1, (-1, False))])
    backend.forward([Segment(slot, (1,), 0, 1, (np.int64(-1),))])  # type: ignore[arg-type]


def test_another_branch_than_the_committed_one_is_not_kept(backend: Backend) -> None:
    """It would be moved into a page that others may share by now."""
    slot = with_tree(backend, (-1, 0, -1))
    backend.commit(slot, 6)
    with pytest.raises(RollbackError, match="that page is shared or published"):
        backend.keep(slot, 4, [2])
    backend.check()
    other = backend.acquire((*TEXT, 7, 8, 1))
    assert backend.length(other) == 6
    (row,) = backend.forward([Segment(other, (1,), 6, 1)])
    (wanted,) = backend.forward([Segment(backend.acquire(), (*TEXT, 7, 8, 1), 0, 1)])
    np.testing.assert_allclose(row, wanted, rtol=0, atol=1e-11)


def test_random_moves_raise_only_typed_errors(backend: Backend) -> None:
    """Whatever follows whatever: a move works or is refused by name, and the books balance."""
    rng = np.random.default_rng(0)
    slots = [backend.acquire()]
    done = dict.fromkeys(("forward", "commit", "truncate", "keep", "fork", "release"), 0)
    for _ in range(400):
        slot = int(rng.choice(slots))
        length, n = backend.length(slot), int(rng.integers(1, 4))
        if length > 20:
            backend.truncate(slot, 0)
            continue
        parents = [None, (-1, 0, 1)[:n], tuple(int(rng.integers(-1, i)) if i else -1 for i in range(n))][
            rng.integers(3)
        ]
        at = max(0, length - int(rng.integers(-1, 4)))
        moves: dict[str, Callable[[], Any]] = {
            "forward": lambda: backend.forward([Segment(slot, (1, 2, 3)[:n], length, n, parents)]),  # noqa: B023
            "commit": lambda: backend.commit(slot, at),  # noqa: B023
            "truncate": lambda: backend.truncate(slot, at),  # noqa: B023
            "keep": lambda: backend.keep(slot, at, [[], [0], [1], [0, 1], [0, 2]][rng.integers(5)]),  # noqa: B023
            "fork": lambda: slots.append(backend.fork(slot)),  # noqa: B023
            "release": lambda: backend.release(slots.pop()) if len(slots) > 1 else None,
        }
        move = list(moves)[rng.choice(6, p=[0.4, 0.15, 0.15, 0.2, 0.05, 0.05])]
        try:
            moves[move]()
            done[move] += 1
        except (BackendError, RollbackError):
            pass
        backend.check()
    assert min(done.values()) > 5


def test_every_small_tree_keeps_its_paths_and_nothing_else() -> None:
    for parents in product((-1,), (-1, 0), (-1, 0, 1)):
        for nodes in ([], [0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            book = TreeBook()
            book.wrote(Segment(0, (1, 2, 3), 5, 0, parents))
            if all(parents[node] == before for before, node in zip([-1, *nodes], nodes, strict=False)):
                book.check_keep(0, 5, nodes, 8)
            else:
                with pytest.raises(RollbackError):
                    book.check_keep(0, 5, nodes, 8)


def test_a_tree_that_is_not_the_end_of_its_slot_is_noticed() -> None:
    book = TreeBook()
    book.wrote(Segment(3, (1, 2), 5, 0, (-1, -1)))
    book.check(lambda slot: 7)
    with pytest.raises(InvariantError, match="slot 3 holds 8 tokens, but its tree has 2 from 5 on"):
        book.check(lambda slot: 8)
