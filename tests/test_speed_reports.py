"""What made speculation slow elsewhere: the kinds of fault that can occur here.

Operations are counted: forwards, tokens, rows, passes over a row, bytes. Where time itself is meant, the clock is made
up: a forward moves it by what it is said to cost, and nothing else does. Drafts that were bad elsewhere:
test_acceptance_reports.py. Threads of the same kind that other tests name: sglang#12411 (tests/schedule,
tests/conformance, tests/backend).
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from paceline import LLM, AsyncEngine
from paceline.backend.toy import ToyBackend
from paceline.draft import DEFAULT_DRAFT_LENGTH, LookupDrafter, NoDrafter
from paceline.engine import Engine
from paceline.rng import KeyedDraws
from paceline.sampling import kernels
from paceline.schedule import Controller
from paceline.types import Backend, DraftContext, Drafter, RequestOutput, Role

from .counted import Clock, Counted, Price, endless, run, table, twin_drafter
from .draft.fakes import CountingList
from .drafters import PointDrafter

K = DEFAULT_DRAFT_LENGTH


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The engine's clock."""
    made_up = Clock()
    monkeypatch.setattr("paceline.engine.perf_counter", made_up)
    return made_up


# --- under load ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_under_load_no_draft_is_forwarded(requests: int, clock: Clock) -> None:
    """vllm#27379, vllm#19254, vllm#7540, vllm#6494, ArcticInference#185: slower than plain at concurrency.

    A forward costs the same up to 32 tokens. Below, drafts are verified; above, the target is given exactly the tokens
    that it is given without a drafter. Catches load that does not reach the decision, and verification "for free".
    """

    def price(tokens: int) -> float:
        return max(tokens, 32) / 32

    def measured(drafter: Drafter, controller: Controller | None) -> tuple[list[RequestOutput], int, float]:
        target = Counted(8, clock=clock, price=price, max_len=96, max_seqs=64, max_step_tokens=2048)
        engine, start = Engine(target, drafter, controller=controller), clock.now
        for i in range(requests):
            engine.add([i % 8, 1, 2, 3, 1, 2, 3], endless(40))
        return run(engine), target.tokens_forwarded, clock.now - start

    plain, plain_tokens, plain_seconds = measured(NoDrafter(), None)
    outs, tokens, seconds = measured(LookupDrafter(), Controller(table(price, 2048)))
    assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in plain]
    if requests == 64:
        assert tokens == plain_tokens
        assert seconds == plain_seconds
    else:
        assert tokens > plain_tokens
        assert seconds < plain_seconds


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "words": {"bad_words": [[3, 4, 5]], "stop": "zzzz", "min_tokens": 3},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_reads_as_much_of_a_long_text_as_of_a_short_one(options: dict[str, Any]) -> None:
    """vllm#27379 (n-gram search on the CPU), llama.cpp#25908 (a fixed 20 ms for each block): what is read in the steps
    of a request, by the engine and by lookup, does not grow with its context. Catches a copy or a scan of the text."""

    def read(length: int) -> int:
        engine = Engine(Counted(8, max_len=4000, max_step_tokens=8000), LookupDrafter())
        engine.add([i * i % 7 for i in range(length)], endless(30, temperature=1.0, seed=3, **options))
        engine.step()  # the prompt
        (sequence,) = engine.running
        tokens = CountingList(sequence.tokens)
        sequence.tokens, sequence.history._tokens = tokens, tokens
        CountingList.read = 0
        (out,) = run(engine)
        assert out.speculation.drafted > 0
        return CountingList.read // out.speculation.steps

    assert abs(read(3000) - read(100)) <= 8


