"""The battery that every mutant meets: small checks, each well under a second, most of them exact.

rules/...   the law of one step of a pure rule, every draw followed, and its expected accepted length
law/...     the law of whole requests through the engine, every draw followed
drawn/...   the law of several steps with real noise, the drafter in the loop (a G-test)
keys, coins random numbers at their documented address; strict comparison
the others  one deterministic run each: streams, memory, stops, counters, faults

A check returns where the code is right and raises AssertionError, or a typed error, where it is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
from scipy.stats import chi2

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import BadLogits, DrafterError
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws
from paceline.types import Distribution, DraftContext, Drafter, Proposal, RequestOutput, Role
from paceline.verify import speculative_step_verification, verify_block, verify_point, verify_rejection
from paceline.verify.block import keep_prefix
from tests.drafters import PointDrafter, TableDrafter
from tests.verify.tables import (
    POSITION,
    Rule,
    Tables,
    dense,
    error,
    expected_tau,
    one_step,
    prefixes,
    probability,
    sparse,
)

from .enumerator import Branches, EveryDraft, enumerate_outcomes
from .mutants_reference import (
    Completion,
    Tokens,
    chi2_statistic,
    furthest,
    noise,
    plain_law,
    plain_stream,
    race,
    softmax_logits,
)

TOLERANCE = 1e-12
ALPHA = 1e-6  # chance that a G-test below calls right code wrong; its seeds are fixed, so it is drawn once
MAX_LEAVES = 1_000  # right code needs 135; a mutant may have no end
RULES: dict[str, Rule] = {"rejection": verify_rejection, "block": verify_block, "point": verify_point}

CHECKS: dict[str, Callable[[], None]] = {}


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return register


# --- pure rules ---------------------------------------------------------------------------------------


def rule_is_exact(name: str) -> None:
    """One step emits p and keeps as many drafts as theory says, over tables that have broken rules before."""
    for pair, V, K in (("random", 3, 1), ("zeros in both", 3, 2), ("p = q", 2, 2), ("mixed", 2, 3), ("random", 3, 2)):
        model = tables(pair, V, 3)
        tokens: dict[Tokens, float] = {}
        tau = 0.0
        run = partial(one_verdict, name, model, K, sparse if K % 2 else dense)
        for (emitted, accepted), weight in enumerate_outcomes(run, MAX_LEAVES).items():
            tokens[emitted] = tokens.get(emitted, 0.0) + weight
            tau += accepted * weight
        off = error(tokens, model, K + 1)
        assert off <= TOLERANCE, f"{pair}, V={V}, K={K}: the law is off by {off:.2g}"
        wanted = accepted_length(name, model, K)
        assert abs(tau - wanted) <= TOLERANCE, f"{pair}, V={V}, K={K}: {tau:.4f} drafts kept, {wanted:.4f} can be"


def one_verdict(name: str, model: Tables, K: int, form: Any, branches: Branches) -> tuple[Tokens, int]:
    verdict = one_step(RULES[name], model, K, branches(), form, point=name == "point")
    n = verdict.num_accepted
    assert len(verdict.tokens) == n + 1, f"{len(verdict.tokens)} tokens with {n} accepted"
    return verdict.tokens, n


def accepted_length(name: str, model: Tables, K: int) -> float:
    if name != "point":
        return expected_tau(model, K, name)
    # A draft chosen whatever p is survives with p's own probability of it.
    drafts = itertools.chain.from_iterable(prefixes(model.vocab_size, length) for length in range(1, K + 1))
    return sum(probability(model.q, x) * probability(model.p, x) for x in drafts)


@cache
def tables(pair: str, vocab_size: int, seed: int) -> Tables:
    return Tables(pair, vocab_size, seed)


for rule_name in RULES:
    CHECKS[f"rules/{rule_name}"] = partial(rule_is_exact, rule_name)


@check("rounding")
def certain_prefixes_are_kept() -> None:
    """b = 1 must give h = 1 whatever dust the residual holds, or p = q loses drafts now and then."""
    for r in (0.0, 1e-300, 1e-17, 1.2e-16, 3.5e-16, 0.3):
        h = keep_prefix(1.0, np.float64(r))
        assert h == 1.0, f"b = 1, r = {r}: h = {h!r}"
    row = dense(np.array([0.25, 0.75]))
    verdict = verify_rejection([row, row], Proposal.sampled([0], [row]), Unlucky(1, POSITION), POSITION)
    assert verdict.num_accepted == 0
    assert verdict.tokens[0] in (0, 1), f"nothing was recovered from p: {verdict}"


class Unlucky(KeyedDraws):
    """Rejects whatever may be rejected but for rounding."""

    def accept(self, probability: float, position: int, node: int = 0) -> bool:
        return False


class Coin:
    """random() from a list, for the taught functions."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


