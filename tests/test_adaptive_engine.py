"""Draft lengths that change from step to step change nothing that is generated."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.draft import ForcedDrafter, LookupDrafter, ModelDrafter
from paceline.engine import Engine
from paceline.errors import InvalidParams
from paceline.schedule import MAX_DRAFTS, Controller, CostTable, FixedLengths
from paceline.types import Drafter, RequestOutput

ROOT = Path(__file__).parents[1]
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 9, [7, 8, 9, 7, 8, 9, 7], [4]]


def backend(seed: int = 3) -> ToyBackend:
    return ToyBackend(12, seed=seed, stop_ids=(11,), max_len=96, max_seqs=4, kv_tokens=160)


def drafter(kind: str, target: ToyBackend) -> Drafter:
    if kind == "lookup":
        return ForcedDrafter(LookupDrafter(min_ngram=1))
    # The target's own twin is right all the time, another model hardly ever.
    model = ToyBackend(12, seed=3 if kind == "twin" else 9, stop_ids=(11,), max_len=96, max_seqs=4)
    return ModelDrafter(model, "model:toy", target)


def generate(
    kind: str, params: list[SamplingParams], controller: Controller | None, **options: Any
) -> list[RequestOutput]:
    target = backend()
    engine = Engine(target, drafter(kind, target), controller=controller, **options)
    ids = [engine.add(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        done.update({c.request_id: c.output for c in engine.step() if c.output is not None})
        engine.check()
    assert target.slots_in_use == 0
    if isinstance(engine.controller, Controller):
        assert engine.controller._standings == {}, "a request that is over is remembered"
    return [done[i] for i in ids]


def random_table(rng: random.Random) -> CostTable:
    """Anything from free drafts to dear ones, with cliffs and dents, so that lengths come out in every way."""
    widths = sorted(rng.sample(range(1, 64), 8))
    seconds = np.cumsum([rng.choice([0.0, 1e-5, 1e-3]) + 1e-6 for _ in widths])
    return CostTable(widths, [0], [seconds])


@pytest.mark.parametrize("kind", ["lookup", "model", "twin"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_path_is_the_same_as_with_fixed_lengths(kind: str, temperature: float) -> None:
    """Point and coupled, with the real clock in the loop: whatever it decides, the tokens are plain decoding's."""
    rng = random.Random(7)
    lengths = set()
    for seed in range(12):
        params = [
            SamplingParams(max_tokens=40, temperature=temperature, seed=seed + i, verification="coupled", top_p=0.95)
            for i in range(len(PROMPTS))
        ]
        plain = [o.outputs[0].token_ids for o in generate(kind, params, None, draft_length=0)]
        adaptive = generate(kind, params, Controller(random_table(rng)))
        assert [o.outputs[0].token_ids for o in adaptive] == plain
        lengths |= {len(o.speculation.drafted_at) for o in adaptive}
    assert len(lengths) > (1 if kind == "model" else 2), "the lengths never varied, so nothing was shown"


def test_a_request_that_says_how_many_gets_them() -> None:
    dear = CostTable([1, 2], [0], [[1.0, 50.0]])
    params = [SamplingParams(max_tokens=20, draft_length=n, seed=1) for n in (0, 1, 2, 3)]
    outs = generate("lookup", params, Controller(dear))
    assert [len(o.speculation.drafted_at) for o in outs][:3] == [0, 1, 2]


def test_free_drafts_are_taken_and_dear_ones_are_not() -> None:
    params = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    free = generate("lookup", params, Controller(CostTable([1, 999], [0], [[1.0, 1.1]])))
    dear = generate("lookup", params, Controller(CostTable([1, 2], [0], [[1.0, 1e3]])))
    assert max(len(o.speculation.drafted_at) for o in free) > 4
    assert sum(o.speculation.drafted for o in dear) <= 4


