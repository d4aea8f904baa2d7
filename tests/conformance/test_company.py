"""Alone = in company: seeded point and coupled requests give the tokens they give alone, whatever the schedule.

Random schedules with staggered arrival, aborts, preemption (memory for about two requests while up to five run),
prompts that share their beginnings, and every kind of sampling, on a backend with pages. The same on the toy, whose
rows are a hash of its cells, and on a tiny transformers model in float64.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.types import Backend, Drafter, RequestOutput
from tests.drafters import PointDrafter

VOCAB = 23
STOP = VOCAB - 1
MAX_LEN = 80
SCHEDULES = 200
Tokens = tuple[int, ...]


def open_toy(**options: Any) -> Backend:
    return ToyBackend(VOCAB, stop_ids=(STOP,), seed=5, max_len=MAX_LEN, sharpness=9.0, **options)


@cache
def tiny_model() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        eos_token_id=STOP,
        bos_token_id=None,
        initializer_range=0.4,  # logits far enough apart that texts are not noise
    )
    return transformers.LlamaForCausalLM(config).to(torch.float64).eval()


def open_hf(**options: Any) -> Backend:
    model = copy.deepcopy(tiny_model())  # a backend keeps its model to itself
    from paceline.backend.hf import HFBackend

    return HFBackend(model, **options)


OPEN: dict[str, Callable[..., Backend]] = {"toy": open_toy, "hf": open_hf}


@dataclass(frozen=True, eq=False)
class Job:
    prompt: Tokens
    params: SamplingParams


@cache
def jobs() -> tuple[Job, ...]:
    """Eighteen requests; their prompts begin with one of three texts, cut anywhere."""
    rng = random.Random(7)
    beginnings = [[rng.randrange(STOP) for _ in range(40)] for _ in range(3)]
    made = []
    for number in range(18):
        prompt = rng.choice(beginnings)[: rng.choice((0, 3, 4, 8, 16, 31, 32, 40))]
        prompt = [*prompt, *(rng.randrange(STOP) for _ in range(rng.choice((1, 1, 2, 5, 12))))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 36),
            seed=number,
            temperature=rng.choice((0.0, 0.5, 1.0, 1.0)),
            top_k=rng.choice((0, 0, 5)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.3)),
            draft_length=rng.choice((None, 0, 1, 3, 8)),
            ignore_eos=rng.random() < 0.5,
            verification="coupled",
        )
        made.append(Job(tuple(prompt), params))
    return tuple(made)


@cache
def alone(kind: str, number: int) -> RequestOutput:
    """Alone on a backend of its own, without drafts, pages of another size and nothing shared."""
    job = jobs()[number]
    options = {"kv_tokens": 2 * MAX_LEN, "max_step_tokens": 2 * MAX_LEN, "page_size": MAX_LEN}
    backend = OPEN[kind](max_seqs=1, prefix_cache=False, **options)
    engine = Engine(backend, NoDrafter())
    engine.add(job.prompt, job.params)
    outputs = []
    while engine.has_work:
        outputs += [chunk.output for chunk in engine.step() if chunk.output is not None]
    return outputs[0]


def garbage(seen: Any, budget: int) -> list[int]:
    return [(sum(seen) * 7 + i) % VOCAB for i in range(budget)]


def mostly_right(kind: str) -> PointDrafter:
    """Knows what every job gives alone, and errs at every fifth place."""

    def guess(seen: Any, budget: int) -> list[int]:
        texts = [job.prompt + alone(kind, i).outputs[0].token_ids for i, job in enumerate(jobs())]
        right = next((text[len(seen) :] for text in texts if text[: len(seen)] == seen), ())
        return [t if (len(seen) + i) % 5 else (t + 1) % VOCAB for i, t in enumerate(right[:budget])]

    return PointDrafter(guess)


def model_drafter(kind: str) -> Drafter:
    """Samples from a toy model with memory for about two requests, whatever the target is."""
    target = open_toy(max_seqs=1)  # has the vocabulary of the other kind too
    return ModelDrafter(ToyBackend(VOCAB, stop_ids=(STOP,), seed=6, kv_tokens=128, page_size=4), "model:six", target)


DRAFTERS: list[Callable[[str], Drafter]] = [
    model_drafter,
    lambda kind: NoDrafter(),
    lambda kind: LookupDrafter(1, 1),
    lambda kind: PointDrafter(garbage),
    mostly_right,
    mostly_right,
]


@dataclass
class Totals:
    tokens: int = 0
    preemptions: int = 0
    shared: int = 0
    cancelled: int = 0
    accepted: int = 0
    rejected: int = 0


def run_schedule(kind: str, seed: int, totals: Totals) -> None:
    rng = random.Random(seed)
    page_size = rng.choice((1, 4, 16))
    kv_tokens = rng.choice((80, 80, 80, 96, 160))
    backend = OPEN[kind](
        max_seqs=rng.choice((1, 4, 5)),
        kv_tokens=kv_tokens,
        page_size=page_size,
        max_step_tokens=rng.choice((10, 16, 40, 80)),
        prefix_cache=rng.random() < 0.8,
        **({"max_len": MAX_LEN} if kind == "hf" else {}),
    )
    engine = Engine(backend, rng.choice(DRAFTERS)(kind), draft_length=rng.choice((None, 1, 5)))
    chosen = [rng.randrange(len(jobs())) for _ in range(rng.randint(3, 8))]
    arrivals = sorted(rng.choice((0, 0, rng.randrange(25))) for _ in chosen)
    cancels = {i: arrivals[i] + rng.randrange(30) for i in range(len(chosen)) if rng.random() < 0.2}
    done: dict[int, RequestOutput] = {}
    step = added = 0
    while added < len(chosen) or engine.has_work:
        while added < len(chosen) and arrivals[added] <= step:
            job = jobs()[chosen[added]]
            assert engine.add(job.prompt, job.params) == added
            added += 1
        chunks = engine.step()
        chunks += [c for i, when in cancels.items() if when == step for c in engine.cancel(i)]
        done.update({c.request_id: c.output for c in chunks if c.output is not None})
        engine.check()
        order = [s.request.request_id for s in (*engine.running, *engine.waiting)]
        assert order == sorted(order), "somebody overtook"
        step += 1
        assert step < 5000, "the engine never finishes"
    for i, number in enumerate(chosen):
        got, wanted = done[i], alone(kind, number)
        if got.outputs[0].error is not None:
            raise got.outputs[0].error
        ids, all_ids = got.outputs[0].token_ids, wanted.outputs[0].token_ids
        cancelled = got.outputs[0].finish_reason == "cancelled"
        assert ids == (all_ids[: len(ids)] if cancelled else all_ids), f"schedule {seed}, job {number}"
        assert cancelled or got.outputs[0].text == wanted.outputs[0].text
        totals.tokens += len(ids)
        totals.preemptions += got.num_preemptions
        totals.shared += got.num_cached_tokens
        totals.cancelled += cancelled
        totals.accepted += got.speculation.accepted
        totals.rejected += got.speculation.rejected
    # All memory is free, or held by published pages that give way.
    slot = backend.acquire()
    assert backend.reserve(slot, backend.info.max_len)
    backend.release(slot)
    backend.check()
    backend.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors are slower on two threads, and much slower beside other work."""
    try:
        import torch
    except ModuleNotFoundError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", OPEN)
