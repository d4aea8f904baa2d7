"""Path equality: under point and coupled, a seed has one stream, whoever drafts and whoever else is there.

Every job is run alone, without a drafter and in one prefill chunk; that is its plain stream. Then all jobs run
together, in many ways that must not matter, and every token is compared with it. The toy's logits are a hash
of the KV cells, so a stale, missing or misplaced cell changes all that follows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import InvariantError
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws
from paceline.types import Distribution, DraftContext, Drafter, Proposal, RequestOutput, Role
from tests.drafters import PointDrafter

VOCAB = 23
STOP = VOCAB - 1
MAX_LEN = 768
DRAFT_LENGTHS = (0, 1, 2, 4, 7, 16)
WANTED_TOKENS = 200_000

Tokens = tuple[int, ...]


# --- jobs and their plain streams ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Job:
    """A request, and nothing about how it is run. Compared by identity, so that its plain run can be kept."""

    prompt: Tokens
    params: SamplingParams


def toy(**options: Any) -> ToyBackend:
    defaults: dict[str, Any] = {"stop_ids": (STOP,), "seed": 3, "max_len": MAX_LEN, "max_seqs": 16, "sharpness": 9.0}
    return ToyBackend(VOCAB, **{**defaults, **options})


def make_job(number: int, *, longest: int = 480, greedy: bool = False) -> Job:
    """Job `number` of a fixed list: every option of the sampler, alone and with others, and prompts of all sizes."""
    rng = random.Random(number)
    prompt_length = rng.choice((1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 150, 300))
    options: dict[str, Any] = {
        "temperature": 0.0 if greedy else rng.choice((0.0, 0.3, 1.0, 1.0, 1.5)),
        "top_k": rng.choice((0, 0, 1, 3, 8, VOCAB)),
        "top_p": rng.choice((1.0, 1.0, 0.9, 0.5)),
        "min_p": rng.choice((0.0, 0.0, 0.02, 0.2)),
        "presence_penalty": rng.choice((0.0, 0.0, 0.4)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.0, 0.05, -0.02)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.0, 1.1)),
        "logit_bias": rng.choice((None, None, {1: 2.0, 4: -3.0})),
        "stop": rng.choice((None, None, None, "0a1", ["77", "b2b"])),
        "stop_token_ids": rng.choice((None, None, None, None, [0])),
        "ignore_eos": rng.random() < 0.8,  # most run to their length, some end at a stop
    }
    params = SamplingParams(
        max_tokens=rng.randint(longest // 3, longest),
        seed=rng.choice((number, 2**63 + number)),
        draft_length=rng.choice(DRAFT_LENGTHS),
        verification=rng.choice(("auto", "coupled")),
        **options,
    )
    return Job(tuple(rng.randrange(VOCAB - 1) for _ in range(prompt_length)), params)


@cache
def plain(job: Job) -> RequestOutput:
    """Alone, without a drafter."""
    return run_alone(job.prompt, job.params)


@cache
def plain_tokens(job: Job) -> Tokens:
    """The plain stream as if nothing could end it before max_tokens; what an oracle drafts."""
    endless = replace(job.params, stop=None, stop_token_ids=None, ignore_eos=True)
    return run_alone(job.prompt, endless).outputs[0].token_ids


def run_alone(prompt: Tokens, params: SamplingParams) -> RequestOutput:
    engine = Engine(toy(max_seqs=1, max_step_tokens=2 * MAX_LEN), NoDrafter())
    engine.add(prompt, params)
    (output,) = (chunk.output for chunk in drain(engine) if chunk.output is not None)
    return output


def drain(engine: Engine) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step()


# --- drafters -----------------------------------------------------------------------------------------


class JobDrafter(PointDrafter):
    """Knows the plain stream of every job; how it uses that is `use(right drafts, position) -> drafts`."""

    def __init__(self, jobs: Sequence[Job], use: Callable[[list[int], int], list[int]]) -> None:
        super().__init__(lambda seen, k: ())
        self._jobs, self._use = jobs, use

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        answers = []
        for context, budget in zip(contexts, budgets, strict=True):
            assert self.observed[context.request_id] == list(context.tokens), "observe() missed tokens"
            start = len(context.tokens) - context.prompt_length
            right = plain_tokens(self._jobs[context.request_id])[start : start + budget]
            answers.append(Proposal.point(self._use(list(right), start)))
        return answers

    def check(self, contexts: Sequence[DraftContext]) -> None:
        assert set(self.observed) == {c.request_id for c in contexts}, "memory of requests that are over"


def mostly_right(right: list[int], start: int) -> list[int]:
    return [(t + 1) % VOCAB if (start + i) % 7 == 3 else t for i, t in enumerate(right)]


def always_wrong(right: list[int], start: int) -> list[int]:
    """Never the plain token; stop ids among them."""
    return [(t + 1 + (start + i) % (VOCAB - 1)) % VOCAB for i, t in enumerate(right)]


def moody(right: list[int], start: int) -> list[int]:
    """Nothing in some steps, garbage in others, the truth in between; of any length."""
    rng = random.Random(start)
    length = rng.randrange(len(right) + 1)
    return rng.choice((right, always_wrong(right, start), [STOP] * len(right)))[:length]


Build = Callable[[ToyBackend, Sequence[Job]], Drafter]
DRAFTERS: dict[str, Build] = {
    "none": lambda target, jobs: NoDrafter(),
    "lookup": lambda target, jobs: LookupDrafter(),
    "lookup 1..1": lambda target, jobs: LookupDrafter(1, 1),
    "lookup 3..8": lambda target, jobs: LookupDrafter(8, 3),
    "model, same": lambda target, jobs: ModelDrafter(toy(), "model:same", target),
    "model, other": lambda target, jobs: ModelDrafter(toy(seed=4, max_step_tokens=48), "model:other", target),
    "model, close": lambda target, jobs: ModelDrafter(toy(sharpness=7.0), "model:close", target),
    "oracle": lambda target, jobs: JobDrafter(jobs, lambda right, start: right),
    "mostly right": lambda target, jobs: JobDrafter(jobs, mostly_right),
    "always wrong": lambda target, jobs: JobDrafter(jobs, always_wrong),
    "moody": lambda target, jobs: JobDrafter(jobs, moody),
}


# --- running jobs together ----------------------------------------------------------------------------


@dataclass
class World:
    """How the jobs are run; none of it may show in a token.

    arrivals[i]: the step at which job i is added. cancels[i]: the step at which it is cancelled, if it still
    runs. draft_length: instead of each job's own. verification: instead of each job's own.
    """

    drafter: str = "none"
    max_seqs: int = 16
    max_step_tokens: int = 512
    kv_tokens: int | None = None
    arrivals: list[int] = field(default_factory=list)
    cancels: dict[int, int] = field(default_factory=dict)
    draft_length: int | None = None
    verification: str | None = None
    shuffle_slots: int | None = None
    backend: dict[str, Any] = field(default_factory=dict)
    checks: bool = True


def run_world(world: World, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Every job's output; owners check themselves after every step, and nothing is held at the end."""
    backend = toy(
        max_seqs=world.max_seqs,
        max_step_tokens=world.max_step_tokens,
        kv_tokens=world.kv_tokens,
        **world.backend,
    )
    shuffle_slots(backend, world.shuffle_slots)
    drafter = DRAFTERS[world.drafter](backend, jobs)
    engine = Engine(backend, drafter)
    arrivals = world.arrivals or [0] * len(jobs)
    done: dict[int, RequestOutput] = {}
    step, added = 0, 0
    while added < len(jobs) or engine.has_work:
        while added < len(jobs) and arrivals[added] <= step:
            assert engine.add(jobs[added].prompt, params_in(world, jobs[added])) == added
            added += 1
        chunks = engine.step()
        for number, when in world.cancels.items():
            if when == step and (chunk := engine.cancel(number)) is not None:
                chunks.append(chunk)
        done.update({c.request_id: c.output for c in chunks if c.output is not None})
        if world.checks:
            backend.check()
            check_drafter(drafter, engine)
        step += 1
        assert step < 50_000, "the engine never finishes"
    assert backend.slots_in_use == 0
    if isinstance(drafter, ModelDrafter):
        assert drafter.backend.slots_in_use == 0  # type: ignore[attr-defined]
    return [done[i] for i in range(len(jobs))]