def test_the_books_of_lookup_are_asked_as_often_at_any_length() -> None:
    """vllm#27379, llama.cpp#25908: one proposal and five committed tokens at 1,000 and 100,000 tokens of context."""

    class Book(dict[Any, Any]):
        asked = 0

        def get(self, *arguments: Any) -> Any:
            Book.asked += 1
            return super().get(*arguments)

        def __setitem__(self, key: Any, value: Any) -> None:
            Book.asked += 1
            super().__setitem__(key, value)

    def work(length: int) -> tuple[int, int]:
        drafter = LookupDrafter()
        engine = Engine(Counted(64, max_len=9), drafter)
        engine.add([1, 2], endless(3))
        engine.step()
        text = [(i * i) % 61 for i in range(length)]
        drafter.observe(77, text)
        history = drafter._histories[77]
        history.tokens, history._behind = CountingList(history.tokens), Book(history._behind)
        (sequence,) = engine.running
        context = DraftContext(77, CountingList(text), 1, endless(9), KeyedDraws(0, 0), Role.DRAFT, sequence.history)
        CountingList.read = Book.asked = 0
        (proposal,) = drafter.propose([context], [K])
        assert len(proposal) == K  # type: ignore[arg-type]
        drafter.observe(77, [1, 2, 3, 4, 5])
        return CountingList.read, Book.asked

    assert work(1_000) == work(100_000)


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_forwards_of_a_step_do_not_grow_with_the_batch(kind: str) -> None:
    """sglang#5274, sglang#11948, TensorRT-LLM#9208, llama.cpp#12968: overheads for each request made speculation slow
    under load. A step is one forward of the target, and one of the draft model for each depth, for all together."""

    def forwards(requests: int) -> tuple[int, int, int]:
        target = Counted(12, max_len=96)
        drafter, model = twin_drafter(target, max_len=96)
        engine = Engine(target, drafter if kind == "model" else LookupDrafter(1, 1))
        for _ in range(requests):
            engine.add([1, 2, 3, 1, 2, 3], endless(41))
        run(engine)
        return target.calls, model.calls, max(len(batch) for batch in target.batches)

    alone, among = forwards(1), forwards(12)
    assert alone[:2] == among[:2]
    assert (alone[2], among[2]) == (1, 12)


def test_tokens_that_are_cached_already_are_not_in_a_steps_budget() -> None:
    """TensorRT-LLM#2295: the scheduler counted reused tokens, so that fewer requests fit into a step."""
    target = Counted(12, max_len=256, max_seqs=8, max_step_tokens=64, page_size=16)
    engine = Engine(target, LookupDrafter(1, 1))
    shared = [(i * i) % 11 for i in range(97)]
    engine.add(shared, endless(2))
    run(engine)
    for i in range(5):  # five times a hundred tokens; six of them new, five of those to be read before the last
        engine.add([*shared[:96], i, 1, 2, 3, 1, 2], endless(30))
    target.batches.clear()
    engine.step()
    assert target.batches == [[(5, 0)] * 5]  # 25 of the 32 that prompts may have
    engine.step()
    assert sum(n for n, _ in target.batches[-1]) == sum(rows for _, rows in target.batches[-1])  # all decode
    outs = run(engine)
    assert [o.num_cached_tokens for o in outs] == [96] * 5
    # Nor does what is cached leave less room for drafts: 32 for five requests, far behind their prompts.
    assert max(sum(n for n, _ in batch) for batch in target.batches) == 5 * (1 + K)


