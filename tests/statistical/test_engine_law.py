"""The whole engine with real keyed draws: full ragged batches, every rule beside every other, many steps.

Sixteen requests without a seed share each engine, with two prompts, draft lengths 0 to 3 and all three rules among
them. alpha = 1e-6, power 0.999. Request seeds come from a counted source instead of the operating system, so that a
run can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np
import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import ModelDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.types import Drafter, RequestOutput, Verification
from tests.drafters import PointDrafter, TableDrafter
from tests.verify.tables import Tables, prefixes, probability

from .gtest import ALPHA, GTest, count, detectable_tv, g_test_given, seeds

Tokens = tuple[int, ...]
TABLES = Tables("random", 2, seed=6)
PROMPTS: tuple[Tokens, ...] = ((0,), (1, 0, 1))
RULES: tuple[Verification, ...] = ("rejection", "block", "coupled")
BATCH, LENGTH = 16, 6


def logits(table: Callable[[Tokens], np.ndarray]) -> Callable[[Tokens], np.ndarray]:
    return cache(lambda tokens: np.log(table(tokens)))


TARGET, DRAFT = logits(TABLES.p), logits(TABLES.q)


def kind(i: int) -> tuple[Tokens, Verification, int]:
    """Prompt, rule and draft length of the i-th request of a batch; pairs share prompt and rule, so that shared noise
    would show in them."""
    return PROMPTS[i // 8], RULES[i // 2 % 3], i % 4


def target() -> ToyBackend:
    return ToyBackend(2, stop_ids=(), table=TARGET, max_len=16, max_seqs=BATCH, max_step_tokens=128)


def table(backend: ToyBackend) -> Drafter:
    return TableDrafter(TABLES.q)


def model(backend: ToyBackend) -> Drafter:
    draft = ToyBackend(2, stop_ids=(), table=DRAFT, max_len=16, max_seqs=BATCH, max_step_tokens=128)
    return ModelDrafter(draft, "model", backend)


def point(backend: ToyBackend) -> Drafter:
    return PointDrafter(lambda tokens, budget: [0] * budget)


def batches(drafter: Callable[[ToyBackend], Drafter], n: int) -> Iterator[list[RequestOutput]]:
    """n finished batches of BATCH requests, each in the order of its requests."""
    for _ in range(n):
        backend = target()
        engine = Engine(backend, drafter(backend))
        done: dict[int, RequestOutput] = {}
        for i in range(BATCH):
            prompt, rule, K = kind(i)
            engine.add(prompt, SamplingParams(max_tokens=LENGTH, verification=rule, draft_length=K))
        while engine.has_work:
            done.update((c.request_id, c.output) for c in engine.step() if c.output is not None)
        assert backend.slots_in_use == 0
        yield [done[i] for i in range(BATCH)]


def use_seeds(monkeypatch: pytest.MonkeyPatch, source: Iterable[int]) -> None:
    """Requests without a seed get the next of `source`."""
    numbers = iter(source)
    monkeypatch.setattr("paceline.admission.fresh_seed", lambda: next(numbers))


@cache
def continuation_law(prompt: Tokens, length: int) -> dict[Tokens, float]:
    """The joint law of `length` tokens after the prompt."""
    return {t: probability(TABLES.p, (*prompt, *t), len(prompt)) for t in prefixes(2, length)}


def tokens_of(output: RequestOutput) -> Tokens:
    return output.outputs[0].token_ids


def first_tokens(done: list[list[RequestOutput]], rule: str | None = None) -> GTest:
    """The first four tokens of every request (of one rule), given its prompt."""
    outputs = (o for batch in done for o in batch if rule in (None, o.outputs[0].verification))
    counts = count((o.prompt_token_ids, tokens_of(o)[:4]) for o in outputs)
    return g_test_given(counts, lambda prompt: continuation_law(prompt, 4))


def last_tokens(done: list[list[RequestOutput]]) -> GTest:
    """The last two tokens given all before them: at least the second step, mostly the third or fourth."""
    counts = count(((*o.prompt_token_ids, *tokens_of(o)[:-2]), tokens_of(o)[-2:]) for batch in done for o in batch)
    return g_test_given(counts, lambda text: continuation_law(text, 2))


def neighbours(done: list[list[RequestOutput]]) -> GTest:
    """The first two tokens of a request and of the next in its batch, in pairs that do not overlap."""
    pairs = (pair for batch in done for pair in zip(batch[::2], batch[1::2], strict=True))
    counts = count(((a.prompt_token_ids, b.prompt_token_ids), (*tokens_of(a)[:2], *tokens_of(b)[:2])) for a, b in pairs)

    def product(prompts: tuple[Tokens, Tokens]) -> dict[Tokens, float]:
        one, other = (continuation_law(prompt, 2) for prompt in prompts)
        return {(*x, *y): one[x] * other[y] for x in one for y in other}

    return g_test_given(counts, product)


def check(drafter: Callable[[ToyBackend], Drafter], n: int, tv: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """n batches: the law of the tokens, over all and by rule, and independence of neighbours. `tv`: the smallest
    distance that the first of these sees."""
    assert detectable_tv(n * BATCH, 31) <= tv
    use_seeds(monkeypatch, seeds(f"engine, {drafter.__name__}", n * BATCH))
    done = list(batches(drafter, n))
    tests = {"all": first_tokens(done), "last": last_tokens(done), "neighbours": neighbours(done)}
    tests |= {rule: first_tokens(done, rule) for rule in RULES}
    for name, result in tests.items():
        assert result.p_value >= ALPHA, f"{name}: {result}, p = {result.p_value:.1e}"


@pytest.mark.parametrize("drafter", [table, model, point])
def test_unseeded_batches(drafter: Callable[[ToyBackend], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#50440: the marginal over many unseeded requests is p, and neighbours are independent. 2 x 16 cells,
    N = 4,800 requests, sees TV 0.08; the slow twin 0.02."""
    check(drafter, 300, 0.08, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [table, model, point])
def test_unseeded_batches_closely(drafter: Callable[[ToyBackend], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 16 cells, N = 72,000 requests, sees TV 0.02."""
    check(drafter, 4_500, 0.02, monkeypatch)


def test_one_seed_for_a_whole_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#50440: what that engine did. With a new seed a batch, each request alone follows p, but neighbours agree."""
    shared = (seed for seed in seeds("one seed a batch", 40) for _ in range(BATCH))
    use_seeds(monkeypatch, shared)
    assert neighbours(list(batches(table, 40))).p_value < ALPHA


def test_seeds_from_the_operating_system_are_distinct() -> None:
    """vllm#50440, vllm#17498: an unseeded request has a seed of its own, reported with its output."""
    outputs = [o for batch in batches(table, 4) for o in batch]
    assert len({o.outputs[0].seed for o in outputs}) == 4 * BATCH
