"""n samples of one prompt: each is the request that its reported seed is alone, whoever runs beside it.

With drafters of every kind, with memory for a few of them, with fewer places than samples; on the toy and on a
transformers model in float64. Whatever ends them, nothing is held afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from paceline.draft import ForcedDrafter, LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.types import Backend, RequestOutput

from .matrix import STOP, TOY, TOY_PROMPT, Adversary, finished, with_seed
from .test_matrix import TINY, one_thread  # noqa: F401  (a fixture)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "penalties and bad words": {"frequency_penalty": 0.6, "repetition_penalty": 1.2, "bad_words": [(14, 25)]},
    "grammar": {"grammar": {"regex": "(id[0-9]{1,2} (yes|no) ){2,3}"}, "logprobs": 1},
    "stop": {"stop": ["e", "yc"], "min_tokens": 3},
}
WORLDS = {"toy": TOY, "hf-tiny": TINY}
Build = Callable[[Backend, str, dict[int, Any]], Any]
DRAFTERS: dict[str, Build] = {
    "none": lambda target, world, streams: NoDrafter(),
    "forced+lookup": lambda target, world, streams: ForcedDrafter(LookupDrafter(2, 1)),
    "model": lambda target, world, streams: ModelDrafter(WORLDS[world].open(draft=True), "model:second", target),
    "adversary": lambda target, world, streams: Adversary(streams, [STOP, 0, 98, 14, 25], 100),
}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> str:
    if request.param == "hf-tiny":
        request.getfixturevalue("one_thread")
    return str(request.param)


def asked(**options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 17, "n": 5, "max_tokens": 24, "verification": "coupled", **options})


@cache
def alone(world: str, name: str, seed: int) -> RequestOutput:
    """The request of one seed, with a whole engine to itself and no drafts."""
    backend = WORLDS[world].open()
    engine = Engine(backend, NoDrafter())
    engine.add(TOY_PROMPT, with_seed(asked(**OPTIONS[name]), seed))
    (output,) = finished(engine).values()
    backend.close()
    return output


def told(one: Any) -> tuple[Any, ...]:
    return one.token_ids, one.text, one.finish_reason, one.stop_reason


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_samples_under_pressure(world: str, name: str, drafter: str) -> None:
    """Two requests of five samples, three places, memory for about two samples: some are preempted, all come out as
    alone, and the memory is as it was."""
    backend = WORLDS[world].open(max_seqs=3, max_len=40, max_step_tokens=40, kv_tokens=44, page_size=4)
    free = free_pages(backend)
    streams: dict[int, Any] = {}
    built = DRAFTERS[drafter](backend, world, streams)
    engine = Engine(backend, built, draft_length=3)
    ids = [engine.add(TOY_PROMPT, asked(seed=seed, **OPTIONS[name])) for seed in (17, 18)]
    streams.update(dict.fromkeys(range(10), (14, 25, 36, 13, 10, 28) * 9))
    done = finished(engine)
    for request_id in ids:
        output = done[request_id]
        assert [one.index for one in output.outputs] == list(range(5))
        assert len({one.seed for one in output.outputs}) == 5
        for one in output.outputs:
            (plain,) = alone(world, name, one.seed).outputs
            assert told(one) == told(plain), f"sample {one.index}"
    if name == "plain" and drafter == "none":
        assert sum(done[i].num_preemptions for i in ids) > 0
    assert free_pages(backend) == free
    assert backend._book.slots_in_use == 0  # type: ignore[attr-defined]
    if drafter == "model":
        assert built.backend._book.slots_in_use == 0
    built.close()
    backend.close()


def free_pages(backend: Any) -> int:
    return int(backend._book.free_pages)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_samples_are_all_equal(world: str, drafter: str) -> None:
    """sglang-jax#1103: n texts at temperature 0 are n times the same, that of n = 1, in places of any number."""
    params = asked(temperature=0.0, ignore_eos=True, verification="auto")
    backend = WORLDS[world].open(max_seqs=4)
    streams = dict.fromkeys(range(9), (14, 25, 36) * 9)
    built = DRAFTERS[drafter](backend, world, streams)
    engine = Engine(backend, built, draft_length=3)
    first, single = engine.add(TOY_PROMPT, params), engine.add(TOY_PROMPT, with_seed(params, 3))
    done = finished(engine)
    assert {told(one) for one in done[first].outputs} == {told(done[single].outputs[0])}
    assert len(done[first].outputs) == 5
    built.close()
    backend.close()


@pytest.mark.parametrize("when", [1, 2, 5, 9])
def test_cancelled_in_the_middle(when: int) -> None:
    """Samples that run, that wait and that are over: every one ends, once, the memory comes back, and the neighbour is
    not disturbed."""
    backend: Any = TOY.open(max_seqs=3, kv_tokens=96, page_size=4)
    free = free_pages(backend)
    engine = Engine(backend, LookupDrafter(2, 1), draft_length=3)
    doomed = engine.add(TOY_PROMPT, asked(ignore_eos=True, stop="e"))
    kept = engine.add(TOY_PROMPT, asked(seed=18, n=2, ignore_eos=True))
    done: dict[int, RequestOutput] = {}
    over: list[int] = []
    for step in range(2000):
        chunks = engine.step() if engine.has_work else []
        if step == when:
            chunks += engine.cancel(doomed)
            assert engine.cancel(doomed) == []
        for chunk in chunks:
            done.update({chunk.request_id: chunk.output} if chunk.output is not None else {})
            if chunk.request_id == doomed and chunk.finish_reason is not None:
                over.append(chunk.index)
        engine.check()
    assert sorted(over) == list(range(5))
    reasons = [one.finish_reason for one in done[doomed].outputs]
    assert "cancelled" in reasons
    for one in done[doomed].outputs:
        whole = alone("toy", "plain", one.seed).outputs[0].token_ids
        assert one.token_ids == whole[: len(one.token_ids)]
    for one in done[kept].outputs:
        assert told(one) == told(alone("toy", "plain", one.seed).outputs[0])
    assert free_pages(backend) == free
    assert backend.slots_in_use == 0
