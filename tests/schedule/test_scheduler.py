"""Queues, memory and preemption, without a model: a memory of pages that only counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BackendError, PacelineError
from paceline.schedule import Scheduler, Turn, prefill_chunk
from paceline.types import BackendInfo

PAGE = 4
STEP_TOKENS = 16


class CountingMemory:
    """The part of a Backend that the scheduler calls. Slots are pages in numbers only."""

    def __init__(self, pages: int, slots: int = 4) -> None:
        self.info = BackendInfo("counting", "counting", 10, frozenset(), pages * PAGE, pages * PAGE, slots, STEP_TOKENS)
        self.pages = pages
        self.held: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.refuse_release = False
        self.forks = 0

    def acquire(self, tokens: Any = ()) -> int:
        free = set(range(self.info.max_slots)) - set(self.held)
        if not free:
            raise BackendError("no slot is free")
        slot = min(free)
        self.held[slot] = self.lengths[slot] = 0
        return slot

    def length(self, slot: int) -> int:
        return self.lengths[slot]

    def reserve(self, slot: int, length: int) -> bool:
        others = sum(n for s, n in self.held.items() if s != slot)
        need = max(self.held[slot], -(-length // PAGE))
        if others + need > self.pages:
            return False
        self.held[slot] = need
        return True

    def fork(self, slot: int) -> int:
        """As strict as the protocol allows: the donor loses what it had reserved, and nothing stays shared."""
        new = self.acquire()
        self.truncate(slot, self.lengths[slot])
        self.lengths[new] = self.lengths[slot]
        self.forks += 1
        return new

    def write(self, slot: int, count: int) -> None:
        assert self.lengths[slot] + count <= self.held[slot] * PAGE, "written without having been reserved"
        self.lengths[slot] += count

    def truncate(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.held[slot] = min(self.held[slot], -(-length // PAGE))

    def release(self, slot: int) -> None:
        del self.held[slot], self.lengths[slot]
        if self.refuse_release:
            raise BackendError("release went wrong")


@dataclass(eq=False)
class Job:
    """A request that emits made-up tokens."""

    prompt: int
    max_tokens: int
    number: int = 0
    wants: int = 2
    tokens: list[int] = field(init=False)
    cached: int = 0
    slot: int = -1
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    error: PacelineError | None = None
    finish_reason: str | None = None
    age: int = 0  # steps since it was added
    siblings: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [0] * self.prompt
        self.siblings.append(self)

    @property
    def shared(self) -> int:
        return self.prompt - 1

    @property
    def shareable(self) -> list[int]:
        return self.tokens

    @property
    def limit(self) -> int:
        return self.prompt + self.max_tokens

    @property
    def uncached(self) -> int:
        return len(self.tokens) - self.cached

    def finish(self, reason: Any, *, error: PacelineError | None = None) -> None:
        self.finish_reason, self.error = reason, error


def wanted(job: Job) -> int:
    return min(job.wants, job.limit - len(job.tokens) - 1)


def step(scheduler: Scheduler[Job], memory: CountingMemory, rng: np.random.Generator) -> list[tuple[Job, Turn]]:
    """What an engine does with the turns; accepted drafts by chance."""
    turns = scheduler.schedule(wanted)
    assert sum(t.prefill + t.decode + t.drafts for _, t in turns) <= STEP_TOKENS
    for job, turn in turns:
        if turn.decode:
            memory.write(job.slot, 1 + turn.drafts)
            job.tokens += [0] * (1 + int(rng.integers(0, turn.drafts + 1)))
            job.cached = len(job.tokens) - 1
            memory.truncate(job.slot, job.cached)
        else:
            memory.write(job.slot, turn.prefill)
            job.cached += turn.prefill
    for job in list(scheduler.running):
        if len(job.tokens) >= job.limit or job.finish_reason:
            job.finish_reason = job.finish_reason or "length"
            scheduler.remove(job)
    return turns


def read(scheduler: Scheduler[Job], memory: CountingMemory, *jobs: Job) -> None:
    """Add jobs and read their prompts; they are then ready to decode."""
    for job in jobs:
        scheduler.add(job)
    while any(job.uncached > 1 for job in jobs):
        for job, turn in scheduler.schedule(lambda job: 0):
            memory.write(job.slot, turn.prefill)
            job.cached += turn.prefill


def bound(job: Job) -> int:
    """Steps that a request alone may need at most: what it adds to everybody behind it."""
    return -(-job.limit // prefill_chunk(STEP_TOKENS)) + job.max_tokens


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=9),
    st.integers(15, 40),
    st.lists(st.integers(0, 12), min_size=9, max_size=9),
    st.integers(0, 2**32),
)
def test_nobody_starves(sizes: list[tuple[int, int, int]], pages: int, arrivals: list[int], seed: int) -> None:
    """The stated bound, with preemption, staggered arrival and drafts; and the order of arrival throughout."""
    memory = CountingMemory(pages)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    jobs = [Job(p, m, i, wants) for i, (p, m, wants) in enumerate(sizes)]
    coming = sorted(zip(arrivals, jobs, strict=False), key=lambda pair: pair[0])
    order = [job for _, job in coming]
    added: list[Job] = []
    for now in range(2000):
        while coming and coming[0][0] <= now:
            added.append(coming.pop(0)[1])
            scheduler.add(added[-1])
        alive = [job for job in added if job.finish_reason is None]
        assert [*scheduler.running, *scheduler.waiting] == alive, "somebody overtook"
        if not alive and not coming:
            break
        oldest = alive[0] if alive else None
        before = (oldest.cached, len(oldest.tokens)) if oldest else None
        step(scheduler, memory, rng)
        if oldest is not None:
            assert (oldest.cached, len(oldest.tokens)) != before, "the oldest did not get on"
        for job in alive:
            job.age += 1
    for i, job in enumerate(order):
        assert job.finish_reason == "length"
        assert job.age <= sum(bound(earlier) for earlier in order[: i + 1])
    assert not memory.held


def family(n: int, prompt: int, max_tokens: int) -> list[Job]:
    """n samples of one request."""
    siblings: list[Job] = []
    for i in range(n):
        Job(prompt, max_tokens, i, wants=0, siblings=siblings)
    return siblings


def test_samples_wait_for_the_prompt_and_fork_it() -> None:
    memory = CountingMemory(pages=40)
    scheduler: Scheduler[Job] = Scheduler(memory, 3)  # type: ignore[arg-type]
    jobs, stranger = family(4, 20, 6), Job(3, 4, wants=0)
    jobs[2].max_tokens = 3  # over first; the fourth then forks one that has gone on
    for job in (*jobs, stranger):
        scheduler.add(job)
    rng = np.random.default_rng(0)
    prefilled = 0
    while scheduler.running or scheduler.waiting:
        assert [*scheduler.running, *scheduler.waiting] == [j for j in (*jobs, stranger) if j.finish_reason is None]
        prefilled += sum(turn.prefill for job, turn in step(scheduler, memory, rng) if job is not stranger)
    assert prefilled == 19, "the prompt was computed more than once"
    assert memory.forks == 3
    assert [job.num_cached_tokens for job in jobs] == [0, 19, 19, 19]
    assert not memory.held


def test_a_sample_whose_donor_is_gone_enters_like_anybody_else() -> None:
    memory = CountingMemory(pages=40)
    scheduler: Scheduler[Job] = Scheduler(memory, 3)  # type: ignore[arg-type]
    first, second = jobs = family(2, 20, 6)
    for job in jobs:
        scheduler.add(job)
    step(scheduler, memory, np.random.default_rng(0))
    assert (first.slot, second.slot) == (0, -1)
    scheduler.remove(first)
    step(scheduler, memory, np.random.default_rng(0))
    assert second.slot == 0
    assert second.cached > 0
    assert memory.forks == 0


def test_a_fork_for_which_memory_is_short_takes_nothing_from_its_donor() -> None:
    """vllm#42971: memory that one sequence needs must not be handed to another."""
    memory = CountingMemory(pages=8)
    scheduler: Scheduler[Job] = Scheduler(memory, 3)  # type: ignore[arg-type]
    first, second = jobs = family(2, 16, 12)
    for job in jobs:
        scheduler.add(job)
    rng = np.random.default_rng(0)
    while first.finish_reason is None:
        step(scheduler, memory, rng)
    assert first.num_preemptions == 0
    while second.finish_reason is None:
        step(scheduler, memory, rng)
    assert not memory.held


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=5),
    st.integers(14, 40),
    st.integers(0, 2**32),
)
def test_families_in_order_and_without_loss(sizes: list[tuple[int, int, int]], pages: int, seed: int) -> None:
    """Random families under scarce memory: order of arrival, everybody ends, everything is given back."""
    memory = CountingMemory(pages)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    jobs = [job for n, prompt, most in sizes for job in family(n, prompt, most)]
    for job in jobs:
        scheduler.add(job)
    for _ in range(sum(bound(job) for job in jobs) + 1):
        alive = [job for job in jobs if job.finish_reason is None]
        assert [*scheduler.running, *scheduler.waiting] == alive, "somebody overtook"
        if not alive:
            break
        step(scheduler, memory, rng)
    assert {job.finish_reason for job in jobs} == {"length"}
    assert not memory.held


