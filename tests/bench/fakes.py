"""Contenders and clocks without a machine behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.bench.guard import Load
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, PeerError, Prompts, Result, Run
from paceline.types import SpeculationStats


def stats(emitted: int, steps: int, drafted: int = 0) -> SpeculationStats:
    """One request's, with all drafts at position 0."""
    accepted = min(drafted, emitted - steps)
    return SpeculationStats(steps, drafted, accepted, emitted, [drafted], [accepted], forward_seconds=1.0)


def result(tokens: int = 10, seconds: float = 1.0, steps: int = 10, text: str = "x") -> Result:
    """An answer that took so long to decode."""
    return Result("q", 5, tokens, text, "length", seconds, tokens, stats(tokens, steps))


def run(contender: str, seconds: float, *, unit: int = 0, repeat: int = 0, **rest: Any) -> Run:
    """Ten tokens in so many seconds; steps and text for its result."""
    known = {"category": "a", "temperature": 0.0, "concurrency": 1, "load": None, "error": None, **rest}
    steps, text = known.pop("steps", 10), known.pop("text", "x")
    results = known.pop("results", (result(10, seconds, steps, text),))
    return Run(contender=contender, seconds=seconds, unit=unit, repeat=repeat, results=results, **known)


def loaded(others: float = 1.0) -> Load:
    """What the guard says of a run beside other load."""
    return Load(others, 3, True)


def prompts(**counts: int) -> Prompts:
    """So many questions of each category; their one token tells them apart."""
    groups, token = {}, 0
    for category, count in counts.items():
        pairs = []
        for i in range(count):
            pairs.append((Question(f"{category}{i}", category, f"text {i}"), (token,)))
            token += 1
        groups[category] = pairs
    return Prompts(groups, {}, False)


class FakeContender:
    """Notes what it is asked; fails at the call with that number, as a peer does or with `error`."""

    sessions = ()

    def __init__(
        self,
        name: str,
        log: list[tuple[str, tuple[Ask, ...], int]],
        fails_at: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.name, self._log, self._fails_at, self._calls = name, log, fails_at, 0
        self._error = error or PeerError(f"peer {name} fell over")

    def run(self, asks: Sequence[Ask], concurrency: int) -> tuple[float, tuple[Result, ...]]:
        self._calls += 1
        if self._calls == self._fails_at:
            raise self._error
        self._log.append((self.name, tuple(asks), concurrency))
        return 1.0, tuple(result() for _ in asks)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "peer": False}


class FakeMachine:
    """A clock that only sleeping and working move, and a load of others that follows a plan.

    load(now): CPUs that others keep busy at that second.
    """

    def __init__(self, load: Callable[[float], float]) -> None:
        self.now, self.used, self._load = 0.0, 0.0, load
        self.slept = 0.0

    def clock(self) -> float:
        return self.now

    def others(self, sessions: Sequence[int]) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            self.used += 0.01 * self._load(self.now)
            self.now += 0.01
