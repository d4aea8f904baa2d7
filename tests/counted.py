"""A toy model that counts what it is asked for, and a clock that only forwards move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline import SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.draft import ModelDrafter
from paceline.engine import Engine
from paceline.schedule import CostTable
from paceline.types import RequestOutput, Segment

Price = Callable[[int], float]


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Counted(ToyBackend):
    """Counts forwards, rows and tokens, and lets time pass as `price(tokens)` says."""

    def __init__(self, vocab_size: int = 64, *, clock: Clock | None = None, price: Price | None = None, **options: Any):
        super().__init__(vocab_size, **{"seed": 1, "stop_ids": (), **options})
        self.clock, self.price = clock, price
        self.batches: list[list[tuple[int, int]]] = []  # (tokens, rows) of each segment

    @property
    def calls(self) -> int:
        return len(self.batches)

    def forward(self, batch: Sequence[Segment]) -> list[Any]:
        self.batches.append([(len(s.tokens), s.num_rows) for s in batch])
        if self.clock is not None and self.price is not None:
            self.clock.now += self.price(sum(len(s.tokens) for s in batch))
        return super().forward(batch)


def run(engine: Engine) -> list[RequestOutput]:
    """All outputs, in order of their requests."""
    done: list[RequestOutput] = []
    while engine.has_work:
        done += [chunk.output for chunk in engine.step() if chunk.output is not None]
    assert all(one.error is None for out in done for one in out.outputs)
    return sorted(done, key=lambda out: out.request_id)


def endless(n: int, **options: Any) -> SamplingParams:
    """Exactly n tokens."""
    return SamplingParams(**{"max_tokens": n, "ignore_eos": True, "temperature": 0.0, **options})


def table(price: Price, most: int = 64) -> CostTable:
    """The truth about `price`."""
    return CostTable(range(1, most + 1), [0], [[price(width) for width in range(1, most + 1)]])


def twin_drafter(target: ToyBackend, seed: int = 1, **options: Any) -> tuple[ModelDrafter, Counted]:
    """A draft model; with seed 1 it has the weights of Counted()."""
    model = Counted(target.info.vocab_size, seed=seed, **options)
    return ModelDrafter(model, "model:twin", target), model
