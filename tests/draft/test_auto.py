"""One of two drafters for each request in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.draft import AutoDrafter, ForcedDrafter, LookupDrafter, ModelDrafter, open_drafter, parse_drafter
from paceline.engine import Engine
from paceline.errors import BackendError, DrafterError, InvalidParams
from paceline.schedule import Candidate, Controller, CostTable
from paceline.types import DraftContext, Drafter, Proposal, RequestOutput

from .fakes import context_of
from .test_forced import Inner

FREE = CostTable([1, 999], [0], [[1.0, 1.1]])


def either(cheap: Sequence[Any], dear: Sequence[Any]) -> AutoDrafter:
    """Two drafters that give request i the i-th answer."""
    stages = [Inner(lambda c, k, answers=answers: answers[c.request_id]) for answers in (cheap, dear)]  # type: ignore[misc]
    stages[1].name = "dear"
    return AutoDrafter(*stages, "auto:inner")


def test_the_dear_one_is_asked_where_the_cheap_one_has_nothing() -> None:
    forced = Proposal.point([4, 5], sources=(("forced", 2),))
    broken = DrafterError("no")
    cheap = [Proposal.point([1]), Proposal.point([]), forced, broken, None]
    dear = [Proposal.point([7, request]) for request in range(5)]
    drafter = either(cheap, dear)
    answers = drafter.propose([context_of([1], i) for i in range(5)], [3] * 5)
    assert [getattr(a, "tokens", a) for a in answers] == [(1,), (7, 1), (7, 2), broken, None]
    assert [c.request_id for c, _ in drafter.stages[1].asked] == [1, 2]  # type: ignore[attr-defined]


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidParams, match="two drafters named 'lookup'"):
        AutoDrafter(LookupDrafter(), LookupDrafter(), "auto:lookup")


def test_nobody_is_asked_for_nothing() -> None:
    drafter = either([Proposal.point([1])], [])
    drafter.propose([context_of([1], 0)], [3])
    assert drafter.stages[1].asked == []  # type: ignore[attr-defined]


def test_both_learn_everything() -> None:
    drafter = either([], [])
    drafter.observe(3, [1, 2])
    drafter.check([])
    drafter.release(3)
    drafter.close()
    for stage in drafter.stages:
        assert stage.told == [(3, [1, 2], None), ("check", []), ("release", 3), "close"]  # type: ignore[attr-defined]
    assert isinstance(drafter, Drafter)


@pytest.mark.parametrize("what", ["release", "close"])
def test_the_second_is_told_even_where_the_first_fails(what: str) -> None:
    drafter = either([], [])

    def fail(*_: Any) -> None:
        raise BackendError("stuck")

    setattr(drafter.stages[0], what, fail)
    with pytest.raises(BackendError, match="stuck"):
        drafter.release(3) if what == "release" else drafter.close()
    assert drafter.stages[1].told == [("release", 3) if what == "release" else "close"]  # type: ignore[attr-defined]


def test_its_name() -> None:
    assert parse_drafter("auto:smollm2:q4_0") == ("auto", "smollm2:q4_0", True)
    with pytest.raises(InvalidParams, match="names no model; write auto:NAME, as in auto:smollm2"):
        parse_drafter("auto:")
    for wrong in ("forced+auto:x", "forced+auto", "Auto:x"):
        with pytest.raises(InvalidParams, match="allowed"):
            parse_drafter(wrong)
    drafter = open_drafter("auto:same", ToyBackend(), lambda name: ToyBackend())
    assert isinstance(drafter, AutoDrafter)
    cheap, dear = drafter.stages
    assert isinstance(cheap, ForcedDrafter) and isinstance(dear, ForcedDrafter)  # noqa: PT018
    assert isinstance(cheap.inner, LookupDrafter)
    assert isinstance(dear.inner, ModelDrafter)
    assert (drafter.name, dear.name) == ("auto:same", "forced+model:same")


# --- in the engine ----------------------------------------------------------------------------------


class Moody(LookupDrafter):
    """Has nothing for whoever `refuses` says."""

    def __init__(self, refuses: set[int]) -> None:
        super().__init__(min_ngram=1)
        self.refuses = refuses

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        answers = super().propose(contexts, budgets)
        return [
            Proposal.point([]) if c.request_id in self.refuses else a for c, a in zip(contexts, answers, strict=True)
        ]


class Count(ModelDrafter):
    """A draft model that notes whom it was asked for."""

    def __init__(self, target: ToyBackend) -> None:
        super().__init__(ToyBackend(12, seed=3, max_len=96, max_seqs=4), "model:twin", target)
        self.asked: list[int] = []

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        self.asked += [context.request_id for context in contexts]
        return super().propose(contexts, budgets)


def run(controller: Controller | None, **options: Any) -> tuple[list[RequestOutput], Count]:
    target = ToyBackend(12, seed=3, max_len=96, max_seqs=4)
    dear = Count(target)
    engine = Engine(target, AutoDrafter(Moody({1}), dear, "auto:twin"), controller=controller, **options)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    ids = [engine.add([1, 2, 3, 1, 2, 3, 1, 2], params) for _ in range(2)]
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        done.update({c.request_id: c.output for c in engine.step() if c.output is not None})
        engine.check()
    return [done[i] for i in ids], dear


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_engine_asks_the_dear_one_for_whom_the_cheap_one_has_nothing(adaptive: bool) -> None:
    """A draft model that is always right; where lengths are decided, it may also be asked where lookup is wrong."""
    plain, _ = run(None, draft_length=0)
    controller = Controller(FREE) if adaptive else None
    outputs, dear = run(controller)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert dear.asked.count(1) >= 3
    assert outputs[1].speculation.accepted > 20
    if not adaptive:
        assert dear.asked.count(0) < dear.asked.count(1)


def test_a_dear_one_without_drafts_leaves_those_of_the_cheap_one() -> None:
    controller = Controller(FREE)
    target = ToyBackend(12, seed=3, max_len=96)
    cheap, dear = Inner(lambda c, k: Proposal.point([1] * k)), Inner(lambda c, k: Proposal.point([]))
    cheap.name, dear.name = "cheap", "dear"
    controller._per_step = {("cheap", 1): 0.0, ("dear", 1): 1.0}
    controller._per_depth = {"cheap": 0.0, "dear": 1e-9}
    engine = Engine(target, AutoDrafter(cheap, dear, "auto:dear"), controller=controller)
    believer = Candidate(0, (1, 0), 8, False, greedy=True)
    for _ in range(50):  # the cheap one is always wrong, the dear one is believed to be right half the time
        controller._estimate(controller._standing(believer), "cheap").observe(0, kept=False)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    while engine.has_work:
        engine.step()
    assert dear.asked
    assert len(controller._pool["cheap", True]._seen) > 0
    assert controller._pool["dear", True]._seen == [], "drafts were booked on a drafter that had none"


def test_by_name_on_a_toy() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0)
    with LLM("toy", drafter="auto:toy:1") as llm, LLM("toy", drafter="none") as plain:
        assert llm.drafter.name == "auto:toy:1"
        assert llm.generate("abcabc", params)[0].outputs[0].text == plain.generate("abcabc", params)[0].outputs[0].text


# --- whatever a drafter does wrong ends in its request --------------------------------------------------


@pytest.mark.parametrize("what", ["observe", "release"])
def test_a_typed_error_of_a_drafter_does_not_hang_the_engine(what: str) -> None:
    """It became its own cause, and whoever followed the causes never came to an end."""

    class Bad(LookupDrafter):
        def observe(self, *arguments: Any) -> None:
            if what == "observe":
                raise DrafterError("no")
            super().observe(*arguments)

        def release(self, request_id: int) -> None:
            if what == "release":
                raise DrafterError("no")
            super().release(request_id)

    engine = Engine(ToyBackend(64), Bad())
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    outputs = [chunk.output for _ in range(20) if engine.has_work for chunk in engine.step() if chunk.output]
    assert isinstance(outputs[0].outputs[0].error, DrafterError)


def test_an_error_that_is_its_own_cause_is_told() -> None:
    class Loop(LookupDrafter):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
            error = DrafterError("round and round")
            error.__cause__ = error
            return [error] * len(contexts)

    engine = Engine(ToyBackend(64), Loop())
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    outputs = [chunk.output for _ in range(20) if engine.has_work for chunk in engine.step() if chunk.output]
    assert "round and round" in str(outputs[0].outputs[0].error)


@pytest.mark.parametrize(
    "sources",
    [None, ["x"], (("x",),), ("x",), (("x", "1"),), (("x", 1.0),), (("x", None),), (("x", -1),), ((["x"], 1),)],
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_malformed_sources_end_their_own_request(sources: Any, adaptive: bool) -> None:
    class Odd(LookupDrafter):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
            return [Proposal.point([1], sources=sources if c.request_id == 0 else ()) for c in contexts]

    engine = Engine(ToyBackend(64), Odd(), controller=Controller(FREE) if adaptive else None)
    for _ in range(2):
        engine.add([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    outputs = {}
    while engine.has_work:
        outputs.update({c.request_id: c.output for c in engine.step() if c.output is not None})
    bad, good = outputs[0].outputs[0], outputs[1].outputs[0]
    assert isinstance(bad.error, DrafterError)
    assert "allowed: a tuple of (name, number of drafts)" in str(bad.error)
    assert (good.error, len(good.token_ids)) == (None, 6)
