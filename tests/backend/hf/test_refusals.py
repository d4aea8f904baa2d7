"""Which configurations are refused, and with which words; no weights are made here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paceline.backend.hf.refusals import longest, refuse, refuse_class  # noqa: E402
from paceline.errors import ModelFormatError  # noqa: E402

from .models import FAMILIES, SIZES  # noqa: E402

STATE = "cannot go back when drafts are rejected"
GPTQ = {"quant_method": "gptq", "bits": 4}
# configuration class, what it says, part of the reason
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("BartConfig", {}, "it has an encoder"),
    ("T5Config", {}, "it has an encoder"),
    ("BertConfig", {}, "it is an encoder"),
    ("BertConfig", {"is_decoder": True}, "it is an encoder"),
    ("XLMRobertaConfig", {}, "it is an encoder"),
    ("MambaConfig", {}, STATE),
    ("RwkvConfig", {}, STATE),
    ("RecurrentGemmaConfig", {}, STATE),
    ("JambaConfig", {}, STATE),
    ("Qwen3NextConfig", {}, STATE),
    ("FalconH1Config", {}, STATE),
    ("GraniteMoeHybridConfig", {}, STATE),
    ("Lfm2Config", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "1 are 'conv'"),
    ("Llama4TextConfig", {}, "'chunked_attention'"),
    ("Gemma3nTextConfig", {}, "layers take their keys and values from earlier layers"),
    ("Gemma3Config", {}, "put together from parts (text_config, vision_config)"),
    ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "see what comes behind them"),
    ("LlamaConfig", {"is_causal": False}, "see what comes behind them"),
    ("LlamaConfig", {"quantization_config": GPTQ}, "its weights are quantised (gptq)"),
    ("DeepseekV4Config", {}, "of a kind that is not known here"),
]


@pytest.mark.parametrize("kind, says, reason", REFUSED, ids=[f"{k} {'-'.join(s)}" for k, s, _ in REFUSED])
def test_refused_by_configuration(kind: str, says: dict[str, Any], reason: str) -> None:
    """Catches a family that would run with wrong logits, or with a state that a rollback leaves behind."""
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, kind)(**says)
    with pytest.raises(ModelFormatError) as caught:
        refuse(config, "some model")
    message = str(caught.value)
    assert message.startswith(f"some model ({config.model_type}) cannot be served by backend 'hf': ")
    assert reason in message


@pytest.mark.parametrize("prefix", ["Bloom", "Mpt", "Falcon", "GPTNeo", "XGLM"])
def test_refused_by_class(prefix: str) -> None:
    """Catches classes that keep to an attention of their own, which would attend to this step's tokens only."""
    kind, config = getattr(transformers, f"{prefix}ForCausalLM"), getattr(transformers, f"{prefix}Config")()
    with pytest.raises(ModelFormatError, match=f"{prefix}ForCausalLM computes its own attention"):
        refuse_class(kind, config, "some model")


def test_a_class_with_a_state_whose_configuration_does_not_say_so() -> None:
    class New(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
        _is_stateful = True

    with pytest.raises(ModelFormatError, match=STATE):
        refuse_class(New, transformers.LlamaConfig(), "some model")


@pytest.mark.parametrize("family", FAMILIES)
def test_served(family: str) -> None:
    """Catches a rule that refuses too much."""
    prefix, says = FAMILIES[family]
    config = getattr(transformers, prefix + ("TextConfig" if family == "gemma3" else "Config"))(**{**SIZES, **says})
    refuse(config, family)
    refuse_class(getattr(transformers, f"{prefix}ForCausalLM"), config, family)


@pytest.mark.slow
def test_every_class_that_transformers_calls_stateful_is_refused() -> None:
    """Catches what a new release brings: every causal model of it, by its default configuration."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    checked = 0
    for name in names:
        try:
            config = transformers.CONFIG_MAPPING[name]()
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        except Exception:  # some cannot be made by default
            continue
        if not getattr(kind, "_is_stateful", False):
            continue
        checked += 1
        with pytest.raises(ModelFormatError):
            refuse_both(config, kind)
    assert checked > 10


def refuse_both(config: Any, kind: type) -> None:
    refuse(config, "some model")
    refuse_class(kind, config, "some model")


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def test_how_long_a_sequence_may_be() -> None:
    """Catches RoPE that would rotate a request differently for the company it keeps; cached pages keep the old."""

    def limit(**says: Any) -> tuple[int | None, str]:
        return longest(transformers.LlamaConfig(**{"max_position_embeddings": 512, **says}))

    assert limit() == (512, "what it was trained for")
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=128)
    assert limit(rope_parameters=yarn) == (512, "what it was trained for")
    size, why = limit(rope_parameters=rope("dynamic", factor=2.0))
    assert size == 512
    assert "dynamic NTK" in why
    assert "longest request" in why
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    size, why = limit(rope_parameters=rope("longrope", original_max_position_embeddings=128, **factors))
    assert size == 128
    assert "longrope" in why


def test_how_long_where_each_kind_of_layer_has_its_own_rope() -> None:
    class Config:
        max_position_embeddings = 512
        rope_parameters = {  # noqa: RUF012
            "full_attention": rope("longrope", original_max_position_embeddings=64),
            "sliding_attention": rope("default"),
        }

    assert longest(Config())[0] == 64


def test_how_long_where_nobody_says() -> None:
    assert longest(object()) == (None, "")
