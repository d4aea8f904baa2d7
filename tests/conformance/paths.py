"""Jobs, their plain streams, and worlds in which they run together; for test_paths.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws
from paceline.types import Distribution, DraftContext, Drafter, Proposal, RequestOutput, Role
from tests.drafters import PointDrafter

VOCAB = 23
STOP = VOCAB - 1
MAX_LEN = 768
DRAFT_LENGTHS = (0, 1, 2, 4, 7, 16)

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
    "sampled": lambda target, jobs: SampledDrafter(jobs),
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
            if when == step:
                chunks += engine.cancel(number)
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
    if seed is not None:
        random.Random(seed).shuffle(backend._book._free_slots)


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
                    history=s.history,
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
