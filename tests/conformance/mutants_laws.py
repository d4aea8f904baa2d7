"""The battery, continued: laws of whole requests through the engine, every draw followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from paceline.backend.toy import ToyBackend
from paceline.draft import ModelDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws
from paceline.types import Drafter, RequestOutput
from tests.drafters import PointDrafter, TableDrafter
from tests.verify.tables import Tables

from .enumerator import Branches, EveryDraft, enumerate_outcomes
from .mutants_checks import CHECKS, MAX_LEAVES, TOLERANCE, check, tables
from .mutants_reference import Completion, Tokens, furthest, plain_law, softmax_logits

WATCHED = 1


@dataclass(frozen=True, eq=False)
class Scenario:
    """One watched request on a table toy; companions run beside it with noise of their own.

    drafter: "table" samples from the table's q; "model" is a ModelDrafter on it; "point" guesses.
    """

    params: SamplingParams
    drafter: str = "table"
    vocab_size: int = 3
    pair: str = "random"
    draft_length: int = 2
    stop_ids: tuple[int, ...] = ()
    prompt: Tokens = (0, 1)
    companions: tuple[Tokens, ...] = ()

    @property
    def model(self) -> Tables:
        return tables(self.pair, self.vocab_size, 5)

    def toy(self, rows: Callable[[Tokens], Any]) -> ToyBackend:
        slots = 1 + len(self.companions)
        table = cache(lambda seen: softmax_logits(rows(seen)))
        return ToyBackend(self.vocab_size, stop_ids=self.stop_ids, max_len=16, max_seqs=slots, table=table)

    def build_drafter(self, target: ToyBackend) -> Drafter:
        if self.drafter == "model":
            return ModelDrafter(self.toy(self.model.q), "model:table", target)
        if self.drafter == "point":
            return PointDrafter(lambda seen, k: [(3 * sum(seen) + len(seen) + i) % self.vocab_size for i in range(k)])
        return TableDrafter(self.model.q)

    @property
    def wanted(self) -> dict[Completion, float]:
        return wanted_law(self)


@cache
def wanted_law(scenario: Scenario) -> dict[Completion, float]:
    table = cache(lambda seen: softmax_logits(scenario.model.p(seen)))
    return plain_law(table, scenario.prompt, scenario.params, frozenset(scenario.stop_ids))


def law_is_right(scenario: Scenario, drafter: Callable[[ToyBackend], Drafter] | None = None) -> None:
    """The engine's law is that of plain decoding, whoever drafts. drafter: instead of the scenario's own."""
    law = enumerate_outcomes(partial(run_watched, scenario, drafter or scenario.build_drafter), MAX_LEAVES)
    off = furthest(law, scenario.wanted)
    assert off <= TOLERANCE, f"the law is off by {off:.2g}"


def run_watched(scenario: Scenario, build: Callable[[ToyBackend], Drafter], branches: Branches) -> Completion:
    backend = scenario.toy(scenario.model.p)
    drafter = build(backend)
    if scenario.params.verification == "coupled" and scenario.drafter != "point":
        drafter = EveryDraft(drafter, _BySeed(branches))
    engine = Engine(
        backend,
        drafter,
        draft_length=scenario.draft_length,
        make_draws=lambda seed, start: branches(seed, start) if seed == WATCHED else KeyedDraws(seed, start),
    )
    half = len(scenario.companions) // 2
    for i, prompt in enumerate(scenario.companions[:half]):
        engine.add(prompt, replace(scenario.params, seed=100 + i))
    watched = engine.add(scenario.prompt, replace(scenario.params, seed=WATCHED))
    for i, prompt in enumerate(scenario.companions[half:]):
        engine.add(prompt, replace(scenario.params, seed=200 + i))
    return completion(finish(engine)[watched])


class _BySeed:
    """The enumerator's draws for coupled drafts, under the watched seed instead of the request's id."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    def every_draft(self, request_id: int, step_start: int) -> Any:
        return self._branches.every_draft(WATCHED, step_start)