def test_memory_that_runs_out_preempts_the_newest() -> None:
    memory = CountingMemory(pages=6)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    old, new = Job(8, 16, wants=0), Job(8, 16, wants=0)
    scheduler.add(old)
    scheduler.add(new)
    rng = np.random.default_rng(0)
    while not new.num_preemptions:
        step(scheduler, memory, rng)
    assert old.num_preemptions == 0
    assert new.slot == -1
    assert new.cached == 0
    assert list(scheduler.waiting) == [new]
    kept = len(new.tokens)
    assert kept > 8  # what it had emitted is committed and stays
    while new.finish_reason is None:
        step(scheduler, memory, rng)
    assert len(new.tokens) == 24
    assert not memory.held


def test_drafts_go_before_anybody_is_preempted() -> None:
    memory = CountingMemory(pages=5)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    a, b = Job(8, 12, wants=0), Job(6, 12, wants=0)
    read(scheduler, memory, a, b)
    # Two pages each and one to spare: it goes to the older one, and each uses its pages up.
    turns = dict(scheduler.schedule(lambda job: 9))
    assert turns == {a: Turn(decode=True, drafts=4), b: Turn(decode=True, drafts=2)}
    assert a.num_preemptions == b.num_preemptions == 0


def test_drafts_preempt_nobody() -> None:
    """The older one's guesses must not take the memory that the younger one's own next token needs."""
    memory = CountingMemory(pages=5)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    a, b = Job(8, 12, wants=0), Job(8, 12, wants=0)
    read(scheduler, memory, a, b)
    for job in (a, b):  # one more token each: both now stand at a page border, and one page is left
        memory.truncate(job.slot, 7)
    b.tokens.append(0)
    memory.reserve(b.slot, 8)
    memory.write(b.slot, 1)
    b.cached = 8
    memory.truncate(b.slot, 8)
    turns = dict(scheduler.schedule(lambda job: 4))
    assert turns == {a: Turn(decode=True, drafts=0), b: Turn(decode=True, drafts=3)}
    assert b.num_preemptions == 0


