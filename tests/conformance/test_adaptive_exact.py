"""The exact law with the controller in the loop: it looks at earlier steps, and the law does not.

Times are made up and stand still, for the enumerator runs every branch from the beginning and must meet the same
choices; what the controller believes of the acceptance moves with every branch, and so do the draft lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import AutoDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.schedule import Candidate, Controller, CostTable
from paceline.schedule.cost import Share
from paceline.types import DraftContext
from tests.drafters import TableDrafter
from tests.verify.tables import PAIRS, Tables

from .engine_oracle import assert_same_law
from .engine_runs import SUBJECT, Ask, Scene, law, logits_of, lookup, sampling
from .enumerator import Branches
from .test_engine_exact import MATES, WAYS, constant


def either(scene: Scene, target: ToyBackend) -> AutoDrafter:
    """Lookup, or drafts that are drawn: which of the two hangs on the text and on what was kept before."""
    return AutoDrafter(lookup(scene, target), sampling(scene, target), "auto:test")


EITHER = {f"either, {rule}": (rule, either) for rule in ("rejection", "block", "coupled")}
LENGTHS: set[int] = set()
ASKED: set[str] = set()


class Dear(dict[Any, float]):
    """What drafting costs: half a second, but asking lookup nothing that anybody knows of."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default if key[0] == "lookup" else 0.5

    def __missing__(self, drafter: str) -> float:
        return 0.5


class Still(Controller):
    """Drafting costs, so that lengths are settled before drafts are drawn; no clock has a say."""

    def __init__(self, steep: float) -> None:
        super().__init__(CostTable([1, 2, 3, 4], [0], [[10.0, 10.0 + steep, 10.0 + 2 * steep, 10.0 + 4 * steep]]))
        self._per_step = self._per_depth = Dear()

    def observe_forward(self, shares: Sequence[Share], others: Sequence[Share], seconds: float) -> None:
        pass

    def observe_drafting(self, drafter: str, *_: Any) -> None:
        pass

    def observe_step(self, rest: float) -> None:
        pass

    def budgets(self, drafter: str, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        budgets = super().budgets(drafter, candidates, others)
        LENGTHS.update(budgets)
        ASKED.update(drafter for budget in budgets if budget)
        return budgets


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptiveScene(Scene):
    """A scene whose engine decides draft lengths; at most three."""

    steep: float = 2.0

    def engine(self, branches: Branches) -> Engine:
        engine = super().engine(branches)
        engine.controller = Still(self.steep)
        engine.draft_length = 3
        return engine


@pytest.mark.parametrize("steep", [1.0, 2.5, 4.0])
@pytest.mark.parametrize("pair", ["random", "zeros in both", "mixed"])
@pytest.mark.parametrize("way", [*list(WAYS)[:4], "model, block", "unsure, block", "lookup", *EITHER])
def test_lengths_that_follow_the_acceptance(way: str, pair: str, steep: float) -> None:
    LENGTHS.clear()
    tables = Tables(pair, 2, seed=3)
    verification, drafter = {**WAYS, **EITHER}[way]
    ask = Ask((0, 1, 0), SamplingParams(seed=SUBJECT, verification=verification, max_tokens=4))
    mate = dataclasses.replace(MATES[0], params=SamplingParams(seed=71, verification="coupled", max_tokens=3))
    s = AdaptiveScene(logits=logits_of(tables.p), q=tables.q, drafter=drafter, asks=(mate, ask), steep=steep)
    assert_same_law(law(s), s.plain(ask))


def test_the_lengths_do_follow() -> None:
    """Otherwise the test above would show nothing."""
    LENGTHS.clear()
    s = AdaptiveScene(
        logits=logits_of(constant(0.5, 0.5)),
        q=constant(0.9, 0.1),
        drafter=WAYS["block"][1],
        asks=(Ask((0,), SamplingParams(seed=SUBJECT, verification="block", max_tokens=6)),),
        steep=2.5,
    )
    law(s)
    assert len(LENGTHS) >= 3, LENGTHS
    assert len(PAIRS) > 3


def test_both_of_two_drafters_are_asked() -> None:
    """Otherwise enumerating them above would show nothing."""
    ASKED.clear()
    ask = Ask((0, 1, 0), SamplingParams(seed=SUBJECT, verification="block", max_tokens=6))
    law(
        AdaptiveScene(
            logits=logits_of(constant(0.5, 0.5)), q=constant(0.7, 0.3), drafter=either, asks=(ask,), steep=1.0
        )
    )
    assert {"lookup", "test-table"} == ASKED


@dataclass(frozen=True)
class Elsewhere:
    """Draws with noise of their own, so that two drafters may draw for one place."""

    draws: Any

    def pick(self, weights: Any, position: int, role: Any, *, ids: Any = None, node: int = 0) -> int:
        return int(self.draws.pick(weights, position, role, ids=ids, node=node + 100))


class First(TableDrafter):
    """Stops behind a 1: how many drafts it has hangs on what was drawn."""

    name = "first"

    def __init__(self) -> None:
        super().__init__(lambda tokens: (0.8, 0.2), more=lambda tokens, drafts: 1 not in drafts)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        return super().propose([dataclasses.replace(c, draws=Elsewhere(c.draws)) for c in contexts], budgets)


def two_that_draw(scene: Scene, target: ToyBackend) -> AutoDrafter:
    return AutoDrafter(First(), sampling(scene, target), "auto:test")


@pytest.mark.parametrize("kept", [True, False])
def test_drafts_that_were_drawn_are_not_given_up_for_others(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the negative control: where the second takes their place, their number decides it, and the law is lost."""
    ask = Ask((0,), SamplingParams(seed=SUBJECT, verification="rejection", max_tokens=3))
    q = constant(0.5, 0.5)
    s = AdaptiveScene(logits=logits_of(q), q=q, drafter=two_that_draw, asks=(ask,), steep=0.1)
    if kept:
        assert_same_law(law(s), s.plain(ask))
        return
    monkeypatch.setattr("paceline.schedule.controller._is_drawn", lambda candidate: False)
    monkeypatch.setattr(Candidate, "has_guesses", False)
    with pytest.raises(AssertionError):
        assert_same_law(law(s), s.plain(ask))


class Peeking(Still):
    """Cuts sampled drafts after they were drawn, by what they are: what must never be done."""

    def lengths(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        return [sum(token == 0 for token in (c.proposal.tokens if c.proposal else ())) for c in candidates]


def test_cutting_by_the_draft_itself_is_seen() -> None:
    """The negative control: the enumerator sees anticipation."""

    class Scene2(AdaptiveScene):
        def engine(self, branches: Branches) -> Engine:
            engine = super().engine(branches)
            engine.controller = Peeking(1.0)
            return engine

    ask = Ask((0,), SamplingParams(seed=SUBJECT, verification="rejection", max_tokens=3))
    s = Scene2(logits=logits_of(constant(0.5, 0.5)), q=constant(0.9, 0.1), drafter=WAYS["rejection"][1], asks=(ask,))
    with pytest.raises(AssertionError):
        assert_same_law(law(s), s.plain(ask))