@check("taught")
def taught_step_is_exact_on_a_grid() -> None:
    """Probabilities in quarters: uniforms at the lower edges of quarters count the law out exactly."""
    p, q = np.array([[0.5, 0.25, 0.25], [0.25, 0.75, 0.0]]), np.array([[0.25, 0.5, 0.25]])
    edges = (0.0, 0.25, 0.5, 0.75)
    law: dict[Tokens, float] = {}
    for x in range(3):
        for coins in itertools.product(edges, repeat=2):
            emitted = tuple(speculative_step_verification([x], p, q, Coin(*coins)))
            law[emitted] = law.get(emitted, 0.0) + q[0, x] / 16
    first = [sum(weight for tokens, weight in law.items() if tokens[0] == v) for v in range(3)]
    assert first == p[0].tolist(), f"the first token follows {first}"
    second = [sum(law.get((x, y), 0.0) for x in range(3)) / 0.75 for y in range(3)]  # 3/4 of all drafts are kept
    assert second == p[1].tolist(), f"the bonus follows {second}"
    impossible = speculative_step_verification([1], [[1.0, 0.0]], [[0.5, 0.5]], Coin(0.0, 0.0))
    assert impossible == [0], f"u = 0 kept a draft with p = 0: {impossible}"


# --- real noise ---------------------------------------------------------------------------------------


@check("coins")
def comparison_is_strict() -> None:
    for seed, position, start, node in ((1, 5, 5, 0), (2**40, 9, 7, 2), (77, 1000, 998, 2)):
        draws = KeyedDraws(seed, start)
        u = noise(seed, position, Role.ACCEPT, start, node)
        assert not draws.accept(u, position, node), "u = probability was accepted"
        assert draws.accept(float(np.nextafter(u, 1.0)), position, node), "u just below probability was rejected"
    with mock.patch("paceline.rng._lane0", return_value=0.0):
        assert not KeyedDraws(1, 5).accept(0.0, 5), "u = 0 accepted a draft with p = 0"


@check("keys")
def noise_is_at_its_documented_address() -> None:
    weights = np.array([0.1, 0.0, 0.3, 0.2, 0.4])
    ids = np.flatnonzero(weights)
    addresses = itertools.product((1, 2**40 + 3), (7, 8), (5, 7), (0, 1, 3))
    for seed, position, start, node in addresses:
        draws = KeyedDraws(seed, start)
        for role in (Role.TARGET, Role.DRAFT, Role.RECOVER):
            where = (0, 0) if role == Role.TARGET else (start, node)
            wanted = race(weights, seed, position, role, *where)
            for row, names in ((weights, None), (weights[ids], ids)):
                token = draws.pick(row, position, role, ids=names, node=node)
                assert token == wanted, f"{draws}, {role.name}, position {position}, node {node}: {token}, not {wanted}"
        u = noise(seed, position, Role.ACCEPT, start, node)
        assert draws.accept(u + 1e-9, position, node), f"{draws}: accept at {position}, node {node} is another coin"
        assert not draws.accept(u - 1e-9, position, node), f"{draws}: accept at {position}, node {node} is another coin"