def params_in(world: World, job: Job) -> SamplingParams:
    changes: dict[str, Any] = {}
    if world.draft_length is not None:
        changes["draft_length"] = world.draft_length
    if world.verification is not None:
        changes["verification"] = world.verification
    return replace(job.params, **changes)


def shuffle_slots(backend: ToyBackend, seed: int | None) -> None:
    """Leave the free slots in an order of their own, so that slot and row differ."""
    slots = [backend.acquire() for _ in range(backend.info.max_slots)]
    if seed is not None:
        random.Random(seed).shuffle(slots)
    for slot in slots:
        backend.release(slot)


def check_drafter(drafter: Any, engine: Engine) -> None:
    if hasattr(drafter, "check"):
        drafter.check(
            [
                DraftContext(
                    request_id=s.request.request_id,
                    tokens=s.tokens,
                    prompt_length=len(s.request.prompt_ids),
                    params=s.request.params,
                    draws=KeyedDraws(s.request.seed, len(s.tokens)),
                    role=Role.TARGET,
                )
                for s in engine.running
            ]
        )


@dataclass
class Totals:
    """Over all jobs of a world; every token was compared and equal."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    cancelled: int = 0


def compare(outputs: Sequence[RequestOutput], jobs: Sequence[Job]) -> Totals:
    """Assert that every stream is the plain one, or a prefix of it where it was cancelled."""
    totals = Totals()
    for number, (got, job) in enumerate(zip(outputs, jobs, strict=True)):
        one, wanted = got.outputs[0], plain(job).outputs[0]
        if one.error is not None:
            raise one.error
        n = len(one.token_ids)
        if one.finish_reason == "cancelled":
            assert one.token_ids == plain_tokens(job)[:n], f"job {number} was cancelled after other tokens"
        else:
            difference = first_difference(one.token_ids, wanted.token_ids)
            assert difference is None, f"job {number}: {difference}"
            ended, plainly = ((o.text, o.finish_reason, o.stop_reason) for o in (one, wanted))
            assert ended == plainly, f"job {number} ended otherwise"
        totals.tokens += n
        totals.steps += got.speculation.steps
        totals.drafted += got.speculation.drafted
        totals.accepted += got.speculation.accepted
        totals.cancelled += one.finish_reason == "cancelled"
    return totals


def first_difference(got: Tokens, wanted: Tokens) -> str | None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            return f"output token {i} is {a}, plainly {b}"
    return None if len(got) == len(wanted) else f"{len(got)} tokens, plainly {len(wanted)}"


def staggered(count: int, seed: int, spread: int) -> list[int]:
    rng = random.Random(seed)
    return sorted(rng.randrange(spread) for _ in range(count))


# --- the default run: 200,000 tokens ------------------------------------------------------------------

WORLDS: dict[str, World] = {
    "all at once, no drafts": World("none"),
    "one after the other": World("mostly right", max_seqs=1),
    "lookup": World("lookup"),
    "lookup, staggered, shuffled slots": World("lookup 1..1", arrivals=staggered(64, 1, 200), shuffle_slots=1),
    "lookup, long n-grams, 5 at a time": World("lookup 3..8", max_seqs=5, draft_length=7),
    "lookup, trimmed drafts": World("lookup 1..1", max_step_tokens=40, draft_length=16, shuffle_slots=2),
    "same model, coupled": World("model, same", verification="coupled"),
    "close model, staggered": World("model, close", arrivals=staggered(64, 2, 300), shuffle_slots=3),
    "other model, trimmed drafts": World("model, other", max_step_tokens=50, draft_length=4),
    "oracle": World("oracle", draft_length=16),
    "oracle, trimmed drafts, little memory": World("oracle", max_step_tokens=33, kv_tokens=3000),
    "mostly right, judged as rejection": World("mostly right", verification="rejection", shuffle_slots=4),
    "mostly right, judged as block": World("mostly right", verification="block", kv_tokens=2000),
    "always wrong": World("always wrong", draft_length=4, max_seqs=7),
    "moody, staggered": World("moody", arrivals=staggered(64, 3, 400), shuffle_slots=5),
    "moody, cancellations": World("moody", cancels={i: 5 + 11 * i for i in range(0, 64, 3)}),
    "close model, cancellations": World(
        "model, close", cancels={i: 3 + 7 * i for i in range(1, 64, 4)}, kv_tokens=2500
    ),
    "lookup, cancellations, staggered": World(
        "lookup", arrivals=staggered(64, 4, 150), cancels={i: 60 + 5 * i for i in range(2, 64, 5)}, max_seqs=9
    ),
}


@cache
def jobs_of(first: int, count: int = 64) -> tuple[Job, ...]:
    return tuple(make_job(first + i) for i in range(count))


@cache
def compared(name: str, first: int) -> Totals:
    """Run the jobs from number `first` on in this world and compare."""
    jobs = jobs_of(first)
    return compare(run_world(WORLDS[name], jobs), jobs)


@pytest.mark.parametrize("name", WORLDS)
def test_the_stream_of_a_seed(name: str) -> None:
    """vllm#6038, vllm-ascend#13608, sglang PR #30822: the same seed in any company, with drafts or without.

    TensorRT-LLM PR #3456: slots in any order, arrivals in waves. TensorRT-LLM#15182: steps that reject all, then
    draft again. sglang PR #18984, PR #18760, PR #13826: aborts at any moment, and all slots free at the end.
    """
    world, totals = WORLDS[name], compared(name, 0)
    assert totals.tokens > 1000
    assert (totals.drafted > 0) == (world.drafter != "none")
    assert (totals.accepted > 0) == (world.drafter not in ("none", "always wrong"))
    assert (totals.cancelled > 5) == bool(world.cancels)


def test_the_size_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    totals = {name: compared(name, 0) for name in WORLDS}
    lines = [f"{t.tokens:>8,} tokens, {t.tokens / t.steps:5.2f} per step  {name}" for name, t in totals.items()]
    total = sum(t.tokens for t in totals.values())
    with capsys.disabled():
        print("\n" + "\n".join([*lines, f"{total:>8,} tokens compared"]))
    assert total >= WANTED_TOKENS


def test_the_jobs_are_a_mixture() -> None:
    ends = [(o.finish_reason, type(o.stop_reason).__name__) for o in (plain(job).outputs[0] for job in jobs_of(0))]
    assert set(ends) == {("length", "NoneType"), ("stop", "int"), ("stop", "str")}
    assert len({job.params.temperature for job in jobs_of(0)}) == 4
    assert {len(job.prompt) for job in jobs_of(0)} >= {1, 300}


@pytest.mark.slow
@pytest.mark.parametrize("round_number", range(1, 11))
def test_two_million_tokens(round_number: int, capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(compared(name, 1000 * round_number).tokens for name in WORLDS)
    with capsys.disabled():
        print(f"\nround {round_number}: {total:,} tokens compared")
    assert total >= WANTED_TOKENS


# --- greedy, under every rule -------------------------------------------------------------------------


class SampledDrafter(JobDrafter):
    """Really draws its drafts, from a q that gives the plain token half of its mass."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs, lambda right, start: right)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        return [
            self._sample(c, answer.tokens)
            for c, answer in zip(contexts, super().propose(contexts, budgets), strict=True)
        ]

    def _sample(self, context: DraftContext, right: Tokens) -> Proposal:
        q = [Distribution.of(np.full(VOCAB, 0.5 / VOCAB) + 0.5 * (np.arange(VOCAB) == token)) for token in right]
        start = len(context.tokens)
        drafts = [context.draws.pick(row.probs, start + i, context.role, node=i) for i, row in enumerate(q)]
        return Proposal.sampled(drafts, q)


