"""A sliding window that only the model's mask knows of: Paceline makes the masks, so such a window would be lost."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paceline.backend.hf import HFBackend  # noqa: E402
from paceline.backend.hf.refusals import windows  # noqa: E402
from paceline.errors import ModelFormatError  # noqa: E402
from paceline.types import Segment  # noqa: E402

from .models import Reference, apart, tokens  # noqa: E402

LONG = 5000
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": LONG, "initializer_range": 0.6, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Phimoe": {**MOE, "num_local_experts": 2},
    "Qwen2Moe": {
        **MOE, "num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2,
    },
    "ModernBertDecoder": {},
}  # fmt: skip


def build(family: str, window: int | None, **changes: Any) -> Any:
    sizes = {**SIZES, **FAMILIES[family], "sliding_window": window, **changes}
    if family == "ModernBertDecoder":
        del sizes["num_key_value_heads"], sizes["sliding_window"]
        sizes |= {"local_attention": 2 * (window or 0), "cls_token_id": 1, "sep_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)


@pytest.mark.parametrize("window", [100, 150, 4096])
@pytest.mark.parametrize("family", ["Mistral", "ModernBertDecoder"])
def test_a_window_that_is_passed_is_served(family: str, window: int) -> None:
    """Catches a rule that refuses too much, and rows beyond the window that are not the model's own."""
    text = tokens(1, 230)
    backend = HFBackend(build(family, window), max_len=LONG)
    (rows,) = backend.forward([Segment(backend.acquire(), text, 0, 230)])
    wanted = Reference(build(family, window)).rows(text)
    assert apart(rows, wanted) <= 1e-3 * wanted.std()
    backend.close()


@pytest.mark.parametrize("window", [100, 150, 4096])
@pytest.mark.parametrize("family", ["Phimoe", "Qwen2Moe"])
def test_a_window_that_only_the_mask_knows_is_refused(family: str, window: int) -> None:
    """Phimoe's rows were wrong from the window on where that was longer than the probe."""
    seen = (
        "differ from those of the model's own" if window == 100 else f"sliding_window = {window}, and none of its lay"
    )
    model = build(family, window)
    before = model.config._attn_implementation
    with pytest.raises(ModelFormatError, match=rf"{family}ForCausalLM .* cannot be served .*{seen}"):
        HFBackend(model, max_len=LONG)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("window", [100, 150])
def test_a_slot_no_longer_than_the_window_needs_none(window: int) -> None:
    """As the message says: with that max_len no token ever leaves the window."""
    text = tokens(2, window)
    backend = HFBackend(build("Phimoe", window), max_len=window)
    (rows,) = backend.forward([Segment(backend.acquire(), text, 0, window)])
    wanted = Reference(build("Phimoe", window)).rows(text)
    assert apart(rows, wanted) <= 1e-3 * wanted.std()
    backend.close()


def test_what_counts_as_a_window() -> None:
    def named(family: str, **says: Any) -> dict[str, int]:
        return windows(getattr(transformers, f"{family}Config")(**says))

    assert named("Mistral") == {"sliding_window": 4096}
    assert named("Mistral", sliding_window=None) == named("Llama") == named("Phimoe") == {}
    assert named("Llama", attention_window_size=7, attn_chunk=8) == {"attention_window_size": 7, "attn_chunk": 8}
    unused = {"use_sliding_window": False, "sliding_window": 150, "max_window_layers": 3}
    assert named("Qwen2", **unused) == named("Qwen2Moe", **unused) == {}
    assert named("Gemma2", layer_types=["full_attention"] * 26, sliding_window=9) == {}
    assert named("Exaone4", sliding_window=9) == {"sliding_window": 9}  # and a sliding_window_pattern of 4
    assert named("ModernBertDecoder", local_attention=300) == {"local_attention // 2": 150, "sliding_window": 150}
