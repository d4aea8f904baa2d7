"""Every option, alone and in pairs, on every kind of row, with every drafter, on every backend: as without drafts.

Greedy, whatever the rule; and sampled, where point and coupled promise the path of the seed: tokens, text, how it ends,
logprobs of output and prompt, and the counts. What plain decoding itself must give on the toy is worked out by
options_reference.py, which shares no code with it. The laws of the other rules are enumerated in
test_options_exact.py and test_grammar_exact.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.backend.toy import ToyTokenizer
from paceline.types import Backend, RequestOutput
from tests.test_real_model import BIT_STABLE, rows_are_bit_stable

from .engine_oracle import plain_request
from .engine_runs import check_logprobs
from .matrix import (
    DRAFTERS,
    STOP,
    TOY,
    TOY_GRAMMARS,
    TOY_PROMPT,
    VOCAB,
    WIDE,
    Case,
    World,
    cases,
    differences,
    options,
    run,
    toy_row,
    with_seed,
)

MODES = pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
KINDS = {"accepted", "recovered", "bonus"}
SILENT = {"none", "n", "logprobs", "processed", "prompt logprobs", "include"}
"""Options that change what is told of a text, not the text; `include` needs another one to be seen."""


@cache
def plainly(world: World, greedy: bool, every: int | None) -> tuple[list[Case], list[RequestOutput]]:
    """The cases, and what plain decoding says to each."""
    wanted = cases(world, greedy, every)
    return wanted, run(world, wanted)


def check_drafter(world: World, drafter: str, greedy: bool, every: int | None) -> dict[str, set[str]]:
    """Every case comes out as it does plainly. The kinds of rows that came with each option."""
    wanted, plain = plainly(world, greedy, every)
    kinds: dict[str, set[str]] = defaultdict(set)
    wrong = []
    for case, got, one in zip(wanted, run(world, wanted, drafter, plain), plain, strict=True):
        wrong += [f"{case}: {difference}" for difference in differences(world, got, one)]
        for name in case.names:
            kinds[name].update(kind for sample in got.outputs for kind in sample.kinds)
    assert not wrong, f"{drafter}, {len(wrong)} differences:\n" + "\n".join(wrong[:5])
    return kinds


def assert_every_kind_of_row(world: World, kinds: dict[str, set[str]]) -> None:
    missing = {name: KINDS - kinds[name] for name in options(world) if name != "none" and kinds[name] != KINDS}
    assert not missing, f"rows that never came with these options: {missing}"


# --- the toy: all pairs -------------------------------------------------------------------------------


@MODES
def test_plain_decoding_is_what_the_options_mean(greedy: bool) -> None:
    """Every option and all pairs, against a reference that shares no code; each sample of n with its own seed."""
    wanted, plain = plainly(TOY, greedy, 1)
    for case, output in zip(wanted, plain, strict=True):
        for one in output.outputs:
            by_definition = plain_request(toy_row, TOY.prompt, case.params, WIDE["max_len"], (STOP,))
            end = by_definition.stream(one.seed)
            reason = type(one.error).__name__ if one.error is not None else one.stop_reason
            assert (one.token_ids, one.text, one.finish_reason, reason) == end, f"{case}, sample {one.index}"
            check_logprobs(output, one.index, by_definition)


def test_every_option_shows() -> None:
    """What does not show is not tested: every option changes the text or the end of it, in one mode or both."""
    seen: set[str] = set()
    for greedy in (True, False):
        wanted, plain = plainly(TOY, greedy, None)
        for case, output in zip(wanted, plain, strict=True):
            one, bare = output.outputs[0], plain[0].outputs[0]
            if (one.token_ids, one.text, one.finish_reason) != (bare.token_ids, bare.text, bare.finish_reason):
                seen.update(case.names)
    assert seen == set(options(TOY)) - SILENT


@MODES
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_toy(drafter: str, greedy: bool) -> None:
    """vllm#18902, vllm#22987, sglang#21724, sglang#33695: options bypassed on rows of drafts; transformers PR #48281:
    no drafter without sampling; sglang#31978: no drafter without grammar; vllm#27969, #9423, #11484 and sglang#15050:
    drafts that break the grammar, or go on behind its end; llama.cpp#27972, PR #27196 and #24271: logprobs of accepted
    tokens; sglang PR #21258: penalties of tokens within the step."""
    kinds = check_drafter(TOY, drafter, greedy, 1)
    if drafter == "adversary":
        assert_every_kind_of_row(TOY, kinds)