def test_the_controller_is_told_who_decoded_in_a_step_and_who_did_not() -> None:
    """One report of a step, however many forwards it took: a price is compared with what the whole step was believed
    to cost."""

    class Told(Controller):
        def observe_forward(self, shares: Any, others: Any, seconds: float) -> None:
            steps.append((list(shares), list(others)))

    steps: list[tuple[list[Any], list[Any]]] = []
    target = ToyBackend(12, seed=3, stop_ids=(), max_len=96, max_seqs=4, max_step_tokens=16)
    twin = ModelDrafter(ToyBackend(12, seed=3, stop_ids=(), max_len=96, max_seqs=4), "model:toy", target)
    engine = Engine(target, twin, controller=Told(CostTable([1, 99], [0], [[1.0, 1.1]])))
    engine.max_rows = 4  # a step of two requests that draft takes two forwards
    forwards = 0

    def counted(batch: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return forward(batch)

    forward, target.forward = target.forward, counted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=9, temperature=0.0, draft_length=2)
    engine.add([1, 2, 3], params)
    engine.step()
    engine.add([4] * 10, params)
    while engine.has_work:
        engine.step()
    assert steps[0] == ([], [(2, 0)])
    assert steps[1] == ([(3, 2)], [(8, 0)])
    assert steps[2] == ([(3, 5)], [(1, 8)])
    assert steps[3] == ([(3, 8), (3, 9)], [])
    assert forwards > len(steps)


@pytest.fixture(scope="module")
def roofline() -> Any:
    """benchmarks/roofline.py as a module."""
    spec = importlib.util.spec_from_file_location("roofline", ROOT / "benchmarks" / "roofline.py")
    assert spec is not None
    assert spec.loader is not None
    roofline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(roofline)
    return roofline


def test_under_load_drafts_go_to_zero_and_come_back_in_the_whole_engine(roofline: Any) -> None:
    """The picture of docs/adaptive.md, small: it could not be drawn any more, and nobody saw it."""
    lines = roofline.simulate(knee=28, most=32, steps=60)
    crowded = [drafts for requests, drafts, _ in lines if requests >= 28]
    begin, end = [drafts for requests, drafts, _ in lines[:8]], [drafts for requests, drafts, _ in lines[-8:]]
    assert max(crowded) == 0.0
    assert max(begin) > 1.0
    assert max(end) > 1.0
    assert roofline.draw(lines, 28).startswith("<svg")


@pytest.mark.parametrize(("option", "value"), [("--knee", "0"), ("--most", "0"), ("--steps", "2")])
def test_a_load_of_nothing_is_refused(
    roofline: Any, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["roofline.py", option, value])
    with pytest.raises(SystemExit):
        roofline.main()
    assert f"{option} {value}; allowed: at least" in capsys.readouterr().err


def test_who_adapts() -> None:
    assert not LLM("toy").engine.is_adaptive
    assert LLM("toy", measure=True).engine.is_adaptive
    assert not LLM("toy", measure=True, drafter="none").engine.is_adaptive
    fixed = LLM("toy", measure=True, draft_length=3).engine
    assert (fixed.is_adaptive, fixed.draft_length) == (False, 3)
    assert isinstance(fixed.controller, FixedLengths)
    assert LLM("toy", measure=True).engine.draft_length == MAX_DRAFTS
    with pytest.raises(InvalidParams, match="measure = 1"):
        LLM("toy", measure=1)  # type: ignore[arg-type]


def test_reasons_are_told_to_who_listens() -> None:
    llm = LLM("toy", measure=True)
    said: list[str] = []
    llm.engine.controller.listener = said.append  # type: ignore[attr-defined]
    out = llm.generate("abcabcabcabc", SamplingParams(max_tokens=30, temperature=0.0))[0]
    assert len(said) == out.speculation.steps
    assert all("tokens in" in one and "without:" in one and "request 0:" in one for one in said)


def test_settled_drafts_are_told_as_such() -> None:
    """ "0 drafts" stood above steps that verified four, and what came without them was told as with them."""
    said: list[str] = []
    controller = Controller(CostTable([1, 16], [0], [[1.0, 16.0]]))
    controller.listener = said.append
    params = [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, draft_length=3)] * len(PROMPTS)
    generate("lookup", params, controller)
    with_drafts = [one for one in said if "3, settled before, from lookup" in one]
    assert with_drafts
    for one in with_drafts:
        assert not one.startswith("0 drafts")
        expected, without = one.splitlines()[0].split("; without: ")
        assert float(expected.split()[2]) > float(without.split()[0])