def test_alone_is_in_company(kind: str) -> None:
    """sglang PR #30822, PR #33395, vllm#6038: the same seed alone, in batches, after preemption. sglang PR #18984,
    PR #18760, #2730: abort, timeout and retraction at random. vllm#46899, #40768, #43434: no id of a stale draft
    reaches the model after a skipped step or a preemption (the toy and the tiny model both refuse or crash).
    vllm#42971, sglang PR #13826: shared prefixes stay what they were, and nothing leaks."""
    totals = Totals()
    for seed in range(SCHEDULES):
        run_schedule(kind, seed, totals)
    assert totals.preemptions > 30
    assert totals.shared > 500
    assert totals.cancelled > 30
    assert totals.accepted > 500
    assert totals.rejected > 500


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_warm_is_cold(kind: str, page_size: int) -> None:
    """sglang PR #10846, vllm#47930, vllm#40624: what the prefix cache gives back changes neither a token nor what is
    accepted. mlx-vlm#1715: nor does it where the draft model's own memory was shared too."""
    backend = OPEN[kind](max_seqs=4, page_size=page_size, **({"max_len": MAX_LEN} if kind == "hf" else {}))
    shared = 0
    for number in range(len(jobs())):
        job = jobs()[number]
        drafter: Drafter = mostly_right(kind)
        if kind == "toy":  # drafts with a model of its own, which shares prefixes as well
            drafter = ModelDrafter(
                ToyBackend(VOCAB, stop_ids=(STOP,), seed=6, page_size=page_size), "model:six", backend
            )
        engine = Engine(backend, drafter, draft_length=3)
        runs = []
        for _ in range(2):
            engine.add(job.prompt, job.params)
            runs.append(next(c.output for c in iterate(engine) if c.output is not None))
        cold, warm = runs
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids == alone(kind, number).outputs[0].token_ids
        for name in ("steps", "drafted_at", "accepted_at", "emitted"):
            assert getattr(warm.speculation, name) == getattr(cold.speculation, name), name
        assert warm.num_cached_tokens == (len(job.prompt) - 1) // page_size * page_size
        shared += warm.num_cached_tokens
    assert shared > 100


def iterate(engine: Engine) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step()