def test_what_the_first_slot_held_is_remembered() -> None:
    memory = CountingMemory(pages=8)
    found = iter([5, 3])
    memory.length = lambda slot: next(found)  # type: ignore[method-assign]
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    job = Job(8, 4, wants=0)
    scheduler.add(job)
    scheduler.schedule(lambda job: 0)
    scheduler._preempt(job)
    scheduler.schedule(lambda job: 0)
    assert (job.cached, job.num_cached_tokens, job.num_preemptions) == (3, 5, 1)


def test_admission_asks_for_exactly_what_is_needed() -> None:
    """sglang#32459: reservations of twice the need evict what could have been shared, and let fewer in."""
    memory = CountingMemory(pages=4)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    for job in (Job(8, 8, wants=0), Job(8, 8, wants=0), Job(1, 1, wants=0)):
        scheduler.add(job)
    scheduler.schedule(lambda job: 0)
    assert memory.held == {0: 2, 1: 2}
    assert len(scheduler.waiting) == 1  # nothing is left for it, and it did not overtake


def test_a_request_that_can_never_run_ends_with_an_error() -> None:
    """Memory that somebody outside of this engine holds must not make a request wait for ever."""
    memory = CountingMemory(pages=4)
    memory.reserve(memory.acquire(), 9)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    job = Job(8, 4, wants=0)
    scheduler.add(job)
    assert scheduler.schedule(lambda job: 0) == []
    assert isinstance(job.error, BackendError)
    assert "in use elsewhere" in str(job.error)
    scheduler.remove(job)
    assert list(memory.held) == [0]


def test_a_preemption_whose_release_fails_ends_that_request_alone() -> None:
    memory = CountingMemory(pages=6)
    scheduler: Scheduler[Job] = Scheduler(memory, 4)  # type: ignore[arg-type]
    old, new = Job(8, 16, wants=0), Job(8, 16, wants=0)
    scheduler.add(old)
    scheduler.add(new)
    rng = np.random.default_rng(0)
    while len(old.tokens) < 12:
        step(scheduler, memory, rng)
    memory.refuse_release = True
    while new.finish_reason is None:
        for job, _ in scheduler.schedule(lambda job: 0):
            memory.write(job.slot, 1)
            job.tokens.append(0)
            job.cached += 1
            memory.truncate(job.slot, job.cached)
    assert "release went wrong" in str(new.error)
    assert old.finish_reason is None
    scheduler.remove(new)
    assert scheduler.running == [old]


def test_removing_somebody_who_waits_touches_no_memory() -> None:
    memory = CountingMemory(pages=4)
    scheduler: Scheduler[Job] = Scheduler(memory, 1)  # type: ignore[arg-type]
    a, b = Job(3, 3), Job(3, 3)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule(wanted)
    scheduler.remove(b)
    assert list(memory.held) == [a.slot]
    with pytest.raises(ValueError):
        scheduler.remove(b)
