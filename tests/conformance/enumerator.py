"""Exact laws of shipped code: a `Draws` that follows every outcome with its weight.

`enumerate_outcomes(run)` calls `run(branches)` again and again, depth first over everything that was drawn,
and returns the exact probability of each outcome. `branches` replaces randomness in two forms:

    branches()                          a Draws for a pure rule
    branches(seed, step_start)          so `branches` itself is the factory that an engine takes

A draw has a key: (seed, position) for Role.TARGET, else (seed, step_start, position, role, node). Equal keys
are the same noise. Drawing a key again with the same meaning gives the same result; with another meaning,
such as an accept and a recovery that share noise, it is an AssertionError.

Under coupled verification a drafter shares the target's noise on purpose, and how often they agree is not the
question. The drafter then draws from `branches.every_draft(...)` (`EveryDraft` puts it into a drafter's
contexts): each token it might draw is followed, without a probability, and the law of the outcome must be the
same behind each, else it is an AssertionError. The result is the law for *any* way of drafting that does not
see the noise of this step. That it may see it too is the pathwise claim: let `run` assert that the token at
each position is `branches.target_draws(seed)[position]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.types import DraftContext, Drafter, Proposal, Role

TOLERANCE = 1e-12

Law = dict[Any, float]


def enumerate_outcomes(run: Callable[[Branches], Hashable], max_leaves: int = 5_000_000) -> Law:
    """The exact law of `run`'s outcome. `run` must be a function of its draws alone."""
    branches = Branches()
    for _ in range(max_leaves):
        branches.restart()
        outcome = run(branches)
        law = branches.fold(outcome)
        if law is not None:
            total = sum(law.values())
            assert abs(total - 1.0) <= TOLERANCE, f"the outcomes' weights sum to {total!r}"
            return law
    raise AssertionError(f"more than {max_leaves} leaves; make the grid smaller")


@dataclass(slots=True)
class Choice:
    """One branching of the run: `options` with probabilities `weights`, or None for "for every one"."""

    options: list[Any]
    weights: list[float] | None
    index: int = 0
    law: Law = field(default_factory=dict)

    def add(self, law: Law) -> None:
        """Take in the law behind the option that was just finished."""
        if self.weights is None:
            if self.index == 0:
                self.law = law
            apart = max(abs(law.get(o, 0.0) - self.law.get(o, 0.0)) for o in {*law, *self.law})
            assert apart <= TOLERANCE, (
                f"the law depends on the draft: {self.options[0]} gives {self.law}, "
                f"{self.options[self.index]} gives {law}"
            )
            return
        weight = self.weights[self.index]
        for outcome, probability in law.items():
            self.law[outcome] = self.law.get(outcome, 0.0) + weight * probability


class Branches:
    """The draws of the current run, and where the depth-first walk stands."""

    def __init__(self) -> None:
        self._path: list[Choice] = []
        self._cursor = 0
        self._seen: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, seed: int = 0, step_start: int = 0) -> BranchDraws:
        return BranchDraws(self, seed, step_start, every=False)

    def every_draft(self, seed: int = 0, step_start: int = 0) -> BranchDraws:
        """Draws for a drafter under coupled verification: every token of positive weight, no probability."""
        return BranchDraws(self, seed, step_start, every=True)

    def target_draws(self, seed: int = 0) -> dict[int, int]:
        """What this run drew with the target's noise so far: position -> token."""
        return {
            key[2]: result
            for key, (_, result) in self._seen.items()
            if key[0] is Role.TARGET and key[1] == seed and not key[3]
        }

    def restart(self) -> None:
        self._cursor = 0
        self._seen = {}

    def fold(self, outcome: Hashable) -> Law | None:
        """Record a finished run and move on; the whole law once nothing is left to follow."""
        assert self._cursor == len(self._path), "run() drew less than before on the same path"
        law: Law = {outcome: 1.0}
        while self._path:
            choice = self._path[-1]
            choice.add(law)
            choice.index += 1
            if choice.index < len(choice.options):
                return None
            law = self._path.pop().law
        return law

    def draw(self, key: Any, options: list[Any], weights: list[float], every: bool) -> Any:
        """The option this run takes for `key`. Weights are probabilities; every one is positive."""
        meaning = (options, weights)
        if key in self._seen:
            earlier, result = self._seen[key]
            same = earlier[0] == options and np.allclose(earlier[1], weights, rtol=0.0, atol=TOLERANCE)
            assert same, f"key {key} is drawn twice with different meaning: {earlier}, then {meaning}"
            return result
        result = options[0] if len(options) == 1 else self._follow(options, None if every else weights)
        self._seen[key] = (meaning, result)
        return result

    def _follow(self, options: list[Any], weights: list[float] | None) -> Any:
        if self._cursor == len(self._path):
            self._path.append(Choice(options, weights))
        choice = self._path[self._cursor]
        assert choice.options == options, "run() is not a function of its draws"
        self._cursor += 1
        return choice.options[choice.index]


class BranchDraws:
    """The `Draws` protocol on top of `Branches`."""

    def __init__(self, branches: Branches, seed: int, step_start: int, every: bool) -> None:
        self._branches = branches
        self._seed = seed
        self._step_start = step_start
        self._every = every

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        assert 0.0 <= probability <= 1.0, f"accept with probability {probability!r}"
        options = [outcome for outcome, p in ((True, probability), (False, 1.0 - probability)) if p > 0.0]
        weights = [p for p in (probability, 1.0 - probability) if p > 0.0]
        key = (Role.ACCEPT, self._seed, position, self._every, self._step_start, node)
        return bool(self._branches.draw(key, options, weights, every=False))

    def pick(self, weights: Any, position: int, role: Role, *, ids: Any | None = None, node: int = 0) -> int:
        assert role is not Role.ACCEPT, "a token picked with the noise of an accept"
        tokens = range(len(weights)) if ids is None else ids.tolist()
        options, positive = [], []
        for token, weight in zip(tokens, weights.tolist(), strict=True):
            assert weight >= 0.0, f"pick with weight {weight!r} for token {token}"
            if weight > 0.0:
                options.append(token)
                positive.append(weight)
        total = sum(positive)
        assert total > 0.0, f"pick at position {position} with no positive weight"
        key: tuple[Any, ...] = (role, self._seed, position, self._every)
        if role is not Role.TARGET or self._every:  # a coupled drafter meets its noise again in the next step
            key += (self._step_start, node)
        return int(self._branches.draw(key, options, [w / total for w in positive], self._every))


class EveryDraft:
    """A drafter whose draws are replaced by "every token it might draw"; for coupled verification."""

    def __init__(self, inner: Drafter, branches: Branches) -> None:
        self.name = inner.name
        self._inner = inner
        self._branches = branches

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        return self._inner.propose(
            [dataclasses.replace(c, draws=self._branches.every_draft(c.request_id, len(c.tokens))) for c in contexts],
            budgets,
        )

    def observe(self, request_id: int, committed: Sequence[int], hidden: Any | None = None) -> None:
        self._inner.observe(request_id, committed, hidden)

    def release(self, request_id: int) -> None:
        self._inner.release(request_id)

    def close(self) -> None:
        self._inner.close()
