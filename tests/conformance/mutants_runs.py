"""The battery, continued: single deterministic runs; streams, memory, stops, counters, faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import BadLogits, DrafterError
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws
from paceline.sampling import History
from paceline.types import DraftContext, Drafter, Proposal, RequestOutput, Role
from tests.drafters import PointDrafter

from .mutants_checks import check
from .mutants_laws import completion, finish
from .mutants_reference import Tokens, plain_stream

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
    length = len(request.prompt_ids)
    return DraftContext(
        request.request_id, sequence.tokens, length, request.params, draws, Role.DRAFT, sequence.history
    )


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
        history = History(one, text[:length], 1, VOCAB)
        context = DraftContext(7, list(text[:length]), 1, one, KeyedDraws(1, length), Role.DRAFT, history)
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