def test_plain_rows_are_their_own_kind() -> None:
    """Without drafts no row is accepted or recovered; that is what the others are compared with."""
    for greedy in (True, False):
        for output in plainly(TOY, greedy, None)[1]:
            assert all(set(one.kinds) <= {"bonus"} for one in output.outputs)
            assert output.speculation.drafted == 0


# --- samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_each_sample_is_the_solo_run_of_its_seed(drafter: str) -> None:
    """Every option with n = 3, and pairs with it: sample i has the text that its reported seed has alone."""
    wanted, plain = plainly(TOY, False, 1)
    chosen = [(case, one) for case, one in zip(wanted, plain, strict=True) if "n" in case.names]
    together = run(TOY, [case for case, _ in chosen], drafter, [one for _, one in chosen])
    alone = [Case(c.names, with_seed(c.params, s.seed)) for (c, _), out in zip(chosen, together, strict=True)
             for s in out.outputs]  # fmt: skip
    singles = iter(run(TOY, alone))
    for (case, _), out in zip(chosen, together, strict=True):
        assert len({s.seed for s in out.outputs}) == 3
        assert out.outputs[0].seed == case.params.seed
        for sample, single in zip(out.outputs, singles, strict=False):
            (one,) = single.outputs
            told = (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, sample.logprobs)
            assert told == (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs), f"{case}"


# --- a transformers model in float64 ------------------------------------------------------------------


@cache
def tiny_model(draft: bool) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WIDE["max_len"],
        bos_token_id=None,
        eos_token_id=STOP,
        initializer_range=0.35,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        model.lm_head.weight[STOP] *= 2.0
        if draft:
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def open_tiny(draft: bool = False, **changes: Any) -> Backend:
    import copy

    from paceline.backend.hf import HFBackend

    model = copy.deepcopy(tiny_model(draft))  # a backend keeps its model to itself
    tokenizer = ToyTokenizer(VOCAB, frozenset({STOP}))
    return HFBackend(model, tokenizer=tokenizer, **{"page_size": 4, "kv_tokens": 4096, **WIDE, **changes})


TINY = World("hf-tiny", open_tiny, TOY_PROMPT, exact=False, grammars=TOY_GRAMMARS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@MODES
@pytest.mark.parametrize("every", [pytest.param(6, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.usefixtures("one_thread")
def test_a_transformers_model(drafter: str, every: int, greedy: bool) -> None:
    """As on the toy; logprobs to 1e-9, for rows of another width differ in their last digits."""
    kinds = check_drafter(TINY, drafter, greedy, every)
    if drafter == "adversary" and every == 1:
        assert_every_kind_of_row(TINY, kinds)
    assert set().union(*kinds.values()) == KINDS


# --- SmolLM2 through llama.cpp ------------------------------------------------------------------------

LLAMA_GRAMMARS: dict[str, Any] = {
    "regex": {"grammar": {"regex": "(The|A) [a-z]{2,9}( [a-z]{2,9}){1,4}[.]"}},
    "schema": {"grammar": {"json_schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": False}}},
    "lark": {"grammar": {"lark": 'start: "yes" (" and " /[a-z]{2,6}/)+ "!"\n'}},
    "after": {"grammar": {"regex": " ([a-z]+ )*[0-9]{1,3}"}},
}  # fmt: skip
QUESTION = "List three animals and say what they eat. List three animals and say what"


@cache
def llama_world(path: Path) -> World:
    from paceline.llm import open_backend

    def open_llama(draft: bool = False) -> Backend:
        return open_backend(path, **BIT_STABLE)

    with_text = open_llama()
    prompt = tuple(with_text.tokenizer.encode(QUESTION))
    if not rows_are_bit_stable(with_text, list(prompt * 4)[:120]):
        pytest.skip(f"{path.name}: rows of different widths differ on this machine; equality is not promised")
    with_text.close()
    return World("llamacpp", open_llama, prompt, max_tokens=12, grammars=LLAMA_GRAMMARS)


SMALL = {("adversary", True), ("forced+lookup", False)}
LLAMA = [
    pytest.param(
        drafter, greedy, every, marks=[] if (drafter, greedy) in SMALL and every is None else [pytest.mark.slow]
    )
    for drafter in ("adversary", "forced+lookup", "model")
    for greedy in (True, False)
    for every in (None, 4)
]


@pytest.mark.model
@pytest.mark.parametrize("drafter, greedy, every", LLAMA)
def test_a_model_through_llama_cpp(
    model_path: Callable[[str], Path], drafter: str, greedy: bool, every: int | None
) -> None:
    """As on the toy, bit by bit, where rows are bit-stable; see tests/test_real_model.py."""
    world = llama_world(model_path("smollm2:q4_0"))
    check_drafter(world, drafter, greedy, every)