def drawn_law_is_right(name: str) -> None:
    """Two steps or more until three tokens are out, 5000 seeds; shifts of the law by 0.05 are seen for sure."""
    p, q = {"rejection": ((0.2, 0.4, 0.4), (0.6, 0.3, 0.1)), "block": ((1 / 3, 2 / 3), (2 / 3, 1 / 3))}[name]
    rows = [Distribution.of(p)] * 3
    q_row = Distribution.of(q)
    counts: dict[Tokens, int] = {}
    for seed in range(5000):
        tokens: Tokens = ()
        while len(tokens) < 3:
            start = POSITION + len(tokens)
            draws = KeyedDraws(seed, start)
            x = [draws.pick(q_row.probs, start + i, Role.DRAFT, node=i) for i in range(2)]
            tokens += RULES[name](rows, Proposal.sampled(x, [q_row] * 2), draws, start).tokens
        counts[tokens[:3]] = counts.get(tokens[:3], 0) + 1
    law = {x: p[x[0]] * p[x[1]] * p[x[2]] for x in prefixes(len(p), 3)}
    statistic, bound = chi2_statistic(counts, law), float(chi2.isf(ALPHA, len(law) - 1))
    assert statistic <= bound, f"G = {statistic:.1f}, above {bound:.1f}"


CHECKS["drawn/rejection"] = partial(drawn_law_is_right, "rejection")
CHECKS["drawn/block"] = partial(drawn_law_is_right, "block")


# --- laws through the engine --------------------------------------------------------------------------

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


# --- one stream ---------------------------------------------------------------------------------------

VOCAB = 11
PROMPTS: tuple[Tokens, ...] = ((1, 2, 3, 1, 2), (4,), (5, 6) * 9, (7, 7, 7))
STREAM_PARAMS = (
    SamplingParams(max_tokens=24, seed=1),
    SamplingParams(max_tokens=24, seed=2, temperature=0.7, top_k=4),
    SamplingParams(max_tokens=24, seed=2**45, temperature=1.3, top_p=0.8, frequency_penalty=0.7),
    SamplingParams(max_tokens=24, seed=4, temperature=0.0, repetition_penalty=1.4, verification="block"),
)


def toy(**options: Any) -> ToyBackend:
    return ToyBackend(
        VOCAB, **{"stop_ids": (), "seed": 5, "max_len": 96, "max_seqs": 4, "max_step_tokens": 24, **options}
    )


@cache
def streams() -> tuple[Tokens, ...]:
    whole = toy(max_step_tokens=96)
    return tuple(plain_stream(whole, prompt, one) for prompt, one in zip(PROMPTS, STREAM_PARAMS, strict=True))


def drafters() -> dict[str, Callable[[ToyBackend], Drafter]]:
    return {
        "none": lambda target: NoDrafter(),
        "lookup": lambda target: LookupDrafter(2, 1),
        "model": lambda target: ModelDrafter(toy(seed=6), "model:other", target),
    }


@check("path")
def seeded_streams_are_the_plain_ones() -> None:
    for name, build in drafters().items():
        backend = toy()
        engine = Engine(backend, build(backend), draft_length=3)
        ids = [engine.add(prompt, one) for prompt, one in zip(PROMPTS, STREAM_PARAMS, strict=True)]
        done = finish(engine)
        for i, (request_id, wanted) in enumerate(zip(ids, streams(), strict=True)):
            tokens, _ = completion(done[request_id])
            assert tokens == wanted, f"{name}, request {i}: {tokens}, plainly {wanted}"


@check("memory")
def books_balance_after_every_step() -> None:
    for build in drafters().values():
        backend = toy()
        drafter = build(backend)
        engine = Engine(backend, drafter, draft_length=3)
        ids = [engine.add(prompt, one) for prompt, one in zip(PROMPTS, STREAM_PARAMS, strict=True)]
        for step in range(60):
            engine.step()
            if step == 5:
                engine.cancel(ids[0])
            backend.check()
            for sequence in engine.running:
                if sequence.num_output:
                    held, wanted = backend.cached_tokens(sequence.slot), tuple(sequence.tokens[:-1])
                    assert held == wanted, f"step {step}: cached {held}, committed but the last {wanted}"
            if isinstance(drafter, ModelDrafter):
                drafter.check([context_of(sequence) for sequence in engine.running])
        assert not engine.has_work, "24 tokens need no 60 steps"
        assert backend.slots_in_use == 0, f"{backend.slots_in_use} slots leaked"
        if isinstance(drafter, ModelDrafter):
            leaked = drafter.backend.slots_in_use  # type: ignore[attr-defined]
            assert leaked == 0, f"{leaked} slots of the draft model leaked"


