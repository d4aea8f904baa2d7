"""Path equality: under point and coupled, a seed has one stream, whoever drafts and whoever else is there.

Every job is run alone, without a drafter and in one prefill chunk; that is its plain stream. Then all jobs run
together, in many ways that must not matter, and every token is compared with it. The toy's logits are a hash
of the KV cells, so a stale, missing or misplaced cell changes all that follows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvariantError
from paceline.params import SamplingParams

from .paths import DRAFT_LENGTHS, DRAFTERS, Job, Totals, World, compare, make_job, plain, run_world, staggered

WANTED_TOKENS = 200_000


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