DRAFTERS["sampled"] = lambda target, jobs: SampledDrafter(jobs)


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("drafter", ["sampled", "model, close", "lookup 1..1"])
def test_greedy_is_greedy_under_every_rule(drafter: str, verification: str, draft_length: int) -> None:
    """transformers#30042, transformers#30413: assisted greedy equals greedy for every k; all rules become argmax."""
    jobs = greedy_jobs()
    totals = compare(run_world(World(drafter, verification=verification, draft_length=draft_length), jobs), jobs)
    assert (totals.accepted > 0) == (draft_length > 0)


@cache
def greedy_jobs() -> tuple[Job, ...]:
    return tuple(make_job(300 + i, longest=60, greedy=True) for i in range(8))


@pytest.mark.parametrize("drafter", ["none", "lookup", "model, close", "sampled"])
def test_copies_of_a_greedy_request_agree(drafter: str) -> None:
    """sglang-jax#1103: at temperature 0 every copy in a batch gives the same text, whatever its seed."""
    job = make_job(400, longest=100, greedy=True)
    copies = [Job(job.prompt, replace(job.params, seed=seed, verification="block")) for seed in range(16)]
    streams = {o.outputs[0].token_ids for o in run_world(World(drafter, arrivals=list(range(16))), copies)}
    assert streams == {plain(job).outputs[0].token_ids}