def context_of(sequence: Any) -> DraftContext:
    request = sequence.request
    draws = KeyedDraws(request.seed, len(sequence.tokens))
    return DraftContext(request.request_id, sequence.tokens, len(request.prompt_ids), request.params, draws, Role.DRAFT)


@check("draws")
def the_engine_names_seed_and_step_start() -> None:
    asked: list[tuple[int, int]] = []

    def make_draws(seed: int, step_start: int) -> KeyedDraws:
        asked.append((seed, step_start))
        return KeyedDraws(seed, step_start)

    engine = Engine(toy(), LookupDrafter(2, 1), draft_length=3, make_draws=make_draws)
    for prompt, one in zip(PROMPTS, STREAM_PARAMS, strict=True):
        engine.add(prompt, one)
    engine.step()
    while engine.has_work:
        wanted = [(s.request.seed, len(s.tokens)) for s in engine.running]
        asked.clear()
        engine.step()
        assert set(asked) <= set(wanted), f"draws for {asked}, the requests stand at {wanted}"


@check("draft memory")
def a_draft_model_forgets_what_did_not_become_text() -> None:
    """Steps without a question, with more or fewer tokens than were drafted: as if it had never drafted."""
    one = SamplingParams(temperature=0)
    text = streams()[0]

    def drafts(drafter: ModelDrafter, length: int) -> Proposal:
        context = DraftContext(7, list(text[:length]), 1, one, KeyedDraws(1, length), Role.DRAFT)
        (answer,) = drafter.propose([context], [4])
        drafter.check([context])
        assert isinstance(answer, Proposal), answer
        return answer

    kept = ModelDrafter(toy(seed=6), "model:kept", toy())
    for length in (3, 4, 5, 9, 10, 12, 17):
        got, wanted = drafts(kept, length), drafts(ModelDrafter(toy(seed=6), "model:fresh", toy()), length)
        assert got.tokens == wanted.tokens, f"after {length} tokens: {got.tokens}, afresh {wanted.tokens}"


@check("self-draft")
def a_model_drafting_for_itself_is_always_right() -> None:
    """p = q bit for bit, so every draft is kept: the drafter sees the target's params, history and memory."""
    one = SamplingParams(max_tokens=30, seed=3, temperature=0.6, top_k=5, frequency_penalty=0.5, repetition_penalty=1.2)
    for verification in ("rejection", "block", "coupled"):
        backend = toy()
        engine = Engine(backend, ModelDrafter(toy(), "model:same", backend), draft_length=3)
        ids = [engine.add(prompt, replace(one, verification=verification)) for prompt in PROMPTS]
        done = finish(engine)
        for request_id in ids:
            tokens, _ = completion(done[request_id])
            s = done[request_id].speculation
            assert s.rejected == 0, f"{verification}: {s.rejected} of {s.drafted} drafts of the same model rejected"
            assert len(tokens) == 30, f"{verification}: {len(tokens)} tokens"


# --- stops, counters, faults --------------------------------------------------------------------------


def oracle(stream: Tokens, prompt: Tokens, wrong_at: tuple[int, ...] = ()) -> PointDrafter:
    """Drafts what will come, but for the output positions in wrong_at."""

    def guess(seen: Tokens, budget: int) -> list[int]:
        start = len(seen) - len(prompt)
        return [(t + (start + i in wrong_at)) % VOCAB for i, t in enumerate(stream[start : start + budget])]

    return PointDrafter(guess)