# --- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "greedy", "model"])
def test_peak_memory_at_most_requests_and_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#48630, vllm#38220, vllm#56572: requests x (K + 1) x V floats were copied where nobody had planned for them.

    The peak of whole steps, in rows of float64[V], with a cap of 16 rows for a forward.
    """
    vocab, requests, drafts, cap = 4000, 8, 8, 16
    monkeypatch.setattr("paceline.engine.LOGITS_BYTES", 8 * vocab * cap)
    options: dict[str, Any] = {"max_len": 64, "max_seqs": requests, "max_step_tokens": 4 * requests * (drafts + 1)}
    target = Counted(vocab, **options)
    drafter: Drafter = LookupDrafter(1, 1) if kind == "lookup" else twin_drafter(target, **options)[0]
    engine = Engine(target, drafter, draft_length=drafts)
    temperature = 0.0 if kind == "greedy" else 1.0
    for i in range(requests):
        engine.add([i] * 10, endless(30, temperature=temperature, seed=i, verification="block"))
    engine.step()
    engine.step()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run(engine)
        rows = (tracemalloc.get_traced_memory()[1] - before) / (8 * vocab)
    finally:
        tracemalloc.stop()
    assert max(sum(n for _, n in batch) for batch in target.batches) > cap / 2  # the widest forwards were made
    # What the toy makes of one request's rows stands beside what it gives; p and a residual of one row come on top, and
    # the logits of q, which are kept for all drafts of a step.
    assert rows <= cap + (drafts + 1) + 4 + (requests * drafts if kind == "model" else 0)


# --- what is computed for a row ------------------------------------------------------------------------

KERNELS = ("peak_of", "race", "total", "weigh", "weights_of", "tops_of", "shortlist", "truncate", "rank")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel that goes over a row was called, and whatever of numpy sorts."""
    counts: Counter[str] = Counter()

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    for name in KERNELS:
        watch(kernels, name)
    for name in ("sort", "argsort", "partition", "argpartition", "lexsort"):
        watch(np, name)
    return counts


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"temperature": 0.6, "presence_penalty": 0.5}], ids=str)
def test_a_drawn_row_is_passed_over_twice_and_never_sorted(options: dict[str, Any], passes: Counter[str]) -> None:
    """sglang#6949, sglang PR #9404: rows were sorted for top-p where top_p = 1. llama.cpp#3649: sampling took longer
    than the model. For lookup: largest logit and race, of the rows that are looked at, and they are as many as tokens
    emitted. Catches rows behind the first mismatch, and a normaliser or a distribution that nobody asked for."""
    engine = Engine(Counted(300), LookupDrafter(1, 1))
    for i in range(3):
        engine.add([1, 2, 3] * 3, endless(40, **{"temperature": 1.0, "seed": i, "top_p": 1.0, **options}))
    stats = [out.speculation for out in run(engine)]
    assert sum(s.drafted for s in stats) > sum(s.accepted for s in stats)  # some rows were not looked at
    drawn = 0 if options.get("temperature") == 0.0 else sum(s.emitted for s in stats)
    assert passes == Counter({name: drawn for name in ("peak_of", "race") if drawn})


def test_filters_select_and_do_not_sort(passes: Counter[str]) -> None:
    """sglang#6949: with top_p on, one selection for each row that is looked at."""
    engine = Engine(Counted(300), LookupDrafter(1, 1))
    engine.add([1, 2, 3] * 3, endless(40, temperature=1.0, seed=1, top_p=0.9))
    (out,) = run(engine)
    assert passes["shortlist"] == passes["truncate"] == passes["peak_of"] == out.speculation.emitted
    assert not any(passes[name] for name in ("sort", "argsort", "partition", "argpartition", "lexsort"))


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_a_draft_model_samples_once_for_each_draft(verification: Any, passes: Counter[str]) -> None:
    """llama.cpp#3649: 525 ms of sampling drafts beside 323 ms of the model. K rows of the draft model and, of the
    target, those up to the token that is taken (block looks at all); one largest logit and at most one draw each."""
    target = Counted(300)
    drafter, _ = twin_drafter(target, seed=2)
    engine = Engine(target, drafter)
    engine.add([1, 2, 3] * 3, endless(60, temperature=1.0, seed=5, verification=verification))
    (out,) = run(engine)
    s = out.speculation
    assert s.rejected > 0
    rows = s.steps + s.drafted if verification == "block" else s.emitted
    assert passes["peak_of"] <= rows + s.drafted
    assert passes["race"] <= s.emitted + s.drafted


def test_coupled_makes_no_distribution(passes: Counter[str]) -> None:
    """llama.cpp#3649: drafts and target draw from logits; what they are is compared, nothing is divided by q."""
    target = Counted(300)
    engine = Engine(target, twin_drafter(target, seed=2)[0])
    engine.add([1, 2, 3] * 3, endless(60, temperature=1.0, seed=5, verification="coupled"))
    run(engine)
    assert set(passes) == {"peak_of", "race"}


