"""SmolLM2-135M through transformers on pages of our own, in float32: the model's own greedy text, drafts or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from paceline import LLM, SamplingParams  # noqa: E402
from paceline.models import available  # noqa: E402

PROMPTS = (
    "Write the days of the week as a numbered list. Then write the same list again.",
    "def add(a, b):\n    return a + b\n\nRepeat this function, but call it plus.",
    "Explain in one sentence why the sky is blue.",
)
TOKENS = 40
NOISE = 1e-3
"""How close the two likeliest tokens must be for a text to part there: far above the rounding of float32."""


@pytest.fixture(scope="module")
def weights() -> Path:
    for entry in available():
        if entry.name == "smollm2:q4_1" and entry.cached:
            return Path(entry.path)
    pytest.skip("smollm2:q4_1 is not in the cache; run: paceline models pull smollm2:q4_1")


@pytest.fixture(scope="module")
def llm(weights: Path) -> Iterator[LLM]:
    with LLM(
        weights, backend="hf", dtype="float32", drafter="lookup", draft_length=4, max_len=512, max_seqs=4
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def own(weights: Path) -> Any:
    """The same weights with transformers' own attention."""
    from paceline.backend.hf.loading import load

    options: dict[str, Any] = {"device": None, "clip_max_len": False, "n_threads": None, "progress": None}
    return load(weights, dtype="float32", max_len=512, **options).model


def greedy(own: Any, prompt: Any) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        out = own.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    return out[0, len(prompt) :].tolist()


def gap(own: Any, tokens: list[int]) -> float:
    """Between the two likeliest tokens behind `tokens`."""
    with torch.inference_mode():
        logits = own(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    top = np.sort(logits.numpy())[-2:]
    return float(top[1] - top[0])


def assert_same(own: Any, prompt: Any, got: list[int], wanted: list[int]) -> None:
    """Token for token, but for a near tie: nothing is compared behind one."""
    for i, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            apart = gap(own, [*prompt, *wanted[:i]])
            assert apart < NOISE, f"token {i} is {a}, by itself {b}, and the two likeliest are {apart} apart"
            return
    assert len(got) == len(wanted)


@pytest.mark.parametrize("draft_length", [0, 4])
def test_the_models_own_greedy_text(llm: LLM, own: Any, draft_length: int) -> None:
    """transformers#30042, transformers#30413; llama.cpp#27407: equal, or parted where two tokens are equally likely."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, draft_length=draft_length)
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.chat(messages, params)  # all at once
    for out in outputs:
        one = out.outputs[0]
        wanted = greedy(own, out.prompt_token_ids)
        assert one.text.strip()
        assert_same(own, out.prompt_token_ids, list(one.token_ids), wanted)
    accepted = sum(out.speculation.accepted for out in outputs)
    assert (accepted > 10) == (draft_length > 0)


def test_a_warm_cache(llm: LLM) -> None:
    """sglang PR #10846: the second time the prompt comes from the prefix cache; the text begins as it did."""
    params = SamplingParams(temperature=0, max_tokens=8)
    prompt = PROMPTS[0] * 3
    cold, warm = (llm.generate(prompt, params)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16 >= 32
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