def run_one(one: SamplingParams, draft_length: int, wrong_at: tuple[int, ...] = ()) -> RequestOutput:
    backend = toy()
    engine = Engine(backend, oracle(streams()[0], PROMPTS[0], wrong_at), draft_length=draft_length)
    request_id = engine.add(PROMPTS[0], one)
    return finish(engine)[request_id]


@check("stops")
def requests_end_where_plain_decoding_ends_them() -> None:
    stream, base = streams()[0], STREAM_PARAMS[0]
    for draft_length, offset in itertools.product((0, 2, 5), range(1, 8)):
        stop = stream[offset]
        first = stream.index(stop)
        where = f"K={draft_length}, offset {offset}"
        for one, wanted in (
            (replace(base, stop_token_ids=[stop]), (stream[: first + 1], "stop")),
            (replace(base, stop_token_ids=[stop], max_tokens=first + 1), (stream[: first + 1], "stop")),
            (replace(base, stop="0123456789a"[stop]), (stream[:first], "stop")),
            (replace(base, max_tokens=offset), (stream[:offset], "length")),
        ):
            got = completion(run_one(one, draft_length))
            assert got == wanted, f"{where}: {got}, wanted {wanted}"


@check("counters")
def counters_follow_what_was_emitted() -> None:
    wrong_at = (2, 3, 9, 14)
    for draft_length, stop in itertools.product((0, 1, 3, 5), (None, 13, 16)):
        stream = streams()[0]
        one = replace(STREAM_PARAMS[0], max_tokens=stop or 24)
        out = run_one(one, draft_length, wrong_at)
        steps, drafted, accepted = simulated(len(stream[: stop or 24]), draft_length, wrong_at)
        s = out.speculation
        got = (s.steps, s.drafted, s.accepted, s.emitted, out.outputs[0].kinds.count("accepted"))
        wanted = (steps, drafted, accepted, stop or 24, accepted)
        assert got == wanted, f"K={draft_length}: (steps, drafted, accepted, emitted, kinds) {got}, wanted {wanted}"
    # A stop inside an accepted run: what lies behind it was never emitted, so it was not accepted either.
    character = "0123456789a"[streams()[0][4]]
    cut = run_one(replace(STREAM_PARAMS[0], stop=character), 6)
    kept = len(cut.outputs[0].token_ids)
    assert cut.speculation.emitted == kept == len(cut.outputs[0].kinds), "counters count what was cut away"
    assert cut.speculation.accepted == cut.outputs[0].kinds.count("accepted"), "counters count what was cut away"


def simulated(length: int, draft_length: int, wrong_at: tuple[int, ...]) -> tuple[int, int, int]:
    """(steps, drafted, accepted) of an oracle that is wrong at the given positions."""
    done = steps = drafted = accepted = 0
    while done < length:
        k = min(draft_length, length - done - 1)
        right = next((i for i in range(k) if done + i in wrong_at), k)
        steps, drafted, accepted, done = steps + 1, drafted + k, accepted + right, done + right + 1
    return steps, drafted, accepted


@check("faults")
def a_fault_ends_one_request_with_a_typed_error() -> None:
    class MinusOne(PointDrafter):
        def propose(self, contexts: Any, budgets: Any) -> Any:
            bad, good = Proposal((-1,), (-1,), "point"), Proposal.point(())
            return [bad if c.request_id == 1 else good for c in contexts]

    def nan_rows(seen: Tokens) -> bool:
        return seen[: len(PROMPTS[1])] == PROMPTS[1] and len(seen) == 6

    faults = (
        (BadLogits, toy(nan_when=nan_rows), NoDrafter()),
        (DrafterError, toy(), MinusOne(lambda seen, k: ())),
    )
    for kind, backend, drafter in faults:
        engine = Engine(backend, drafter, draft_length=3)
        ids = [engine.add(prompt, one) for prompt, one in zip(PROMPTS, STREAM_PARAMS, strict=True)]
        done = finish(engine)
        error = done[ids[1]].outputs[0].error
        assert isinstance(error, kind), f"{error!r} instead of {kind.__name__}"
        for i in (0, 2, 3):
            assert completion(done[ids[i]])[0] == streams()[i], f"a neighbour, request {i}, suffered"