# --- off is off, and the rest never costs much ---------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_request_without_drafts_costs_its_own_tokens(adaptive: bool) -> None:
    """llama.cpp#12968, vllm#19254: "off" was slower than none. In company that drafts: no row more for the target, and
    nothing at all for the draft model, not even the prompt."""

    def price(tokens: int) -> float:
        return 1.0 + 0.01 * tokens

    target = Counted(12, max_len=96)
    drafter, model = twin_drafter(target, max_len=96)
    engine = Engine(target, drafter, controller=Controller(table(price)) if adaptive else None)
    engine.add([1] * 9, endless(30, draft_length=0))
    run(engine)
    assert target.batches == [[(8, 0)], *([[(1, 1)]] * 30)]
    assert model.calls == 0
    silent = engine.add([1] * 9, endless(30, draft_length=0))
    engine.add([2] * 9, endless(30))
    spoke: set[int] = set()
    propose = drafter.propose
    drafter.propose = lambda contexts, budgets: (  # type: ignore[method-assign]
        spoke.update(c.request_id for c in contexts) or propose(contexts, budgets)  # type: ignore[func-returns-value]
    )
    run(engine)
    assert len(spoke) == 1
    assert silent not in spoke
    assert max(len(batch) for batch in model.batches) == 1


MACHINES: dict[str, Price] = {
    "flat": lambda tokens: 1.0 + 0.02 * tokens,  # drafts next to free
    "line": lambda tokens: 0.8 + 0.2 * tokens,
    "steep": lambda tokens: 0.1 + 0.9 * tokens,  # a draft as dear as a step
}


def seconds_of(clock: Clock, price: Price, kind: str, share: float, tokens: int, prompt: int = 8) -> list[float]:
    """What each of four requests takes, one after the other, with a drafter that is (nearly) always wrong.

    share: what a forward of the draft model costs, in forwards of the target.
    """
    target = Counted(64, clock=clock, price=price)
    drafter: Drafter = NoDrafter()
    if kind == "lookup":
        drafter = PointDrafter(lambda seen, budget: [(seen[-1] * 7 + i) % 64 for i in range(budget)])
    elif kind == "model":
        drafter = twin_drafter(target, seed=99, clock=clock, price=lambda n: share * price(n))[0]
    engine = Engine(target, drafter, controller=None if kind == "none" else Controller(table(price)))
    seconds = []
    for i in range(4):
        start = clock.now
        params = endless(tokens, temperature=1.0, seed=i, verification="block")
        engine.add([(i * 7 + j) % 64 for j in range(prompt)], params)
        run(engine)
        seconds.append(clock.now - start)
    return seconds


@pytest.mark.parametrize("tokens", [48, 256])
@pytest.mark.parametrize("machine", MACHINES)
def test_wrong_drafts_that_cost_nothing_to_make_cost_little(machine: str, tokens: int, clock: Clock) -> None:
    """transformers#36337, transformers#26565, llama.cpp#12968, vllm#27379: never slower than 0.95 of plain decoding,
    and 0.97 over a few requests. Virtual time of the forwards alone. Catches attempts that go on where they fail."""
    plain = seconds_of(clock, MACHINES[machine], "none", 0.0, tokens)
    wrong = seconds_of(clock, MACHINES[machine], "lookup", 0.0, tokens)
    assert (sum(wrong) > 1.0001 * sum(plain)) == (machine != "steep"), "nothing was tried, so nothing was shown"
    assert min(p / w for p, w in zip(plain, wrong, strict=True)) >= 0.95
    assert sum(plain) / sum(wrong) >= 0.97


@pytest.mark.parametrize(
    "machine, share",
    [
        ("flat", 0.1),
        ("flat", 0.25),
        ("flat", 1.0),
        ("line", 0.1),
        ("line", 0.5),
        ("steep", 0.1),
        ("steep", 1.0),
    ],
)
def test_probes_of_a_dear_draft_model_cost_at_most_a_twentieth(machine: str, share: float, clock: Clock) -> None:
    """transformers#36337, transformers#26565, llama.cpp#25908: a draft model that never pays is given up.

    The second request and later ones, when prices are known; short prompts.
    """
    plain = seconds_of(clock, MACHINES[machine], "none", 0.0, 256)
    dear = seconds_of(clock, MACHINES[machine], "model", share, 256)
    assert sum(plain[1:]) / sum(dear[1:]) >= 0.95