def completion(output: RequestOutput) -> Completion:
    """Its tokens and finish reason; raises the error that ended it."""
    one = output.outputs[0]
    if one.error is not None:
        raise one.error
    return one.token_ids, one.finish_reason


def finish(engine: Engine) -> dict[int, RequestOutput]:
    """Everything to the end. Fails where the engine goes round in circles."""
    done: dict[int, RequestOutput] = {}
    for _ in range(3000):
        if not engine.has_work:
            return done
        for chunk in engine.step():
            if chunk.output is not None:
                done[chunk.request_id] = chunk.output
    raise AssertionError("the engine never finishes")


def params(max_tokens: int = 3, verification: Any = "rejection", **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, verification=verification, **options)


SCENARIOS = {
    "law/rejection": Scenario(params(3)),
    "law/block": Scenario(params(4, "block"), vocab_size=2),
    "law/coupled": Scenario(params(3, "coupled"), vocab_size=2),
    "law/point": Scenario(params(4), "point"),
    "law/model": Scenario(params(3, temperature=0.6, top_k=2), "model"),
    "law/model block": Scenario(params(3, "block", temperature=1.5, min_p=0.4), "model"),
    "law/filters": Scenario(params(3, temperature=0.8, top_k=2, top_p=0.6), "point", 4),
    "law/top-p": Scenario(params(3, temperature=0.8, top_p=0.75), "point", 4),
    "law/min-p": Scenario(params(2, temperature=2.0, min_p=0.5), "point", 4, draft_length=1),
    "law/ties": Scenario(params(3, top_k=2), "point", 4, "dyadic"),
    "law/greedy": Scenario(params(4, temperature=0), "point", 4, "dyadic"),
    "law/penalties": Scenario(
        params(3, presence_penalty=0.5, frequency_penalty=1.5, repetition_penalty=1.3), "model", prompt=(0, 2)
    ),
    "law/penalties point": Scenario(
        params(4, presence_penalty=0.5, frequency_penalty=-1.5, repetition_penalty=1.3), "point", draft_length=3
    ),
    "law/bias": Scenario(params(3, logit_bias={0: 2.0, 2: -1.0}), vocab_size=3),
    "law/stop": Scenario(params(3), stop_ids=(2,)),
    "law/zeros": Scenario(params(3), pair="zeros in p"),
    "law/company": Scenario(params(2), companions=((2,), (1, 1, 2)), draft_length=1),
    "law/company model": Scenario(params(2), "model", companions=((2,), (1, 1, 2)), draft_length=1),
}
for scenario_name, one_scenario in SCENARIOS.items():
    CHECKS[scenario_name] = partial(law_is_right, one_scenario)


@check("law/joint")
def two_requests_are_independent() -> None:
    scenario = Scenario(params(2), vocab_size=2, draft_length=1)
    mine = scenario.wanted
    law = enumerate_outcomes(partial(run_two, scenario), MAX_LEAVES)
    wanted = {(a, b): mine[a] * mine[b] for a in mine for b in mine}
    off = max(abs(law.get(pair, 0.0) - wanted.get(pair, 0.0)) for pair in {*law, *wanted})
    assert off <= TOLERANCE, f"the joint law of two requests is off by {off:.2g}"


def run_two(scenario: Scenario, branches: Branches) -> tuple[Completion, Completion]:
    backend = ToyBackend(
        2, stop_ids=(), max_len=16, max_seqs=2, table=lambda seen: softmax_logits(scenario.model.p(seen))
    )
    engine = Engine(backend, scenario.build_drafter(backend), draft_length=1, make_draws=branches)
    ids = [engine.add(scenario.prompt, replace(scenario.params, seed=seed)) for seed in (1, 2)]
    done = finish(engine)
    return completion(done[ids[0]]), completion(done[ids[1]])
