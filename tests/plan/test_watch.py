"""What is written down of steps, against what the engine reports itself. On the toy model; no time decides anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.guard import Guard, Load
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, Prompts, Workload
from paceline.bench.target import Target, open_target
from paceline.errors import InvalidInput
from paceline.params import SamplingParams
from paceline.plan.model import Record, tokens_per_step, walk
from paceline.plan.study import RECORDED, Run, Study, compared, doubts, findings
from paceline.plan.watch import Log, Watch
from paceline.schedule import CostTable
from paceline.types import RequestOutput

COSTS = CostTable([1, 5, 17, 64], [0, 500], [[10e-3, 11e-3, 14e-3, 50e-3], [11e-3, 12e-3, 15e-3, 51e-3]])
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, seed=1)
DRAFTERS = {"lookup": "lookup", "model": "model:toy:1", "same": "model:toy"}


@pytest.fixture
def target() -> Iterator[Target]:
    with open_target("toy", DRAFTERS, max_seqs=4, max_len=512, kv_tokens=2048, prefix_cache=False) as opened:
        yield opened


def asks(target: Target, number: int, **changes: object) -> list[Ask]:
    params = replace(PARAMS, **changes)  # type: ignore[arg-type]
    texts = ["hello hello hello", "one two one two", "abc abc abc", "x y x y x"][:number]
    return [
        Ask(Question(str(i), "c", text), tuple(target.backend.tokenizer.encode(text)), replace(params, seed=i))
        for i, text in enumerate(texts)
    ]


def outputs(target: Target, drafter: str, some: list[Ask], length: int | None) -> list[RequestOutput]:
    llm = target.llm(drafter, len(some))
    return llm.generate([ask.ids for ask in some], [replace(ask.params, draft_length=length) for ask in some])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("number", "temperature"), [(1, 0.0), (1, 1.0), (4, 1.0)])
def test_the_log_agrees_with_the_engine(target: Target, drafter: str, number: int, temperature: float) -> None:
    """Catches steps that are left out, counted twice, or of the wrong request; and a watch that changes the text."""
    some = asks(target, number, temperature=temperature)
    with Watch(target, drafter, COSTS) as watch:
        log = watch.run(some, 5)
    known = [output.speculation for output in outputs(target, drafter, some, 5)]
    assert len(log.records) == number
    for records, stats in zip(log.records.values(), known, strict=True):
        assert len(records) == stats.steps
        assert sum(record.emitted for record in records) == stats.emitted
        assert sum(record.drafted for record in records) == stats.drafted
        assert [sum(r.drafted > i for r in records) for i in range(5)] == (stats.drafted_at + [0] * 5)[:5]
        assert sum(min(record.kept, record.emitted) for record in records) == stats.accepted
    assert all(step.batch == number and step.asked == 5 for step in log.timed)
    assert 0 < len(log.timed) <= log.steps
    if number == 1:
        assert [step.tokens for step in log.timed] == [r.emitted for r in next(iter(log.records.values()))]


def test_an_answer_that_stops_inside_a_draft(target: Target) -> None:
    """Catches tokens that are counted as emitted behind the stop."""
    (plain,) = outputs(target, "none", asks(target, 1), 0)
    ids = plain.outputs[0].token_ids
    where = next(i for i in range(5, len(ids)) if ids[i] not in ids[:i])
    with Watch(target, "same", COSTS) as watch:
        log = watch.run(asks(target, 1, stop_token_ids=(ids[where],)), RECORDED)
    (records,) = log.records.values()
    assert sum(record.emitted for record in records) == where + 1
    assert records[-1].kept >= records[-1].emitted
    assert log.tokens == where
    assert sum(step.tokens for step in walk(records, RECORDED, 1)) == where + 1


def test_plain_and_adaptive(target: Target) -> None:
    """Catches a plain run that drafts, and an adaptive one whose length is fixed, or that forgets what things cost."""
    dear = CostTable([1, 2], [0], [[1e-3, 1.0]])
    drafted = {}
    for name, costs, length in (("plain", COSTS, 0), ("cheap", COSTS, None), ("dear", dear, None)):
        with Watch(target, "lookup", costs) as watch:
            (records,) = watch.run(asks(target, 1), length).records.values()
        drafted[name] = {record.drafted for record in records}
        assert sum(record.emitted for record in records) == 40
    assert drafted["plain"] == drafted["dear"] == {0}
    assert max(drafted["cheap"]) > 0  # how many hangs on what lookup takes here, beside a toy's forward


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_the_walk_is_what_shorter_drafts_do(target: Target, drafter: str, length: int, temperature: float) -> None:
    """Catches a walk that promises what the engine does not keep. Greedy and seeded requests have one text only."""
    some = asks(target, 1, temperature=temperature, max_tokens=200)
    with Watch(target, drafter, COSTS) as watch:
        (longest,) = watch.run(some, RECORDED).records.values()
        (real,) = watch.run(some, length).records.values()
    walked, run = tokens_per_step(walk(longest, RECORDED, length)), len(real)
    assert sum(step.tokens for step in walk(longest, RECORDED, length)) == sum(record.emitted for record in real)
    assert walked == pytest.approx(sum(record.emitted for record in real) / run, rel=0.05)


def study(target: Target, watch: Watch, **changes: object) -> Study:
    pairs = [(ask.question, ask.ids) for ask in asks(target, 3)]
    workload = Workload(questions=[], params=replace(PARAMS, **changes))  # type: ignore[arg-type]
    return Study(watch, COSTS, workload, Prompts({"c": pairs}, {}, False), [1, 2], Guard(on=False))


def test_a_study_sets_runs_beside_predictions(target: Target) -> None:
    """Catches settings that are not run, runs that feed the prediction, and a table without a column."""
    with Watch(target, "model", COSTS) as watch:
        one = study(target, watch)
        speed = one.recorded(lambda what, done, total: None)
        before = speed.predict(3, 1)
        runs = one.checked(speed, [3], lambda what, done, total: None).made
        assert speed.predict(3, 1) == before
        found = findings(one, speed, runs)
    settings = {(check["batch"], check["setting"]) for check in found["checks"]}
    for batch in (1, 2):
        assert {(batch, "plain"), (batch, "K = 3"), (batch, "adaptive")} <= settings
        best = speed.best(batch).length
        assert (batch, f"K = {best}" if best else "plain") in settings
    checks = {(check["batch"], check["length"]): check for check in found["checks"]}
    assert checks[1, 3]["tokens_per_step"] == pytest.approx(before.tokens_per_step, rel=0.05)
    assert checks[1, 3]["predicted"]["ratio"] == before.ratio
    assert checks[1, None]["predicted"] is None
    assert (checks[1, 0]["ratio"], checks[1, 0]["tokens_per_step"]) == (None, 1.0)
    assert checks[1, 3]["ratio"]["n"] == 3
    assert len(found["predictions"]) == (RECORDED + 1) * 7
    assert found["tokens"][0]["walked"] == 1.0
    assert found["tokens"][3]["measured"] == checks[1, 3]["tokens_per_step"]
    assert found["tokens"][5]["measured"] is None
    assert speed.costs.to_json() == COSTS.to_json()


def test_what_ends_the_checks_leaves_what_was_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions and the runs before Ctrl-C; catches one that throws minutes of measuring away."""
    with Watch(target, "lookup", COSTS) as watch:
        one = study(target, watch)
        speed = one.recorded(lambda what, done, total: None)
        real, left = one._one, iter(range(5))

        def interrupted(*args: Any) -> Run:
            if next(left) == 4:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(one, "_one", interrupted)
        checked = one.checked(speed, [3], lambda what, done, total: None)
        found = findings(one, speed, checked.made)
    assert (len(checked.made), type(checked.error)) == (4, KeyboardInterrupt)
    assert checked.stopped is not None
    assert checked.stopped.startswith("interrupted after 4 of ")
    assert sum(check["runs"] for check in found["checks"]) == 4
    assert len(found["predictions"]) == (RECORDED + 1) * 7