# --- what company may and may not change --------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["lookup 1..1", "model, close", "mostly right"])
def test_acceptance_does_not_depend_on_the_batch(drafter: str) -> None:
    """sglang#12411: with equal seeds the same drafts are kept at the same places, alone and among sixteen."""
    jobs = jobs_of(0, 12)
    together = run_world(World(drafter, max_step_tokens=1024, shuffle_slots=6), jobs)
    for job, among in zip(jobs, together, strict=True):
        (alone,) = run_world(World(drafter, max_seqs=1, max_step_tokens=1024), [job])
        for name in ("steps", "drafted_at", "accepted_at", "emitted"):
            assert getattr(among.speculation, name) == getattr(alone.speculation, name), name


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_rejection_and_block_at_equal_draft_lengths(verification: str) -> None:
    """Promised for these rules only where no draft is trimmed: then company does not change the tokens either."""
    jobs = jobs_of(0, 12)
    together = run_world(World("model, close", max_step_tokens=1024, verification=verification), jobs)
    differs = 0
    for job, among in zip(jobs, together, strict=True):
        world = World("model, close", max_seqs=1, max_step_tokens=1024, verification=verification)
        (alone,) = run_world(world, [job])
        assert among.outputs[0].token_ids == alone.outputs[0].token_ids
        differs += alone.outputs[0].token_ids != plain(job).outputs[0].token_ids
    assert differs  # another stream than the plain one, of the same law


