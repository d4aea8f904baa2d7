"""Moves that the llama.cpp tests share: feeding slots, rows of a sequence on its own, and a llama.cpp that lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.backend.llamacpp import LlamaCppBackend
from paceline.types import Backend, Segment

Open = Callable[..., LlamaCppBackend]
PROMPT = tuple(range(20, 60))
MORE = (70, 71, 72, 73, 74)
# The KV cache is in half precision and other widths take other kernels: rows of these models (standard deviation 1.6)
# move by up to 1e-3, and by more than 0.1 where one token of the context is another.
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-2}


def feed(backend: Backend, slot: int, tokens: tuple[int, ...], rows: int = 1) -> NDArray[np.float32]:
    """Rows of the last `rows` tokens, copied."""
    return np.array(backend.forward([Segment(slot, tokens, backend.length(slot), rows)])[0])


def alone(backend: Backend, tokens: tuple[int, ...], rows: int) -> NDArray[np.float32]:
    """Rows of `tokens` fed one by one to a slot of their own."""
    slot = backend.acquire()
    out = [feed(backend, slot, (token,)) for token in tokens][-rows:]
    backend.release(slot)
    return np.concatenate(out)


def alone_in(tiny: Open, tokens: tuple[int, ...], name: str = "llama", rows: int = 1) -> NDArray[np.float32]:
    """Rows from a backend that has seen nothing else."""
    return alone(tiny(name), tokens, rows)


class Lying:
    """llama.cpp whose seq_rm does nothing: `says` is what it returns."""

    def __init__(self, native: Any, says: bool) -> None:
        self.native, self.says = native, says

    def llama_memory_seq_rm(self, *_: Any) -> bool:
        return self.says

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


class Failing:
    """llama.cpp that writes the batch and then reports `status`."""

    def __init__(self, native: Any, status: int) -> None:
        self.native, self.status = native, status

    def llama_decode(self, context: Any, batch: Any) -> int:
        assert self.native.llama_decode(context, batch) == 0
        return self.status

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)