def test_records_of_a_perfect_drafter(target: Target) -> None:
    """The toy as its own draft model keeps every draft: the walk knows how many steps each length takes."""
    with Watch(target, "same", COSTS) as watch:
        (records,) = watch.run(asks(target, 1, max_tokens=170, ignore_eos=True), RECORDED).records.values()
    assert records[0] == Record(16, 16, 17)
    for length in (1, 4, 8):
        assert len(walk(records, RECORDED, length)) == -(-170 // (length + 1))


def test_prompts_without_an_answer_are_an_error(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with Watch(target, "lookup", COSTS) as watch:
        one = study(target, watch)
        monkeypatch.setattr(one, "_units", lambda batch: iter([(0, [])]))
        monkeypatch.setattr(watch, "run", lambda asks, length: Log())
        with pytest.raises(InvalidInput, match="no prompt had an answer"):
            one.recorded(lambda what, done, total: None)


def test_units_that_never_ran_together_have_no_speed(target: Target) -> None:
    """Catches a division by no seconds; as where one request is over before the other begins."""
    with Watch(target, "lookup", COSTS) as watch:
        one = study(target, watch)
        speed = one.recorded(lambda what, done, total: None)
        runs = one.checked(speed, [], lambda what, done, total: None).made
    for run in runs:
        run.log.timed.clear()
    assert {check["tokens_per_second"] for check in compared(speed, runs)} == {None}


def test_what_cannot_be_believed_is_said() -> None:
    """Catches a prediction that is faster than its tokens per step and passes for one."""
    fine = {"length": 4, "batch": 2, "ratio": 2.0, "tokens_per_step": 2.5}
    check = {"setting": "K = 4", "batch": 2, "disturbed": 0, "tokens_per_second": 1.0}
    assert doubts({"predictions": [fine], "checks": [check]}, Load(0.1, 1, False)) == []
    found = {
        "predictions": [fine, {**fine, "ratio": 3.0}],
        "checks": [{**check, "disturbed": 2}, {**check, "tokens_per_second": None}],
    }
    said = doubts(found, Load(1.5, 3, True))
    assert len(said) == 4
    assert "beside other load (1.5 CPUs)" in said[0]
    assert "4 drafts, 2 at once: 3.00 times plain is predicted with 2.50 tokens per step" in said[1]
    assert said[2].startswith("2 runs were beside other load")
    assert said[3].startswith("K = 4, 2 at once: never all of them decoded together")