@pytest.mark.parametrize("drafter", ["lookup", "model, close"])
def test_two_engines_agree_without_a_seed_of_the_user(drafter: str) -> None:
    """vllm#17498, vllm#17509: what one engine drew and reported, a second one repeats, token for token."""
    params = SamplingParams(max_tokens=60, verification="block")
    first = run_world(World(drafter), [Job((1, 2, 3, i), params) for i in range(8)])
    reported = [o.outputs[0] for o in first]
    again = [
        Job((1, 2, 3, i), replace(params, seed=o.seed, verification=o.verification))  # type: ignore[arg-type]
        for i, o in enumerate(reported)
    ]
    second = run_world(World(drafter, shuffle_slots=7), again)
    assert [o.token_ids for o in reported] == [o.outputs[0].token_ids for o in second]
    assert len({o.seed for o in reported}) == 8


def test_five_hundred_requests_leave_nothing_behind() -> None:
    """sglang PR #13826: after 500 requests, some of them aborted, every slot is free again."""
    pool = [make_job(600 + i, longest=24) for i in range(25)]
    jobs = [pool[i % 25] for i in range(500)]
    arrivals = staggered(500, 8, 400)
    world = World(
        "model, close",
        kv_tokens=3000,
        max_step_tokens=200,
        arrivals=arrivals,
        cancels={i: arrivals[i] + i % 5 for i in range(0, 500, 7)},
        checks=False,  # after every step elsewhere; here the end counts
    )
    totals = compare(run_world(world, jobs), jobs)
    assert totals.cancelled > 10


# --- random schedules ---------------------------------------------------------------------------------


@cache
def short_jobs() -> tuple[Job, ...]:
    return tuple(make_job(500 + i, longest=30) for i in range(12))


entries = st.tuples(
    st.integers(0, 11),  # which job
    st.integers(0, 6),  # steps after the one before
    st.none() | st.integers(0, 30),  # cancelled so many steps after it came
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    schedule=st.lists(entries, min_size=1, max_size=8),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    max_seqs=st.integers(1, 5),
    spare_step_tokens=st.integers(0, 60),
    kv_tokens=st.integers(340, 1500),
    draft_length=st.none() | st.sampled_from(DRAFT_LENGTHS),
    slots=st.none() | st.integers(0, 3),
)
def test_any_schedule(
    schedule: list[tuple[int, int, int | None]],
    drafter: str,
    max_seqs: int,
    spare_step_tokens: int,
    kv_tokens: int,
    draft_length: int | None,
    slots: int | None,
) -> None:
    """sglang PR #18984, sglang PR #18760: admit and abort at random, with invariants checked after every step."""
    jobs = [short_jobs()[number] for number, _, _ in schedule]
    arrivals = list(itertools.accumulate(gap for _, gap, _ in schedule))
    world = World(
        drafter,
        max_seqs=max_seqs,
        max_step_tokens=2 * max_seqs + spare_step_tokens,
        kv_tokens=kv_tokens,
        arrivals=arrivals,
        cancels={i: arrivals[i] + after for i, (_, _, after) in enumerate(schedule) if after is not None},
        draft_length=draft_length,
        verification="coupled",
        shuffle_slots=slots,
    )
    compare(run_world(world, jobs), jobs)


# --- this test can fail -------------------------------------------------------------------------------


def test_logits_that_depend_on_the_width_are_seen() -> None:
    """The negative control: real kernels may do this (transformers#30413), and then streams do differ."""
    jobs = jobs_of(0, 24)
    with pytest.raises(AssertionError, match="plainly"):
        compare(run_world(World("lookup", backend={"width_noise": 0.5}), jobs), jobs)


@pytest.mark.parametrize("drafter", ["lookup 1..1", "mostly right", "model, other"])
def test_a_silent_rollback_is_seen(drafter: str) -> None:
    """mlx-lm#846: by the owner's own check at once, and without it by the tokens."""
    jobs = short_jobs()
    with pytest.raises(InvariantError, match="attends to"):
        run_world(World(drafter, backend={"rollback": "silent"}), jobs)
    with pytest.raises(AssertionError, match="plainly"):
        compare(run_world(World(drafter, backend={"rollback": "silent"}, checks=False), jobs), jobs)