def test_a_draft_model_that_was_given_up_reads_no_long_prompt(clock: Clock) -> None:
    """transformers#36337: for 48 tokens of output, a prompt of 400 is read by the draft model for one probe."""
    plain = seconds_of(clock, MACHINES["line"], "none", 0.0, 48, prompt=400)
    dear = seconds_of(clock, MACHINES["line"], "model", 0.5, 48, prompt=400)
    assert sum(plain[1:]) / sum(dear[1:]) >= 0.95


def test_the_first_request_does_not_pay_for_learning_prices(clock: Clock) -> None:
    """transformers#36337, llama.cpp#25908: how long a draft takes was not known before sixteen of them were drawn."""
    price = MACHINES["flat"]
    target = Counted(64, clock=clock, price=price)
    drafter, model = twin_drafter(target, seed=99, clock=clock, price=lambda tokens: 3 * price(tokens))
    engine = Engine(target, drafter, controller=Controller(table(price)))
    engine.add([1, 2], endless(18, temperature=1.0, seed=1, verification="block"))
    run(engine)
    assert 1 <= model.calls <= 1 + K  # one draft to warm up, and so many to see what they cost


def test_a_rounds_time_adds_up(clock: Clock) -> None:
    """llama.cpp#3649, llama.cpp#25908, transformers#36337: where a round's time went could not be told.

    Every second of the made-up clock is in one stage, and in the right one.
    """
    ticks: Counter[Role] = Counter()

    class Slow(KeyedDraws):
        __slots__ = ()

        def pick(self, weights: Any, position: int, role: Role, *, ids: Any = None, node: int = 0) -> int:
            clock.now += 2.0**-10
            ticks[role] += 1
            return super().pick(weights, position, role, ids=ids, node=node)

    target = Counted(12, clock=clock, price=lambda n: 1.0, max_len=96)
    drafter, model = twin_drafter(target, seed=2, clock=clock, price=lambda n: 0.25, max_len=96)
    engine = Engine(target, drafter, make_draws=Slow)
    engine.add([1, 2, 3] * 9, endless(40, temperature=1.0, seed=1, verification="rejection"))
    (out,) = run(engine)
    s = out.speculation
    assert s.prefill_seconds == 1.0
    assert s.forward_seconds == s.steps == target.calls - 1
    assert s.draft_seconds == 0.25 * model.calls + ticks[Role.DRAFT] * 2.0**-10
    assert s.verify_seconds == (ticks[Role.TARGET] + ticks[Role.RECOVER]) * 2.0**-10
    assert s.other_seconds == 0.0
    assert s.prefill_seconds + s.draft_seconds + s.forward_seconds + s.verify_seconds == clock.now


def test_a_served_request_takes_the_steps_of_an_offline_one() -> None:
    """llama.cpp#12968: the server was slower than the simple program with the same drafts."""
    params = endless(60, temperature=1.0, seed=4)
    offline, served = Counted(64), Counted(64)
    out = LLM(offline, drafter="lookup").generate([1, 2, 3] * 4, params)[0]

    async def serve() -> RequestOutput:
        async with AsyncEngine(served, drafter="lookup") as engine:
            return await engine.generate([1, 2, 3] * 4, params)

    other = asyncio.run(serve())
    assert other.outputs[0].token_ids == out.outputs[0].token_ids
    assert served.batches == offline.batches


def test_the_draft_model_is_opened_as_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp#10664: the draft model ran on the CPU, for its own device option had been forgotten."""
    opened: dict[str, dict[str, Any]] = {}

    def open_one(name: str, backend: str, **options: Any) -> Backend:
        opened[name] = {"backend": backend, **options}
        return ToyBackend(max_seqs=4)

    monkeypatch.setattr("paceline.llm.open_backend", open_one)
    asked: dict[str, Any] = {
        "device": "cuda:1",
        "dtype": "float16",
        "n_threads": 3,
        "kv_tokens": 4096,
        "max_step_tokens": 128,
    }
    with LLM("big", drafter="model:small", backend="hf", measure=False, **asked) as llm:
        assert llm.drafter.name == "model:small"
    for name in ("big", "small"):
        assert {option: opened[name][option] for option in asked} == asked
        assert opened[name]["backend"] == "hf"
